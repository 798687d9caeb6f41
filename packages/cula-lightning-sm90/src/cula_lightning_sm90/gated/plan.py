"""How a call is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .config import CHUNK, V_TILES

# Microseconds on an H200: of a chunk of a chain by its tiles, with one CTA per multiprocessor; of a chunk and state
# head in `prepare`, per multiprocessor.
CHAIN_US = {1: 1.1, 2: 1.65}
PREPARE_US = 1.2
WORKERS = 3  # of a multiprocessor that prepares


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    tiles: of 64 columns of v per CTA of the recurrence. machines: chains that are walked through at once. ctas,
    prepare_ctas: of the recurrence, and of the kernel beside it.
    """

    tiles: int
    machines: int
    ctas: int
    prepare_ctas: int


@functools.lru_cache(maxsize=4096)
def plan(chunks: int, chains: int, total: int, multiprocessors: int) -> Plan:
    """Returns the fastest way by a model of both kernels.

    chunks: of the longest chain. total: chunks and state heads of all chains.
    """
    best, least = None, float("inf")
    for tiles, pace in CHAIN_US.items():
        per_chain = V_TILES // tiles
        for machines in range(1, min(chains, (multiprocessors - 1) // per_chain) + 1):
            rounds = -(-chains // machines)
            if machines > 1 and -(-chains // (machines - 1)) == rounds:
                continue  # fewer take as long
            left = multiprocessors - machines * per_chain
            walk = max(chunks, total / chains * rounds) * pace
            time = max(walk, total * PREPARE_US / left) + 0.1 * min(walk, total * PREPARE_US / left)
            if time < least:
                best, least = (tiles, machines), time
    assert best is not None
    tiles, machines = best
    ctas = machines * (V_TILES // tiles)
    prepare_ctas = min(multiprocessors - ctas, -(-total // WORKERS))
    return Plan(tiles, machines, ctas, max(prepare_ctas, 1))


def flag_count(chunks: int, chains: int, total: int, machines: int, packed: bool) -> int:
    """Returns how many numbers the chunks of a call have at most (`kernels.order`)."""
    if not packed:
        return chunks * chains
    # A set's chains have the length of its longest one, which no chain of the set before it falls short of, but for
    # the width of the buckets that sort them.
    bucket = -(-chunks // 255)
    return chunks * min(machines, chains) + total + 2 * bucket * chains
