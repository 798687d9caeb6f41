"""A model of the time of KDA prefill: fitted to kernels on the H200, checked on whole calls, carried to Blackwell.

    python benchmarks/ops/kda/model.py [--json FILE]

The command prints how the model does on the H200, what it predicts for Blackwell, and which term limits each kernel of
every setting. With --json it writes the file from which documents get their tables
(benchmarks/results/predicted/kda_prefill_blackwell.json). Times on Blackwell are predicted, not measured.

The time of a call whose kernels run one after the other is the sum of theirs. Each takes a start, and then (in us):

    prepare     the larger of bytes / bandwidth and (chunks x heads) / multiprocessors x clk / clock
    recurrence  the larger of chain and memory; the chain is the busiest CTA, which walks through its chunks one after
                the other, where each free CTA takes the longest item that is left
    scan        chain and memory, combined as the planner combines them
    merge       a step for every segment but the first and the last, and nothing else
    table       nothing else; it runs where sequences are packed

Caches are not modelled: a kernel reads from memory what the one before it wrote. The start, the share of the memory's
peak rate, the clk of prepare per chunk and head, and the step of merge are fitted to kernels that ran alone
(benchmarks/results/h200/kda_prefill_kernels.json). Hopper's chains are constants of its planner, from earlier runs;
`blackwell_chains` counts those of Blackwell.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import report, results
from benchmarks.harness.registry import Setting
from benchmarks.ops.kda import internals, kda_prefill, kda_prefill_kernels
from benchmarks.ops.kda import tables as kda_tables
from benchmarks.ops.kda.work import BLACKWELL, GB200, H200, Card, Work, work

# Instructions of prepare in the machine code, without NOP and BRA; tests count them again.
INSTRUCTIONS = {"sm_90a": 2504, "sm_100a": 2494, "sm_103a": 2485}
PREPARE_WARPS, SCHEDULERS = 8, 4
# tcgen05 computes FMA_PER_CLK fp16 products per clk and multiprocessor; an instruction has 128 lanes, and adds DEPTH
# products for each of its outputs.
FMA_PER_CLK, LANES, DEPTH = 4096, 128, 16
# In every chunk x, u and the state are handed over from the tensor cores to threads and back.
HAND_OVERS = 3
# Assumed clk of a hand-over: commit, mbarrier, load from tensor memory, arithmetic, store, mbarrier, issue.
HAND_OVER_CLK = {"low": 200, "mid": 300, "high": 400}


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted.

    share: the share of the memory's peak rate that kernels reach. prepare_clk: clk of a multiprocessor for prepare, per
    chunk and value head. start_us: the start of a kernel. merge_us: the time of merge for two segments, and the time
    that every further segment adds.
    """

    share: float
    prepare_clk: float
    start_us: float
    merge_us: tuple[float, float]


