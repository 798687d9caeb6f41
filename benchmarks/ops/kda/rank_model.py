"""What a forward of KDA on several GPUs of one host should take, also where it has not been measured.

    python benchmarks/ops/kda/rank_model.py [--json PATH]

A rank prepares its chunks, scans its slice for what that does to a state, and waits for the maps of all; then it walks
from its starting state. The times of kernels are those by which `cula-cp-sm90` plans on an H200, times what ranks took
longer (`PREPARE`, `SCAN`, `WALK`, `AROUND_US`, `FOLD_US`, `AROUND_FOLD_US`: benchmarks/results/h200/rank_stages.json).
Those of links are the latency of messages between two H200s (`LATENCY_US`: several_gpus_x2.json beside it) and an
assumption (`GIGABYTES`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import rank_rows, report, results
from benchmarks.ops.kda import internals
from benchmarks.ops.kda.work import H200, STATE_BYTES
from cula.distributed import balanced_bounds
from cula.distributed.exchange import by_heads

CHUNK = internals.sizes(H200.package).chunk
LATENCY_US = 50.0  # of a collective, with its begin and end
GIGABYTES = 300.0  # a second into a rank
FOLD_US = 3.0  # of a product of maps with states, of all heads
AROUND_FOLD_US = 18.0  # what is copied in front of such products and behind them
PREPARE, SCAN, WALK = 1.06, 1.08, 0.87  # of what the planner expects
AROUND_US = 35.0  # small kernels of a rank

NOTE = (
    "Predicted for the H200 by benchmarks/ops/kda/rank_model.py from the planner's constants and a guess for the "
    "links, not measured."
)


def bounds_of(which: str, tokens: int, heads: int, ranks: int) -> Sequence[int]:
    """Where a sequence is cut: rank r has the tokens from `bounds[r]` to `bounds[r + 1]`."""
    if which == "balanced":
        return balanced_bounds(tokens, ranks, heads)
    return [tokens * r // ranks for r in range(ranks + 1)]


def links_us(heads: int, ranks: int, exchange: str) -> float:
    """What maps take on their way; two ranks need no M."""
    map_bytes = heads * STATE_BYTES * (1 if ranks == 2 else 2)
    gathered = map_bytes * (ranks - 1)
    if not by_heads(exchange, ranks, gathered):
        return LATENCY_US + gathered / GIGABYTES / 1e3
    moved = (map_bytes + heads * STATE_BYTES) * (ranks - 1) / ranks
    return 2 * LATENCY_US + moved / GIGABYTES / 1e3


def fold_us(products: int) -> float:
    """Of so many maps after each other."""
    return FOLD_US * products + AROUND_FOLD_US if products > 0 else 0.0


def exchange_us(heads: int, ranks: int, exchange: str) -> float:
    """From the maps of all ranks to the state in front of each."""
    return links_us(heads, ranks, exchange) + fold_us(ranks - 2)


def one_ms(tokens: int, heads: int) -> float:
    """A call on one GPU, by the better of its two schedules."""
    model = internals.cost_model(H200.package, heads, H200.sms)
    chunks = max(1, -(-tokens // CHUNK))
    apart = model.apart_us(chunks, chunks, model.parts_of(chunks, chunks, "auto"))
    beside, *_ = model.beside(chunks, chunks, 1)
    return min(apart, beside) / 1e3


def halves_us(tokens: int, heads: int, comes_on: bool, goes_on: bool) -> tuple[float, float]:
    """What a rank does in front of the exchange and behind it. comes_on, goes_on: whether its slice of the sequence
    has one in front of it and one behind it."""
    maps = 2 * goes_on + comes_on, goes_on * (1 + comes_on)
    model = internals.cost_model(H200.package, heads, H200.sms, maps)
    chunks = max(1, -(-tokens // CHUNK))
    prepare = PREPARE * model.prepare_us(chunks) + AROUND_US
    parts = model.parts_of(chunks, chunks, "auto")
    if parts == 1:
        scan = SCAN * model.scan_us(chunks, maps[1]) if maps[1] else 0.0
        return prepare + scan, WALK * model.walk_us(chunks, 1)
    length = -(-chunks // parts)
    segments = -(-chunks // length)
    scan = SCAN * model.scan_us(length, model.halves(segments) + maps[0])
    merge = model.merge_us(parts)
    # The map of a slice is a product of all its segments'; that of the first one is the state behind it.
    own = fold_us(segments - 1) if goes_on else 0.0
    return prepare + scan + own, merge + WALK * model.walk_us(length, segments)


def forward_ms(heads: int, bounds: Sequence[int], exchange: str = "auto") -> float:
    """The time of the slowest rank, where rank r holds the tokens from `bounds[r]` to `bounds[r + 1]`."""
    ranks = len(bounds) - 1
    halves = [
        halves_us(bounds[r + 1] - bounds[r], heads, r > 0, r < ranks - 1) for r in range(ranks)
    ]
    before, after = (max(times) for times in zip(*halves, strict=True))
    return (before + exchange_us(heads, ranks, exchange) + after) / 1e3


def document() -> dict[str, Any]:
    """The content of the file of predictions."""
    rows = []
    for heads, tokens in itertools.product((64, 16), (32768, 131072, 262144, 1048576)):
        one = one_ms(tokens, heads)
        for ranks, bounds, exchange in itertools.product(
            (2, 4, 8), rank_rows.BOUNDS, rank_rows.EXCHANGES
        ):
            cuts = bounds_of(bounds, tokens, heads, ranks)
            if bounds == "balanced" and cuts == bounds_of("equal", tokens, heads, ranks):
                continue
            values = tokens, heads, ranks, bounds, exchange
            ms, links = forward_ms(heads, cuts, exchange), links_us(heads, ranks, exchange) / 1e3
            times = {"ms": ms, "links_ms": links, "one_ms": one}
            rows.append({
                **dict(zip(rank_rows.MODEL_KEY, values, strict=True)),
                **{name: round(value, 4) for name, value in times.items()},
            })  # fmt: skip
    return {"op": rank_rows.PREDICTED, "title": "KDA on several GPUs", "note": NOTE, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predicts KDA's forward on several GPUs.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the prediction's file")
    args = parser.parse_args(argv)
    content = document()
    print(report.as_text(rank_rows.predictions(content)), content["note"], sep="\n\n")
    if args.json:
        results.write(content, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
