"""The largest gradients of outputs, where the kernel that writes blocks, which finds them otherwise, is not needed."""

import cutlass
import cutlass.cute as cute

from ...config import CHUNK
from ...kernels.block import find_chunk_of_sequence
from ...kernels.peaks import raise_peak
from ..config import PeaksConfig

THREADS = 256
UNIT = 8  # elements of 16 bytes, of which 16 lanes read a row
OF_WARP = 32 * CHUNK // THREADS  # rows


class Peaks:
    """One CTA per chunk and value head."""

    def __init__(self, config: PeaksConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        mDo: cute.Tensor,
        cu_seqlens: cute.Tensor,
        peaks: cute.Tensor,
        slots: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.peaks_arguments`."""
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(mDo.shape[1], CHUNK))
        self.kernel(mDo, cu_seqlens, per_row, peaks).launch(
            grid=(mDo.shape[2], slots, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mDo: cute.Tensor,
        cu_seqlens: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        peaks: cute.Tensor,
    ):
        head, slot, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        sequence, token, left = find_chunk_of_sequence(cu_seqlens, per_row, slot, mDo.shape[1])
        batch = sequence if cutlass.const_expr(cu_seqlens is None) else cutlass.Int32(0)
        if left > 0:
            first = tidx // 32 * OF_WARP + lane // 16
            # The last row replaces those past the end.
            rows = [token + cutlass.min(first + 2 * j, left - 1) for j in range(OF_WARP // 2)]
            own = mDo[batch, None, head, None]
            raise_peak(own, peaks[sequence, None], head, rows, lane % 16 * UNIT, lane)
