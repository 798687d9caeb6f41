"""How a call is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cula_core.delta_rule.config import MIN_SEGMENT_CHUNKS

from .config import BLOCK, HEAD_DIM, LINE, PLACES, UNCUT, V_TILE, V_TILES

# Microseconds on an H200, both kernels beside each other. A chunk of a chain, with a CTA per multiprocessor: by its
# tiles, and for each CTA more, because all read the same memory. A chain of its own: what its ends add. A chunk and
# state head in `prepare`, per multiprocessor.
CHAIN_US, CTA_US = {1: 1.0, 2: 1.9}, {1: 0.0026, 2: 0.0}
ENDS_US = 4.0
PREPARE_US = 1.25
# Where sequences are cut: a chunk and state head in `prepare`, and in the recurrence, on all multiprocessors, which
# memory limits.
PREPARE_MEMORY_US, CHAIN_MEMORY_US = 0.0122, 0.0205
# A chunk of a scan; a segment of it that forgets. What merging costs, and each segment beyond two of it where none
# does. Kernels more, and their ends.
SCAN_US, MARKED_US = 1.5, 10.0
MERGE_US, MERGE_STEP_US = 5.0, 3.4
CUT_US = 5.0
# Steps that may lie ready in front of a chain, by its tiles: further ahead both kernels would go through DRAM.
AHEAD = {1: 8, 2: 5}
SPARE = 1.23  # of what preparing would need to end with the chains: more costs power and bandwidth
GAIN = 1.03  # what cutting has to gain
# Heads of a machine: how many at most, and by what the model has to promise to be faster with fewer, where these would
# be fewer than share keys, and where they would not. It does not know that the keys of all but one then come from the
# L2, and that longer pieces of a row of memory are read at a time.
MOST_TOGETHER, SHARED_GAIN, NEIGHBOURS_GAIN = 4, 1.05, 1.02


@dataclass(frozen=True)
class Walk:
    """How chains are walked through.

    tiles: of 64 columns per CTA, columns: of them per head. machines: how many walk, `share` steps each
    (`kernels.order`). together: neighbouring heads of a machine, which are walked through in step.
    """

    tiles: int
    machines: int
    share: int
    columns: int = V_TILES
    together: int = 1

    @property
    def seats(self) -> int:
        """Heads that are walked through at a time."""
        return self.machines * self.together

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return self.seats * (self.columns // self.tiles)


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    first: the recurrence, beside the kernel of `prepare_ctas` CTAs that prepares steps up to `ahead` of those that a
    machine has come to; or a scan behind that kernel. segment: chunks of a segment, UNCUT where sequences are whole.
    second: the recurrence behind a scan.
    """

    first: Walk
    prepare_ctas: int
    ahead: int
    segment: int = UNCUT
    second: Walk | None = None

    @property
    def flags(self) -> tuple[int, int]:
        """Words for flags of both walks: of states between machines and a counter; in front of those of a recurrence
        beside `prepare`, of chunks and of machines' progress."""
        first, second = self.first, self.second
        if second is None:
            return first.seats * ((first.share + 1) * LINE + PLACES) + 1, 0
        return first.seats * PLACES + 1, second.seats * PLACES + 1


@functools.lru_cache(maxsize=4096)
def plan(
    longest: int,
    usual: int,
    total: int,
    heads: int,
    group: int,
    multiprocessors: int,
    intracard_cp: str = "auto",
    segment: int = 0,
    sliced: bool = False,
) -> Plan:
    """Returns the fastest way by a model of the kernels, in which segments forget as often as not.

    longest, usual: chunks of the longest sequence, as far as it is known, and of a sequence on average. total: steps of
    all chains. heads: of states, group: those that share keys. intracard_cp: "off": sequences stay whole, "on": they
    are cut, "auto": where it pays. segment: chunks after which they are cut instead, if not 0. sliced: sequences are
    slices of longer ones, so that a scan comes in front of the recurrence also where they stay whole.
    """
    least, best = float("inf"), None
    for together in range(min(heads, MOST_TOGETHER), 0, -1):
        aligned = together % group == 0 or group % together == 0
        fits = together == 1 or together * V_TILES < multiprocessors
        if heads % together == 0 and aligned and fits:
            if segment:
                time, way = _cut(segment, usual, total, together, multiprocessors)
            else:
                time, way = _way(
                    longest, usual, total, together, multiprocessors, intracard_cp, sliced
                )
            gain = SHARED_GAIN if together < group else NEIGHBOURS_GAIN
            if time * gain < least:
                least, best = time, way
    assert best is not None  # one head is always tried
    return best


