"""What is compiled for a config. The only host module that imports the DSL, and only a compile imports it."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import DTYPES, INDICES
from cula_core.delta_rule.build import fold_arguments, merge_arguments
from cula_core.delta_rule.config import FoldConfig, MergeConfig
from cula_core.delta_rule.kernels.fold import Fold
from cula_core.delta_rule.kernels.merge import KdaMerge

from .config import HEAD_DIM, Config, Operands, PrepareConfig, RecurrenceConfig
from .kernels.prepare import GatedDeltaPrepare
from .kernels.recurrence import GatedDeltaRecurrence


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, PrepareConfig):
        return GatedDeltaPrepare(config), *prepare_arguments(config)
    if isinstance(config, MergeConfig):
        return KdaMerge(config), *merge_arguments(config)
    if isinstance(config, FoldConfig):
        return Fold(config), *fold_arguments(config)
    return GatedDeltaRecurrence(config), *recurrence_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, heads, 128], g, beta [B, T, HS], A_log, dt_bias [HS], cu_seqlens [N + 1], the
    workspace, scale, beta and threshold of the softplus, number of flags, of blocks' slots, HS, seats, heads of a
    machine, share of one, chunks of a segment, steps ahead of machines, number of CTAs."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def by_token(name: str):
        dtype = DTYPES[name]
        strides = tuple(cute.sym_int64() for _ in range(3))
        shape = (batch, tokens, heads)
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=dtype.width // 8)

    softplus = config.gate == "softplus"
    return (
        _activation(config, batch, tokens),
        _activation(config, batch, tokens),
        by_token(config.gate_dtype) if config.gate else None,
        by_token(config.strength_dtype) if config.strength else None,
        fake.vector(cutlass.Float32, heads) if softplus else None,
        fake.vector(cutlass.Float32, heads) if softplus and config.bias else None,
        _offsets(config),
        fake.vector(cutlass.Int32),
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Float32(20.0),
        *(cutlass.Int32(1) for _ in range(9)),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """Returns q, k, v, out [B, T, heads, 128], initial [rows, HS, K, V] or V, K, indices, output indices, which
    sequences begin with a state [N], final and checkpoints like initial, rows of checkpoints and tokens in front of
    them [N], cu_seqlens [N + 1], the workspace, maps [segments, HS, 256, K], marks of segments that forget
    [segments, HS], starts [segments, HS, V, K], the padding row, tokens between checkpoints, number of flags, the first
    of this pass and how many it has, slots of blocks, seats, heads of a machine, share of one, chunks of a segment,
    number of CTAs."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def state(rows: int = HEAD_DIM, dtype: str = "float32"):
        return fake.states(heads, rows, HEAD_DIM, dtype)

    kept = partial(state, dtype=config.state_dtype)

    return (
        *(_activation(config, batch, tokens) for _ in range(3)),
        _activation(config, batch, tokens, heads),
        kept() if config.initial_state else None,
        fake.strided_vector(cutlass.Int32) if config.indexed else None,
        fake.strided_vector(cutlass.Int32) if config.redirected else None,
        fake.strided_vector(cutlass.Uint8) if config.fresh else None,
        kept() if config.final_state else None,
        kept() if config.checkpoints else None,
        fake.strided_vector(cutlass.Int32) if config.placed else None,
        fake.strided_vector(cutlass.Int32) if config.checkpoints == "once" else None,
        _offsets(config),
        fake.vector(cutlass.Int32),
        state(2 * HEAD_DIM) if config.scan or config.cut else None,
        fake.matrix(cutlass.Int32, heads) if config.scan or config.cut else None,
        state() if config.cut else None,
        cutlass.Int32(-1),
        *(cutlass.Int32(1) for _ in range(10)),
    )


def _activation(config: Operands, batch: object, tokens: object, heads: object = None):
    heads = cute.sym_int() if heads is None else heads
    return fake.rows(config.dtype, (batch, tokens, heads, HEAD_DIM))


def _offsets(config: Operands):
    return fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None
