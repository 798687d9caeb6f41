"""The power of two by which gradients are scaled, so that fp16 holds them."""

import cutlass
import cutlass.cute as cute

from ....cute.types import F32, I32

_EXPONENT = 23  # where the exponent of an fp32 number begins


@cute.jit
def scale_of(peak):
    """Returns 2^n and 2^-n for the bits of the largest magnitude, which 2^n takes to [2, 4).

    n is 0 where the largest is zero, subnormal or not finite.
    """
    exponent = peak >> _EXPONENT
    known = (exponent > 1) & (exponent < 255)
    bits = cute.make_rmem_tensor(2, I32)
    bits[0] = cutlass.select_(known, 255 - exponent, I32(127)) << _EXPONENT
    bits[1] = cutlass.select_(known, exponent - 1, I32(127)) << _EXPONENT
    floats = cute.recast_tensor(bits, F32)
    return floats[0], floats[1]
