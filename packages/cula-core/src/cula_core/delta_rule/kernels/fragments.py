"""Registers of a thread of the chunk-parallel kernel: units of 8 channels, and products of rows with rows by mma.sync.

Lane 4 n + t of a warp has the tokens 2 n and 2 n + 1 of a sub-block, and unit t of every 32 channels. As a first
operand of a product its tokens are the rows n and n + 8, as a second operand column n of two tiles. An instruction may
sum over any channels in any order, as long as both operands agree.

In shared memory a warp has a line of 8 units for each of its 16 tokens. Units are swapped within a line (`swizzle`), so
that ldmatrix and a lane's own accesses of 16 bytes use all banks. Global memory is read and written by whole lines: 8
lanes share one, and a lane has the same unit of every fourth token (`place_in_line`).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...cute.memory import view
from ...cute.types import F32, I32
from ..config import CHUNK, SUB

UNIT = 8  # channels of 16 bytes; a thread holds two units of a row
LINE = 8  # units
OF_WARP = SUB * LINE  # units, in a line for each token
ROUNDS = OF_WARP // 32  # in which its lanes take them


def row_of(acc, r, c):
    """Returns element c of 4 neighbouring columns of token r among the registers of two tiles, which take turns."""
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


def swizzle(unit, row):
    """Returns where a unit of a line lies: swapped with another one of the line, another in each of 8 rows."""
    return unit ^ row


def unit_of(row, at, size):
    """Returns channels of a row of memory from `at` on, a multiple of 8."""
    return view(row.iterator, at, size, UNIT)


def unit_of_panel(block, offset, panel, sub, lane, j):
    """Returns the j-th unit that a lane has of a line, in the block: `panel` of 64 channels of a [64, 128] matrix."""
    first = (sub * SUB + lane // LINE) * 64 + swizzle(lane % LINE, lane // LINE) * UNIT
    at = (first ^ 4 * UNIT * (j % 2)) + 4 * 64 * j + offset + panel * (CHUNK * 64)
    return view(block.iterator, at, UNIT)


def unit_of_wide(row, unit):
    """Returns where unit 0 ... 15 of a row of a [64, 128] matrix begins: panels of a line a row."""
    return (
        unit // LINE * (CHUNK * LINE * UNIT)
        + row * (LINE * UNIT)
        + swizzle(unit % LINE, row % 8) * UNIT
    )


def unit_of_triangle(row, column):
    """Returns where 8 columns from `column` on of a row of T' or Aqk begin; the row is not above the panel."""
    panel, unit = column // SUB, column % SUB // UNIT
    # Panels before have 64, 48, ... rows, and this one begins with row 16 panel.
    above = SUB * SUB // 2 * panel * (2 * CHUNK // SUB - 1 - panel)
    return above + row * SUB + swizzle(unit, row // 4 % 2) * UNIT


def place_in_triangle(number):
    """Returns the row and the first column of a unit of T' or Aqk, by its number in the block."""
    # Panels have 64, 48, 32 and 16 rows of two units.
    panel = I32(0)
    for first in (128, 224, 288):
        panel = panel + I32(number >= first)
    # A shift, because the compiler does not see that the difference is not negative.
    row = SUB * panel + ((number - SUB * panel * (9 - panel)) >> 1)
    return row, SUB * panel + swizzle(number & 1, row >> 2 & 1) * UNIT


def place_of(pair, unit):
    """Returns where unit 0 ... 7 of the even one of two tokens lies among those of a warp.

    That of the odd one is a line further on, and unit u ^ x lies at place ^ x.
    """
    return 2 * LINE * pair + swizzle(swizzle(unit, pair % 2 * 4), pair // 2)


def place_of_unit(place, m, r):
    """Returns where the thread's unit m of token r lies: place is that of its first one."""
    return swizzle(place, 4 * m) + LINE * r


def place_in_line(lane, j):
    """Returns where the j-th of four units lies that a lane has of lines: unit lane % 8 of token lane // 8 + 4 j."""
    return swizzle(swizzle(lane, lane // 16 * 4), j) + 4 * LINE * j


def fetch_first(units: cute.Tensor, first, m, step, lane, x: cute.Tensor):
    """Loads 16 channels for one tile of 16 rows from units of 16 bits [channel, place]: x is
    [2 channels, token, half of the channels]. first: where those of the wanted warp begin."""
    _fetch(units, first, lane // 16, 4 * m + 2 * step, lane // 8 % 2, lane, x)


def fetch_second(units: cute.Tensor, first, m, step, lane, x: cute.Tensor):
    """Loads the same for two tiles of 8 columns: x is [2 channels, half of the channels, token]."""
    _fetch(units, first, lane // 8 % 2, 4 * m + 2 * step, lane // 16, lane, x)


@cute.jit
def _fetch(units, first, half, unit, token, lane, x):
    """Loads four matrices: lane 8 i + n addresses row n of the i-th, in the unit or its neighbour."""
    copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), units.element_type)
    at = (first + LINE * token + place_of(lane % 8, half)) ^ unit
    source = view(units.iterator, at * UNIT, UNIT)
    flat = cute.make_layout((UNIT, 1))
    cute.copy(copy, cute.make_tensor(source.iterator, flat), cute.make_tensor(x.iterator, flat))


@cute.jit
def rows_by_rows(mma: cute.MmaAtom, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Adds the products of 16 rows with 16 rows over 16 channels to the registers of two tiles."""
    left = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
    for tile in cutlass.range_constexpr(2):
        right = cute.make_tensor(b.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
        sums = cute.make_tensor(acc.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
        cute.gemm(mma, sums, left, right, sums)


@cute.jit
def write_columns(
    target: cute.Tensor, values: cute.Tensor, row, column, left, dtype: cutlass.Constexpr
):
    """Writes four or eight neighbours of a row of the caller's [T, 64], unless the row is past the end."""
    if row < left:
        rounded = cute.make_rmem_tensor(values.shape, dtype)
        rounded.store(values.load().to(dtype))
        size = cute.size(values)
        cute.autovec_copy(rounded, view(target[row, None].iterator, column, size))


@cute.jit
def copy_sums(g: cute.Tensor, planes: cute.Tensor, back: cutlass.Constexpr):
    """Copies the running sums of a unit to the thread's place in shared memory, or back."""
    for i in cutlass.range_constexpr(cute.size(g) // 4):
        part = cute.make_tensor(g.iterator + 4 * i, cute.make_layout(4))
        if cutlass.const_expr(back):
            cute.autovec_copy(planes[None, i], part)
        else:
            cute.autovec_copy(part, planes[None, i])


@cute.jit
def widen_pair(raw: cute.Tensor, pair: cutlass.Constexpr, wide: cute.Tensor):
    """Converts two channels [channel, token, q or k] to fp32."""
    for which in cutlass.range_constexpr(2):
        for r in cutlass.range_constexpr(2):
            where = raw.iterator + 2 * pair + UNIT * (r + 2 * which)
            widen(cute.make_tensor(where, cute.make_layout(2)), wide[None, r, which])


@cute.jit
def widen(narrow: cute.Tensor, wide: cute.Tensor):
    """Converts 16 bits to fp32, two at once where they are bfloat16: their upper half is the number."""
    if cutlass.const_expr(narrow.element_type is cutlass.BFloat16):
        words = cute.recast_tensor(narrow, I32)
        bits = cute.recast_tensor(wide, I32)
        for i in cutlass.range_constexpr(cute.size(words)):
            bits[2 * i] = words[i] << 16
            bits[2 * i + 1] = words[i] & I32(-65536)
    else:
        for i in cutlass.range_constexpr(cute.size(narrow)):
            wide[i] = narrow[i].to(F32)
