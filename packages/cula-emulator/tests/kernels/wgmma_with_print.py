"""Two wgmmas whose accumulator stays in flight over a call to printf, which makes the assembler serialise them."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

TILE = (64, 64, 64)


@cute.kernel
def _kernel(
    tiled_mma: cute.TiledMma,
    out: cute.Tensor,
    a_smem: cute.ComposedLayout,
    b_smem: cute.ComposedLayout,
    prints: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    sA = smem.allocate_tensor(
        cutlass.BFloat16, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner
    )
    sB = smem.allocate_tensor(
        cutlass.BFloat16, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner
    )
    mine = tiled_mma.get_slice(thread)
    tCrA = tiled_mma.make_fragment_A(mine.partition_A(sA))
    tCrB = tiled_mma.make_fragment_B(mine.partition_B(sB))
    tCgC = mine.partition_C(out)
    acc = cute.make_rmem_tensor(tCgC.shape, cutlass.Float32)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    cute.gemm(tiled_mma, acc, tCrA[None, None, 0, 0], tCrB[None, None, 0, 0], acc)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    if cutlass.const_expr(prints):
        cute.printf("between two wgmmas: thread %d", thread)
    cute.gemm(tiled_mma, acc, tCrA[None, None, 1, 0], tCrB[None, None, 1, 0], acc)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, tCgC)


class WgmmaWithPrint:
    def __init__(self, prints: bool):
        self.prints = prints

    @cute.jit
    def __call__(self, out: cute.Tensor):
        mode = LayoutEnum.ROW_MAJOR
        tiled_mma = sm90.make_trivial_tiled_mma(
            cutlass.BFloat16,
            cutlass.BFloat16,
            mode.sm90_mma_major_mode(),
            mode.sm90_mma_major_mode(),
            cutlass.Float32,
            (1, 1, 1),
            TILE[:2],
        )
        a_smem = sm90.make_smem_layout_a(mode, TILE, cutlass.BFloat16, 1)
        b_smem = sm90.make_smem_layout_b(mode, TILE, cutlass.BFloat16, 1)
        _kernel(tiled_mma, out, a_smem, b_smem, self.prints).launch(
            grid=(1, 1, 1), block=(128, 1, 1)
        )
