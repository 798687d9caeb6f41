"""A model of what KDA prefill costs: fitted to kernels on the H200, checked on whole calls, carried to Blackwell.

    python benchmarks/ops/kda/model.py [--json FILE]

Prints both tables, and what binds in every setting; --json writes what the tables of documents are made from
(benchmarks/results/predicted/kda_prefill_blackwell.json). What it says of Blackwell is predicted, not measured.

A call is a sum over its kernels, each `start + what binds`, in us:

    prepare     the larger of bytes / bandwidth and (chunks x heads) / multiprocessors x clk / clock
    recurrence  the larger of chain and memory: a CTA walks through its chunks one after the other, and items of work
                go to whichever CTA is free, longest first
    scan        chain and memory, put together as the planner does
    merge       a step for every segment but the first and the last
    table       of packed sequences: its start

Caches are not modelled: what a kernel writes, the next one reads from memory. The start, the share of the memory's peak
rate, prepare's clk per chunk and head and merge's step are fitted to kernels that ran alone
(benchmarks/results/h200/kda_prefill_kernels.json). Hopper's chains are in cula_cp_sm90.arch, which had them from
earlier runs; `blackwell_chains` counts Blackwell's.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import report, results
from benchmarks.harness.registry import Setting
from benchmarks.ops.kda import tables as kda_tables

STATE_BYTES = 4 * 128 * 128

# Instructions of prepare in the machine code, without NOP and BRA; tests count them again.
INSTRUCTIONS = {"sm_90a": 2504, "sm_100a": 2494, "sm_103a": 2485}
PREPARE_WARPS, SCHEDULERS = 8, 4
# tcgen05 with 128 lanes: fp16 products per clk and multiprocessor; terms of a sum per instruction.
FMA_PER_CLK, LANES, DEPTH = 4096, 128, 16
HAND_OVERS = 3  # per chunk: of x, of u and of the state
# Assumed clk: commit, mbarrier, load from tensor memory, arithmetic, store, mbarrier, issue.
HAND_OVER_CLK = {"low": 200, "mid": 300, "high": 400}


@dataclass(frozen=True)
class Card:
    """What belongs to a GPU. Those of Blackwell are public specifications or assumptions, not measured."""

    name: str
    package: str
    target: str
    sms: int
    clock_ghz: float
    memory_tbs: float


H200 = Card("H200", "cula_cp_sm90", "sm_90a", 132, 1.98, 4.8)
GB200 = Card("GB200", "cula_kda_sm100", "sm_100a", 152, 1.9, 8.0)
GB300 = Card("GB300", "cula_kda_sm100", "sm_103a", 160, 1.9, 8.0)
BLACKWELL = (GB200, GB300)


@dataclass(frozen=True)
class Constants:
    """share: of the memory's peak rate that kernels reach. prepare_clk: of a multiprocessor, per chunk and value head.
    start_us: of a kernel. merge_us: of merge for two segments, and for each one more."""

    share: float
    prepare_clk: float
    start_us: float
    merge_us: tuple[float, float]


@dataclass(frozen=True)
class Chains:
    """Microseconds a chunk: of the recurrence by tiles of v per CTA, and of the scan."""

    forward: Mapping[int, float]
    scan: float


@dataclass(frozen=True)
class Work:
    """What a call does. *_bytes: moved by a kernel. *_chunks: that the busiest CTA walks through. chunk_heads: chunks
    times value heads. parts: segments of the longest sequence."""

    chunk_heads: int
    tiles: int
    parts: int
    packed: bool
    prepare_bytes: int
    walk_bytes: int
    walk_chunks: int
    scan_bytes: int
    scan_chunks: int


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a call and of its kernels, and which term is the largest in each."""

    us: float
    kernels: Mapping[str, float]
    binds: Mapping[str, str]


def busiest(items: Iterable[int], ctas: int) -> int:
    """Chunks of the CTA that has most, when items are handed out longest first."""
    loads = [0] * ctas
    for item in sorted(items, reverse=True):
        heapq.heapreplace(loads, loads[0] + item)
    return max(loads)


