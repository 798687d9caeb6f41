"""Registers of a thread of the chunk-parallel kernel: units of 8 channels, and products of rows with rows by mma.sync.

The lane 4 n + t of a warp has tokens 2 n and 2 n + 1 of a sub-block, and of 32 channels the unit t. As a first operand
the tokens are rows n and n + 8, as a second one column n of two tiles; which channels an instruction takes is of no
account, as long as it is the same ones on both sides.

In shared memory a warp has a line of 8 units for each of its 16 tokens. They are swapped in a line so that ldmatrix and
a lane's own 16 bytes fall on all banks; global memory is read and written by whole lines, in 8 lanes, a lane taking the
same unit of every fourth token (`place_in_line`).
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


def unit_of_panel(block, offset, panel, sub, lane, j):
    """The j-th unit that a lane takes of a line, in the block: `panel` of 64 channels of a [64, 128] matrix."""
    first = (sub * SUB + lane // LINE) * 64 + (lane % LINE ^ lane // LINE) * UNIT
    at = (first ^ 4 * UNIT * (j % 2)) + 4 * 64 * j + offset + panel * (CHUNK * 64)
    return view(block.iterator, at, UNIT)


def unit_of_wide(row, unit):
    """Where the unit 0 ... 15 of a row of a [64, 128] matrix begins: panels of a line a row."""
    return (
        unit // LINE * (CHUNK * LINE * UNIT) + row * (LINE * UNIT) + (unit % LINE ^ row % 8) * UNIT
    )


def unit_of_triangle(row, column):
    """Where 8 columns from `column` on of a row of T' or Aqk begin; the row is not above the panel."""
    panel, unit = column // SUB, column % SUB // UNIT
    # Panels before have 64, 48, ... rows, and this one begins with row 16 panel.
    above = SUB * SUB // 2 * panel * (2 * CHUNK // SUB - 1 - panel)
    return above + row * SUB + (unit ^ row // 4 % 2) * UNIT


def place_of(pair, unit):
    """Where unit 0 ... 7 of the even one of two tokens lies among those of a warp. That of the odd one is a line
    further on, and unit u ^ x at place ^ x."""
    return 2 * LINE * pair + (unit ^ pair % 2 * 4 ^ pair // 2)


def place_of_unit(place, m, r):
    """Where the thread's unit m of token r lies: place is that of its first one."""
    return (place ^ 4 * m) + LINE * r


def place_in_line(lane, j):
    """Where the j-th of four units lies that a lane takes of lines: unit lane % 8 of token lane // 8 + 4 j."""
    return ((lane ^ lane // 16 * 4) ^ j) + 4 * LINE * j


def fetch_first(units: cute.Tensor, first, m, step, lane, x: cute.Tensor):
    """Of units of 16 bits [channel, place] 16 channels for one tile of 16 rows: x is
    [2 channels, token, half of the channels]. first: where those of the wanted warp begin."""
    _fetch(units, first, lane // 16, 4 * m + 2 * step, lane // 8 % 2, lane, x)


def fetch_second(units: cute.Tensor, first, m, step, lane, x: cute.Tensor):
    """The same for two tiles of 8 columns: x is [2 channels, half of the channels, token]."""
    _fetch(units, first, lane // 8 % 2, 4 * m + 2 * step, lane // 16, lane, x)


@cute.jit
def _fetch(units, first, half, unit, token, lane, x):
    """Lane 8 i + n brings row n of the i-th of four matrices, from the unit's first or second neighbour."""
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
    """Two channels [channel, token, q or k] in fp32."""
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
        for i in cutlass.range_constexpr(cute.size(narrow)):
            wide[i] = narrow[i].to(F32)
