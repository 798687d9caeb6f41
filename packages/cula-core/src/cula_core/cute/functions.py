"""Elementary functions of fp32 in their fast approximations."""

import cutlass.cute as cute
from cutlass._mlir.dialects import llvm, math
from cutlass.cutlass_dsl import T, dsl_user_op

from ..constants import LOG2_E
from .types import F32


@cute.jit
def exp2(x):
    """Returns 2^x by one instruction; subnormal numbers count as zero."""
    return cute.math.exp2(x, fastmath=True)


@dsl_user_op
def exp2_pinned(x, *, loc=None, ip=None):
    """Returns 2^x by an instruction that the compiler neither moves nor merges with another."""
    code = "ex2.approx.ftz.f32 $0, $1;"
    operand = F32(x).ir_value(loc=loc, ip=ip)
    return F32(
        llvm.inline_asm(
            T.f32(),
            [operand],
            code,
            "=f,f",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """Returns a b + c rounded once, where the compiler might fuse another of two multiplications."""
    return F32(math.fma(*(F32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)), loc=loc, ip=ip))


@cute.jit
def sigmoid(x):
    """Returns 1 / (1 + e^-x) with an approximate reciprocal."""
    return cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * x))


@dsl_user_op
def nanosleep(duration: int, *, loc=None, ip=None):
    """Suspends the thread for about so many nanoseconds, at most 1,000,000."""
    llvm.inline_asm(
        None,
        [],
        f"nanosleep.u32 {duration};",
        "",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def discard(line: cute.Pointer, *, loc=None, ip=None):
    """Gives up 128 bytes of global memory: what was written there need not leave the L2 any more."""
    llvm.inline_asm(
        None,
        [line.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "discard.global.L2 [$0], 128;",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
