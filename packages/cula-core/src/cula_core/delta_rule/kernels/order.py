"""How the chunks of a call are spread over machines, and in which order they are walked through and prepared.

A chain is a segment of a sequence, or all of it, and a state head; it has a step for every slot of the segment, and the
last one of a packed sequence as many more as its ends take time. All chains stand in a row, and a machine has
`share` neighbouring steps: the rest of a chain, whole chains, and the beginning of one. It walks through the beginning
first, so that the next machine, which has the rest of that chain, does not wait for it: that comes last there.

Neighbouring heads may be walked through in step, each in a seat of a machine: where they share keys, these come from
the L2 for all but one, and where they do not, longer pieces of a row of memory are read at a time. Then a chain of the
row stands for all of them.

What is prepared is numbered so that every machine finds its first step before any finds its second.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from ...cute.types import I32
from ..config import CHUNK
from .block import first_slot_of


class Step(NamedTuple):
    """A step of the row. chunk, first, last: in the sequence, its own, and those of the chain. whole: the chain ends
    where the sequence does."""

    sequence: cutlass.Int32
    head: cutlass.Int32
    chunk: cutlass.Int32
    first: cutlass.Int32
    last: cutlass.Int32
    whole: cutlass.Boolean


class Order:
    """The row of a call's chains. packed: sequences are those of `cu_seqlens`, which is None otherwise. ends: steps
    that a packed sequence has more than slots. by_head: packed sequences of a head are neighbours, so that machines
    have long ones and short ones, of which more begin and end; otherwise the heads of a sequence are, as in a batch.

    heads: of states. tokens: of a dense sequence. segment: chunks of a segment; `UNCUT`: sequences are whole. total:
    steps of the row.
    """

    def __init__(self, packed: bool, ends: int = 0, by_head: bool = False):
        self.packed, self.ends, self.by_head = packed, ends, by_head

    @cute.jit
    def find(self, cu_seqlens, step, heads, tokens, segment, by_warp: cutlass.Constexpr = False):
        """Returns a step of the row. by_warp: all lanes look for the same one, together.

        The last steps of a packed sequence may have no tokens: its slots are counted without reading its neighbours.
        They belong to its last segment.
        """
        if cutlass.const_expr(self.packed):
            head, slot = I32(0), step // heads
            if cutlass.const_expr(self.by_head):
                of_head = self.first_of(cu_seqlens, cute.size(cu_seqlens) - 1)
                head, slot = step // of_head, step % of_head
            low, high = I32(0), I32(cute.size(cu_seqlens) - 1)
            if cutlass.const_expr(by_warp):
                lane = cute.arch.lane_idx()
                while high - low > 1:
                    apart = cute.ceil_div(high - low, 32)
                    probe = low + lane * apart
                    before = cutlass.Boolean(False)
                    if probe < high:
                        before = self.first_of(cu_seqlens, probe) <= slot
                    low = (
                        low + (I32(cute.arch.popc(cute.arch.vote_ballot_sync(before))) - 1) * apart
                    )
                    high = cutlass.min(high, low + apart)
            else:
                while high - low > 1:
                    middle = (low + high) // 2
                    if self.first_of(cu_seqlens, middle) <= slot:
                        low = middle
                    else:
                        high = middle
            first = self.first_of(cu_seqlens, low)
            chunks = self.first_of(cu_seqlens, low + 1) - first
            length = I32(cu_seqlens[low + 1]) - I32(cu_seqlens[low])
            chunk = slot - first
            if cutlass.const_expr(not self.by_head):
                step = step - first * heads
                head, chunk = step // chunks, step % chunks
            return self.located(low, head, chunk, chunks, length, segment)
        else:
            chunks = cute.ceil_div(tokens, CHUNK)
            chain = step // chunks
            return self.located(
                chain // heads, chain % heads, step % chunks, chunks, tokens, segment
            )

    def first_of(self, cu_seqlens, sequence):
        """Returns the first step of a packed sequence, of one head."""
        return first_slot_of(cu_seqlens, sequence) + self.ends * sequence

    def total(self, cu_seqlens, slots, heads):
        """Returns the steps of the row of a call that has so many slots; tokens behind the last packed sequence have
        none."""
        if cutlass.const_expr(self.packed):
            slots = self.first_of(cu_seqlens, cute.size(cu_seqlens) - 1)
        return slots * heads

    def located(self, sequence, head, chunk, chunks, length, segment):
        """Returns the step of a chunk of a sequence that has so many slots and tokens."""
        last_part = cutlass.max(self.parts(length, segment), 1) - 1
        part = cutlass.min(chunk // segment, last_part)
        whole = part == last_part
        first = part * segment
        return Step(
            sequence, head, chunk, first, cutlass.select_(whole, chunks, first + segment), whole
        )

    def parts(self, length, segment):
        """Returns the segments of a sequence."""
        return cute.ceil_div(cute.ceil_div(length, CHUNK), segment)

    def row_of_segments(self, sequence, start, first, tokens, segment):
        """Returns where what belongs to a segment stands, which begins at chunk `first` of its sequence."""
        if cutlass.const_expr(self.packed):
            return start // (segment * CHUNK) + sequence + first // segment
        return sequence * self.parts(tokens, segment) + first // segment

    @cute.jit
    def tokens_of(self, cu_seqlens, sequence, tokens):
        """Returns (batch, first token, length, first slot) of a sequence."""
        if cutlass.const_expr(self.packed):
            start = I32(cu_seqlens[sequence])
            return I32(0), start, I32(cu_seqlens[sequence + 1]) - start, start // CHUNK + sequence
        else:
            return sequence, I32(0), tokens, sequence * cute.ceil_div(tokens, CHUNK)

    @cute.jit
    def bounds(
        self, cu_seqlens, machine, share, total, heads, tokens, segment,
        by_warp: cutlass.Constexpr = False,
    ):  # fmt: skip
        """Returns (begin, rest, cut, end) of a machine's steps: it walks from cut to end, from rest to cut, from begin
        to rest."""
        begin = cutlass.min(machine * share, total)
        end = cutlass.min(begin + share, total)
        rest, cut = begin, end
        if end < total:
            behind = self.find(cu_seqlens, end, heads, tokens, segment, by_warp)
            cut = cutlass.max(end - (behind.chunk - behind.first), begin)
        if begin < end:
            there = self.find(cu_seqlens, begin, heads, tokens, segment, by_warp)
            if there.chunk > there.first:
                rest = cutlass.min(begin - there.chunk + there.last, cut)
        return begin, rest, cut, end

    @cute.jit
    def walked(self, cu_seqlens, machine, walked, share, total, heads, tokens, segment):
        """Returns the step of the row that a machine comes to after so many others, or -1."""
        bounds = self.bounds(cu_seqlens, machine, share, total, heads, tokens, segment)
        return self.walked_within(walked, *bounds)

    @cute.jit
    def walked_within(self, walked, begin, rest, cut, end):
        """Returns the same for a machine with these bounds."""
        step = I32(-1)
        if walked < end - begin:
            step = cut + walked
            if step >= end:
                step = step - end + rest
                if step >= cut:
                    step = step - cut + begin
        return step
