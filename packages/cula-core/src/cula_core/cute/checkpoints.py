"""States on the way through a sequence: which ones are kept, and in which rows of the caller's memory."""

import cutlass
import cutlass.cute as cute

from .types import I32


class Checkpoints:
    """When a state is kept: after "every" so many tokens, or "once" per sequence.

    placed: the caller names the row of each sequence's first state. packed: dense sequences have equally many rows, one
    behind the other; a packed one at token a begins with row a // n. chunk: the tokens of one.
    """

    def __init__(self, kind: str | None, placed: bool, packed: bool, chunk: int):
        self.kind, self.placed, self.packed, self.chunk = kind, placed, packed, chunk

    @cute.jit
    def first(self, sequence, offsets, every, begun):
        """Returns the chunk behind which the first state is kept of those that an item computes, negative for none.

        begun: tokens of the sequence in front of the item. A kernel compares chunks, and divides nothing in its loop.
        """
        tokens = every - begun % every
        if cutlass.const_expr(self.kind == "once"):
            tokens = offsets[sequence] - begun
            tokens = cutlass.select_(tokens % self.chunk == 0, tokens, I32(0))
        return tokens // self.chunk - 1

    @cute.jit
    def last(self, every, begun, chunks):
        """Returns the last chunk of an item in front of which a state is kept after "every" so many tokens.

        For kernels that run against time. Negative for none, and the first chunk of a sequence does not count. begun:
        tokens of the sequence in front of the item. chunks: of the item.
        """
        return chunks - 1 - (begun // self.chunk + chunks - 1) % (every // self.chunk)

    def following(self, due, every):
        """Returns the chunk behind which the state is kept that comes after that of chunk `due`.

        Against time, with -every, that of the state in front of it.
        """
        return due if self.kind == "once" else due + every // self.chunk

    @cute.jit
    def row(self, sequence, start, tokens, rows, every, done):
        """Returns the row of the state behind `done` tokens, negative if it is not kept after all.

        start: the first token of a packed sequence; tokens: of a dense one.
        """
        row = sequence
        if cutlass.const_expr(self.placed):
            row = rows[sequence]
        elif cutlass.const_expr(self.kind == "every"):
            if cutlass.const_expr(self.packed):
                row = start // every
            else:
                row = sequence * (tokens // every)
        if cutlass.const_expr(self.kind == "every"):
            row = cutlass.select_(row < 0, I32(-1), row + done // every - 1)
        return row