def workspace_words(flags: int, blocks: int, walk: Walk) -> int:
    """Returns the 32-bit words that kernels share: flags, blocks of 16-bit elements, states between machines."""
    return (
        -(-flags // LINE) * LINE
        + blocks * BLOCK // 2
        + walk.seats * walk.columns * V_TILE * HEAD_DIM
    )


def _way(
    longest: int, usual: int, total: int, together: int, multiprocessors: int, intracard_cp: str, sliced: bool
) -> tuple[float, Plan]:  # fmt: skip
    """Returns the time, and the way, where machines have so many heads."""
    prepare_us = total * max(PREPARE_MEMORY_US, PREPARE_US / multiprocessors)
    if sliced:
        least, best = _cut(longest, usual, total, together, multiprocessors)
        least, best = least + prepare_us + CUT_US, replace(best, segment=UNCUT)
    else:
        least, best = _beside(longest, usual, total, together, multiprocessors)
    if intracard_cp == "off" or longest < 2 * MIN_SEGMENT_CHUNKS:
        return least, best
    least = least / GAIN if intracard_cp == "auto" else float("inf")
    # No way takes less than the work of all multiprocessors, so that most calls need not be looked at further.
    work = prepare_us + total * (SCAN_US + CHAIN_US[2]) / multiprocessors
    parts, previous = 2, 0
    while longest // parts >= MIN_SEGMENT_CHUNKS:
        merge_us = MERGE_US + (parts - 2) * MERGE_STEP_US / 2
        if work + merge_us >= least:
            break
        segment = -(-longest // parts)
        if segment != previous:
            cut_us, way = _cut(segment, usual, total, together, multiprocessors)
            time = prepare_us + merge_us + cut_us + CUT_US
            if time < least:
                least, best = time, way
        parts, previous = parts + 1, segment
    return least, best


def _cut(
    segment: int, usual: int, total: int, together: int, multiprocessors: int
) -> tuple[float, Plan]:
    """Returns the time of the scan and the recurrence, and the way, with segments of so many chunks."""
    scan_us, scan = _alone(segment, usual, total, together, multiprocessors, PLACES)
    walk_us, walk = _alone(segment, usual, total, together, multiprocessors, V_TILES)
    walk_us = max(walk_us, total * CHAIN_MEMORY_US)
    scan_us = (scan_us + MARKED_US * -(-scan.share // segment)) / 2
    return scan_us + walk_us, Plan(scan, multiprocessors, 1, segment, walk)


def _walks(
    longest: int, total: int, tiles: int, ctas: int, columns: int, together: int
) -> Iterator[Walk]:
    """Yields the ways to walk with at most so many CTAs: a machine that has less than a whole chain would wait."""
    total = -(-total // together)
    for machines in range(1, max(ctas * tiles // (columns * together), 1) + 1):
        share = max(longest, -(-total // machines))
        if -(-total // share) == machines:
            yield Walk(tiles, machines, share, columns, together)


def _pace(walk: Walk, chain: int) -> float:
    """Returns the time of a chunk of chains of a length."""
    pace = SCAN_US if walk.columns == PLACES else CHAIN_US[walk.tiles]
    return pace + CTA_US[walk.tiles] * walk.ctas + ENDS_US / chain


def _both(time: float, other: float) -> float:
    """Returns how long two things take that slow each other down if they take about the same time."""
    return (time**8 + other**8) ** 0.125


def _beside(
    longest: int, usual: int, total: int, together: int, multiprocessors: int
) -> tuple[float, Plan]:
    """Returns the time, and the way, where chunks are prepared at the same time."""
    least, best = float("inf"), None
    for tiles in CHAIN_US:
        for walk in _walks(longest, total, tiles, multiprocessors - 1, V_TILES, together):
            walk_us = walk.share * _pace(walk, min(longest, usual))
            left = max(multiprocessors - walk.ctas, 1)
            time = _both(walk_us, total * PREPARE_US / left)
            if time < least:
                enough = int(SPARE * total * PREPARE_US / walk_us) + 1
                least = time
                best = Plan(walk, min(left, max(walk.seats, enough)), AHEAD[tiles])
    assert best is not None  # one machine is always tried
    return least, best


def _alone(
    longest: int, usual: int, total: int, together: int, multiprocessors: int, columns: int
) -> tuple[float, Walk]:
    """Returns the time, and the way, of a recurrence or a scan whose chunks are all prepared."""
    ways = [
        (walk.share * _pace(walk, min(longest, usual)), walk)
        for tiles in (CHAIN_US if columns == V_TILES else (2,))
        for walk in _walks(longest, total, tiles, multiprocessors, columns, together)
    ]
    return min(ways, key=lambda way: way[0])
