"""The kernel that folds maps of slices, which may lie on several GPUs.

The slices of a chain follow each other. Slice p turns S into M_p S + A_p. From the state behind the first slice, S_1,
the state behind all follows:

    S_(p+1)^T = S_p^T M_p^T + A_p^T

Gradients D of states go back, from the last slice of a chain to the first, by M_p^T and B_p in place of M_p and A_p.
Whole maps fold as states do, A^T from the first slice's A^T, and M^T from its M^T without anything that is added.
Which matrices belong to a slice stands in a table. Products are those of `KdaMerge`.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ...cute.types import F32
from ..config import HEAD_DIM, FoldConfig, MergeConfig
from .merge import GROUPS, ROWS, STEPS, STRIDE, THREADS, KdaMerge


class Fold:
    """One CTA per 16 rows of a transposed state, or of a whole map, of a chain."""

    def __init__(self, config: FoldConfig):
        self.config = config
        self.groups = 2 * GROUPS if config.whole else GROUPS
        self.merge = KdaMerge(MergeConfig(back=config.back))

    @cute.jit
    def __call__(
        self,
        first: cute.Tensor,
        added: cute.Tensor,
        maps: cute.Tensor,
        behind: cute.Tensor,
        places: cute.Tensor,
        cuts: cute.Tensor,
        chains: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.fold_arguments`."""
        self.kernel(first, added, maps, behind, places, cuts).launch(
            grid=(chains * behind.shape[1] * self.groups, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        first: cute.Tensor,
        added: cute.Tensor,
        maps: cute.Tensor,
        behind: cute.Tensor,
        places: cute.Tensor,
        cuts: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads = behind.shape[1]
        rows, head, chain = (
            block % self.groups * ROWS,
            block // self.groups % heads,
            block // self.groups // heads,
        )
        begin, end = cuts[chain], cuts[chain + 1]
        adds = cutlass.Boolean(True)
        if cutlass.const_expr(self.config.whole):
            adds = rows < HEAD_DIM
        smem = SmemAllocator()
        # [row, column, leading or remaining bits]
        halves = cute.make_layout((ROWS, HEAD_DIM, 2), stride=(STRIDE, 2, 1))
        sS = smem.allocate_tensor(F32, halves, byte_alignment=16)
        for i in cutlass.range_constexpr(ROWS * HEAD_DIM // THREADS):
            at = i * THREADS + tidx
            v, k = at // HEAD_DIM, at % HEAD_DIM
            value = F32(0.0)
            if adds:
                value = first[places[0, begin], head, rows + v, k]
            else:
                value = maps[places[1, begin], head, rows - HEAD_DIM + v, k]
            self.merge.split(sS[v, k, None], value)
            behind[self.place(chain, begin), head, rows + v, k] = value
        # The thread's share of a slice, loaded while the one before it is applied.
        mapped = cute.make_rmem_tensor((2, 2, STEPS), F32)  # [tile, half of the sum, step]
        own = cute.make_rmem_tensor((4, 2), F32)  # [column, 8 rows further]
        own.fill(0.0)
        if begin + 1 < end:
            if adds:
                self.merge.load_added(
                    added[places[0, begin + 1], head, None, None], own, rows, tidx
                )
            source = maps[places[1, begin + 1], head, None, None]
            for step in cutlass.range_constexpr(STEPS):
                self.merge.load_step(source, mapped, step, 0, tidx)
        for slice in cutlass.range(begin + 1, end, unroll=1):
            acc = cute.make_rmem_tensor((4, 2, 3), F32)  # [register, tile, term]
            acc.fill(0.0)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    for tile in cutlass.range_constexpr(2):
                        acc[2 * r + i, tile, 0] = own[2 * i + tile, r]
            more = slice + 1 < end
            following = cutlass.select_(more, slice + 1, slice)
            source = maps[places[1, following], head, None, None]
            if more & adds:
                self.merge.load_added(
                    added[places[0, following], head, None, None], own, rows, tidx
                )
            cute.arch.sync_threads()
            for step in cutlass.range_constexpr(STEPS):
                self.merge.apply(sS, mapped, acc, step, tidx)
                if more:
                    self.merge.load_step(source, mapped, step, 0, tidx)
            cute.arch.sync_threads()
            self.merge.store_state(
                sS, behind[self.place(chain, slice), head, None, None], acc, rows, tidx
            )

    def place(self, chain, slice):
        """Returns where what is behind a slice goes: of whole maps only that of the last one stays."""
        return chain if self.config.whole else slice