@dataclass(frozen=True)
class Chains:
    """Microseconds that a CTA takes per chunk: in the recurrence, by tiles of v per CTA, and in the scan."""

    forward: Mapping[int, float]
    scan: float


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a call and of its kernels, and the term that limits each kernel."""

    us: float
    kernels: Mapping[str, float]
    limits: Mapping[str, str]


def products(scan: bool) -> dict[str, tuple[int, int]]:
    """(instructions, columns of each) of every product of a chunk on Blackwell; the scan has no output o."""
    sizes = internals.sizes(GB200.package)
    keys, tokens = sizes.head_dim // DEPTH, sizes.chunk // DEPTH
    chain = {
        "x": (keys, sizes.chunk),
        "u": (tokens, sizes.chunk),
        "state": (tokens, sizes.head_dim),
    }
    of_output = {"inter": (keys, sizes.chunk), "intra": (tokens, sizes.chunk)}
    return chain if scan else chain | of_output


def tensor_clk(scan: bool) -> int:
    """Clk that the tensor cores of a multiprocessor take for the products of a chunk."""
    return sum(n * LANES * columns * DEPTH // FMA_PER_CLK for n, columns in products(scan).values())


def hopper_chains() -> Chains:
    """The chains that the planner for Hopper assumes."""
    costs = internals.planner_costs(H200.package)
    return Chains(costs.chain_us, costs.scan_chain_us)


def blackwell_chains(card: Card, hand_over_clk: float) -> Chains:
    """The products of x, u and the state, each with a hand-over behind it.

    The products of o run during the hand-overs, and lengthen the chain only where they do not fit there.
    """
    chain = tensor_clk(scan=True) + HAND_OVERS * hand_over_clk
    clk_per_us = card.clock_ghz * 1e3
    return Chains({1: max(chain, tensor_clk(scan=False)) / clk_per_us}, chain / clk_per_us)


def terms(w: Work, card: Card, constants: Constants, chains: Chains) -> dict[str, dict[str, float]]:
    """Microseconds of every term that may limit a kernel, for the kernels that have more than one."""
    bytes_per_us = card.memory_tbs * constants.share * 1e6
    throughput = w.chunk_heads / card.sms * constants.prepare_clk / (card.clock_ghz * 1e3)
    found = {"prepare": {"memory": w.prepare_bytes / bytes_per_us, "throughput": throughput}}
    if w.parts > 1:
        found["scan"] = {
            "chain": w.scan_chunks * chains.scan,
            "memory": w.scan_bytes / bytes_per_us,
        }
    found["recurrence"] = {
        "chain": w.walk_chunks * chains.forward[w.tiles],
        "memory": w.walk_bytes / bytes_per_us,
    }
    return found


def estimate(w: Work, card: Card, constants: Constants, chains: Chains) -> Estimate:
    """The modelled time of a call and of its kernels."""
    found = terms(w, card, constants, chains)
    kernels = {name: constants.start_us + max(t.values()) for name, t in found.items()}
    if w.parts > 1:
        scan = found["scan"]
        pace = internals.pace_us(scan["chain"], scan["memory"])
        kernels["scan"] = constants.start_us + pace
        first, step = constants.merge_us
        kernels["merge"] = first + step * (w.parts - 2)
    if w.packed:
        kernels["table"] = constants.start_us
    limits = {name: max(t, key=lambda term: t[term]) for name, t in found.items()}
    return Estimate(sum(kernels.values()), kernels, limits)


# ---- calibration ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A measured call, or a kernel of it that ran alone."""

    setting: str
    work: Work
    us: float
    kernel: str | None = None


def known() -> list[Setting]:
    """The settings of kda_prefill without unbounded gates, for which prepare computes other products."""
    return [s for s in kda_prefill.settings(False) if s.params["feature"] != "unbounded"]


def measured() -> list[Row]:
    """Whole calls on the H200 whose kernels run one after the other, in the order of the settings."""
    result = results.load(results.result_path("kda_prefill_schedule", "h200"))
    rows = results.rows_of(result, role="variant", method=results.device_method(result))
    times = {r["setting"]: r["median_us"] for r in rows if r["provider"] == "cula_apart"}
    return [Row(s.name, work(s, H200), times[s.name]) for s in known() if s.name in times]


def alone() -> list[Row]:
    """Kernels on the H200. prepare_repeated is prepare with inputs that stay in the L2."""
    result = results.load(results.result_path("kda_prefill_kernels", "h200"))
    works = {s.name: work(s, H200) for s in kda_prefill_kernels.settings(False)}
    return [
        Row(r["setting"], works[r["setting"]], r["median_us"], r["provider"])
        for r in results.rows_of(result, role="variant", method=results.device_method(result))
    ]


def errors(rows: Iterable[Row], constants: Constants) -> list[float]:
    """Modelled times over measured ones, less 1."""
    chains, found = hopper_chains(), []
    for r in rows:
        w = r.work
        if r.kernel == "prepare_repeated":
            w = replace(w, prepare_bytes=0)
        e = estimate(w, H200, constants, chains)
        modelled = e.us if r.kernel is None else e.kernels[r.kernel.removesuffix("_repeated")]
        found.append(modelled / r.us - 1)
    return found


def squares(rows: Iterable[Row], constants: Constants) -> float:
    """The sum of the squares of the errors."""
    return sum(e * e for e in errors(rows, constants))


def fit(rows: Iterable[Row]) -> Constants:
    """The constants with the least squares of the errors of kernels.

    A line through the times of merge gives its two constants. A search gives the others: it moves to a better neighbour
    as long as there is one, and then halves its steps.
    """
    rows = list(rows)
    merges = [(r.work.parts - 2, r.us) for r in rows if r.kernel == "merge"]
    step, first = statistics.linear_regression(*zip(*merges, strict=True))
    rows = [r for r in rows if r.kernel != "merge"]
    best = Constants(0.85, 8000.0, 6.0, (first, step))
    least = squares(rows, best)
    for halving in range(6):
        moved = True
        while moved:
            moved, near = False, best
            for a, b, s in itertools.product((-1, 0, 1), repeat=3):
                tried = replace(
                    near,
                    share=near.share + a * 0.08 / 2**halving,
                    prepare_clk=near.prepare_clk + b * 800 / 2**halving,
                    start_us=near.start_us + s * 4 / 2**halving,
                )
                if tried.start_us >= 0 and (sum_ := squares(rows, tried)) < least:
                    best, least, moved = tried, sum_, True
    return best


