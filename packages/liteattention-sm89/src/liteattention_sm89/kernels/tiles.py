"""What the kernels share: tiles of rows in shared memory, filled by cp.async and emptied in whole lines."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from cula_core.cute.memory import view
from cula_core.cute.types import I32

from ..config import PADDING


@dataclass(frozen=True)
class Lines:
    """How a thread copies between a tile in shared memory and rows of [T, D].

    shared: its part of the tile. where: (row, column) of each unit of that, the first of which is (row, column). start:
    the address of the first row's unit. skip: rows from there to the tile. last: the last row. pitch: bytes of a row.
    """

    load: cute.TiledCopy
    shared: cute.Tensor
    tile: cute.Tensor
    where: cute.Tensor
    row: cutlass.Int32
    column: cutlass.Int32
    start: cutlass.Int64
    skip: cutlass.Int32
    last: cutlass.Int32
    pitch: cutlass.Int32


def tokens_of(sequence, starts, x):
    """Returns (batch, first token, number of tokens) of a sequence in x [B, T, ...]. starts: None unless packed."""
    if starts is None:
        return sequence, I32(0), I32(x.shape[1])
    first = I32(starts[sequence])
    return I32(0), first, I32(starts[sequence + 1]) - first


def rarely(condition, length):
    """Returns how often a loop runs whose body is for a rare condition: once if it holds, else never.

    A branch is turned into instructions that are always executed. The compiler leaves a loop alone, as long as it
    doesn't know the number, and it doesn't know that a length is not negative.
    """
    return I32(condition) - (length >> 31)


class Tiles:
    """Tiles [rows, width] of 16-bit tensors [T, head_dim], that all threads of a CTA copy together."""

    def __init__(self, dtype, dim: int, width: int, threads: int):
        self.dtype, self.dim, self.width, self.threads = dtype, dim, width, threads
        self.columns = 64 if width % 64 == 0 else 32  # columns that neighbouring threads copy

    def padded(self, rows, columns=None):
        """Returns the layout in shared memory of [rows, columns]; the columns are the head dimension unless given.

        16 bytes behind every row keep ldmatrix free of bank conflicts. Unlike a swizzle this leaves every address a
        constant away from one register.
        """
        columns = self.width if columns is None else columns
        return cute.make_layout((rows, columns), stride=(columns + PADDING, 1))

    def tiled_load(self):
        """Returns the copy of a tile by cp.async, 16 bytes per thread."""
        per_line = self.columns // 8
        return cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
            ),
            cute.make_layout((self.threads // per_line, per_line), stride=(per_line, 1)),
            cute.make_layout((1, 8)),
        )

    @cute.jit
    def lines(self, load, thr_load, rows_of, first, left, shared):
        """Returns how this thread copies between a tile in shared memory and rows of [T, D]: `left` from `first` on."""
        start = self.start_of(thr_load, rows_of, first, shared)
        return self.lines_behind(start, load, thr_load, rows_of, 0, left, shared)

    @cute.jit
    def start_of(self, thr_load, rows_of, first, shared):
        """Returns the address, in row `first` of [T, D], of what this thread copies."""
        column = self.places(thr_load, shared)[0, 0][1]
        start = cute.domain_offset((first, 0), rows_of).iterator + cute.assume(column, divby=8)
        return start.toint()

    @cute.jit
    def lines_behind(self, start, load, thr_load, rows_of, skip, end, shared):
        """Returns what `lines` returns, from the address that `start_of` returned.

        The tile begins `skip` rows behind that one, and the rows end before `end`. Pitches are 32-bit: strides of
        tokens are below 2^24.
        """
        where = self.places(thr_load, shared)
        row, column = where[0, 0]
        return Lines(
            load=load, shared=thr_load.partition_D(shared), tile=shared, where=where, row=row, column=column,
            start=start, skip=skip, last=end - 1, pitch=I32(rows_of.stride[0]) * (self.dtype.width // 8),
        )  # fmt: skip

    def places(self, thr_load, shared):
        """Returns (row, column), in the tile, of what this thread copies."""
        shape = (cute.size(shared, mode=[0]), self.width)
        return thr_load.partition_S(cute.make_identity_tensor(shape))[0, None, None]

    def rows_of_thread(self, x):
        """Returns the number of rows that one thread copies."""
        return cute.size(x.shared, mode=[1])

    @cute.jit
    def address_of(self, x, i):
        """Returns the number in the tile, and the address, of this thread's i-th row; behind the last row, the last."""
        row = cutlass.min(x.skip + x.row + (x.where[i, 0][0] - x.row), x.last)
        address = x.start + cutlass.Int64(row) * cutlass.Int64(x.pitch)
        at = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return row - x.skip, at

    @cute.jit
    def copy_part_async(self, x, number, of):
        """Starts part `number` of `of` of a copy to shared memory; rows behind the last one become copies of it."""
        rows = self.rows_of_thread(x)
        for i in cutlass.range_constexpr(rows):
            if cutlass.const_expr(i * of // rows == number):
                _, at = self.address_of(x, i)
                for j in cutlass.range_constexpr(cute.size(x.shared, mode=[2])):
                    unit = view(at, self.columns * j, 8)
                    if cutlass.const_expr(self.dim == self.width):
                        cute.copy(x.load, unit, x.shared[None, i, j])
                    else:
                        if x.column + self.columns * j < self.dim:
                            cute.copy(x.load, unit, x.shared[None, i, j])

    @cute.jit
    def copy_async(self, load, thr_load, rows_of, first, left, shared):
        """Starts a whole copy to shared memory."""
        self.copy_part_async(self.lines(load, thr_load, rows_of, first, left, shared), 0, 1)

    @cute.jit
    def store(self, load, thr_load, rows_of, first, left, shared):
        """Copies from shared memory; there is at least one row.

        In the place of rows behind the last one the last one is stored again. That needs no branches, which would make
        each row wait for the one before.
        """
        x = self.lines(load, thr_load, rows_of, first, left, shared)
        rows, units = self.rows_of_thread(x), cute.size(x.shared, mode=[2])
        values = cute.make_rmem_tensor(cute.make_layout((8, units, rows)), self.dtype)
        for i in cutlass.range_constexpr(rows):
            row, _ = self.address_of(x, i)
            for j in cutlass.range_constexpr(units):
                place = x.tile.layout((row, x.column + self.columns * j))
                cute.autovec_copy(view(x.tile.iterator, place, 8), values[None, j, i])
        for i in cutlass.range_constexpr(rows):
            _, at = self.address_of(x, i)
            for j in cutlass.range_constexpr(units):
                unit = view(at, self.columns * j, 8)
                if cutlass.const_expr(self.dim == self.width):
                    cute.autovec_copy(values[None, j, i], unit)
                else:
                    if x.column + self.columns * j < self.dim:
                        cute.autovec_copy(values[None, j, i], unit)

    @cute.jit
    def clear_padding(self, shared, tidx):
        """Zeroes the columns behind the head dimension, which no load writes."""
        if cutlass.const_expr(self.dim < self.width):
            padding = self.width - self.dim
            rows = cute.size(shared, mode=[0])
            for i in cutlass.range(tidx, rows * padding, self.threads, unroll=1):
                shared[i // padding, self.dim + i % padding] = self.dtype(0.0)

    def single(self, fragment, number, k):
        """Returns the operand of a single mma, as (V, 1), from the k-th slice of a fragment."""
        part = fragment[None, number, k]
        return cute.make_tensor(part.iterator, cute.append(part.layout, cute.make_layout(1)))
