"""What the kernels share: tiles of rows in shared memory, filled by cp.async and emptied in whole lines."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .config import PADDING

F32, I32 = cutlass.Float32, cutlass.Int32
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
        self.line = 64 if width % 64 == 0 else 32  # columns that neighbouring threads copy

    def padded(self, rows, columns=None):
        """[rows, columns], the head dimension unless said, in shared memory. 16 bytes behind every row keep ldmatrix
        free of bank conflicts; unlike a swizzle this leaves every address a constant away from one register."""
        columns = self.width if columns is None else columns
        return cute.make_layout((rows, columns), stride=(columns + PADDING, 1))

    def tiled_load(self):
        per_line = self.line // 8
        return cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
            ),
            cute.make_layout((self.threads // per_line, per_line), stride=(per_line, 1)),
            cute.make_layout((1, 8)),
        )

    @cute.jit
    def lines(self, load, thr_load, rows_of, first, left, shared):
        """How this thread copies between a tile in shared memory and rows of [T, D]: from `first` on, `left` of them.

        Offsets of rows within a tile are 32-bit: strides of tokens are below 2^24.
        """
        shape = (cute.size(shared, mode=[0]), self.width)
        where = thr_load.partition_S(cute.make_identity_tensor(shape))[0, None, None]
        row, column = where[0, 0]
        start = cute.domain_offset((first, 0), rows_of).iterator + cute.assume(column, divby=8)
        return SimpleNamespace(
            load=load, shared=thr_load.partition_D(shared), where=where, row=row, column=column,
            start=start, left=left, pitch=I32(rows_of.stride[0]),
        )  # fmt: skip

    def line_rows(self, x):
        """The number of rows that one thread copies."""
        return cute.size(x.shared, mode=[1])

    @cute.jit
    def fetch_part(self, x, number, of):
        """Starts part `number` of `of` of a copy to shared memory. Rows behind the last one hold the last one."""
        rows = self.line_rows(x)
        for i in cutlass.range_constexpr(rows):
            if cutlass.const_expr(i * of // rows == number):
                row = cutlass.min(x.row + (x.where[i, 0][0] - x.row), x.left - 1)
                at = cute.assume(row * x.pitch, divby=8)
                for j in cutlass.range_constexpr(cute.size(x.shared, mode=[2])):
                    unit = cute.make_tensor(x.start + at + self.line * j, cute.make_layout(8))
                    if cutlass.const_expr(self.dim == self.width):
                        cute.copy(x.load, unit, x.shared[None, i, j])
                    else:
                        if x.column + self.line * j < self.dim:
                            cute.copy(x.load, unit, x.shared[None, i, j])

    @cute.jit
    def fetch(self, load, thr_load, rows_of, first, left, shared):
        """Starts a whole copy to shared memory."""
        self.fetch_part(self.lines(load, thr_load, rows_of, first, left, shared), 0, 1)

    @cute.jit
    def store(self, load, thr_load, rows_of, first, left, shared):
        """The other way: stores the rows that there are."""
        x = self.lines(load, thr_load, rows_of, first, left, shared)
        for i in cutlass.range_constexpr(self.line_rows(x)):
            row = x.row + (x.where[i, 0][0] - x.row)
            if row < x.left:
                self.store_row(x, i, row)

    @cute.jit
    def store_row(self, x, i, row):
        at = cute.assume(row * x.pitch, divby=8)
        for j in cutlass.range_constexpr(cute.size(x.shared, mode=[2])):
            value = cute.make_rmem_tensor(8, self.dtype)
            source = x.shared[None, i, j].iterator
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), value)
            unit = cute.make_tensor(x.start + at + self.line * j, cute.make_layout(8))
            if cutlass.const_expr(self.dim == self.width):
                cute.autovec_copy(value, unit)
            else:
                if x.column + self.line * j < self.dim:
                    cute.autovec_copy(value, unit)

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
