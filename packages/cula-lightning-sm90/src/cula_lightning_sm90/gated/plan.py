"""How a call is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .config import LINE, V_TILES

# Microseconds on an H200: of a chunk of a chain by its tiles, with one CTA per multiprocessor; of a chunk and state
# head in `prepare`, per multiprocessor.
CHAIN_US = {1: 1.14, 2: 1.78}
PREPARE_US = 1.3
WORKERS = 3  # of a multiprocessor that prepares
AHEAD_STEPS = 8
AHEAD = 0.7  # of the time of the recurrence that preparing may take


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    tiles: of 64 columns of v per CTA of the recurrence. machines: how many walk through chains, `share` steps each
    (`kernels.order`). prepare_ctas: of the kernel beside it, which prepares steps up to `ahead` of those that a machine
    has come to.
    """

    tiles: int
    machines: int
    share: int
    prepare_ctas: int
    ahead: int = AHEAD_STEPS

    @property
    def ctas(self) -> int:
        """CTAs of the recurrence."""
        return self.machines * (V_TILES // self.tiles)

    @property
    def flags(self) -> int:
        """Words for flags: of chunks, of machines' progress, of states between them, and a counter."""
        return self.machines * ((self.share + 1) * LINE + V_TILES) + 1


@functools.lru_cache(maxsize=4096)
def plan(longest: int, total: int, multiprocessors: int) -> Plan:
    """Returns the fastest way by a model of both kernels.

    longest: chunks of the longest chain, as far as it is known. total: steps of all chains.
    """
    least, best = float("inf"), None
    work = total * PREPARE_US
    for tiles, pace in CHAIN_US.items():
        for most in range(1, (multiprocessors - 1) // (V_TILES // tiles) + 1):
            share = max(longest, -(-total // most))
            machines = -(-total // share)
            if machines < most:
                break  # more do not help
            walk = share * pace
            prepare = work / (multiprocessors - machines * (V_TILES // tiles))
            # They slow each other down.
            time = (walk**8 + prepare**8) ** 0.125
            if time < least:
                least, best = time, (tiles, machines, share, walk)
    if best is None:  # one chain that is longer than all others together
        best = (1, 1, total, total * CHAIN_US[1])
    tiles, machines, share, walk = best
    left = multiprocessors - machines * (V_TILES // tiles)
    wanted = max(-(-machines // WORKERS), int(work / (AHEAD * walk)) + 1)
    return Plan(tiles, machines, share, max(1, min(left, wanted, -(-total // WORKERS))))
