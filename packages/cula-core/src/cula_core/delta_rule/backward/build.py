"""What is compiled for a walk and for the largest gradients, and fake arguments of the kernels around it. The only host
module of this folder that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ...cute import fake
from ...cute.types import DTYPES, INDICES
from ..config import CHUNK, HEAD_DIM
from ..kernels.block import BLOCK, SQUARE, WIDE
from .config import FACTORS, MAP_ROWS, V_TILES, PeaksConfig, WalkConfig
from .kernels.peaks import Peaks
from .kernels.walk import KdaWalk


def kernel(config: WalkConfig | PeaksConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, PeaksConfig):
        return Peaks(config), *peaks_arguments(config)
    return KdaWalk(config), *walk_arguments(config)


def peaks_arguments(config: PeaksConfig) -> tuple:
    """Returns do [B, T, HV, 128], cu_seqlens [N + 1] or None, peaks [N, HV] int32, number of chunks."""
    heads_v = cute.sym_int()
    return (
        fake.rows(config.dtype, (cute.sym_int(), cute.sym_int(), heads_v, HEAD_DIM)),
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        fake.matrix(cutlass.Int32, heads_v),
        cutlass.Int32(1),
    )


def walk_arguments(config: WalkConfig) -> tuple:
    """Returns blocks [slots, HV, BLOCK], v or do [B, T, HV, 128], forward factors [slots, HV, 4, 64], back peaks
    [N, HV], states [N, HV, K, V] or V, K in front of the walk and behind it, kept states [slots, HV, 2, 64 * 128] and
    rows [slots, HV, 2, 64 * 64], maps [segments, HV, 384, 128] and starts [segments, HV, 128, 128] of fp32, segment
    table, tokens of a segment, number of CTAs."""
    batch, tokens, heads_v, slots = (cute.sym_int() for _ in range(4))

    def states(wanted: bool):
        return fake.states(heads_v, HEAD_DIM, HEAD_DIM, config.state_dtype) if wanted else None

    return (
        of_chunks(config.operand, slots, heads_v, BLOCK),
        fake.rows(config.dtype, (batch, tokens, heads_v, HEAD_DIM)),
        None if config.back else factors(slots, heads_v),
        fake.matrix(cutlass.Int32, heads_v) if config.back else None,
        states(config.start),
        states(config.end),
        *(kept(config.operand, slots, heads_v) if config.keeps else (None, None)),
        fake.states(heads_v, MAP_ROWS, HEAD_DIM) if config.scan else None,
        fake.states(heads_v, HEAD_DIM, HEAD_DIM) if config.split else None,
        fake.segment_table() if config.packed else None,
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def of_tokens() -> tuple:
    """Returns makers of the call's tensors: rows of a dtype and so many heads, and numbers of tokens, which are
    [B, T, HV]; and the sizes of heads and value heads."""
    batch, tokens, heads, heads_v = (cute.sym_int() for _ in range(4))

    def rows(dtype: str, heads: object):
        return fake.rows(dtype, (batch, tokens, heads, HEAD_DIM))

    def numbers(dtype: str):
        strides = tuple(cute.sym_int64() for _ in range(3))
        return make_fake_tensor(DTYPES[dtype], (batch, tokens, heads_v), stride=strides)

    return rows, numbers, heads, heads_v


def between(operand: str, index_dtype: str | None, slots: object, heads_v: object) -> tuple:
    """Returns what the kernel of gradients reads of those before: factors [slots, HV, 4, 64] fp32, peaks [N, HV] int32,
    states, d_states [slots, HV, 2, 64 * 128], z, minus_y [slots, HV, 2, 64 * 64]; and cu_seqlens [N + 1] or None."""
    walks = zip(*(kept(operand, slots, heads_v) for _ in range(2)))
    return (
        factors(slots, heads_v),
        fake.matrix(cutlass.Int32, heads_v),
        *(x for pair in walks for x in pair),
        fake.vector(INDICES[index_dtype]) if index_dtype else None,
    )


def kept(operand: str, slots: object, heads: object) -> tuple:
    """Returns the states and the rows that a walk keeps: [slots, HV, 2, 64 * 128] and [slots, HV, 2, 64 * 64]."""
    return tuple(of_chunks(operand, slots, heads, V_TILES, size) for size in (WIDE, SQUARE))


def factors(slots: object, heads: object):
    """Returns the factors of tokens, [slots, HV, 4, 64] fp32."""
    return of_chunks("float32", slots, heads, FACTORS, CHUNK)


def of_chunks(dtype: str, slots: object, heads: object, *shape: int):
    """Returns a tensor [slots, heads, ...] of dense parts that begin at multiples of 128 bytes."""
    strides = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    return make_fake_tensor(
        DTYPES[dtype], (slots, heads, *shape),
        stride=(cute.sym_int64(divisibility=strides[0]), *strides), assumed_align=128,
    )  # fmt: skip
