"""How a call is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .config import LINE, V_TILES

# Microseconds on an H200, both kernels beside each other. A chunk of a chain, with a CTA per multiprocessor: by its
# tiles, and for each CTA more, because all read the same memory. A chain of its own: what its ends add. A chunk and
# state head in `prepare`, per multiprocessor.
CHAIN_US, CTA_US = {1: 1.0, 2: 1.85}, {1: 0.0026, 2: 0.0}
ENDS_US = 4.0
PREPARE_US = 1.2
# Steps that may lie ready in front of a chain, by its tiles: further ahead both kernels would go through DRAM.
AHEAD = {1: 8, 2: 6}
WORKERS = 3  # groups of a CTA that prepares
SPARE = 1.4  # of what preparing would need to end with the chains: more costs power and bandwidth


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
    ahead: int

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
    for tiles in CHAIN_US:
        per_machine = V_TILES // tiles
        for most in range(1, (multiprocessors - 1) // per_machine + 1):
            # A machine that has less than a whole chain would wait for others.
            share = max(longest, -(-total // most))
            machines = -(-total // share)
            if machines < most:
                continue
            pace = CHAIN_US[tiles] + CTA_US[tiles] * machines * per_machine + ENDS_US / longest
            walk = share * pace
            left = multiprocessors - machines * per_machine
            # They slow each other down.
            time = (walk**8 + (total * PREPARE_US / left) ** 8) ** 0.125
            if time < least:
                ctas = min(left, max(machines, int(SPARE * total * PREPARE_US / walk) + 1))
                least, best = time, Plan(tiles, machines, share, ctas, AHEAD[tiles])
    assert best is not None  # one machine is always tried
    return best
