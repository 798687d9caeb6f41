"""A kernel that changes the sign of the states in some slots of a pool, and does nothing else."""

import torch
import triton
import triton.language as tl


@triton.jit
def _negate_kernel(pool, slots, stride, BLOCK: tl.constexpr):
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    at = pool + slot * stride + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, -tl.load(at))


def negate(pool: torch.Tensor, slots: torch.Tensor, block: int = 1024) -> None:
    """Multiplies the states of `slots`, int32 [B], by -1. pool [slots, ...]: each slot contiguous, of whole blocks."""
    programs = (pool[0].numel() // block, len(slots))
    _negate_kernel[programs](pool, slots, pool.stride(0), BLOCK=block, num_warps=4)
