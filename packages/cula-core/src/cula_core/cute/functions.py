"""Elementary functions of fp32 in their fast approximations."""

import cutlass.cute as cute

from .types import LOG2_E


@cute.jit
def exp2(x):
    """Returns 2^x by one instruction."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def sigmoid(x):
    """Returns 1 / (1 + e^-x) with an approximate reciprocal."""
    return cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * x))
