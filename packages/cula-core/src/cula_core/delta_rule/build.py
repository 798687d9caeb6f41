"""What is compiled for a config. The only host module of this folder that imports the DSL, and only a compile imports
it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ..compiled.artifacts import part
from ..cute import fake
from ..cute.types import DTYPES, F32, INDICES
from .config import (
    CHUNK,
    HEAD_DIM,
    Config,
    FactorsConfig,
    FoldConfig,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
)
from .kernels.beside import KdaPrepareBeside
from .kernels.block import BLOCK
from .kernels.factors import KdaFactors
from .kernels.fold import Fold
from .kernels.merge import KdaMerge
from .kernels.prepare import KdaPrepare


def kernel(config: Config, arch: str, recurrence: str | None = None) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream.

    recurrence: "module:class" of the recurrence of the architecture, which differs where others do not.
    """
    if isinstance(config, PrepareConfig) and config.beside:
        return KdaPrepareBeside(config), *prepare_beside_arguments(config)
    if isinstance(config, PrepareConfig):
        return KdaPrepare(config), *prepare_arguments(config)
    if isinstance(config, FactorsConfig):
        return KdaFactors(config), *factors_arguments(config)
    if isinstance(config, RecurrenceConfig):
        arguments = beside_arguments if config.beside else recurrence_arguments
        return part(recurrence)(config), *arguments(config)
    if isinstance(config, FoldConfig):
        return Fold(config), *fold_arguments(config)
    return KdaMerge(config), *merge_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, H, 128], g [B, T, HV, 128], beta [B, T, HV], rate [HV], bias [HV * 128], cu_seqlens [N + 1],
    segment table, blocks [slots, HV, BLOCK], Aqk and (I + Akk)^-1 [B, T, HV, 64] or None, for a backward pass do [B, T,
    HV, 128], factors [slots, HV, 4, 64] and peaks [N, HV], scale, lower_bound, tokens of a segment, of the longest one,
    first slot, number of slots."""
    batch, tokens, heads, heads_v = (cute.sym_int() for _ in range(4))

    def rows(dtype: str, heads: object, width: int = HEAD_DIM):
        return fake.rows(dtype, (batch, tokens, heads, width))

    beta = DTYPES[config.beta_dtype]
    return (
        rows(config.dtype, heads),
        rows(config.dtype, heads),
        rows(config.gate_dtype, heads_v),
        make_fake_tensor(
            beta, (batch, tokens, heads_v), stride=tuple(cute.sym_int64() for _ in range(3))
        ),
        fake.vector(F32, heads_v) if config.rate else None,
        make_fake_tensor(F32, (cute.sym_int(),), stride=(1,), assumed_align=16)
        if config.bias
        else None,
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        fake.segment_table() if config.index_dtype else None,
        _blocks(config.operand, heads_v),
        *(rows(config.dtype, heads_v, CHUNK) if config.intra else None for _ in range(2)),
        rows(config.dtype, heads_v) if config.peaks else None,
        fake.states(heads_v, 4, CHUNK) if config.rooted else None,
        fake.matrix(cutlass.Int32, heads_v) if config.peaks else None,
        *(cutlass.Float32(1.0) for _ in range(2)),
        *(cutlass.Int32(1) for _ in range(4)),
    )


def prepare_beside_arguments(config: PrepareConfig) -> tuple:
    """Returns q to cu_seqlens as `prepare_arguments` does, blocks, words that kernels share (`flag_words`), scale,
    lower_bound, machines, steps of each, how many chunks may be ahead, CTAs."""
    every = prepare_arguments(config)
    blocks, numbers = every[8], every[-6:]
    return *every[:7], blocks, fake.vector(cutlass.Int32), *numbers


def factors_arguments(config: FactorsConfig) -> tuple:
    """Returns blocks [slots, HV, BLOCK], v, w, u, qg, kg [B, T, HV, 128], cu_seqlens [N + 1], scale, first slot, number
    of slots."""
    batch, tokens, heads_v = (cute.sym_int() for _ in range(3))
    shape = (batch, tokens, heads_v, HEAD_DIM)
    return (
        _blocks(config.operand, heads_v),
        *(fake.rows(config.dtype, shape) for _ in range(5)),
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """Returns blocks [slots, HV, BLOCK], v and out [B, T, HV, 128], initial [rows, HV, K, V] or V, K, indices of
    initial and of final states [N], bytes [N] that are 0 where a sequence has no initial state, final and checkpoints
    like initial, rows of checkpoints and tokens in front of them [N], maps [segments, HV, 256, 128] and starts
    [segments, HV, 128, 128] of fp32, factors of rooted blocks [slots, HV, 4, 64], segment table, null slot, tokens
    between checkpoints, tokens of a segment, first slot of the blocks, number of CTAs."""
    batch, tokens, heads_v = (cute.sym_int() for _ in range(3))
    shape = (batch, tokens, heads_v, HEAD_DIM)
    packed, forward = config.packed, not config.scan
    return (
        _blocks(config.operand, heads_v),
        fake.rows(config.dtype, shape),
        fake.rows(config.dtype, shape),
        _states(heads_v, config.state_dtype)
        if config.initial_state and (config.scan or not config.split)
        else None,
        fake.strided_vector(cutlass.Int32) if config.indexed else None,
        fake.strided_vector(cutlass.Int32) if config.redirected else None,
        fake.strided_vector(cutlass.Uint8) if config.fresh else None,
        _states(heads_v, config.state_dtype) if config.final_state and forward else None,
        _states(heads_v, config.kept_dtype) if config.checkpoints else None,
        fake.strided_vector(cutlass.Int32) if config.placed else None,
        fake.strided_vector(cutlass.Int32) if config.checkpoints == "once" else None,
        _maps(heads_v) if config.scan else None,
        _states(heads_v) if config.split and forward else None,
        fake.states(heads_v, 4, CHUNK) if config.rooted else None,
        fake.segment_table() if packed and not config.beside else None,
        *(cutlass.Int32(1) for _ in range(5)),
    )


def beside_arguments(config: RecurrenceConfig) -> tuple:
    """Returns what `recurrence_arguments` does, but before the number of CTAs cu_seqlens [N + 1], words that kernels
    share (`flag_words`), states between machines [machines, 1, 128, 128], steps of a machine."""
    *first, ctas = recurrence_arguments(config)
    return (
        *first,
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        fake.vector(cutlass.Int32),
        fake.states(1, HEAD_DIM, HEAD_DIM),
        cutlass.Int32(1),
        ctas,
    )


def merge_arguments(config: MergeConfig) -> tuple:
    """Returns maps, marks of segments that forget [segments, HV], starts, initial, indices, bytes as
    `recurrence_arguments` has them, cu_seqlens [N + 1], null slot, number of sequences, tokens of a dense one, tokens
    of a segment. Back, maps are [segments, HV, 384, 128]."""
    heads_v = cute.sym_int()
    return (
        fake.states(heads_v, 3 * HEAD_DIM, HEAD_DIM) if config.back else _maps(heads_v),
        fake.matrix(cutlass.Int32, heads_v) if config.fades else None,
        _states(heads_v),
        _states(heads_v, config.state_dtype) if config.initial_state else None,
        fake.strided_vector(cutlass.Int32) if config.indexed else None,
        fake.strided_vector(cutlass.Uint8) if config.fresh else None,
        fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        *(cutlass.Int32(1) for _ in range(4)),
    )


def fold_arguments(config: FoldConfig) -> tuple:
    """Returns first states, A^T and M^T of slots, each [.., HV, 128, 128], what is behind slices, the same or whole
    maps [.., HV, 256, 128], places [2, slices], cuts [chains + 1], number of chains."""
    heads_v = cute.sym_int()
    height = 2 * HEAD_DIM if config.whole else HEAD_DIM
    return (
        *(_states(heads_v) for _ in range(3)),
        fake.states(heads_v, height, HEAD_DIM),
        fake.matrix(cutlass.Int32, cute.sym_int()),
        fake.vector(cutlass.Int32),
        cutlass.Int32(1),
    )


def _states(heads_v: object, dtype: str = "float32"):
    return fake.states(heads_v, HEAD_DIM, HEAD_DIM, dtype)


def _maps(heads_v: object):
    return fake.states(heads_v, 2 * HEAD_DIM, HEAD_DIM)


def _blocks(operand: str, heads_v: object):
    stride = (cute.sym_int64(divisibility=BLOCK), BLOCK, 1)
    shape = (cute.sym_int(), heads_v, BLOCK)
    return make_fake_tensor(DTYPES[operand], shape, stride=stride, assumed_align=128)
