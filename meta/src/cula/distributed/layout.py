"""Which tokens a rank holds, and whose states it needs because of that. Pure Python, equal on all ranks.

A *range* is a run of neighbouring tokens of the packed batch that one rank holds. A *piece* is the part of one sequence
in one range: what a local call sees as a sequence of its own. A piece turns the state S in front of it into `M S + A`
and the gradient D behind it into `M^T D + B`. A piece that does not end its sequence sends (M, A) forward, one that
does not begin its sequence sends B backward. Every rank sends as many maps as the busiest one, its *slots*, so that
messages have one size; unused slots are never read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

# Of KDA on an H200, microseconds a chunk: the chunk-parallel kernel of one value head, and the scan of a whole slice.
# Slices of so many value heads are not cut.
_CHUNK, _PREPARE_US, _SCAN_US, _WHOLE_HEADS = 64, 0.0337, 1.12, 48
Range = tuple[int, int]
Chain = tuple[tuple[int, int], ...]
"""Slots `(of A or B, of M)` in the order in which they are folded; M of the first is not used."""


class Piece(NamedTuple):
    """Tokens `start` to `stop - 1` of the batch, all of one sequence."""

    sequence: int
    start: int
    stop: int
    begins: bool
    ends: bool


class Route(NamedTuple):
    """What travels in one direction, seen from one rank.

    slots: how many maps every rank sends. sends, takes: the local pieces that own the first slots, and those that
    receive. chains: by rank, one for every piece that receives there.
    """

    slots: int
    sends: tuple[int, ...]
    takes: tuple[int, ...]
    chains: Mapping[int, tuple[Chain, ...]]


class Halo(NamedTuple):
    """Which tokens travel so that every local piece has the `size` tokens in front of it.

    rows: the local tokens that this rank gives, in the order of the ranks, `gives[r]` of them to rank r. places: where
    in `[pieces * size]` those go that come, `takes[r]` of them from rank r.
    """

    pieces: int
    size: int
    rows: tuple[int, ...]
    gives: list[int]
    places: tuple[int, ...]
    takes: list[int]


@dataclass(frozen=True)
class Layout:
    """The pieces of every rank, in the order in which its tokens lie."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def needs_matrices(self) -> bool:
        """Whether a piece lies inside a sequence: only then is an M used."""
        return any(not p.begins and not p.ends for own in self.pieces for p in own)

    def forward(self, rank: int) -> Route:
        """States travel to the pieces that do not begin their sequence."""
        slots, _ = self._forward_slots
        chains = {
            place: tuple((slots[p], slots[p]) for p in places[:i])
            for places in self._sequences
            for i, place in enumerate(places)
        }
        return self._route(rank, self._forward_slots, lambda p: not p.begins, chains)

    def backward(self, rank: int) -> Route:
        """Gradients of states travel to the pieces that do not end their sequence."""
        (matrices, _), (slots, _) = self._forward_slots, self._backward_slots
        chains = {
            place: tuple((slots[p], matrices.get(p, -1)) for p in reversed(places[i + 1 :]))
            for places in self._sequences
            for i, place in enumerate(places)
        }
        return self._route(rank, self._backward_slots, lambda p: not p.ends, chains)

    def halo(self, rank: int, size: int) -> Halo:
        """The `size` tokens in front of each local piece, in its sequence, from whichever ranks hold them."""
        offsets = [[0, *accumulate(p.stop - p.start for p in own)] for own in self.pieces]
        gives: list[list[int]] = [[] for _ in self.pieces]
        takes: list[list[int]] = [[] for _ in self.pieces]
        for places in self._sequences:
            for n, (taker, i) in enumerate(places):
                start = self.pieces[taker][i].start
                for giver, j in reversed(places[:n]):
                    theirs = self.pieces[giver][j]
                    if theirs.stop <= start - size:
                        break
                    run = range(max(theirs.start, start - size), min(theirs.stop, start))
                    if giver == rank:
                        gives[taker] += [offsets[rank][j] + t - theirs.start for t in run]
                    if taker == rank:
                        takes[giver] += [i * size + t - (start - size) for t in run]
        return Halo(
            len(self.pieces[rank]), size, tuple(chain.from_iterable(gives)), list(map(len, gives)),
            tuple(chain.from_iterable(takes)), list(map(len, takes)),
        )  # fmt: skip

    @cached_property
    def _sequences(self) -> list[list[tuple[int, int]]]:
        """`(rank, index)` of the pieces of every sequence, from its begin to its end."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for rank, own in enumerate(self.pieces):
            for i, piece in enumerate(own):
                found.setdefault(piece.sequence, []).append((piece.start, rank, i))
        return [[place[1:] for place in sorted(places)] for places in found.values()]

    @cached_property
    def _forward_slots(self) -> tuple[dict[tuple[int, int], int], int]:
        return self._slots(lambda p: not p.ends)

    @cached_property
    def _backward_slots(self) -> tuple[dict[tuple[int, int], int], int]:
        return self._slots(lambda p: not p.begins)

    def _slots(self, travels: Callable[[Piece], bool]) -> tuple[dict[tuple[int, int], int], int]:
        senders = [[i for i, p in enumerate(own) if travels(p)] for own in self.pieces]
        width = max(map(len, senders))
        return {
            (rank, i): rank * width + slot
            for rank, own in enumerate(senders)
            for slot, i in enumerate(own)
        }, width

    def _route(
        self,
        rank: int,
        slots: tuple[dict[tuple[int, int], int], int],
        receives: Callable[[Piece], bool],
        chains: Mapping[tuple[int, int], Chain],
    ) -> Route:
        takers = [tuple(i for i, p in enumerate(own) if receives(p)) for own in self.pieces]
        return Route(
            slots=slots[1],
            sends=tuple(i for i in range(len(self.pieces[rank])) if (rank, i) in slots[0]),
            takes=takers[rank],
            chains={r: tuple(chains[r, i] for i in own) for r, own in enumerate(takers)},
        )


def packed(cu_seqlens: Sequence[int], ranges: Sequence[Sequence[Range]]) -> Layout:
    """Sequence n holds tokens `cu_seqlens[n] .. cu_seqlens[n + 1] - 1`; ranges: those of every rank.

    An empty sequence lives on the first rank that touches its position.
    """
    homeless = {n for n in range(len(cu_seqlens) - 1) if cu_seqlens[n] == cu_seqlens[n + 1]}
    pieces: list[list[Piece]] = []
    for own in ranges:
        pieces.append([])
        for low, high in own:
            n = max(bisect_left(cu_seqlens, low) - 1, 0)
            while n < len(cu_seqlens) - 1 and cu_seqlens[n] <= high:
                begin, end = cu_seqlens[n : n + 2]
                start, stop = max(begin, low), min(end, high)
                if start < stop or (n in homeless and low <= begin):
                    homeless.discard(n)
                    pieces[-1].append(Piece(n, start, stop, start == begin, stop == end))
                n += 1
    return Layout(tuple(map(tuple, pieces)))


def dense(ranks: int, rows: int, zigzag: bool) -> Layout:
    """`rows` sequences that are cut alike, into parts of any lengths; positions count the parts."""
    parts = part_numbers(ranks, zigzag)
    last = max(map(max, parts))
    return Layout(
        tuple(
            tuple(
                Piece(row, part, part + 1, part == 0, part == last)
                for row in range(rows)
                for part in own
            )
            for own in parts
        )
    )


def dense_at(rows: int, ranges: Sequence[Sequence[Range]]) -> Layout:
    """The same with tokens for positions: every row of the batch is cut into `ranges`."""
    tokens = max(high for own in ranges for _, high in own)
    return Layout(
        tuple(
            tuple(
                Piece(row, row * tokens + low, row * tokens + high, low == 0, high == tokens)
                for row in range(rows)
                for low, high in own
            )
            for own in ranges
        )
    )


def part_numbers(ranks: int, zigzag: bool) -> list[tuple[int, ...]]:
    """Which parts of the batch a rank holds: one, or with zigzag one from the front and its mirror image."""
    return [(r, 2 * ranks - 1 - r) if zigzag else (r,) for r in range(ranks)]


def ranges_of(bounds: Sequence[int], ranks: int, zigzag: bool) -> list[list[Range]]:
    """Ranges of every rank; part p of the batch holds tokens `bounds[p] .. bounds[p + 1] - 1`."""
    return [[(bounds[p], bounds[p + 1]) for p in own] for own in part_numbers(ranks, zigzag)]


def equal_bounds(tokens: int, ranks: int, zigzag: bool) -> list[int]:
    """Where a batch is cut without other bounds: as `torch.chunk` does; with zigzag into nearly equal parts."""
    if zigzag:
        return [tokens * p // (2 * ranks) for p in range(2 * ranks + 1)]
    step = -(-tokens // ranks)
    return [min(r * step, tokens) for r in range(ranks + 1)]


def balanced_bounds(tokens: int, ranks: int, value_heads: int) -> list[int]:
    """Bounds for `ContextParallel` by which the ranks of a forward pass of KDA end at about the same time.

    Two ranks with so many value heads that one GPU does not cut its sequences: the second one waits for the first
    one's scan, and gets more tokens. Otherwise slices are equal. From times on an H200; training keeps equal slices.

    Args:
        tokens: of the sequence. ranks: of the group. value_heads: on each rank.

    Returns:
        `ranks + 1` numbers from 0 to tokens; inner ones are multiples of 64, the chunk of the kernels.

    Raises:
        ValueError: a number is too small.

    Example:
        >>> from cula.distributed import balanced_bounds
        >>> balanced_bounds(131072, 2, value_heads=64), balanced_bounds(131072, 2, value_heads=16)
        ([0, 52032, 131072], [0, 65536, 131072])
    """
    for name, value, least in (
        ("tokens", tokens, 0),
        ("ranks", ranks, 1),
        ("value_heads", value_heads, 1),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    first = 1 / ranks
    if ranks == 2 and value_heads >= _WHOLE_HEADS:
        # The second rank has prepared when the scan of the first one ends.
        prepare = _PREPARE_US * value_heads
        first = prepare / (2 * prepare + _SCAN_US)
    chunks = tokens / _CHUNK
    inner = (
        round(chunks * (first + (1 - first) * r / max(1, ranks - 1))) * _CHUNK
        for r in range(ranks - 1)
    )
    return [0, *(min(x, tokens) for x in inner), tokens]
