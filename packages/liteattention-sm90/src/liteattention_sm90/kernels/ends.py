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
from .packed import sequence_of, token, units_before


class Ends:
    """Tiles of 64 rows of one head; `lanes` neighbouring threads share a row, each with `unit` columns of it."""

    def __init__(self, config: SumsConfig | ConvertConfig, unit: int):
        self.config, self.dtype, self.unit = config, DTYPES[config.dtype], unit
        self.lanes = config.width // unit
        self.rows = UNIT * self.lanes // ENDS_THREADS  # of a thread

    def launched(self, kernel, x: cute.Tensor, starts, longest, stream):
        """Launches a kernel with a CTA per tile of x [B, T, H, D], or of as many of each packed sequence."""
        rows, batches = x.shape[1], x.shape[0]
        if starts is not None:
            rows, batches = longest, starts.shape[0] - 1
        tiles = cute.ceil_div(rows, UNIT)
        kernel.launch(
            grid=(x.shape[2] * tiles, batches, 1), block=(ENDS_THREADS, 1, 1), stream=stream
        )

    def length_of(self, x: cute.Tensor, sequence):
        """Returns the number of rows of a sequence of x."""
        return x.shape[1] if sequence[0] is None else sequence[1]

    def place(self, x: cute.Tensor):
        """Returns batch, head, first row of the tile, this thread's group of lanes, and its lane there."""
        tidx, _, _ = cute.arch.thread_idx()
        number, batch, _ = cute.arch.block_idx()
        heads = x.shape[2]
        return batch, number % heads, number // heads * UNIT, tidx // self.lanes, tidx % self.lanes

    def part(self, x: cute.Tensor, batch, row, head, sequence, number):
        """Returns so many columns of a row as a thread copies at once."""
        place, at = token(row, batch, sequence[0])
        return cute.local_tile(x[place, at, head, None], (self.unit,), (number,))


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
        starts: cute.Tensor,
        longest: cutlass.Int32 | None,
        stream,
    ):
        """The arguments of `build.sums_arguments`."""
        kernel = self.kernel(out, dout, lse, dlse, lse_log2, delta, acc, starts)
        self.launched(kernel, out, starts, longest, stream)

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
        starts: cute.Tensor,
    ):
        place = self.place(out)
        sequence = sequence_of(place[0], starts, out.shape[1])
        if cutlass.const_expr(self.config.packed is None):
            self.sum(out, dout, lse, dlse, lse_log2, delta, acc, sequence, *place)
        else:
            if place[2] < sequence[1]:
                self.sum(out, dout, lse, dlse, lse_log2, delta, acc, sequence, *place)

    @cute.jit
    def sum(
        self, out: cute.Tensor, dout: cute.Tensor, lse: cute.Tensor, dlse: cute.Tensor, lse_log2: cute.Tensor,
        delta: cute.Tensor, acc: cute.Tensor, sequence, batch, head, tile, group, lane,
    ):  # fmt: skip
        """Does a tile."""
        length = sequence[1]
        first = tile + group * self.rows
        own = first + lane % self.rows  # the row whose numbers this thread stores
        place, at = token(cutlass.min(own, length - 1), batch, sequence[0])
        value, known = F32(lse[place, head, at]), F32(0.0)
        if cutlass.const_expr(dlse is not None):
            known = dlse[place, head, at]
        rOut, rDout = (self.load(x, batch, head, first, sequence, lane) for x in (out, dout))
        if cutlass.const_expr(self.config.with_acc):
            self.clear(acc, batch, head, first, sequence, lane)
        total = F32(0.0)
        for i in cutlass.range_constexpr(self.rows):
            row_total = self.row_total(rOut[None, i], rDout[None, i])
            total = row_total if lane % self.rows == i else total
        if lane < self.rows:
            seen = (own < length) & (value != -math.inf)
            at = own
            if cutlass.const_expr(self.config.packed is not None):
                at = own + units_before(batch, sequence[0]) * UNIT
            lse_log2[place, head, at] = value * LOG2_E if seen else F32(math.inf)
            delta[place, head, at] = total - known if seen else F32(0.0)

    @cute.jit
    def load(self, x: cute.Tensor, batch, head, first, sequence, lane):
        """Returns this thread's columns of its rows, zero behind the head dimension."""
        values = cute.make_rmem_tensor((self.unit, self.rows), self.dtype)
        if cutlass.const_expr(self.config.head_dim < self.config.width):
            values.fill(0.0)
        if (self.config.head_dim == self.config.width) | (lane * self.unit < self.config.head_dim):
            for i in cutlass.range_constexpr(self.rows):
                row = cutlass.min(first + i, self.length_of(x, sequence) - 1)
                part = self.part(x, batch, row, head, sequence, lane)
                cute.autovec_copy(part, values[None, i])
        return values

    @cute.jit
    def clear(self, acc: cute.Tensor, batch, head, first, sequence, lane):
        """Zeroes this group's rows of the accumulators."""
        zeros = cute.make_rmem_tensor(4, F32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.rows):
            if first + i < self.length_of(acc, sequence):
                place, at = token(first + i, batch, sequence[0])
                row = acc[place, at, head, None]
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
    def __call__(
        self,
        acc: cute.Tensor,
        dq: cute.Tensor,
        scale: cutlass.Float32,
        starts: cute.Tensor,
        longest: cutlass.Int32 | None,
        stream,
    ):
        """The arguments of `build.convert_arguments`."""
        self.launched(self.kernel(acc, dq, scale, starts), dq, starts, longest, stream)

    @cute.kernel
    def kernel(
        self, acc: cute.Tensor, dq: cute.Tensor, scale: cutlass.Float32, starts: cute.Tensor
    ):
        place = self.place(dq)
        sequence = sequence_of(place[0], starts, dq.shape[1])
        if cutlass.const_expr(self.config.packed is None):
            self.convert(acc, dq, scale, sequence, *place)
        else:
            if place[2] < sequence[1]:
                self.convert(acc, dq, scale, sequence, *place)

    @cute.jit
    def convert(
        self, acc: cute.Tensor, dq: cute.Tensor, scale, sequence, batch, head, tile, group, lane
    ):
        """Does a tile."""
        length = sequence[1]
        first = tile + group
        step = ENDS_THREADS // self.lanes
        if lane * self.unit < self.config.head_dim:
            values = cute.make_rmem_tensor((self.unit, self.rows), F32)
            for i in cutlass.range_constexpr(self.rows):
                row = cutlass.min(first + i * step, length - 1)
                part = self.part(acc, batch, row, head, sequence, lane)
                cute.autovec_copy(part, values[None, i])
            rounded = cute.make_rmem_tensor(values.shape, self.dtype)
            rounded.store((values.load() * scale).to(self.dtype))
            for i in cutlass.range_constexpr(self.rows):
                row = first + i * step
                if row < length:
                    target = self.part(dq, batch, row, head, sequence, lane)
                    cute.autovec_copy(rounded[None, i], target)
