"""How a call of KDA is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import (
    BLOCK_BYTES,
    CHUNK,
    MAX_GRID_Z,
    MIN_SEGMENT_CHUNKS,
    MOST_MACHINES,
    TEAMS,
    chunk_slots,
)

if TYPE_CHECKING:
    from .target import Target

GAIN = 1.03  # cutting must win this much
MAX_PARTS = 16
EVENLY = 8  # exponent of the mean of two times that slow each other down only where they are about the same


@dataclass(frozen=True)
class Beside:
    """The recurrence on multiprocessors of its own, beside those that prepare its chunks.

    machines: how many walk through chains, `share` steps each (`kernels.order`). ctas: of the recurrence, prepare_ctas:
    of the other kernel. lead: how many steps a chunk that is begun may be in front of what its machine has come to.
    """

    machines: int
    share: int
    ctas: int
    prepare_ctas: int
    lead: int


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    tiles: of v_tile columns of v per CTA of the recurrence. segment_tokens: length of a segment, a multiple of 64; 0
    when sequences stay whole. segments: how many there may be in all. piece_slots: chunks that the workspace holds at
    once. beside: how both kernels run at the same time; None: one after the other.
    """

    tiles: int
    segment_tokens: int
    segments: int
    pieces: int
    piece_slots: int
    beside: Beside | None = None

    @property
    def split(self) -> bool:
        """Whether sequences are cut into segments."""
        return self.segment_tokens > 0


@dataclass(frozen=True)
class Cut:
    """Where the sequences of a call are cut.

    segment_tokens: length of a segment, a multiple of 64; 0 when sequences stay whole. segments: how many there may be
    in all. alike: how many of the longest hold all tokens.
    """

    segment_tokens: int
    segments: int
    alike: int


@dataclass(frozen=True)
class BesideCosts:
    """The times of kernels beside each other, in microseconds.

    start_us: until the first blocks are there, and behind the last ones, by the tiles of a machine's CTAs. prepare_us:
    of a chunk and value head on a multiprocessor, alone_us: where the card does nothing else. step_us: of a step of a
    machine, by its tiles. chain_us: of a chain more. lead: steps from the last one of a machine whose block may be
    missing to one that may not be begun yet, at least. multiprocessors: that a card has at least for which this holds;
    one with fewer may have slower tensor cores, or be a part of a card.
    """

    start_us: Mapping[int, float]
    prepare_us: float
    alone_us: float
    step_us: Mapping[int, float]
    chain_us: float
    lead: int
    multiprocessors: int


@dataclass(frozen=True)
class Costs:
    """The times of an architecture's kernels, in microseconds.

    A chain is a CTA that walks through chunks one after the other. Alone it needs chain_us a chunk, by its tiles of v;
    all chains together are limited by the memory, which needs block_us a chunk and value head. start_us: of a kernel,
    until its first chunk is done. merge_us, merge_step_us: of a merge of two segments, and of each further one. beside:
    None where kernels do not run beside each other.
    """

    start_us: float
    chain_us: Mapping[int, float]
    block_us: float
    scan_chain_us: float
    scan_block_us: float
    merge_us: float
    merge_step_us: float
    beside: BesideCosts | None = None


