"""Compiles configs and launches calls. The only host file that imports the DSL."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from .arch import TARGETS
from .common import BLOCK, DTYPES, F32, INDICES
from .config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    V_TILES,
    FactorsConfig,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
    chunk_slots,
    dtype_name,
    plan,
)
from .factors import KdaFactors
from .merge import KdaMerge
from .prepare import KdaPrepare
from .recurrence import KdaRecurrence
from .schedule import COLUMNS, SegmentTable


def prepare_arguments(config: PrepareConfig) -> tuple:
    """q, k [B, T, H, 128], g [B, T, HV, 128], beta [B, T, HV], rate [HV], bias [HV, 128], cu_seqlens [N + 1], blocks
    [slots, HV, BLOCK], Aqk and (I + Akk)^-1 [B, T, HV, 64] or None, scale, lower_bound, first slot, number of slots."""
    batch, tokens, heads, heads_v = (cute.sym_int() for _ in range(4))

    def rows(dtype: str, heads: object, width: int = HEAD_DIM):
        return _rows(dtype, (batch, tokens, heads, width))

    beta = DTYPES[config.beta_dtype]
    return (
        rows(config.dtype, heads),
        rows(config.dtype, heads),
        rows(config.gate_dtype, heads_v),
        make_fake_tensor(
            beta, (batch, tokens, heads_v), stride=tuple(cute.sym_int64() for _ in range(3))
        ),
        _vector(F32, heads_v) if config.rate else None,
        make_fake_tensor(F32, (heads_v, HEAD_DIM), stride=(HEAD_DIM, 1), assumed_align=16)
        if config.bias
        else None,
        _vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        _blocks(config.operand, heads_v),
        *(rows(config.dtype, heads_v, CHUNK) if config.intra else None for _ in range(2)),
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def factors_arguments(config: FactorsConfig) -> tuple:
    """blocks [slots, HV, BLOCK], v, w, u, qg, kg [B, T, HV, 128], cu_seqlens [N + 1], scale, first slot, number of
    slots."""
    batch, tokens, heads_v = (cute.sym_int() for _ in range(3))

    shape = (batch, tokens, heads_v, HEAD_DIM)
    return (
        _blocks(config.operand, heads_v),
        *(_rows(config.dtype, shape) for _ in range(5)),
        _vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """blocks [slots, HV, BLOCK], v and out [B, T, HV, 128], initial [rows, HV, K, V] or V, K, indices [N], final like
    initial, maps [segments, HV, 256, 128] and starts [segments, HV, 128, 128] of fp32, segment table, counter [1],
    tokens of a segment, first slot of the blocks, number of CTAs."""
    batch, tokens, heads_v = (cute.sym_int() for _ in range(3))

    shape = (batch, tokens, heads_v, HEAD_DIM)
    packed, forward = config.packed, not config.scan
    return (
        _blocks(config.operand, heads_v),
        _rows(config.dtype, shape),
        _rows(config.dtype, shape),
        _states(heads_v) if config.initial_state and (config.scan or not config.split) else None,
        _vector(cutlass.Int32) if config.indexed else None,
        _states(heads_v) if config.final_state and forward else None,
        _states(heads_v, 2 * HEAD_DIM) if config.scan else None,
        _states(heads_v) if config.split and forward else None,
        make_fake_tensor(cutlass.Int32, (cute.sym_int(), COLUMNS), stride=(COLUMNS, 1))
        if packed
        else None,
        _vector(cutlass.Int32) if packed else None,
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def merge_arguments(config: MergeConfig) -> tuple:
    """maps, starts, initial, indices as `recurrence_arguments` has them, cu_seqlens [N + 1], number of sequences,
    tokens of a dense one, tokens of a segment."""
    heads_v = cute.sym_int()
    return (
        _states(heads_v, 2 * HEAD_DIM),
        _states(heads_v),
        _states(heads_v) if config.initial_state else None,
        _vector(cutlass.Int32) if config.indexed else None,
        _vector(INDICES[config.index_dtype]) if config.index_dtype else None,
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def _rows(dtype: str, shape: tuple):
    """[B, T, heads, D], rows of which begin at multiples of 16 bytes."""
    strides = (*(cute.sym_int64(divisibility=128 // DTYPES[dtype].width) for _ in range(3)), 1)
    return make_fake_tensor(DTYPES[dtype], shape, stride=strides, assumed_align=16)


def _states(heads_v: object, height: int = HEAD_DIM):
    outer = tuple(cute.sym_int64(divisibility=4) for _ in range(2))
    shape = (cute.sym_int(), heads_v, height, HEAD_DIM)
    return make_fake_tensor(F32, shape, stride=(*outer, HEAD_DIM, 1), assumed_align=16)


def _blocks(operand: str, heads_v: object):
    stride = (cute.sym_int64(divisibility=BLOCK), BLOCK, 1)
    shape = (cute.sym_int(), heads_v, BLOCK)
    return make_fake_tensor(DTYPES[operand], shape, stride=stride, assumed_align=128)


def _vector(dtype: type, size: object = None):
    return make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), stride=(1,))


@dataclass(frozen=True)
class TableConfig:
    """The kernel that makes the segment table of packed sequences; index_dtype is that of cu_seqlens."""

    index_dtype: str


Config = PrepareConfig | FactorsConfig | RecurrenceConfig | MergeConfig | TableConfig


def table_arguments(config: TableConfig) -> tuple:
    """cu_seqlens [N + 1], table, counters, tokens of a segment, of the longest one."""
    return (
        _vector(INDICES[config.index_dtype]),
        make_fake_tensor(cutlass.Int32, (cute.sym_int(), COLUMNS), stride=(COLUMNS, 1)),
        _vector(cutlass.Int32),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


_KERNELS: dict[type, tuple[Callable, Callable]] = {
    PrepareConfig: (KdaPrepare, prepare_arguments),
    FactorsConfig: (KdaFactors, factors_arguments),
    RecurrenceConfig: (KdaRecurrence, recurrence_arguments),
    MergeConfig: (KdaMerge, merge_arguments),
    TableConfig: (lambda _: SegmentTable(), table_arguments),
}


def kernel(config: Config) -> tuple[object, ...]:
    """What `cute.compile` takes: the kernel and its arguments."""
    make, arguments = _KERNELS[type(config)]
    return (make(config), *arguments(config))


@functools.cache
def compile(config: Config, target: str, *options) -> Callable[..., None]:
    """A callable for one config and target, reused for every size and stride."""
    with warnings.catch_warnings():
        # Loops over the registers of a thread are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile[(cute.GPUArch(target), cute.EnableTVMFFI, *options)](
            *kernel(config), make_fake_stream(use_tvm_ffi_env_stream=True)
        )


@functools.cache
def _compile_for(device: torch.device) -> Callable[[Config], Callable[..., None]]:
    target = TARGETS[torch.cuda.get_device_capability(device)]
    return lambda config: compile(config, target)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    workspace: Tensor,
    *,
    scale: float,
    gate: str,
    lower_bound: float,
    bounded: bool,
    l2norm: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    state_v_first: bool,
    operand: str,
    intra: tuple[Tensor, ...] | None = None,
    intracard_cp: str | bool = "auto",
    longest: int | None = None,
    multiprocessors: int | None = None,
    kernel_for: Callable[..., Callable[..., None]] | None = None,
) -> None:
    """Launches one call on torch's current stream.

    Arguments are those of the public function, checked. A final state that is the initial one is updated in place,
    at the rows that state_indices name. intra: Aqk and (I + Akk)^-1 [B, T, HV, 64] and, if more than two, w, u, qg,
    kg [B, T, HV, 128], in the dtype of q, written. kernel_for turns a config into what is called, and
    multiprocessors is their number, for tests without a GPU.
    """
    batch, tokens, heads_v = v.shape[:3]
    packed = cu_seqlens is not None
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(heads_v, HEAD_DIM)
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if kernel_for is None:
        kernel_for = _compile_for(q.device)
    if multiprocessors is None:
        multiprocessors = _multiprocessors(q.device)
    spread = plan(
        batch, tokens, heads_v, count if packed else None, multiprocessors, workspace.numel(), intracard_cp, longest
    )  # fmt: skip
    index_dtype = None if cu_seqlens is None else dtype_name(cu_seqlens.dtype)
    in_place = final_state is not None and final_state is initial_state
    if spread.pieces > 1 and not in_place:
        # States stand where the pieces find them again, and are the final ones at last.
        carried = _carried(initial_state, state_indices, final_state, count, heads_v, q)
        initial_state = final_state = carried
        in_place = True
        # Padding slots keep their indices, so that their tokens are skipped; the others have a row of their own.
        if state_indices is not None:
            own = torch.arange(count, dtype=torch.int32, device=q.device)
            state_indices = torch.where(state_indices < 0, state_indices, own)
    segment_tokens = spread.segment_tokens or max(tokens, 64)
    blocks = workspace[: spread.piece_slots * heads_v * BLOCK_BYTES]
    blocks = blocks.view(getattr(torch, operand)).view(spread.piece_slots, heads_v, BLOCK)
    prepare = kernel_for(
        PrepareConfig(
            dtype_name(q.dtype), dtype_name(g.dtype), dtype_name(beta.dtype), operand, gate, bounded, l2norm,
            beta_sigmoid, neg_eigval, A_log is not None, dt_bias is not None, index_dtype, intra is not None,
        )
    )  # fmt: skip
    forward = RecurrenceConfig(
        dtype_name(v.dtype), operand, spread.tiles, spread.split, False, packed, state_v_first,
        initial_state is not None, final_state is not None, state_indices is not None, in_place,
    )  # fmt: skip
    segments = counters = maps = starts = None
    slots = chunk_slots(batch, tokens, count if packed else None)
    aqk, akk, *factors = intra or (None, None)
    for piece in range(spread.pieces):
        first = piece * spread.piece_slots
        held = min(spread.piece_slots, slots - first)
        prepare(
            q, k, g, beta, A_log, dt_bias, cu_seqlens, blocks, aqk, akk, scale, lower_bound, first, held
        )  # fmt: skip
        if factors:
            give = kernel_for(FactorsConfig(dtype_name(v.dtype), operand, index_dtype))
            give(blocks, v, *factors, cu_seqlens, scale, first, held)
        if packed:
            segments = q.new_empty((1 + spread.segments, COLUMNS), dtype=torch.int32)
            counters = q.new_empty(2, dtype=torch.int32)
            table = kernel_for(TableConfig(index_dtype))
            table(cu_seqlens, segments, counters, segment_tokens, min(tokens, segment_tokens))
        if spread.split:
            maps = q.new_empty(
                (spread.segments, heads_v, 2 * HEAD_DIM, HEAD_DIM), dtype=torch.float32
            )
            starts = q.new_empty(
                (spread.segments, heads_v, HEAD_DIM, HEAD_DIM), dtype=torch.float32
            )
            scan = RecurrenceConfig(
                dtype_name(v.dtype), operand, V_TILES, True, True, packed, state_v_first, initial_state is not None,
                False, state_indices is not None,
            )  # fmt: skip
            ctas = min(multiprocessors, 2 * spread.segments * heads_v)
            kernel_for(scan)(
                blocks, v, out, initial_state, state_indices, None, maps, None, segments,
                None if counters is None else counters[:1], segment_tokens, first, ctas,
            )  # fmt: skip
            merge = MergeConfig(
                state_v_first, initial_state is not None, state_indices is not None, index_dtype
            )
            kernel_for(merge)(
                maps,
                starts,
                initial_state,
                state_indices,
                cu_seqlens,
                count,
                tokens,
                segment_tokens,
            )
        ctas = min(multiprocessors, spread.segments * heads_v * V_TILES // spread.tiles)
        kernel_for(forward)(
            blocks[:held], v, out, None if spread.split else initial_state, state_indices, final_state, None, starts,
            segments, None if counters is None else counters[1:], segment_tokens, first, ctas,
        )  # fmt: skip


def _carried(
    initial: Tensor | None,
    indices: Tensor | None,
    final: Tensor | None,
    count: int,
    heads_v: int,
    like: Tensor,
) -> Tensor:
    """The states of all sequences, in the final states' memory if there is any."""
    if final is None:
        shape = (count, heads_v, HEAD_DIM, HEAD_DIM)
        final = torch.empty(shape, dtype=torch.float32, device=like.device)
    if initial is None:
        return final.zero_()
    if indices is None:
        return final.copy_(initial[:count])
    rows = initial[indices.clamp(min=0).long()]
    return final.copy_(torch.where((indices >= 0)[:, None, None, None], rows, 0.0))
