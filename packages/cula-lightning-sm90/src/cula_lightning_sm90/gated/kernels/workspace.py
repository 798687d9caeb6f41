"""Memory that the kernels of a call share, one vector of 32-bit words: flags, blocks, states between machines."""

import cutlass
import cutlass.cute as cute

from cula_core.cute.types import F32

from ..config import BLOCK, HEAD_DIM, LINE


@cute.jit
def blocks_in(workspace: cute.Tensor, flags, slots, heads, operand: cutlass.Constexpr):
    """Returns the blocks [slots, heads, BLOCK], which begin behind so many flags, at a line of their own."""
    first = cute.ceil_div(flags, LINE) * LINE
    pointer = cute.recast_ptr((workspace.iterator + first).align(4 * LINE), dtype=operand)
    stride = (cutlass.Int64(heads) * BLOCK, BLOCK, 1)
    return cute.make_tensor(pointer, cute.make_layout((slots, heads, BLOCK), stride=stride))


@cute.jit
def carried_in(blocks: cute.Tensor, seats, rows: cutlass.Constexpr):
    """Returns the states [seats, rows, 128] in fp32, which begin behind the blocks."""
    size = cutlass.Int64(blocks.shape[0]) * blocks.shape[1] * BLOCK
    pointer = cute.recast_ptr((blocks.iterator + size).align(4 * LINE), dtype=F32)
    shape = (seats, rows, HEAD_DIM)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=(rows * HEAD_DIM, HEAD_DIM, 1)))
