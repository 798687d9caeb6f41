"""Gradients of queries, from the accumulators to the layout of the queries."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import F32

from .backward_tiles import BackwardTiles
from .tiles import tokens_of


class GatherDq(BackwardTiles):
    """dq in order and in its dtype, from what the atomics of `LiteBackward` added up; one CTA per tile of rows."""

    @cute.jit
    def __call__(
        self,
        acc: cute.Tensor,
        dq: cute.Tensor,
        starts_q: cute.Tensor,
        scale: cutlass.Float32,
        tiles: cutlass.Int32,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.gather_arguments`."""
        self.kernel(acc, dq, starts_q, scale, self.tiled_mma(), self.tiled_load()).launch(
            grid=(tiles, dq.shape[2], sequences), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        acc: cute.Tensor,
        dq: cute.Tensor,
        starts_q: cute.Tensor,
        scale: cutlass.Float32,
        mma: cute.TiledMma,
        load: cute.TiledCopy,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, sequence = cute.arch.block_idx()
        batch, first_q, length_q = tokens_of(sequence, starts_q, dq)
        slot = tile
        if cutlass.const_expr(self.problem.packed):
            slot = self.slot(first_q, sequence) + tile
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, self.padded(self.m), 128)
        if tile * self.m < length_q:
            thr_mma = mma.get_slice(tidx)
            line = acc[batch, head, slot, None]
            for chunk in cutlass.range_constexpr(self.width // self.chunk):
                values = cute.make_rmem_tensor(self.chunk_shape(thr_mma), F32)
                size = cute.size(values)
                for i in cutlass.range_constexpr(size):
                    values[i] = line[(chunk * size + i) * self.threads + tidx] * scale
                part = cute.local_tile(sQ, (self.m, self.chunk), (0, chunk))
                self.store_rounded(values, thr_mma, part)
            cute.arch.sync_threads()
            first = tile * self.m
            rows = dq[batch, None, head, None]
            self.store(load, load.get_slice(tidx), rows, first_q + first, length_q - first, sQ)
