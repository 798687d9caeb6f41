"""What is compiled for a config. The only host module that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.schedule import SegmentTable
from cula_core.cute.types import DTYPES, INDICES

from .config import CHUNK, V_TILE, WARPS, Config, TableConfig
from .kernels.prefill import LightningPrefill


def kernel(config: Config | TableConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
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
        _dots(heads, v_tiles) if problem.dots and forward else None,
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


def _dots(heads: object, v_tiles: int):
    """Sums over columns [B, heads, parts, 2, T], a part per warp of a tile; tokens lie side by side."""
    shape = (cute.sym_int(), heads, WARPS * v_tiles, 2, cute.sym_int())
    strides = (*(cute.sym_int64() for _ in range(4)), 1)
    return make_fake_tensor(cutlass.Float32, shape, stride=strides)


def _workspace(*shape: object):
    """A contiguous fp32 tensor; all but its first two extents are fixed."""
    strides = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    outer = cute.sym_int64(divisibility=math.prod(shape[2:]))
    return make_fake_tensor(cutlass.Float32, shape, stride=(outer, *strides), assumed_align=16)
