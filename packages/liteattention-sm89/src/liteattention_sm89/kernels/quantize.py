"""The kernel that rounds queries and keys to 8-bit integers.

A block of rows has one scale, largest magnitude / 127. Keys are centred first: their mean over a sequence, which
shifts all scores of a row by the same amount, holds the outliers of single channels (SageAttention, arXiv 2410.02367).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import DTYPES, F32, I32

from ..config import BLOCK_M, KEY_GROUP, QUANTIZED_ROWS, QUERY_GROUP, Problem, int8_width
from .int8 import EXACT
from .tiles import tokens_of

LEAST = 1e-15  # magnitude, so that no product of scales is zero


class Quantize:
    """Rows to 8-bit integers and one scale per group: 16 queries of a head, or 64 keys less their mean.

    One CTA of 4 warps per (64 rows, head, sequence), 16 rows per warp in registers. Of queries it also writes scale *
    (q . mean of the keys), which the log-sum-exp of centred keys misses. Groups are counted from the start of a
    sequence; packed sequences begin at a multiple of 128 queries or 64 keys.
    """

    rows, threads = QUANTIZED_ROWS, 128

    def __init__(self, problem: Problem, of_keys: bool):
        self.problem, self.of_keys = problem, of_keys
        self.dtype, self.dim = DTYPES[problem.dtype], problem.head_dim
        self.width = int8_width(self.dim)
        self.lanes = 32 if self.width > 128 else self.width // 8  # of a row
        self.group, self.period = (KEY_GROUP, 64) if of_keys else (QUERY_GROUP, BLOCK_M)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        means: cute.Tensor,
        integers: cute.Tensor,
        scales: cute.Tensor,
        shifts: cute.Tensor,
        starts: cute.Tensor,
        scale: cutlass.Float32,
        tiles: cutlass.Int32,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.quantize_arguments`."""
        self.kernel(x, means, integers, scales, shifts, starts, scale).launch(
            grid=(tiles, x.shape[2], sequences), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        means: cute.Tensor,
        integers: cute.Tensor,
        scales: cute.Tensor,
        shifts: cute.Tensor,
        starts: cute.Tensor,
        scale: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, sequence = cute.arch.block_idx()
        batch, first, length = tokens_of(sequence, starts, x)
        slot = I32(0)
        if cutlass.const_expr(self.problem.packed):
            slot = first // self.period + sequence
        warp_max = SmemAllocator().allocate_tensor(F32, cute.make_layout(4), 16)
        if tile * self.rows < length:
            self.quantize(
                x, means, integers, scales, shifts, scale, warp_max, tidx, tile, head, sequence, batch, first, length,
                slot * (self.period // self.group),
            )  # fmt: skip

    @cute.jit
    def quantize(
        self, x, means, integers, scales, shifts, scale, warp_max, tidx, tile, head, sequence, batch, first, length,
        slot,
    ):  # fmt: skip
        """Rounds the rows of a CTA, of which there is at least one."""
        warp, lane = tidx // 32, tidx % 32
        column = lane % self.lanes * 8
        per_pass = 32 // self.lanes  # rows of a warp
        passes = 16 // per_pass
        row = tile * self.rows + warp * 16 + lane // self.lanes
        mean = cute.make_rmem_tensor(8, F32)
        mean.fill(0.0)
        if column < self.dim:
            head_k = (
                head if cutlass.const_expr(self.of_keys) else head // (x.shape[2] // means.shape[1])
            )
            unit = cute.local_tile(means[sequence, head_k, None], (8,), (column // 8,))
            cute.autovec_copy(unit, mean)
        values = cute.make_rmem_tensor(cute.make_layout((8, passes)), self.dtype)
        values.fill(0.0)
        for i in cutlass.range_constexpr(passes):
            self.load(x, values[None, i], batch, first, row + i * per_pass, length, head, column)
        most = F32(LEAST)
        for i in cutlass.range_constexpr(passes):
            seen = row + i * per_pass < length
            dot = F32(0.0)
            for c in cutlass.range_constexpr(8):
                value = F32(values[c, i])
                dot = dot + value * mean[c]
                if cutlass.const_expr(self.of_keys):
                    value = value - mean[c] if seen else F32(0.0)
                most = cute.arch.fmax(most, cute.arch.fmax(value, -value))
            if cutlass.const_expr(not self.of_keys):
                for distance in cutlass.range_constexpr(int(math.log2(self.lanes))):
                    dot = dot + cute.arch.shuffle_sync_bfly(dot, 1 << distance)
                if (lane % self.lanes == 0) & seen:
                    shifts[batch, head, first + row + i * per_pass] = dot * scale
        for distance in cutlass.range_constexpr(5):
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1 << distance))
        if cutlass.const_expr(self.of_keys):
            if lane == 0:
                warp_max[warp] = most
            cute.arch.sync_threads()
            for other in cutlass.range_constexpr(4):
                most = cute.arch.fmax(most, warp_max[other])
            if tidx == 0:
                scales[batch, head, slot + tile] = most * (1 / 127)
        else:
            if lane == 0:
                scales[batch, head, slot + tile * 4 + warp] = most * (1 / 127)
        inverse = 127.0 / most
        for i in cutlass.range_constexpr(passes):
            self.store(
                integers, values[None, i], mean, inverse, batch, first, row + i * per_pass, length, head, column
            )  # fmt: skip

    @cute.jit
    def load(self, x, values, batch, first, row, length, head, column):
        """Loads 8 values of a row that exists."""
        if (row < length) & (column < self.dim):
            unit = cute.local_tile(x[batch, first + row, head, None], (8,), (column // 8,))
            cute.autovec_copy(unit, values)

    @cute.jit
    def store(self, integers, values, mean, inverse, batch, first, row, length, head, column):
        """Stores 8 values, rounded to nearest even; adding EXACT leaves the integer in the lowest byte."""
        words = cute.make_rmem_tensor(2, I32)
        for word in cutlass.range_constexpr(2):
            packed = I32(0)
            for c in cutlass.range_constexpr(4):
                value = F32(values[4 * word + c])
                if cutlass.const_expr(self.of_keys):
                    value = value - mean[4 * word + c]
                bits = (value * inverse + EXACT).bitcast(I32)
                packed = packed | ((bits & 255) << (8 * c))
            words[word] = packed
        if (row < length) & (column < self.width):
            line = cute.recast_tensor(integers[batch, first + row, head, None], I32)
            cute.autovec_copy(words, cute.local_tile(line, (2,), (column // 8,)))
