"""Fake tensors for `cute.compile`: dtypes, head dimensions and alignment are fixed, sizes and strides are not."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ..constants import COLUMNS
from .types import DTYPES


def rows(dtype: str, shape: tuple):
    """Returns [B, T, heads, D] whose rows begin at multiples of 16 bytes."""
    strides = (*(cute.sym_int64(divisibility=128 // DTYPES[dtype].width) for _ in range(3)), 1)
    return make_fake_tensor(DTYPES[dtype], shape, stride=strides, assumed_align=16)


def states(heads: object, height: int, width: int, dtype: str = "float32"):
    """Returns matrices [rows, heads, height, width], each dense and at a multiple of 16 bytes."""
    kind = DTYPES[dtype]
    outer = tuple(cute.sym_int64(divisibility=128 // kind.width) for _ in range(2))
    shape = (cute.sym_int(), heads, height, width)
    return make_fake_tensor(kind, shape, stride=(*outer, width, 1), assumed_align=16)


def vector(dtype: type, size: object = None):
    """Returns a contiguous vector."""
    return make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), stride=(1,))


def strided_vector(dtype: type, size: object = None):
    """Returns a vector of one number per row or sequence, of any stride: engines pass a column of their table."""
    shape = (cute.sym_int() if size is None else size,)
    return make_fake_tensor(dtype, shape, stride=(cute.sym_int64(),))


def matrix(dtype: type, columns: object):
    """Returns a matrix of rows that are contiguous."""
    shape = (cute.sym_int(), columns)
    return make_fake_tensor(dtype, shape, stride=(cute.sym_int64(), 1))


def segment_table():
    """Returns the table of segments that `SegmentTable` makes."""
    return make_fake_tensor(cutlass.Int32, (cute.sym_int(), COLUMNS), stride=(COLUMNS, 1))


def segment_table_arguments(index_dtype: type) -> tuple:
    """Returns the arguments of `SegmentTable`: cu_seqlens [N + 1], table, tokens of a segment, of the longest one."""
    return (
        vector(index_dtype),
        segment_table(),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )
