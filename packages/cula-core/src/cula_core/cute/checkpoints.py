"""States on the way through a sequence: which ones are kept, and in which rows of the caller's memory."""

import cutlass
import cutlass.cute as cute

from .types import I32


class Checkpoints:
    """When a state is kept: after "every" so many tokens, or "once" per sequence.

    placed: the caller names the row of each sequence's first state. packed: dense sequences have equally many rows, one
    behind the other; a packed one at token a begins with row a // n.
    """

    def __init__(self, kind: str | None, placed: bool, packed: bool):
        self.kind, self.placed, self.packed = kind, placed, packed

    @cute.jit
    def after(self, sequence, offsets, every):
        """Returns the number of tokens in front of a sequence's state, or between two of them."""
        if cutlass.const_expr(self.kind == "once"):
            return offsets[sequence]
        else:
            return every

    def due(self, done, after):
        """Returns whether the state behind `done` tokens is kept."""
        return done == after if self.kind == "once" else done % after == 0

    @cute.jit
    def row(self, sequence, start, tokens, rows, after, done):
        """Returns the row of a state that is due, negative if it is not kept after all.

        start: the first token of a packed sequence; tokens: of a dense one.
        """
        row = sequence
        if cutlass.const_expr(self.placed):
            row = rows[sequence]
        elif cutlass.const_expr(self.kind == "every"):
            if cutlass.const_expr(self.packed):
                row = start // after
            else:
                row = sequence * (tokens // after)
        if cutlass.const_expr(self.kind == "every"):
            row = cutlass.select_(row < 0, I32(-1), row + done // after - 1)
        return row
