"""What the backward kernel needs to know of each row: its log-sum-exp, and the sum Delta of outputs times gradients."""

import math

import cutlass
import cutlass.cute as cute

from cula_core.constants import LOG2_E
from cula_core.cute.types import F32

from ..config import BLOCK_M
from .backward_tiles import BackwardTiles
from .tiles import tokens_of


class RowSums(BackwardTiles):
    """Per row lse in log2 units and Delta, one CTA per tile of rows; accumulators of dq become zero.

    Rows behind the end, and those that saw nothing, get an lse of infinity: their probabilities are zero.
    """

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        sums: cute.Tensor,
        acc: cute.Tensor,
        starts_q: cute.Tensor,
        tiles: cutlass.Int32,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.sums_arguments`."""
        self.kernel(out, dout, lse, dlse, sums, acc, starts_q).launch(
            grid=(tiles, out.shape[2], sequences), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        sums: cute.Tensor,
        acc: cute.Tensor,
        starts_q: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, sequence = cute.arch.block_idx()
        batch, first_q, length_q = tokens_of(sequence, starts_q, out)
        slot = tile
        if cutlass.const_expr(self.problem.packed):
            slot = self.slot(first_q, sequence) + tile
        if tile * self.m < cute.round_up(length_q, BLOCK_M):
            if cutlass.const_expr(acc is not None):
                zeros = cute.make_rmem_tensor(4, F32)
                zeros.fill(0.0)
                line = acc[batch, head, slot, None]
                for i in cutlass.range_constexpr(self.m * self.width // (4 * self.threads)):
                    unit = cute.local_tile(line, (4,), (i * self.threads + tidx,))
                    cute.autovec_copy(zeros, unit)
            lanes = 32 if self.width > 128 else 16 if self.width > 64 else 8  # of a row
            for i in cutlass.range_constexpr(self.m * lanes // self.threads):
                row = i * (self.threads // lanes) + tidx // lanes
                self.sum_row(
                    out, dout, lse, dlse, sums[batch, head, slot, None], batch, head,
                    first_q, tile * self.m + row, row, length_q, tidx % lanes, lanes,
                )  # fmt: skip

    @cute.jit
    def sum_row(
        self, out, dout, lse, dlse, sums, batch, head, first_q, token, row, length_q, lane, lanes
    ):
        """Stores the two numbers of a row, which `lanes` threads read together."""
        total = F32(0.0)
        if (token < length_q) & (lane * 8 < self.dim):
            values = []
            for tensor in (out, dout):
                unit = cute.local_tile(tensor[batch, first_q + token, head, None], (8,), (lane,))
                value = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(unit, value)
                values.append(value)
            for i in cutlass.range_constexpr(8):
                total = total + F32(values[0][i]) * F32(values[1][i])
        for i in cutlass.range_constexpr(int(math.log2(lanes))):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        bias = F32(math.inf)
        if token < length_q:
            value = F32(lse[batch, head, first_q + token])
            bias = bias if value == -math.inf else value * LOG2_E
            if cutlass.const_expr(dlse is not None):
                total = total - dlse[batch, head, first_q + token]
            total = F32(0.0) if value == -math.inf else total
        if lane == 0:
            sums[row] = bias
            sums[self.m + row] = total
