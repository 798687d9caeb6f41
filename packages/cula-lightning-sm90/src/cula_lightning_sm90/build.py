"""What is compiled for a config. The only host module that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.schedule import SegmentTable
from cula_core.cute.types import DTYPES, INDICES

from .config import CHUNK, V_TILE, WARPS, Config, DecaysConfig, TableConfig
from .kernels.decays import GradientsOfDecays
from .kernels.prefill import LightningPrefill


def kernel(config: Config | TableConfig | DecaysConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
    if isinstance(config, DecaysConfig):
        return GradientsOfDecays(config), *decays_arguments(config)
    return LightningPrefill(config), *fake_arguments(config)


def fake_arguments(config: Config) -> tuple:
    """Returns the arguments of `LightningPrefill` without the stream: only dtypes, head dims and flags are fixed."""
    problem = config.problem
    batch, tokens, heads_k, values, heads = (cute.sym_int() for _ in range(5))

    def activation(heads: object, dim: int):
        return fake.rows(problem.dtype, (batch, tokens, heads, dim))

    def gate():
        dtype = DTYPES[problem.gate_dtype]
        unit = 128 // dtype.width if config.paired else 1
        strides = (
            *(cute.sym_int64(divisibility=unit) for _ in range(2)),
            1 if config.paired else cute.sym_int64(),
        )
        align = 16 if config.paired else dtype.width // 8
        return make_fake_tensor(dtype, (batch, tokens, heads), stride=strides, assumed_align=align)

    dims = (problem.head_dim_k, problem.head_dim_v)
    rows, columns = dims[::-1] if problem.state_v_first else dims

    def state():
        return fake.states(heads, rows, columns, problem.state_dtype)

    forward = not config.prescan
    v_tiles, units = problem.head_dim_v // V_TILE, problem.head_dim_k * V_TILE // (4 * 128)
    return (
        activation(heads_k, problem.head_dim_k) if forward else None,
        activation(heads_k, problem.head_dim_k),
        activation(values, problem.head_dim_v),
        activation(heads, problem.head_dim_v),
        activation(cute.sym_int(), problem.head_dim_v) if problem.dots and forward else None,
        _dots(heads, WARPS * v_tiles) if problem.dots and forward else None,
        gate() if problem.gate_dtype else None,
        fake.vector(cutlass.Float32, heads) if problem.decay else None,
        state() if problem.initial_state else None,
        fake.strided_vector(cutlass.Int32) if problem.indexed else None,
        fake.strided_vector(cutlass.Uint8) if problem.fresh else None,
        state() if problem.final_state and forward else None,
        state() if problem.checkpoints and forward else None,
        fake.strided_vector(cutlass.Int32) if problem.placed and forward else None,
        fake.strided_vector(cutlass.Int32) if problem.checkpoints == "once" and forward else None,
        fake.segment_table() if problem.packed else None,
        _workspace(cute.sym_int(), heads, v_tiles, units, 128, 4) if config.split else None,
        _workspace(cute.sym_int(), heads) if config.split else None,
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1) for _ in range(5)),
    )


def decays_arguments(config: DecaysConfig) -> tuple:
    """Returns sums of dq with q and of dk with k [B, HV, parts, 2, T], states and gradients of states [rows, HV, K V],
    sums of initial and final states [N, HV], g and its gradient [B, T, HV], head_decay [HV], segment table, sums over
    tokens [slots, HV], scale, sign of head_decay, number of segments; all but g in fp32."""
    heads = cute.sym_int()

    def numbers(dtype: str):
        shape, strides = (
            (cute.sym_int(), cute.sym_int(), heads),
            (cute.sym_int64() for _ in range(3)),
        )
        return make_fake_tensor(DTYPES[dtype], shape, stride=tuple(strides))

    def pair(wanted: bool, make):
        return [make() if wanted else None for _ in range(2)]

    f32, gate = cutlass.Float32, config.gate_dtype
    return (
        *pair(True, lambda: _dots(heads, config.parts)),
        *pair(config.size is not None, lambda: _workspace(cute.sym_int(), heads, config.size)),
        fake.matrix(f32, heads) if config.started else None,
        fake.matrix(f32, heads) if config.ended else None,
        numbers(gate) if gate else None,
        fake.vector(f32, heads) if config.decay else None,
        fake.segment_table() if config.packed else None,
        numbers("float32") if gate else None,
        fake.matrix(f32, heads) if config.decay else None,
        f32(1.0),
        f32(1.0),
        cutlass.Int32(1),
    )


def _dots(heads: object, parts: int):
    """Sums over columns [B, heads, parts, 2, T], a part per warp of a tile; tokens lie side by side."""
    shape = (cute.sym_int(), heads, parts, 2, cute.sym_int())
    strides = (*(cute.sym_int64() for _ in range(4)), 1)
    return make_fake_tensor(cutlass.Float32, shape, stride=strides)


def _workspace(*shape: object):
    """A contiguous fp32 tensor; all but its first two extents are fixed."""
    strides = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    outer = cute.sym_int64(divisibility=math.prod(shape[2:]))
    return make_fake_tensor(cutlass.Float32, shape, stride=(outer, *strides), assumed_align=16)
