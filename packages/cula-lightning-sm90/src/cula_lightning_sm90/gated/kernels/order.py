"""How the chunks of a call are spread over machines, and in which order they are walked through and prepared.

A chain is a sequence and a state head; it has a step for every slot of the sequence. All chains stand in a row, and a
machine has `share` neighbouring steps: the rest of a chain, whole chains, and the beginning of one. It walks through the
beginning first, so that the next machine, which has the rest of that chain, does not wait for it: that comes last there.

What is prepared is numbered so that every machine finds its first step before any finds its second.
"""

import cutlass
import cutlass.cute as cute

from cula_core.cute.types import I32
from cula_core.delta_rule.kernels.block import first_slot_of

from ..config import CHUNK


class Order:
    """The row of a call's chains. packed: sequences are those of `cu_seqlens`, which is None otherwise.

    heads: of states. tokens: of a dense sequence. total: steps of the row.
    """

    def __init__(self, packed: bool):
        self.packed = packed

    @cute.jit
    def find(self, cu_seqlens, step, heads, tokens):
        """Returns (sequence, head, chunk, chunks of the chain) of a step of the row.

        The last chunks of a packed sequence may have no tokens: its slots are counted without reading its neighbours.
        """
        if cutlass.const_expr(self.packed):
            slot = step // heads
            low, high = I32(0), I32(cute.size(cu_seqlens) - 1)
            while high - low > 1:
                middle = (low + high) // 2
                if first_slot_of(cu_seqlens, middle) <= slot:
                    low = middle
                else:
                    high = middle
            first = first_slot_of(cu_seqlens, low)
            chunks = first_slot_of(cu_seqlens, low + 1) - first
            step = step - first * heads
            return low, step // chunks, step % chunks, chunks
        else:
            chunks = cute.ceil_div(tokens, CHUNK)
            chain = step // chunks
            return chain // heads, chain % heads, step % chunks, chunks

    @cute.jit
    def tokens_of(self, cu_seqlens, sequence, tokens):
        """Returns (batch, first token, length, first slot) of a sequence."""
        if cutlass.const_expr(self.packed):
            start = I32(cu_seqlens[sequence])
            return I32(0), start, I32(cu_seqlens[sequence + 1]) - start, start // CHUNK + sequence
        else:
            return sequence, I32(0), tokens, sequence * cute.ceil_div(tokens, CHUNK)

    @cute.jit
    def bounds(self, cu_seqlens, machine, share, total, heads, tokens):
        """Returns (begin, rest, cut, end) of a machine's steps: it walks from cut to end, from rest to cut, from begin
        to rest."""
        begin = cutlass.min(machine * share, total)
        end = cutlass.min(begin + share, total)
        rest, cut = begin, end
        if end < total:
            _, _, chunk, _ = self.find(cu_seqlens, end, heads, tokens)
            cut = cutlass.max(end - chunk, begin)
        if begin < end:
            _, _, chunk, chunks = self.find(cu_seqlens, begin, heads, tokens)
            if chunk > 0:
                rest = cutlass.min(begin - chunk + chunks, cut)
        return begin, rest, cut, end

    @cute.jit
    def numbered(self, cu_seqlens, number, machines, share, total, heads, tokens):
        """Returns the step of the row that has a number, or -1."""
        machine, walked = number % machines, number // machines
        begin, rest, cut, end = self.bounds(cu_seqlens, machine, share, total, heads, tokens)
        step = I32(-1)
        if walked < end - begin:
            step = cut + walked
            if step >= end:
                step = step - end + rest
                if step >= cut:
                    step = step - cut + begin
        return step