def highest_clk(rows: Iterable[Row], constants: Constants) -> float:
    """The median clk of prepare, on the assumption that memory never limits it."""
    return statistics.median(
        (r.us - constants.start_us) * H200.clock_ghz * 1e3 * H200.sms / r.work.chunk_heads
        for r in rows
        if r.kernel == "prepare"
    )


# ---- prediction -----------------------------------------------------------------------------------------------------


def on_blackwell(
    card: Card, best: Constants, highest: float
) -> dict[str, tuple[Constants, Chains]]:
    """Constants and chains by case.

    The clk of prepare are proportional to its instructions. In the low case only the issue of instructions limits it;
    the high case assumes that memory limited none of its time on the H200.
    """
    ratio = INSTRUCTIONS[card.target] / INSTRUCTIONS[H200.target]
    clk = {
        "low": INSTRUCTIONS[card.target] * PREPARE_WARPS / SCHEDULERS,
        "mid": best.prepare_clk * ratio,
        "high": highest * ratio,
    }
    return {
        case: (replace(best, prepare_clk=clk[case]), blackwell_chains(card, hand_over))
        for case, hand_over in HAND_OVER_CLK.items()
    }


def predict(problem: Setting, card: Card, best: Constants, highest: float) -> dict[str, Estimate]:
    """Estimates of a setting by case."""
    w = work(problem, card)
    cases = on_blackwell(card, best, highest)
    return {case: estimate(w, card, *how) for case, how in cases.items()}


def document() -> dict[str, Any]:
    """The content of the file of predictions."""
    fitted, held_out = alone(), measured()
    best = fit(fitted)
    highest = highest_clk(fitted, best)
    rows = []
    for card, problem in itertools.product(BLACKWELL, known()):
        found = predict(problem, card, best, highest)
        times = {f"{case}_us": round(e.us, 1) for case, e in found.items()}
        kernels = {name: round(us, 1) for name, us in found["mid"].kernels.items()}
        rows.append({"setting": problem.name, "card": card.name, **times, "kernels": kernels})
        rows[-1]["binds"] = dict(found["mid"].limits)
    return {
        "op": kda_tables.OP,
        "note": "Predicted, not measured, by benchmarks/ops/kda/model.py. Figures of the Blackwell cards are public "
        "specifications or assumptions.",
        "cards": [asdict(card) for card in (H200, *BLACKWELL)],
        "constants": {**asdict(best), "highest_prepare_clk": highest},
        "assumed": {"instructions": INSTRUCTIONS, "hand_over_clk": HAND_OVER_CLK},
        "tensor_clk": {"chain": tensor_clk(scan=True), "all": tensor_clk(scan=False)},
        "fitted": _compared(fitted, best),
        "held_out": _compared(held_out, best),
        "rows": rows,
    }


def _compared(measured: Sequence[Row], constants: Constants) -> dict[str, Any]:
    """Rows with their modelled times, and the median and the largest error."""
    rows, sizes = [], []
    for r, e in zip(measured, errors(measured, constants), strict=True):
        kernel = {} if r.kernel is None else {"kernel": r.kernel}
        times = {"measured_us": r.us, "modelled_us": round(r.us * (1 + e), 1)}
        rows.append({"setting": r.setting, **kernel, **times})
        sizes.append(abs(e))
    summary = {"median": statistics.median(sizes), "worst": max(sizes)}
    return {"rows": rows, **{name: round(size, 4) for name, size in summary.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Models KDA prefill; predicts it for Blackwell.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the prediction's file")
    args = parser.parse_args(argv)
    content = document()
    published = kda_tables.published()
    predicted = kda_tables.prediction_table(content, published)
    first, second = kda_tables.captions(content, published)
    print(report.as_text(kda_tables.held_out_table(content)), second, sep="\n\n", end="\n\n")
    print(report.as_text(predicted), first, sep="\n\n", end="\n\n")
    print(report.as_text(kda_tables.limits_table(content)))
    if args.json:
        results.write(content, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