@dataclass(frozen=True)
class CostModel:
    """The time of a call on a card of an architecture. Lengths are in chunks.

    maps: of sequences that other cards go on with, which a scan gives beyond those of segments, as halves [128, K]: of
    cut sequences, and of whole ones.
    """

    costs: Costs
    v_tiles: int
    value_heads: int
    multiprocessors: int
    maps: tuple[int, int] = (0, 0)

    def tiles(self, sequences: int) -> int:
        """Returns the tiles of v per CTA: one, as long as all CTAs fit on the card at once."""
        return (
            1
            if self.v_tiles * sequences * self.value_heads <= self.multiprocessors
            else self.v_tiles
        )

    def walk_us(self, length: int, segments: float) -> float:
        """Returns the time of the recurrence over so many segments of one length, of which one may be a part."""
        tiles = self.tiles(math.ceil(segments))
        chains = segments * self.value_heads
        at_once = min(chains, self.multiprocessors * tiles // self.v_tiles)
        pace = _pace_us(self.costs.chain_us[tiles], self.costs.block_us * at_once)
        return self.costs.start_us + length * pace * max(1.0, chains / at_once)

    def scan_us(self, length: int, halves: int) -> float:
        """Returns the time of the scan of so many halves of maps."""
        ctas = self.value_heads * halves
        at_once = min(ctas, self.multiprocessors)
        pace = _pace_us(self.costs.scan_chain_us, self.costs.scan_block_us * at_once / 2)
        return self.costs.start_us + length * pace * -(-ctas // self.multiprocessors)

    def cut_us(self, longest: int, total: int, parts: int) -> float:
        """Returns the time of scan, merge and recurrence with the longest sequence in `parts`; total: of all
        sequences."""
        length = -(-longest // parts)
        segments = -(-total // length)
        halves = max(1, self.halves(segments)) + self.maps[0]
        return self.scan_us(length, halves) + self.merge_us(parts) + self.walk_us(length, segments)

    def merge_us(self, parts: int) -> float:
        """Returns the time of the merge of sequences of which the longest one has so many segments."""
        return self.costs.merge_us + self.costs.merge_step_us * (parts - 2)

    def halves(self, segments: int) -> int:
        """Returns the halves of maps that a scan gives: of the first segment one, of the last one nothing."""
        return 2 * segments - 3

    def whole_us(self, longest: int, total: int) -> float:
        """Returns the time of the recurrence over whole sequences, and of a scan of those that go on elsewhere."""
        scan = self.scan_us(longest, self.maps[1]) if self.maps[1] else 0.0
        return scan + self.walk_us(longest, total / longest)

    def beside(self, longest: int, total: int, sequences: int) -> tuple[float, int, Beside] | None:
        """Returns the time of both kernels beside each other, the tiles per CTA, and how; None on a card with too few
        multiprocessors. total: slots of all sequences.

        A machine has one tile per CTA only where no chain waits for another machine that does: more would not be
        faster than all tiles in one, which reads blocks once.
        """
        costs = self.costs.beside
        assert costs is not None
        steps, chains, best = total * self.value_heads, sequences * self.value_heads, None
        for tiles, step_us in costs.step_us.items():
            per_machine = self.v_tiles // tiles
            most = min((self.multiprocessors - 1) // per_machine, MOST_MACHINES, steps)
            if most < 1:
                continue
            walk_us = steps * step_us + chains * costs.chain_us
            prepare_us = steps * costs.prepare_us
            counts: tuple[int, ...] = (-(-steps // longest),)
            if tiles == self.v_tiles:
                # Where `_slower` is least, if machines need not be whole.
                apart = per_machine * (prepare_us / walk_us) ** EVENLY
                ideal = int(self.multiprocessors / (per_machine + apart ** (1 / (EVENLY + 1))))
                counts = (ideal, ideal + 1)
            for count in counts:
                share = max(longest, -(-steps // min(max(count, 1), most)))
                if tiles < self.v_tiles and share > longest:
                    continue
                machines = -(-steps // share)
                left = self.multiprocessors - machines * per_machine
                time = costs.start_us[tiles] + _slower(
                    share * step_us + chains / machines * costs.chain_us, prepare_us / left
                )
                if best is None or time < best[0]:
                    # A team has a chunk in hand when it begins another one.
                    lead = costs.lead + -(-2 * TEAMS * left // machines)
                    way = Beside(machines, share, machines * per_machine, left, lead)
                    best = time, tiles, way
        return best

    def apart_us(self, longest: int, total: int, parts: int) -> float:
        """Returns the time of both kernels one after the other, with the longest sequence in `parts`."""
        if parts == 1:
            return self.prepare_us(total) + self.whole_us(longest, total)
        return self.prepare_us(total) + self.cut_us(longest, total, parts)

    def prepare_us(self, total: int) -> float:
        """Returns the time of the kernel that prepares the slots of all sequences, by itself."""
        costs = self.costs.beside
        assert costs is not None
        return self.costs.start_us + total * self.value_heads * (
            costs.alone_us / self.multiprocessors
        )

    def parts_of(self, longest: int, total: int, intracard_cp: str) -> int:
        """Returns into how many segments the longest sequence is cut; 1: sequences stay whole."""
        if intracard_cp == "off" or longest < 2 * MIN_SEGMENT_CHUNKS:
            return 1
        # More segments than there are CTAs at once gain nothing.
        at_once = self.multiprocessors * longest // (self.value_heads * total)
        most = min(MAX_PARTS, longest // MIN_SEGMENT_CHUNKS, max(2, at_once))
        costs = {parts: self.cut_us(longest, total, parts) for parts in range(2, most + 1)}
        best = min(costs, key=lambda parts: costs[parts])
        if intracard_cp == "on":
            return best
        return best if costs[best] * GAIN < self.whole_us(longest, total) else 1

    def cut(
        self,
        batch: int,
        tokens: int,
        sequences: int | None,
        intracard_cp: str,
        longest: int | None,
        segment_tokens: int = 0,
    ) -> Cut:
        """Decides where sequences are cut; the arguments are those of `plan`."""
        longest = _longest(tokens, sequences, longest)
        chunks = max(1, -(-longest // CHUNK))
        total = max(chunks, batch * -(-tokens // CHUNK))
        if segment_tokens:
            length = segment_tokens if longest > segment_tokens else 0
        else:
            parts = self.parts_of(chunks, total, intracard_cp)
            length = -(-chunks // parts) * CHUNK if parts > 1 else 0
        if not length:
            return Cut(0, batch if sequences is None else sequences, -(-total // chunks))
        segments = (
            batch * -(-tokens // length) if sequences is None else tokens // length + sequences
        )
        return Cut(length, segments, -(-total * CHUNK // length))


def _longest(tokens: int, sequences: int | None, longest: int | None) -> int:
    """Returns the tokens of the longest sequence, or where it is not known the most that it may have."""
    if longest is not None:
        return longest
    return tokens if sequences is None else max(tokens - sequences + 1, 1)


def _slower(time: float, other: float) -> float:
    """Returns how long two things take that slow each other down if they take about the same time."""
    return (time**EVENLY + other**EVENLY) ** (1 / EVENLY)


def _pace_us(chain: float, memory: float) -> float:
    """Returns the time of a chunk where a chain and the memory slow each other down: more than that of the slower."""
    return (chain**2.5 + memory**2.5) ** 0.4


def plan(
    target: Target,
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    workspace: int,
    intracard_cp: str = "auto",
    longest: int | None = None,
    segment_tokens: int = 0,
    maps: tuple[int, int] = (0, 0),
    beside: str = "off",
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens.

    sequences: of packed input, else None. workspace: its bytes. intracard_cp: "auto", "on" or "off". longest: tokens of
    the longest sequence where it is known; otherwise one sequence may hold all tokens but one of each other.
    segment_tokens: where to cut instead, if not 0. maps: as in `CostModel`. beside: whether both kernels run at the
    same time, "auto", "on" or "off"; not in several pieces, nor where sequences have to be cut.
    """
    model = CostModel(target.costs, target.v_tiles, value_heads, multiprocessors, maps)
    slots = chunk_slots(batch, tokens, sequences)
    piece_slots = min(slots, workspace // (value_heads * BLOCK_BYTES), MAX_GRID_Z)
    pieces = -(-slots // piece_slots)
    cut = model.cut(
        batch, tokens, sequences, intracard_cp if pieces == 1 else "off", longest, segment_tokens
    )
    spread = Plan(model.tiles(cut.alike), cut.segment_tokens, cut.segments, pieces, piece_slots)
    forced = segment_tokens or intracard_cp == "on" or any(maps)
    costs = target.costs.beside
    if beside == "off" or costs is None or pieces > 1 or forced:
        return spread
    if beside == "auto" and multiprocessors < costs.multiprocessors:
        return spread
    longest = _longest(tokens, sequences, longest)
    # A packed sequence may have a slot without tokens.
    chunks = max(1, -(-longest // CHUNK)) + (sequences is not None)
    count = batch if sequences is None else sequences
    best = model.beside(chunks, slots, count)
    if best is None:
        return spread
    time, tiles, way = best
    parts = -(-longest // cut.segment_tokens) if cut.segment_tokens else 1
    if beside == "auto" and time > model.apart_us(chunks, slots, parts):
        return spread
    return Plan(tiles, 0, count, 1, piece_slots, way)
