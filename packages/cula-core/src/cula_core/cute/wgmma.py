"""Products of a warpgroup (wgmma) whose second operand lies in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .types import F32


def mma(dtype, n, b_major, a_source=warpgroup.OperandSource.RMEM):
    """Returns the tiled product m64 x n x k16; the first operand lies in registers unless told otherwise."""
    op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), a_source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: cutlass.Constexpr,
):
    """Issues acc (+)= a b^T as one committed group; the caller has fenced and will wait."""
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh one: its flag may be set inside loops
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def fill_identity(s: cute.Tensor, part, height: cutlass.Constexpr, width: cutlass.Constexpr, first):
    """Sets an accumulator [height, width] to the rows of the identity from `first` on. part: the thread's slice of the
    product."""
    where = part.partition_C(cute.make_identity_tensor((height, width)))
    for i in cutlass.range_constexpr(cute.size(s)):
        s[i] = F32(1.0) if where[i][0] + first == where[i][1] else F32(0.0)


def as_operand(registers, a):
    """Returns accumulator registers seen as a first operand: their order is the same."""
    return cute.make_tensor(registers.iterator, a.layout)
