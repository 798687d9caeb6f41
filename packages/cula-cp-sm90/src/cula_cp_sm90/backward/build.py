"""What is compiled for a config of the backward pass. The only host module of this folder that imports the DSL, and
only a compile imports it."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import DTYPES, F32, INDICES
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_core.delta_rule.kernels.block import BLOCK, SQUARE, WIDE

from .config import V_TILE, GradientsConfig, WalkConfig
from .kernels.gradients import KdaGradients
from .kernels.walk import KdaWalk

V_TILES = HEAD_DIM // V_TILE


def kernel(config: WalkConfig | GradientsConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, WalkConfig):
        return KdaWalk(config), *walk_arguments(config)
    return KdaGradients(config), *gradients_arguments(config)


def walk_arguments(config: WalkConfig) -> tuple:
    """Returns blocks [slots, HV, BLOCK], v or do [B, T, HV, 128], forward factors [slots, HV, 4, 64], back peaks
    [N, HV], states [N, HV, K, V] or V, K in front of the walk and behind it, kept states [slots, HV, 2, 64 * 128] and
    rows [slots, HV, 2, 64 * 64], segment table, tokens of a segment, number of CTAs."""
    batch, tokens, heads_v, slots = (cute.sym_int() for _ in range(4))

    def states(wanted: bool):
        return fake.states(heads_v, HEAD_DIM, HEAD_DIM, config.state_dtype) if wanted else None

    return (
        _of_chunks(config.operand, slots, heads_v, BLOCK),
        fake.rows(config.dtype, (batch, tokens, heads_v, HEAD_DIM)),
        None if config.back else _of_chunks("float32", slots, heads_v, 4, CHUNK),
        fake.matrix(cutlass.Int32, heads_v) if config.back else None,
        states(config.start),
        states(config.end),
        _of_chunks(config.operand, slots, heads_v, V_TILES, WIDE),
        _of_chunks(config.operand, slots, heads_v, V_TILES, SQUARE),
        fake.segment_table() if config.packed else None,
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def gradients_arguments(config: GradientsConfig) -> tuple:
    """Returns q, k [B, T, H, 128], g, do [B, T, HV, 128], rate [HV] and bias [HV * 128] or None, factors [slots, HV, 4,
    64] fp32, peaks [N, HV] int32, states, d_states [slots, HV, 2, 64 * 128], z, minus_y [slots, HV, 2, 64 * 64],
    cu_seqlens [N + 1] or None; written: dq, dk, dv, dg [B, T, HV, 128], dbeta [B, T, HV], sums over the tokens of a
    chunk for the gradients of rate [slots, HV] and of bias [slots, HV, 128] fp32 or None; scale, lower_bound, first
    slot, number of slots, number of CTAs."""
    batch, tokens, heads, heads_v, slots = (cute.sym_int() for _ in range(5))

    def rows(dtype: str, heads: object):
        return fake.rows(dtype, (batch, tokens, heads, HEAD_DIM))

    states = _of_chunks(config.operand, slots, heads_v, V_TILES, WIDE)
    d_states = _of_chunks(config.operand, slots, heads_v, V_TILES, WIDE)
    z = _of_chunks(config.operand, slots, heads_v, V_TILES, SQUARE)
    minus_y = _of_chunks(config.operand, slots, heads_v, V_TILES, SQUARE)
    strides = tuple(cute.sym_int64() for _ in range(3))
    return (
        rows(config.dtype, heads),
        rows(config.dtype, heads),
        rows(config.gate_dtype, heads_v),
        rows(config.dtype, heads_v),
        fake.vector(F32, heads_v) if config.rate else None,
        make_fake_tensor(F32, (cute.sym_int(),), stride=(1,), assumed_align=16)
        if config.bias
        else None,
        _of_chunks("float32", slots, heads_v, 4, CHUNK),
        fake.matrix(cutlass.Int32, heads_v),
        states,
        d_states,
        z,
        minus_y,
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        *(rows("float32" if config.grouped else config.dtype, heads_v) for _ in range(2)),
        rows(config.dtype, heads_v),
        rows(config.gate_dtype, heads_v),
        make_fake_tensor(DTYPES[config.beta_dtype], (batch, tokens, heads_v), stride=strides),
        fake.matrix(F32, heads_v) if config.rate else None,
        _of_chunks("float32", slots, heads_v, HEAD_DIM) if config.bias else None,
        *(cutlass.Float32(1.0) for _ in range(2)),
        *(cutlass.Int32(1) for _ in range(3)),
    )


def _of_chunks(dtype: str, slots: object, heads: object, *shape: int):
    """Returns a tensor [slots, heads, ...] of dense parts that begin at multiples of 128 bytes."""
    strides = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    return make_fake_tensor(
        DTYPES[dtype], (slots, heads, *shape),
        stride=(cute.sym_int64(divisibility=strides[0]), *strides), assumed_align=128,
    )  # fmt: skip
