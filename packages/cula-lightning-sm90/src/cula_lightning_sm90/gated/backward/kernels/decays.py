"""Sums of the log decays of a chunk."""

import cutlass
import cutlass.cute as cute

from cula_core.constants import LOG2_E
from cula_core.cute.types import F32
from cula_core.cute.warp import prefix_sum
from cula_core.delta_rule.kernels.tokens import FLOOR


@cute.jit
def sums_behind(value, lane):
    """Returns the sum of the values of the lanes above this one."""
    upto = prefix_sum(cute.arch.shuffle_sync(value, 31 - lane), lane)
    behind = cute.arch.shuffle_sync(upto, (30 - lane) & 31)
    return F32(0.0) if lane == 31 else behind


@cute.jit
def sums_before(value, lane):
    """Returns the sum of the values of the lanes below this one."""
    before = cute.arch.shuffle_sync_up(prefix_sum(value, lane), 1, mask_and_clamp=0)
    return F32(0.0) if lane == 0 else before


@cute.jit
def sum_decays(g: cute.Tensor, sums: cute.Tensor, left, lane):
    """Writes the sums of log2 decays up to and with each of the chunk's 64 tokens, and behind it: [token, 2].

    By a warp. g: log decays from the chunk's first token on, of which `left` are there; later ones count as zero. A
    difference of the first sums would do for the second, but for its rounding behind a token that forgets everything.
    """
    steps = cute.make_rmem_tensor(2, F32)
    for i in cutlass.range_constexpr(2):
        steps[i] = F32(0.0)
        if 2 * lane + i < left:
            step = g[2 * lane + i].to(F32) * LOG2_E
            steps[i] = F32(FLOOR) if step < FLOOR else step
    before, behind = sums_before(steps[0] + steps[1], lane), sums_behind(steps[0] + steps[1], lane)
    sums[2 * lane, 0] = before + steps[0]
    sums[2 * lane + 1, 0] = before + (steps[0] + steps[1])
    sums[2 * lane, 1] = steps[1] + behind
    sums[2 * lane + 1, 1] = behind