def work(problem: Setting, card: Card) -> Work:
    """Counts a setting of kda_prefill, spread as the package for the card spreads it."""
    from benchmarks.ops import sequences as seq

    c = import_module(f"{card.package}.config")
    p, heads, packed = problem.params, problem.params["H"], seq.is_packed(problem)
    lengths = [end - start for _, start, end in seq.spans(problem)]
    size = (seq.batch_of(problem), p["T"], heads, p.get("N"))
    longest = max(lengths) if packed else None
    spread = c.plan(*size, card.sms, c.workspace_bytes(*size), longest=longest)
    chunks = [-(-n // c.CHUNK) for n in lengths]
    # A sequence that stays whole is one segment.
    segment = spread.segment_tokens // c.CHUNK or max(chunks)
    cut = [[min(segment, n - i) for i in range(0, n, segment)] for n in chunks]
    # A scan walks through V columns of first segments, K + V of the others, and nothing of last ones.
    scans = [n for row in cut for i, n in enumerate(row[:-1]) for _ in range(1 + (i > 0))]
    scanned = sum(n for row in cut for n in row[:-1])

    rows = 2 * c.CHUNK * c.HEAD_DIM  # bytes of a chunk of v; of q and k too
    gates = rows * (2 if seq.has(problem, "fp32gate") else 1) + 2 * c.CHUNK  # beta too
    both = 2 * rows * seq.query_heads(problem)
    states = heads * (len(lengths) + spread.split * sum(map(len, cut)))
    states += heads * len(lengths) * (seq.has(problem, "state") or seq.has(problem, "pool"))
    without_queries = c.BLOCK_BYTES - 2 * (c.CHUNK * c.HEAD_DIM + c.TRIANGLE)
    return Work(
        chunk_heads=sum(chunks) * heads,
        tiles=spread.tiles,
        parts=max(map(len, cut)),
        packed=packed,
        prepare_bytes=sum(chunks) * (heads * (gates + c.BLOCK_BYTES) + both),
        walk_bytes=sum(chunks) * heads * (c.BLOCK_BYTES + 2 * rows) + STATE_BYTES * states,
        walk_chunks=busiest(
            [n for row in cut for n in row] * (heads * c.V_TILES // spread.tiles), card.sms
        ),
        scan_bytes=heads * (scanned * (without_queries + rows) + STATE_BYTES * len(scans)),
        scan_chunks=busiest(scans * heads, card.sms),
    )


def products(scan: bool) -> dict[str, tuple[int, int]]:
    """(instructions, columns of a sum) of a chunk on Blackwell, by product; those of o are not on the chain."""
    c = import_module(f"{GB200.package}.config")
    keys, tokens = c.HEAD_DIM // DEPTH, c.CHUNK // DEPTH
    chain = {"x": (keys, c.CHUNK), "u": (tokens, c.CHUNK), "state": (tokens, c.HEAD_DIM)}
    return chain if scan else chain | {"inter": (keys, c.CHUNK), "intra": (tokens, c.CHUNK)}


def tensor_clk(scan: bool) -> int:
    """What the tensor cores of a multiprocessor take for the products of a chunk."""
    return sum(n * LANES * columns * DEPTH // FMA_PER_CLK for n, columns in products(scan).values())


def hopper_chains() -> Chains:
    arch = import_module(f"{H200.package}.arch")
    return Chains(arch.CHAIN_US, arch.SCAN_CHAIN_US)


def blackwell_chains(card: Card, hand_over_clk: float) -> Chains:
    """The products of x, u and the state with a hand-over behind each; those of o fill the gaps as far as they fit."""
    chain = tensor_clk(scan=True) + HAND_OVERS * hand_over_clk
    clk_per_us = card.clock_ghz * 1e3
    return Chains({1: max(chain, tensor_clk(scan=False)) / clk_per_us}, chain / clk_per_us)


def estimate(w: Work, card: Card, constants: Constants, chains: Chains) -> Estimate:
    pace = import_module(f"{card.package}.config")._pace_us
    bytes_per_us = card.memory_tbs * constants.share * 1e6
    throughput = w.chunk_heads / card.sms * constants.prepare_clk / (card.clock_ghz * 1e3)
    terms = {
        "prepare": {"memory": w.prepare_bytes / bytes_per_us, "throughput": throughput},
        "scan": {"chain": w.scan_chunks * chains.scan, "memory": w.scan_bytes / bytes_per_us},
        "recurrence": {
            "chain": w.walk_chunks * chains.forward[w.tiles],
            "memory": w.walk_bytes / bytes_per_us,
        },
    }
    if w.parts == 1:
        del terms["scan"]
    kernels = {}
    for name, t in terms.items():
        together = pace(t["chain"], t["memory"]) if name == "scan" else max(t.values())
        kernels[name] = constants.start_us + together
    if w.parts > 1:
        first, step = constants.merge_us
        kernels["merge"] = first + step * (w.parts - 2)
    if w.packed:
        kernels["table"] = constants.start_us
    binds = {name: max(t, key=lambda term: t[term]) for name, t in terms.items()}
    return Estimate(sum(kernels.values()), kernels, binds)


# ---- calibration ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A measured call, or a kernel of it that ran alone."""

    setting: str
    work: Work
    us: float
    kernel: str | None = None


def known() -> list[Setting]:
    """The settings of kda_prefill but the one without a bound: its prepare has other products, and more of them."""
    from benchmarks.ops.kda import kda_prefill

    return [s for s in kda_prefill.settings(False) if s.params["feature"] != "unbounded"]


def measured() -> list[Row]:
    """Whole calls on the H200, in the order of the settings."""
    result = results.load(results.result_path("kda_prefill", "h200"))
    method = results.device_method(result)
    times = {
        r["setting"]: r["median_us"] for r in results.rows_of(result, role="ours", method=method)
    }
    return [Row(s.name, work(s, H200), times[s.name]) for s in known() if s.name in times]


def alone() -> list[Row]:
    """Kernels on the H200. prepare_repeated is prepare with inputs that stay in the L2."""
    from benchmarks.ops.kda import kda_prefill_kernels

    result = results.load(results.result_path("kda_prefill_kernels", "h200"))
    works = {s.name: work(s, H200) for s in kda_prefill_kernels.settings(False)}
    return [
        Row(r["setting"], works[r["setting"]], r["median_us"], r["provider"])
        for r in results.rows_of(result, role="variant", method=results.device_method(result))
    ]


def errors(rows: Iterable[Row], constants: Constants) -> list[float]:
    """Of the modelled times, relative to the measured ones."""
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
    return sum(e * e for e in errors(rows, constants))


def fit(rows: Iterable[Row]) -> Constants:
    """The constants of least squares of relative errors of kernels, by steps that are halved."""
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
    """Clk of prepare, in the median, as if the multiprocessors alone held it up wherever it is slow."""
    return statistics.median(
        (r.us - constants.start_us) * H200.clock_ghz * 1e3 * H200.sms / r.work.chunk_heads
        for r in rows
        if r.kernel == "prepare"
    )


# ---- prediction -----------------------------------------------------------------------------------------------------


def on_blackwell(
    card: Card, best: Constants, highest: float
) -> dict[str, tuple[Constants, Chains]]:
    """Constants and chains by case. Prepare's clk go with its instructions; in the low case nothing but their issue
    limits it, in the high case memory is not to blame for any of its time on the H200."""
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
    """By case."""
    w = work(problem, card)
    cases = on_blackwell(card, best, highest)
    return {case: estimate(w, card, *how) for case, how in cases.items()}


def document() -> dict[str, Any]:
    """What the prediction's file holds."""
    fitted, held_out = alone(), measured()
    best = fit(fitted)
    highest = highest_clk(fitted, best)
    rows = []
    for card, problem in itertools.product(BLACKWELL, known()):
        found = predict(problem, card, best, highest)
        times = {f"{case}_us": round(e.us, 1) for case, e in found.items()}
        kernels = {name: round(us, 1) for name, us in found["mid"].kernels.items()}
        rows.append({"setting": problem.name, "card": card.name, **times, "kernels": kernels})
        rows[-1]["binds"] = dict(found["mid"].binds)
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
    """Rows with their modelled times, and how far off these are."""
    rows, sizes = [], []
    for r, e in zip(measured, errors(measured, constants), strict=True):
        kernel = {} if r.kernel is None else {"kernel": r.kernel}
        times = {"measured_us": r.us, "modelled_us": round(r.us * (1 + e), 1)}
        rows.append({"setting": r.setting, **kernel, **times})
        sizes.append(abs(e))
    summary = {"median": statistics.median(sizes), "worst": max(sizes)}
    return {"rows": rows, **{name: round(size, 4) for name, size in summary.items()}}


def as_json(content: Mapping[str, Any]) -> str:
    """One row per line, so that two predictions can be compared with diff."""
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


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
    print(report.as_text(kda_tables.binding_table(content)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_json(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
