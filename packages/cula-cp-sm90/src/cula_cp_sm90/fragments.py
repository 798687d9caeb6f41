"""Registers of a thread of the chunk-parallel kernel: units of 8 channels, and products of rows with rows by mma.sync.

The lane 4 n + t of a warp has tokens 2 n and 2 n + 1 of a sub-block, and of 32 channels the unit t. As a first operand
the tokens are rows n and n + 8, as a second one column n of two tiles; which channels an instruction takes is of no
account, as long as it is the same ones on both sides.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from .common import F32, I32, view
from .config import CHUNK

UNIT = 8  # channels of 16 bytes; a thread holds two units of a row


def row_of(acc, r, c):
    """Element c of 4 neighbouring columns of token r among the registers of two tiles: columns are dealt in turn."""
    return acc[2 * r + c // 2, c % 2]


@cute.jit
def rows_by_rows_tf32(sums: cute.Tensor, x: cute.Tensor):
    """Adds the products of the first two operands [token, channel] with the third, over 8 channels."""
    tf32 = cute.make_mma_atom(warp.MmaTF32Op((16, 8, 8)))
    operands = cute.recast_tensor(x, cutlass.TFloat32)
    for which in cutlass.range_constexpr(2):
        left = cute.make_tensor(operands.iterator + 4 * which, cute.make_layout(((2, 2), 1, 1)))
        for tile in cutlass.range_constexpr(2):
            right = cute.make_tensor(
                operands.iterator + 8 + tile, cute.make_layout((2, 1, 1), stride=(2, 0, 0))
            )
            acc = cute.make_tensor(
                sums.iterator + 8 * which + 4 * tile, cute.make_layout(((2, 2), 1, 1))
            )
            cute.gemm(tf32, acc, left, right, acc)


def unit_of(row, at, size):
    """Channels of a row of memory from `at` on, a multiple of 8."""
    return view(row.iterator, at, size, UNIT)


def unit_of_panel(block, offset, panel, row, lane, m, r):
    """The thread's unit m of token r in a [64, 128] matrix of the block; row is even."""
    first = row * 64 + (lane % 4 ^ row % 8) * UNIT
    at = (first ^ (32 * m + UNIT * r)) + 64 * r + offset + panel * (CHUNK * 64)
    return view(block.iterator, at, UNIT)


@cute.jit
def rows_by_rows(mma: cute.MmaAtom, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Adds the products of 16 rows with 16 rows over 32 channels to the registers of two tiles."""
    for step in cutlass.range_constexpr(UNIT // 4):
        left = cute.make_tensor(
            a.iterator + 4 * step, cute.make_layout(((2, 2, 2), 1, 1), stride=((1, UNIT, 2), 0, 0))
        )
        for tile in cutlass.range_constexpr(2):
            right = cute.make_tensor(
                b.iterator + 4 * step + UNIT * tile,
                cute.make_layout(((2, 2), 1, 1), stride=((1, 2), 0, 0)),
            )
            sums = cute.make_tensor(acc.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
            cute.gemm(mma, sums, left, right, sums)


@cute.jit
def copy_sums(g: cute.Tensor, planes: cute.Tensor, back: cutlass.Constexpr):
    """The running sums of a unit to the thread's place in shared memory, or back."""
    for i in cutlass.range_constexpr(cute.size(g) // 4):
        part = cute.make_tensor(g.iterator + 4 * i, cute.make_layout(4))
        if cutlass.const_expr(back):
            cute.autovec_copy(planes[None, i], part)
        else:
            cute.autovec_copy(part, planes[None, i])


@cute.jit
def widen_pair(raw: cute.Tensor, pair: cutlass.Constexpr, wide: cute.Tensor):
    """Two channels [channel, token, q or k] of a unit in fp32."""
    for which in cutlass.range_constexpr(2):
        for r in cutlass.range_constexpr(2):
            where = raw.iterator + 2 * pair + UNIT * (r + 2 * which)
            widen(cute.make_tensor(where, cute.make_layout(2)), wide[None, r, which])


@cute.jit
def widen(narrow: cute.Tensor, wide: cute.Tensor):
    """16 bits to fp32, two at once where they are bfloat16: their upper half is the number."""
    if cutlass.const_expr(narrow.element_type is cutlass.BFloat16):
        words = cute.recast_tensor(narrow, I32)
        bits = cute.recast_tensor(wide, I32)
        for i in cutlass.range_constexpr(cute.size(words)):
            bits[2 * i] = words[i] << 16
            bits[2 * i + 1] = words[i] & I32(-65536)
    else:
        wide.store(narrow.load().to(F32))
