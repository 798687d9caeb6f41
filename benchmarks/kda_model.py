"""A model of what KDA prefill costs: fitted to half of the H200's rows, checked on the others, carried to Blackwell.

    python benchmarks/kda_model.py [--json FILE]

Prints both tables, and what binds in every setting; --json writes what the tables of documents are made from
(benchmarks/results/predicted/kda_prefill_blackwell.json). What it says of Blackwell is predicted, not measured.

A call is a sum over its kernels, each `start + what binds`, in us:

    prepare     the larger of bytes / bandwidth and (chunks x heads) / multiprocessors x clk / clock
    recurrence  chain and memory, put together as the planner does: a CTA walks through its chunks one after the other,
    and scan    and items of work go to whichever CTA is free, longest first
    merge       as the planner has it
    table       of packed sequences: its start

Caches are not modelled: what a kernel writes, the next one reads from memory. Of the constants, the start, the share of
the memory's peak rate and prepare's clk per chunk and head are fitted. Hopper's chains are in cula_cp_sm90.arch, which
had them from an earlier run of some of these settings; `blackwell_chains` counts Blackwell's.
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kda_tables, report, results
from benchmarks.registry import Setting

STATE_BYTES = 4 * 128 * 128

# Instructions of prepare in the machine code, without NOP and BRA; tests count them again.
INSTRUCTIONS = {"sm_90a": 2504, "sm_100a": 2494, "sm_103a": 2485}
PREPARE_WARPS, SCHEDULERS = 8, 4
# tcgen05 with 128 lanes: fp16 products per clk and multiprocessor; terms of a sum per instruction.
FMA_PER_CLK, LANES, DEPTH = 4096, 128, 16
HAND_OVERS = 3  # per chunk: of x, of u and of the state
# Assumed clk: commit, mbarrier, load from tensor memory, arithmetic, store, mbarrier, issue.
HAND_OVER_CLK = {"low": 200, "mid": 300, "high": 400}
# An upper end of prepare's clk may make the calibration's sum of squares so much larger.
LOOSER = 1.1


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
    start_us: of a kernel."""

    share: float
    prepare_clk: float
    start_us: float


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
    from benchmarks.ops import _sequences as seq

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
    c = import_module(f"{card.package}.config")
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
        pace = max(t.values()) if name == "prepare" else c._pace_us(t["chain"], t["memory"])
        kernels[name] = constants.start_us + pace
    if w.parts > 1:
        kernels["merge"] = c.MERGE_US + c.MERGE_STEP_US * (w.parts - 2)
    if w.packed:
        kernels["table"] = constants.start_us
    binds = {name: max(t, key=lambda term: t[term]) for name, t in terms.items()}
    return Estimate(sum(kernels.values()), kernels, binds)


# ---- calibration ----------------------------------------------------------------------------------------------------


def known() -> list[Setting]:
    """The settings of kda_prefill but the one without a bound: its prepare has other products, and more of them."""
    from benchmarks.ops import kda_prefill

    return [s for s in kda_prefill.settings(False) if s.params["feature"] != "unbounded"]


@dataclass(frozen=True)
class Row:
    """A measured call."""

    setting: str
    work: Work
    us: float


def measured(path: Path | None = None) -> list[Row]:
    """Our rows of the H200's result file, in the order of the settings."""
    result = results.load(path or results.result_path("kda_prefill", "h200"))
    method = results.device_method(result)
    times = {
        r["setting"]: r["median_us"] for r in results.rows_of(result, role="ours", method=method)
    }
    return [Row(s.name, work(s, H200), times[s.name]) for s in known() if s.name in times]


def halves(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Every other row to fit, and those between them to check."""
    return rows[::2], rows[1::2]


def errors(rows: Sequence[Row], constants: Constants) -> list[float]:
    """Of the modelled times, relative to the measured ones."""
    chains = hopper_chains()
    return [estimate(r.work, H200, constants, chains).us / r.us - 1 for r in rows]


def squares(rows: Sequence[Row], constants: Constants) -> float:
    return sum(e * e for e in errors(rows, constants))


def fit(rows: Sequence[Row], clk: float | None = None) -> Constants:
    """The constants of least squares of relative errors, by steps that are halved; prepare_clk is `clk` if given."""
    best = Constants(0.85, 6000.0 if clk is None else clk, 6.0)
    least = squares(rows, best)
    for halving in range(6):
        steps = [(-1, 0, 1)] * 3 if clk is None else [(-1, 0, 1), (0,), (-1, 0, 1)]
        moved = True
        while moved:
            moved, near = False, best
            for a, b, s in itertools.product(*steps):
                tried = Constants(
                    near.share + a * 0.08 / 2**halving,
                    near.prepare_clk + b * 800 / 2**halving,
                    near.start_us + s * 4 / 2**halving,
                )
                if tried.start_us >= 0 and (sum_ := squares(rows, tried)) < least:
                    best, least, moved = tried, sum_, True
    return best


def highest_clk(rows: Sequence[Row], best: Constants) -> float:
    """The largest clk of prepare that the rows allow: with the other constants fitted anew, LOOSER holds."""
    limit, clk = LOOSER * squares(rows, best), best.prepare_clk
    while squares(rows, fit(rows, clk + 100)) <= limit:
        clk += 100
    return clk


# ---- prediction -----------------------------------------------------------------------------------------------------


def on_blackwell(
    card: Card, best: Constants, highest: float
) -> dict[str, tuple[Constants, Chains]]:
    """Constants and chains by case. Prepare's clk go with its instructions; in the low case nothing but their issue
    limits it, in the high case it has the most clk that the calibration allows."""
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
    fitted, held_out = halves(measured())
    best = fit(fitted)
    highest = highest_clk(fitted, best)
    modelled = errors(held_out, best)
    rows = []
    for card, problem in itertools.product(BLACKWELL, known()):
        found = predict(problem, card, best, highest)
        times = {f"{case}_us": round(e.us, 1) for case, e in found.items()}
        kernels = {name: round(us, 1) for name, us in found["mid"].kernels.items()}
        rows.append({"setting": problem.name, "card": card.name, **times, "kernels": kernels})
        rows[-1]["binds"] = dict(found["mid"].binds)
    return {
        "op": kda_tables.OP,
        "note": "Predicted, not measured, by benchmarks/kda_model.py. Figures of the Blackwell cards are public "
        "specifications or assumptions.",
        "cards": [asdict(card) for card in (H200, *BLACKWELL)],
        "constants": {**asdict(best), "highest_prepare_clk": highest},
        "assumed": {"instructions": INSTRUCTIONS, "hand_over_clk": HAND_OVER_CLK},
        "tensor_clk": {"chain": tensor_clk(scan=True), "all": tensor_clk(scan=False)},
        "fitted": {
            "rows": len(fitted),
            **_summary(errors(fitted, best)),
            # All that the fit knows prepare's clk from.
            "throughput_binds": [
                r.setting
                for r in fitted
                if estimate(r.work, H200, best, hopper_chains()).binds["prepare"] == "throughput"
            ],
        },
        "held_out": {
            "rows": [
                {"setting": r.setting, "measured_us": r.us, "modelled_us": round(r.us * (1 + e), 1)}
                for r, e in zip(held_out, modelled, strict=True)
            ],
            **_summary(modelled),
        },
        "rows": rows,
    }


def _summary(found: Sequence[float]) -> dict[str, float]:
    sizes = [abs(e) for e in found]
    return {"median": round(statistics.median(sizes), 4), "worst": round(max(sizes), 4)}


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
