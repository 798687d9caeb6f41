"""What the kernels share: tiles of rows in shared memory, filled by cp.async and emptied in whole lines."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..config import PADDING

F32, I32 = cutlass.Float32, cutlass.Int32
INFINITY = math.inf
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def tokens_of(sequence, starts, x):
    """Where x [B, T, ...] has a sequence: (batch, its first token, their number). starts: of packed ones, else None."""
    if starts is None:
        return sequence, I32(0), I32(x.shape[1])
    first = I32(starts[sequence])
    return I32(0), first, I32(starts[sequence + 1]) - first


class Tiles:
    """Tiles [rows, width] of 16-bit tensors [T, head_dim], that all threads of a CTA copy together."""

    def __init__(self, dtype, dim: int, width: int, threads: int):
        self.dtype, self.dim, self.width, self.threads = dtype, dim, width, threads
        self.columns = 64 if width % 64 == 0 else 32  # columns that neighbouring threads copy

    def padded(self, rows, columns=None):
        """[rows, columns], the head dimension unless said, in shared memory. 16 bytes behind every row keep ldmatrix
        free of bank conflicts; unlike a swizzle this leaves every address a constant away from one register."""
        columns = self.width if columns is None else columns
        return cute.make_layout((rows, columns), stride=(columns + PADDING, 1))

    def tiled_load(self):
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
        """How this thread copies between a tile in shared memory and rows of [T, D]: `left` from `first` on."""
        start = self.start_of(thr_load, rows_of, first, shared)
        return self.lines_from(start, load, thr_load, rows_of, 0, left, shared)

    @cute.jit
    def start_of(self, thr_load, rows_of, first, shared):
        """The address in row `first` of [T, D] of what this thread copies."""
        column = self.places(thr_load, shared)[0, 0][1]
        start = cute.domain_offset((first, 0), rows_of).iterator + cute.assume(column, divby=8)
        return start.toint()

    @cute.jit
    def lines_from(self, start, load, thr_load, rows_of, skip, end, shared):
        """The same, with `start_of` known: the tile begins `skip` rows behind that one, and the rows end before `end`.

        Pitches are 32-bit: strides of tokens are below 2^24.
        """
        where = self.places(thr_load, shared)
        row, column = where[0, 0]
        return SimpleNamespace(
            load=load, shared=thr_load.partition_D(shared), tile=shared, where=where, row=row, column=column,
            start=start, skip=skip, last=end - 1, pitch=I32(rows_of.stride[0]) * (self.dtype.width // 8),
        )  # fmt: skip

    def places(self, thr_load, shared):
        """(row, column) in the tile of what this thread copies."""
        shape = (cute.size(shared, mode=[0]), self.width)
        return thr_load.partition_S(cute.make_identity_tensor(shape))[0, None, None]

    def line_rows(self, x):
        """The number of rows that one thread copies."""
        return cute.size(x.shared, mode=[1])

    @cute.jit
    def line(self, x, i):
        """Where the i-th row of this thread is: its number in the tile, and its address. Behind the last row stands the
        last one."""
        row = cutlass.min(x.skip + x.row + (x.where[i, 0][0] - x.row), x.last)
        address = x.start + cutlass.Int64(row) * cutlass.Int64(x.pitch)
        at = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return row - x.skip, at

    @cute.jit
    def fetch_part(self, x, number, of):
        """Starts part `number` of `of` of a copy to shared memory. Rows behind the last one hold the last one."""
        rows = self.line_rows(x)
        for i in cutlass.range_constexpr(rows):
            if cutlass.const_expr(i * of // rows == number):
                _, at = self.line(x, i)
                for j in cutlass.range_constexpr(cute.size(x.shared, mode=[2])):
                    unit = cute.make_tensor(at + self.columns * j, cute.make_layout(8))
                    if cutlass.const_expr(self.dim == self.width):
                        cute.copy(x.load, unit, x.shared[None, i, j])
                    else:
                        if x.column + self.columns * j < self.dim:
                            cute.copy(x.load, unit, x.shared[None, i, j])

    @cute.jit
    def fetch(self, load, thr_load, rows_of, first, left, shared):
        """Starts a whole copy to shared memory."""
        self.fetch_part(self.lines(load, thr_load, rows_of, first, left, shared), 0, 1)

    @cute.jit
    def store(self, load, thr_load, rows_of, first, left, shared):
        """The other way, of at least one row. In the place of rows behind the last one, the last one is stored again:
        that takes no branches, which would make each row wait for the one before."""
        x = self.lines(load, thr_load, rows_of, first, left, shared)
        rows, units = self.line_rows(x), cute.size(x.shared, mode=[2])
        values = cute.make_rmem_tensor(cute.make_layout((8, units, rows)), self.dtype)
        for i in cutlass.range_constexpr(rows):
            row, _ = self.line(x, i)
            for j in cutlass.range_constexpr(units):
                place = cute.assume(x.tile.layout((row, x.column + self.columns * j)), divby=8)
                unit = cute.make_tensor(x.tile.iterator + place, cute.make_layout(8))
                cute.autovec_copy(unit, values[None, j, i])
        for i in cutlass.range_constexpr(rows):
            _, at = self.line(x, i)
            for j in cutlass.range_constexpr(units):
                unit = cute.make_tensor(at + self.columns * j, cute.make_layout(8))
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

    def one(self, fragment, number, k):
        """What a single mma takes of the k-th slice of a fragment, as (V, 1)."""
        part = fragment[None, number, k]
        return cute.make_tensor(part.iterator, cute.append(part.layout, cute.make_layout(1)))
