"""What is compiled for a config of the backward pass of the gated delta rule. The only host module of this folder that
imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula_core.cute import fake
from cula_core.cute.types import INDICES
from cula_core.delta_rule.backward.build import between, factors, of_chunks, of_tokens
from cula_core.delta_rule.kernels.block import BLOCK

from .config import SUMS, ChunkConfig, GradientsConfig, PrepareConfig
from .kernels.gradients import ChunkGradients
from .kernels.prepare import ChunkPrepare


def kernel(config: ChunkConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, PrepareConfig):
        return ChunkPrepare(config), *prepare_arguments(config)
    return ChunkGradients(config), *gradients_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, H, 128], g, beta [B, T, HV], cu_seqlens [N + 1] and segment table or None, blocks [slots, HV,
    BLOCK], do [B, T, HV, 128], factors [slots, HV, 4, 64], peaks [N, HV], scale, tokens of a segment, number of
    slots."""
    rows, numbers, heads, heads_v = of_tokens()
    slots = cute.sym_int()
    return (
        *(rows(config.dtype, heads) for _ in range(2)),
        numbers(config.gate_dtype),
        numbers(config.beta_dtype),
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        fake.segment_table() if config.index_dtype else None,
        of_chunks(config.operand, slots, heads_v, BLOCK),
        rows(config.dtype, heads_v),
        factors(slots, heads_v),
        fake.matrix(cutlass.Int32, heads_v),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1) for _ in range(2)),
    )


def gradients_arguments(config: GradientsConfig) -> tuple:
    """Returns q, k [B, T, H, 128], g [B, T, HV], do [B, T, HV, 128], what `between` has; written: dq, dk [B, T, H,
    128], dv [B, T, HV, 128], dg, dbeta [B, T, HV]; memory for sums over value heads [CTAs, 2, 16, 128, 4] fp32 or None,
    scale, number of slots, number of CTAs."""
    rows, numbers, heads, heads_v = of_tokens()
    return (
        *(rows(config.dtype, heads) for _ in range(2)),
        numbers(config.gate_dtype),
        rows(config.dtype, heads_v),
        *between(config.operand, config.index_dtype, cute.sym_int(), heads_v),
        *(rows(config.dtype, heads) for _ in range(2)),
        rows(config.dtype, heads_v),
        numbers(config.gate_dtype),
        numbers(config.beta_dtype),
        of_chunks("float32", cute.sym_int(), *SUMS) if config.grouped else None,
        cutlass.Float32(1.0),
        *(cutlass.Int32(1) for _ in range(2)),
    )
