"""How a call is spread over the multiprocessors, and which passes it takes. Pure Python, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from .config import CHUNK, V_TILE, Config, Problem

# Segments shorter than this cost more in their own start-up than they win.
_MIN_SEGMENT = 1024
_MAX_SEGMENTS = 16
_MAX_PIECES = 8


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    segments: how many segments there may be in all. segment_tokens: their length, a multiple of 64; 0 when sequences
    stay whole. piece_tokens: the same of the pieces of a segment that a prescan works on. parts: segments of one
    sequence of a dense batch. ctas: of the grid, at most one per multiprocessor.
    paired: two CTAs form a cluster; both always have the same segment, and heads that are neighbours or the same, whose
    gates they load for each other. shared: they have the two V tiles of one head, and share its q, k and P.
    """

    tiles: int
    segments: int
    segment_tokens: int
    piece_tokens: int
    parts: int
    ctas: int
    paired: bool
    shared: bool = False

    @property
    def pieces(self) -> int:
        """The pieces of a segment."""
        return -(-self.segment_tokens // self.piece_tokens) if self.piece_tokens else 1

    @property
    def split(self) -> bool:
        """Whether sequences are cut into segments."""
        return self.segment_tokens > 0


def plan(
    problem: Problem,
    batch: int,
    tokens: int,
    sequences: int,
    heads_v: int,
    multiprocessors: int,
    num_splits: int | None = None,
    gate_rows: bool = False,
    segment_tokens: int = 0,
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens.

    A head's V tiles go to CTAs of their own while those fit on the card; sequences are cut where even that leaves most
    of it idle. Lengths of packed sequences are unknown here: cutting by tokens bounds the longest piece whatever they
    are, and short sequences stay whole. gate_rows: TMA can load gates of neighbouring heads.
    segment_tokens: where to cut instead, if not 0; then there are no pieces, whose sums would differ from those of
    packed sequences.
    """
    v_tiles = problem.head_dim_v // V_TILE
    columns = heads_v * v_tiles * (1 if problem.packed else batch)
    length = segment_length(columns, tokens, multiprocessors, num_splits, segment_tokens)
    parts = -(-tokens // length) if length else 1
    piece = length
    if length and problem.forgets and not problem.packed and not segment_tokens:
        # More pieces make the prescan shorter, and the sum over them longer in front of the last segment.
        chunks = length // CHUNK
        piece = -(-chunks // min(_MAX_PIECES, 1 + isqrt(chunks // (4 * (parts - 1))))) * CHUNK
    if problem.packed:
        segments = sequences + (tokens // length if length else 0)
    else:
        segments = batch * parts
    fits = sequences * heads_v * v_tiles <= multiprocessors
    tiles = 1 if v_tiles == 1 or fits or length or problem.dots else 2
    ctas = min(multiprocessors, segments * heads_v * v_tiles // tiles)
    paired = (
        gate_rows and not problem.packed and tiles == 1 and heads_v * v_tiles % 2 == 0 and ctas > 1
    )
    shared = not problem.packed and tiles == 1 and v_tiles == 2 and ctas > 1
    if paired or shared:
        ctas = ctas // 2 * 2
    return Plan(tiles, segments, length, piece, parts, ctas, paired, shared)


def segment_length(
    columns: int, tokens: int, multiprocessors: int, num_splits: int | None, segment_tokens: int
) -> int:
    """Returns the length of the segments that sequences are cut into, 0 where they stay whole.

    columns: V tiles of all heads, and of all sequences of a dense batch. The others are those of `plan`.
    """
    if num_splits is None:
        num_splits = _at_once(columns, tokens, multiprocessors)
    length = -(-tokens // (num_splits * CHUNK)) * CHUNK if num_splits > 1 else 0
    length = segment_tokens or length
    return length if length < tokens else 0


def segment_for_states(columns: int, tokens: int, multiprocessors: int, reverse: bool) -> int:
    """Returns the length of segments where final states alone are wanted, 0 where sequences stay whole. The arguments
    are those of `segment_length`.

    The segment that comes last is the only one with outputs. It gets hardly more than a chunk of the longest sequence,
    but against time, where it is a whole one, because segments are counted from the sequence's begin.
    """
    if reverse:
        most = min(tokens // _MIN_SEGMENT, _MAX_SEGMENTS)
        return segment_length(columns, tokens, multiprocessors, most, 0)
    in_front = tokens - 1
    return in_front // (_at_once(columns, in_front, multiprocessors) * CHUNK) * CHUNK


def _at_once(columns: int, tokens: int, multiprocessors: int) -> int:
    """Returns how many segments of a sequence run side by side."""
    return max(1, min(multiprocessors // columns, tokens // _MIN_SEGMENT, _MAX_SEGMENTS))


def configs(problem: Problem, spread: Plan, ends: bool = False) -> tuple[Config, ...]:
    """Returns the passes of a call, in order. ends: final states alone are wanted."""
    forward = Config(
        problem, spread.tiles, spread.split, paired=spread.paired, shared=spread.shared
    )
    if not spread.split:
        return (forward,)
    return replace(forward, prescan=True), replace(forward, ends=ends)
