"""What comes before and after `LiteBackward`: sums of rows, and gradients of q in their own dtype.

Neighbouring CTAs have neighbouring heads of the same tokens, which lie side by side in memory. All loads of a thread
come before what waits for them: rows behind the end are read as the last one, so that no branch stands between.
"""

import math

import cutlass
import cutlass.cute as cute

from cula_core.constants import LOG2_E
from cula_core.cute.types import DTYPES, F32

from ..config import ENDS_THREADS, UNIT, ConvertConfig, SumsConfig


class Ends:
    """Tiles of 64 rows of one head; `lanes` neighbouring threads share a row, each with `unit` columns of it."""

    def __init__(self, config: SumsConfig | ConvertConfig, unit: int):
        self.config, self.dtype, self.unit = config, DTYPES[config.dtype], unit
        self.lanes = config.width // unit
        self.rows = UNIT * self.lanes // ENDS_THREADS  # of a thread

    def launched(self, kernel, x: cute.Tensor, stream):
        """Launches a kernel with a CTA per tile of x [B, T, H, D]."""
        tiles = cute.ceil_div(x.shape[1], UNIT)
        kernel.launch(
            grid=(x.shape[2] * tiles, x.shape[0], 1), block=(ENDS_THREADS, 1, 1), stream=stream
        )

    def place(self, x: cute.Tensor):
        """Returns batch, head, first row of the tile, this thread's group of lanes, and its lane there."""
        tidx, _, _ = cute.arch.thread_idx()
        number, batch, _ = cute.arch.block_idx()
        heads = x.shape[2]
        return batch, number % heads, number // heads * UNIT, tidx // self.lanes, tidx % self.lanes

    def part(self, x: cute.Tensor, batch, row, head, number):
        """Returns so many columns of a row as a thread copies at once."""
        return cute.local_tile(x[batch, row, head, None], (self.unit,), (number,))


class LiteSums(Ends):
    """Per row the lse in log2 units and Delta = sum(out * dout) - dlse; accumulators of dq, if any, become zero.

    Rows behind the end, and those that saw nothing, get an lse of infinity and a Delta of zero: their probabilities are
    zero. A warp has eight neighbouring rows, and stores their numbers together.
    """

    def __init__(self, config: SumsConfig):
        super().__init__(config, 8)

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        acc: cute.Tensor,
        stream,
    ):
        """The arguments of `build.sums_arguments`."""
        self.launched(self.kernel(out, dout, lse, dlse, lse_log2, delta, acc), out, stream)

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        acc: cute.Tensor,
    ):
        batch, head, tile, group, lane = self.place(out)
        length = out.shape[1]
        first = tile + group * self.rows
        own = first + lane % self.rows  # the row whose numbers this thread stores
        at = cutlass.min(own, length - 1)
        value, known = F32(lse[batch, head, at]), F32(0.0)
        if cutlass.const_expr(dlse is not None):
            known = dlse[batch, head, at]
        rOut, rDout = (self.load(x, batch, head, first, lane) for x in (out, dout))
        if cutlass.const_expr(self.config.with_acc):
            self.clear(acc, batch, head, first, lane)
        total = F32(0.0)
        for i in cutlass.range_constexpr(self.rows):
            row_total = self.row_total(rOut[None, i], rDout[None, i])
            total = row_total if lane % self.rows == i else total
        if lane < self.rows:
            seen = (own < length) & (value != -math.inf)
            lse_log2[batch, head, own] = value * LOG2_E if seen else F32(math.inf)
            delta[batch, head, own] = total - known if seen else F32(0.0)

    @cute.jit
    def load(self, x: cute.Tensor, batch, head, first, lane):
        """Returns this thread's columns of its rows, zero behind the head dimension."""
        values = cute.make_rmem_tensor((self.unit, self.rows), self.dtype)
        if cutlass.const_expr(self.config.head_dim < self.config.width):
            values.fill(0.0)
        if (self.config.head_dim == self.config.width) | (lane * self.unit < self.config.head_dim):
            for i in cutlass.range_constexpr(self.rows):
                row = cutlass.min(first + i, x.shape[1] - 1)
                cute.autovec_copy(self.part(x, batch, row, head, lane), values[None, i])
        return values

    @cute.jit
    def clear(self, acc: cute.Tensor, batch, head, first, lane):
        """Zeroes this group's rows of the accumulators."""
        zeros = cute.make_rmem_tensor(4, F32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.rows):
            if first + i < acc.shape[1]:
                row = acc[batch, first + i, head, None]
                for j in cutlass.range_constexpr(self.unit // 4):
                    cute.autovec_copy(zeros, cute.local_tile(row, (4,), (j * self.lanes + lane,)))

    @cute.jit
    def row_total(self, rOut: cute.Tensor, rDout: cute.Tensor):
        """Returns sum(out * dout) of a row, of which each lane of a group has a part."""
        total = F32(0.0)
        for i in cutlass.range_constexpr(self.unit):
            total = total + F32(rOut[i]) * F32(rDout[i])
        for step in cutlass.range_constexpr(int(math.log2(self.lanes))):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
        return total


class LiteConvert(Ends):
    """dq = acc * scale in the dtype of q, without the columns behind the head dimension.

    A thread has four columns, so that neighbours' loads and stores both lie side by side.
    """

    def __init__(self, config: ConvertConfig):
        super().__init__(config, 4)

    @cute.jit
    def __call__(self, acc: cute.Tensor, dq: cute.Tensor, scale: cutlass.Float32, stream):
        """The arguments of `build.convert_arguments`."""
        self.launched(self.kernel(acc, dq, scale), dq, stream)

    @cute.kernel
    def kernel(self, acc: cute.Tensor, dq: cute.Tensor, scale: cutlass.Float32):
        batch, head, tile, group, lane = self.place(dq)
        length = dq.shape[1]
        first = tile + group
        step = ENDS_THREADS // self.lanes
        if lane * self.unit < self.config.head_dim:
            values = cute.make_rmem_tensor((self.unit, self.rows), F32)
            for i in cutlass.range_constexpr(self.rows):
                row = cutlass.min(first + i * step, length - 1)
                cute.autovec_copy(self.part(acc, batch, row, head, lane), values[None, i])
            rounded = cute.make_rmem_tensor(values.shape, self.dtype)
            rounded.store((values.load() * scale).to(self.dtype))
            for i in cutlass.range_constexpr(self.rows):
                row = first + i * step
                if row < length:
                    cute.autovec_copy(rounded[None, i], self.part(dq, batch, row, head, lane))
