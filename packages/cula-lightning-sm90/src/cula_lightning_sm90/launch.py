"""Compiles configs for an architecture and launches calls. The only host file that imports the DSL."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from .common import DTYPES, LOG2_E
from .config import CHUNK, V_TILE, Config, Problem, configs, dtype_name, plan
from .prefill import LightningPrefill
from .schedule import COLUMNS, SegmentTable

ARCH = "sm_90a"
_DSL = {
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
}


@dataclass(frozen=True)
class TableConfig:
    """The kernel that makes the segment table of packed sequences; index_dtype is that of cu_seqlens."""

    index_dtype: torch.dtype


def kernel(config: Config | TableConfig) -> LightningPrefill | SegmentTable:
    """What `cute.compile` takes beside `fake_arguments`."""
    if isinstance(config, TableConfig):
        return SegmentTable()
    return LightningPrefill(config)


def fake_arguments(config: Config | TableConfig) -> tuple:
    """What `cute.compile` needs to know of the arguments: only dtypes, head dims and flags are fixed."""
    if isinstance(config, TableConfig):
        return (
            _vector(_DSL[config.index_dtype]),
            make_fake_tensor(cutlass.Int32, (cute.sym_int(), COLUMNS), stride=(COLUMNS, 1)),
            _vector(cutlass.Int32),
            cutlass.Int32(1),
            cutlass.Int32(1),
        )
    problem = config.problem
    batch, tokens, heads, heads_v = (cute.sym_int() for _ in range(4))

    def activation(heads: object, dim: int):
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (batch, tokens, heads, dim)
        return make_fake_tensor(DTYPES[problem.dtype], shape, stride=strides, assumed_align=16)

    def gate():
        dtype = DTYPES[problem.gate_dtype]
        unit = 128 // dtype.width if config.paired else 1
        strides = (
            *(cute.sym_int64(divisibility=unit) for _ in range(2)),
            1 if config.paired else cute.sym_int64(),
        )
        align = 16 if config.paired else dtype.width // 8
        return make_fake_tensor(
            dtype, (batch, tokens, heads_v), stride=strides, assumed_align=align
        )

    dims = (problem.head_dim_k, problem.head_dim_v)
    rows, columns = dims[::-1] if problem.state_v_first else dims

    def state():
        outer = tuple(cute.sym_int64(divisibility=4) for _ in range(2))
        shape = (cute.sym_int(), heads_v, rows, columns)
        stride = (*outer, columns, 1)
        return make_fake_tensor(cutlass.Float32, shape, stride=stride, assumed_align=16)

    forward = not config.prescan
    v_tiles, registers = problem.head_dim_v // V_TILE, problem.head_dim_k * V_TILE // 128
    return (
        activation(heads, problem.head_dim_k) if forward else None,
        activation(heads, problem.head_dim_k),
        activation(heads_v, problem.head_dim_v),
        activation(heads_v, problem.head_dim_v),
        gate() if problem.gate_dtype else None,
        _vector(cutlass.Float32, heads_v) if problem.decay else None,
        state() if problem.initial_state else None,
        _vector(cutlass.Int32) if problem.indexed else None,
        state() if problem.final_state and forward else None,
        state() if problem.checkpoints and forward else None,
        make_fake_tensor(cutlass.Int32, (cute.sym_int(), COLUMNS), stride=(COLUMNS, 1))
        if problem.packed
        else None,
        _vector(cutlass.Int32) if problem.packed else None,
        _workspace(cute.sym_int(), heads_v, v_tiles, registers, 128) if config.split else None,
        _workspace(cute.sym_int(), heads_v) if config.split else None,
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def _workspace(*shape: object):
    """A contiguous fp32 tensor; all but its first two extents are fixed."""
    strides = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    outer = cute.sym_int64(divisibility=math.prod(shape[2:]))
    return make_fake_tensor(cutlass.Float32, shape, stride=(outer, *strides), assumed_align=16)


def _vector(dtype: type, size: object = None):
    return make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), stride=(1,))


@functools.cache
def compile(config: Config | TableConfig, *options) -> Callable[..., None]:
    """A callable for one config, reused for every size and stride."""
    with warnings.catch_warnings():
        # Loops over the 64 registers of a state are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile[(cute.GPUArch(ARCH), cute.EnableTVMFFI, *options)](
            kernel(config), *fake_arguments(config), make_fake_stream(use_tvm_ffi_env_stream=True)
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    final_state: Tensor | None,
    checkpoints: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    decay_sign: int = -1,
    state_v_first: bool = False,
    l2norm: bool = False,
    exact_state: bool = False,
    checkpoint_every: int = 0,
    num_splits: int | None = None,
    multiprocessors: int | None = None,
    kernel_for: Callable[..., Callable[..., None]] = compile,
) -> None:
    """Launches one call on torch's current stream.

    Arguments are those of the public functions, checked; the log decay per token is `decay_sign * head_decay` plus g.
    A final state that is the initial one is updated in place, at the rows that state_indices name. kernel_for turns a
    config into what is called, and multiprocessors is their number, for tests without a GPU.
    """
    batch, tokens, _, dim_k = k.shape
    heads_v, dim_v = v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    problem = Problem(
        dtype_name(q.dtype), dim_k, dim_v,
        gate_dtype=None if g is None else dtype_name(g.dtype),
        decay=head_decay is not None,
        packed=cu_seqlens is not None,
        state_v_first=state_v_first,
        initial_state=initial_state is not None,
        final_state=final_state is not None,
        indexed=state_indices is not None,
        in_place=final_state is not None and final_state is initial_state,
        checkpoints=checkpoints is not None,
        l2norm=l2norm,
        exact_state=exact_state,
    )  # fmt: skip
    if multiprocessors is None:
        multiprocessors = _multiprocessors(q.device)
    spread = plan(
        problem, batch, tokens, sequences, heads_v, multiprocessors, num_splits, _in_rows(g)
    )
    segment_tokens = spread.segment_tokens or max(tokens, CHUNK)
    segments = counters = states = decays = None
    if problem.packed:
        segments = q.new_empty((1 + spread.segments, COLUMNS), dtype=torch.int32)
        counters = q.new_empty(2, dtype=torch.int32)
        table = kernel_for(TableConfig(cu_seqlens.dtype))
        table(cu_seqlens, segments, counters, segment_tokens, min(tokens, segment_tokens))
    if spread.split:
        tiles, registers = dim_v // V_TILE, dim_k * V_TILE // 128
        shape = (spread.segments, heads_v, tiles, registers, 128)
        states = q.new_empty(shape, dtype=torch.float32)
        decays = q.new_empty(shape[:2], dtype=torch.float32)
    for number, config in enumerate(configs(problem, spread)):
        forward = not config.prescan
        kernel_for(config)(
            q if forward else None, k, v, out, g, head_decay, initial_state, state_indices,
            final_state if forward else None,
            checkpoints.flatten(0, 1) if forward and checkpoints is not None else None,
            segments, None if counters is None else counters[number : number + 1], states, decays,
            scale, decay_sign * LOG2_E, segment_tokens, max(checkpoint_every, CHUNK), spread.ctas,
        )  # fmt: skip


def _in_rows(g: Tensor | None) -> bool:
    """Whether TMA can load gates of neighbouring heads: contiguous, with rows at multiples of 16 bytes."""
    if g is None or g.stride(2) != 1 or g.data_ptr() % 16:
        return False
    return all(stride > 0 and stride * g.element_size() % 16 == 0 for stride in g.stride()[:2])
