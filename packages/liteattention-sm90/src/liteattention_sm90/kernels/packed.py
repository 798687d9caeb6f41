"""Where the tokens of a sequence lie: in a batch of one length, or packed one sequence behind the other.

A sequence is (first, length): its first token in its batch, None unless packed, and how many there are.
"""

import cutlass
import cutlass.cute as cute

from cula_core.cute.memory import by_token
from cula_core.cute.types import I32

from ..config import UNIT

# Rows of a view of packed tokens, and twice as many places for a sequence and for the way back. A multiple of the rows
# by a stride of so many bytes is a multiple of 2^64, which addresses are counted by.
ROWS = 1 << 30
PLACES = 0x7FFF0000
WAY_BACK = 1 << 34


def tokens(x: cute.Tensor, packed: bool):
    """Returns [B, T, H, D] as TMA takes it, (T, D, H, B) or, of packed sequences, (2^30, D, H, (places, way back)).

    TMA knows one end per dimension, that of a view. In this view every sequence ends at row 2^30: of one that ends
    before token e row r lies at token e + r - 2^30. Two more dimensions bring that about, one with the stride of a
    token, and one whose stride is as much less than 2^34 bytes, so that 2^30 of both are 2^64 bytes or nothing.
    """
    if not packed:
        return by_token(x)
    unit = x.element_type.width // 8
    token, channel, head = x.stride[1], x.stride[3], x.stride[2]
    back = cute.assume(cutlass.Int64(WAY_BACK // unit) - token, divby=16 // unit)
    shape = (ROWS, x.shape[3], x.shape[2], (PLACES, PLACES))
    stride = (token, channel, head, (token, back))
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))


def sequence_of(number, starts, length):
    """Returns a sequence by its number. starts: cu_seqlens, or None of a batch, whose sequences have this length."""
    if starts is None:
        return None, length
    first = I32(starts[number])
    return first, I32(starts[number + 1]) - first


def row_in(row, number, first, length):
    """Returns the row, and the place behind the head, where TMA finds a row of a sequence in what `tokens` returned."""
    if first is None:
        return row, number
    return ROWS - length + row, (first + length, ROWS)


def rows_in(whole: cute.Tensor, head, number, first, length):
    """Returns the rows of a sequence in what TMA is given, from the first one on, as (T, D)."""
    row, place = row_in(0, number, first, length)
    rows = whole[None, None, head, place]
    return rows if first is None else cute.domain_offset((row, 0), rows)


def token(row, number, first):
    """Returns the batch of a row of a sequence, and its token there."""
    return (number, row) if first is None else (0, first + row)


def units_before(number, first):
    """Returns how many units of rows other sequences have, where each has whole units of its own."""
    return 0 if first is None else first // UNIT + number
