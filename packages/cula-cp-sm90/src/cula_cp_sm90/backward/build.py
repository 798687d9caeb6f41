"""What is compiled for a config of the backward pass. The only host module of this folder that imports the DSL, and
only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import F32
from cula_core.delta_rule.backward.build import between, of_chunks, of_tokens
from cula_core.delta_rule.config import HEAD_DIM

from .config import GradientsConfig
from .kernels.gradients import KdaGradients


def kernel(config: GradientsConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    return KdaGradients(config), *gradients_arguments(config)


def gradients_arguments(config: GradientsConfig) -> tuple:
    """Returns q, k [B, T, H, 128], g, do [B, T, HV, 128], rate [HV] and bias [HV * 128] or None, what `between` has;
    written: dq, dk, dv, dg [B, T, HV, 128], dbeta [B, T, HV], sums over the tokens of a chunk for the gradients of rate
    [slots, HV] and of bias [slots, HV, 128] fp32 or None; scale, lower_bound, first slot, number of slots, number of
    CTAs."""
    rows, numbers, heads, heads_v = of_tokens()
    slots = cute.sym_int()
    return (
        rows(config.dtype, heads),
        rows(config.dtype, heads),
        rows(config.gate_dtype, heads_v),
        rows(config.dtype, heads_v),
        fake.vector(F32, heads_v) if config.rate else None,
        make_fake_tensor(F32, (cute.sym_int(),), stride=(1,), assumed_align=16)
        if config.bias
        else None,
        *between(config.operand, config.index_dtype, slots, heads_v),
        *(rows("float32" if config.grouped else config.dtype, heads_v) for _ in range(2)),
        rows(config.dtype, heads_v),
        rows(config.gate_dtype, heads_v),
        numbers(config.beta_dtype),
        fake.matrix(F32, heads_v) if config.rate else None,
        of_chunks("float32", slots, heads_v, HEAD_DIM) if config.bias else None,
        *(cutlass.Float32(1.0) for _ in range(2)),
        *(cutlass.Int32(1) for _ in range(3)),
    )
