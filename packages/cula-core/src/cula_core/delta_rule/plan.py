"""How a call of KDA is spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import BLOCK_BYTES, CHUNK, MAX_GRID_Z, MIN_SEGMENT_CHUNKS, chunk_slots

if TYPE_CHECKING:
    from .target import Target

GAIN = 1.03  # cutting must win this much
MAX_PARTS = 16


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    tiles: of v_tile columns of v per CTA of the recurrence. segment_tokens: length of a segment, a multiple of 64; 0
    when sequences stay whole. segments: how many there may be in all. piece_slots: chunks that the workspace holds at
    once.
    """

    tiles: int
    segment_tokens: int
    segments: int
    pieces: int
    piece_slots: int

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
class Costs:
    """The times of an architecture's kernels, in microseconds.

    A chain is a CTA that walks through chunks one after the other. Alone it needs chain_us a chunk, by its tiles of v;
    all chains together are limited by the memory, which needs block_us a chunk and value head. start_us: of a kernel,
    until its first chunk is done. merge_us, merge_step_us: of a merge of two segments, and of each further one.
    """

    start_us: float
    chain_us: Mapping[int, float]
    block_us: float
    scan_chain_us: float
    scan_block_us: float
    merge_us: float
    merge_step_us: float


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

    def walk_us(self, length: int, segments: int) -> float:
        """Returns the time of the recurrence over segments of one length."""
        tiles = self.tiles(segments)
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
        merge = self.costs.merge_us + self.costs.merge_step_us * (parts - 2)
        halves = max(1, self.halves(segments)) + self.maps[0]
        return self.scan_us(length, halves) + merge + self.walk_us(length, segments)

    def halves(self, segments: int) -> int:
        """Returns the halves of maps that a scan gives: of the first segment one, of the last one nothing."""
        return 2 * segments - 3

    def whole_us(self, longest: int, total: int) -> float:
        """Returns the time of the recurrence over whole sequences, and of a scan of those that go on elsewhere."""
        scan = self.scan_us(longest, self.maps[1]) if self.maps[1] else 0.0
        return scan + self.walk_us(longest, -(-total // longest))

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
        if longest is None:
            longest = tokens if sequences is None else max(tokens - sequences + 1, 1)
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
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens.

    sequences: of packed input, else None. workspace: its bytes. intracard_cp: "auto", "on" or "off". longest: tokens of
    the longest sequence where it is known; otherwise one sequence may hold all tokens but one of each other.
    segment_tokens: where to cut instead, if not 0. maps: as in `CostModel`.
    """
    model = CostModel(target.costs, target.v_tiles, value_heads, multiprocessors, maps)
    slots = chunk_slots(batch, tokens, sequences)
    piece_slots = min(slots, workspace // (value_heads * BLOCK_BYTES), MAX_GRID_Z)
    pieces = -(-slots // piece_slots)
    cut = model.cut(
        batch, tokens, sequences, intracard_cp if pieces == 1 else "off", longest, segment_tokens
    )
    return Plan(model.tiles(cut.alike), cut.segment_tokens, cut.segments, pieces, piece_slots)
