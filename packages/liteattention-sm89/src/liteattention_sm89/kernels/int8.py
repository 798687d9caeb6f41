"""Products of signed 8-bit integers: the mma, and its use on fragments of 16-bit elements."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu.warp import mma as warp_mma

# Added to an integer below 2^22 these bits make it a float: 1.5 * 2^23 + the integer. Sums that start with them are
# floats without a conversion.
EXACT, EXACT_BITS = 12582912.0, 0x4B400000


@dataclass(frozen=True)
class SignedInt8Op(warp_mma.WarpMmaOp):
    """mma.m16n8k32 of signed integers; the DSL's own element type Int8 would mean unsigned ones here."""

    shape_mnk: tuple = (16, 8, 32)

    def _make_trait(self, *, loc=None, ip=None, **_):
        shape = warp_mma._pack_shape(self.shape_mnk, loc=loc, ip=ip)
        s8 = ir.IntegerType.get_signed(8)
        atom = cute_nvgpu.MmaAtomSM80Type.get(shape.type.attribute, s8, s8, cutlass.Int32.mlir_type)
        return warp_mma.MmaTF32Trait(warp_mma.make_atom(atom, loc=loc, ip=ip))

    def _verify_fragment_A(self, fragment, *, loc=None, ip=None):
        return True

    def _verify_fragment_B(self, fragment, *, loc=None, ip=None):
        return True


def multiply(mma, acc, a, b):
    """Adds a b^T to acc. a (V, blocks of 16 rows) and b (V, blocks of 8 keys) are 16-bit fragments of integer pairs."""
    rows, keys = cute.size(a, mode=[1]), cute.size(b, mode=[1])
    for n in range(keys):
        for m in range(rows):
            c = cute.make_tensor(
                acc.iterator + 4 * (rows * n + m), cute.make_layout(((2, 2), 1, 1))
            )
            cute.gemm(mma, c, _bytes(a[None, m]), _bytes(b[None, n]), c)


def _bytes(fragment):
    """Returns a fragment of pairs of integers as the operand of the 8-bit mma."""
    whole = cute.recast_tensor(fragment, cutlass.Int8)
    size = cute.size(whole)
    shape = ((4, 2, size // 8), 1, 1) if size == 16 else ((4, 2), 1, 1)
    stride = ((1, 4, 8), 0, 0) if size == 16 else ((1, 4), 0, 0)
    return cute.make_tensor(whole.iterator, cute.make_layout(shape, stride=stride))
