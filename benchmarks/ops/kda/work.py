"""What a call of KDA prefill does on a card: bytes and chunks of its kernels, as its package spreads the call.

The chunk-parallel kernel (prepare) writes blocks to memory. The recurrence walks through the chunks of a sequence one
after the other. Where sequences are cut into segments, a scan computes what each segment does to its state, and a merge
computes the states that segments start from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.registry import Setting
from benchmarks.ops import sequences
from benchmarks.ops.kda import internals

STATE_BYTES = 4 * 128 * 128


@dataclass(frozen=True)
class Card:
    """The figures of a GPU. Those of Blackwell are public specifications or assumptions, not measured."""

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
class Work:
    """Counts of a call.

    chunk_heads: chunks times value heads. tiles: tiles of v per CTA of the recurrence. parts: segments of the longest
    sequence. packed: whether sequences are packed. prepare_bytes, walk_bytes and scan_bytes: bytes that prepare, the
    recurrence and the scan move. walk_chunks and scan_chunks: chunks that the busiest CTA of each walks through.
    """

    chunk_heads: int
    tiles: int
    parts: int
    packed: bool
    prepare_bytes: int
    walk_bytes: int
    walk_chunks: int
    scan_bytes: int
    scan_chunks: int


def busiest(items: Iterable[int], ctas: int) -> int:
    """Chunks of the busiest CTA, where each free CTA takes the longest item of work that is left."""
    loads = [0] * ctas
    for item in sorted(items, reverse=True):
        heapq.heapreplace(loads, loads[0] + item)
    return max(loads)


def work(problem: Setting, card: Card) -> Work:
    """Counts a setting of kda_prefill, spread as the package for the card spreads it."""
    sizes, heads = internals.sizes(card.package), problem.params["H"]
    spread = _plan(problem, card)
    cut = _segments(problem, sizes.chunk, spread.segment_tokens)
    chunks = sum(map(sum, cut))
    # A scan walks through V columns of first segments, K + V of the others, and nothing of last ones.
    scans = [n for row in cut for i, n in enumerate(row[:-1]) for _ in range(1 + (i > 0))]
    scanned = sum(n for row in cut for n in row[:-1])

    rows = 2 * sizes.chunk * sizes.head_dim  # bytes of a chunk of v; of q and k too
    gates = rows * (2 if sequences.has(problem, "fp32gate") else 1) + 2 * sizes.chunk  # beta too
    queries_and_keys = 2 * rows * sequences.query_heads(problem)
    given = sequences.has(problem, "state") or sequences.has(problem, "pool")
    states = heads * (len(cut) * (1 + given) + spread.split * sum(map(len, cut)))
    walked = [n for row in cut for n in row] * (heads * sizes.v_tiles // spread.tiles)
    return Work(
        chunk_heads=chunks * heads,
        tiles=spread.tiles,
        parts=max(map(len, cut)),
        packed=sequences.is_packed(problem),
        prepare_bytes=chunks * (heads * (gates + sizes.block_bytes) + queries_and_keys),
        walk_bytes=chunks * heads * (sizes.block_bytes + 2 * rows) + STATE_BYTES * states,
        walk_chunks=busiest(walked, card.sms),
        scan_bytes=heads
        * (scanned * (sizes.block_bytes - sizes.query_bytes + rows) + STATE_BYTES * len(scans)),
        scan_chunks=busiest(scans * heads, card.sms),
    )


def _plan(problem: Setting, card: Card) -> Any:
    """The planner's choice; it knows the longest sequence of a packed problem."""
    p = problem.params
    longest = None
    if sequences.is_packed(problem):
        longest = max(end - start for _, start, end in sequences.spans(problem))
    shape = (sequences.batch_of(problem), p["T"], p["H"], p.get("N"))
    return internals.plan(card.package, *shape, card.sms, longest=longest)


def _segments(problem: Setting, chunk: int, segment_tokens: int) -> list[list[int]]:
    """Chunks of every segment, by sequence; with 0 for `segment_tokens` a sequence is one segment."""
    chunks = [-(-(end - start) // chunk) for _, start, end in sequences.spans(problem)]
    segment = segment_tokens // chunk or max(chunks)
    return [[min(segment, n - i) for i in range(0, n, segment)] for n in chunks]
