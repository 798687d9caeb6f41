"""What both prefill kernels do with a chunk: sums of decays, and keys past the end of a sequence."""

import cutlass
import cutlass.cute as cute

from cula_core.cute.output import GROUP, row_units
from cula_core.cute.types import F32


@cute.jit
def sums_of_decays(steps: cute.Tensor, found: cute.Tensor, lane):
    """Sums log2 decays over a warp: up to and with each token to `found[.., 0]`, behind it to `found[.., 1]`.

    A lane has two neighbouring tokens. Sums behind are no differences of the others, whose rounding they would have.
    """
    upto = behind = steps[0] + steps[1]
    for k in cutlass.range_constexpr(5):
        left = cute.arch.shuffle_sync_up(upto, 1 << k, mask_and_clamp=0)
        upto = upto + left if lane >= 1 << k else upto
        right = cute.arch.shuffle_sync_down(behind, 1 << k)
        behind = behind + right if lane < 32 - (1 << k) else behind
    left = cute.arch.shuffle_sync_up(upto, 1, mask_and_clamp=0)
    right = cute.arch.shuffle_sync_down(behind, 1)
    found[0, 0] = steps[0] + left if lane > 0 else steps[0]
    found[1, 0] = upto
    found[1, 1] = right if lane < 31 else F32(0.0)
    found[0, 1] = steps[1] + found[1, 1]


@cute.jit
def clear_past(keys: cute.Tensor, left, barrier: cutlass.Int32, tidx):
    """Writes zeros over what lies past the end of a packed sequence: tokens of the next one, of any value.

    By a warpgroup, whose products may read the keys behind it. barrier: the number of its named barrier.
    """
    units = row_units(keys.element_type, tidx)
    target = units.partition_D(keys)
    zeros = cute.make_rmem_tensor(target[None, 0, 0].shape, keys.element_type)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
        if tidx // 8 + 16 * i >= left:
            for j in cutlass.range_constexpr(cute.size(target, mode=[2])):
                cute.copy(units, zeros, target[None, i, j])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
