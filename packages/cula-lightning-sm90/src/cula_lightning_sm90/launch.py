"""Compiles configs and launches calls. The only host module that imports the DSL."""

from __future__ import annotations

import math
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from cula_core import tensors
from cula_core.cute import fake
from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.schedule import COLUMNS, SegmentTable
from cula_core.cute.types import DTYPES, INDICES, LOG2_E
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import CHUNK, V_TILE, Config, Problem, TableConfig
from .kernels.prefill import LightningPrefill
from .plan import configs, plan

ARCH = "sm_90a"
Kernels = Callable[[Config | TableConfig], Callable[..., None]]


def kernel(config: Config | TableConfig) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
    return LightningPrefill(config), *fake_arguments(config)


def fake_arguments(config: Config) -> tuple:
    """Returns the arguments of `LightningPrefill` without the stream: only dtypes, head dims and flags are fixed."""
    problem = config.problem
    batch, tokens, heads, heads_v = (cute.sym_int() for _ in range(4))

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
        return make_fake_tensor(
            dtype, (batch, tokens, heads_v), stride=strides, assumed_align=align
        )

    dims = (problem.head_dim_k, problem.head_dim_v)
    rows, columns = dims[::-1] if problem.state_v_first else dims

    def state():
        return fake.states(heads_v, rows, columns)

    forward = not config.prescan
    v_tiles, registers = problem.head_dim_v // V_TILE, problem.head_dim_k * V_TILE // 128
    return (
        activation(heads, problem.head_dim_k) if forward else None,
        activation(heads, problem.head_dim_k),
        activation(heads_v, problem.head_dim_v),
        activation(heads_v, problem.head_dim_v),
        gate() if problem.gate_dtype else None,
        fake.vector(cutlass.Float32, heads_v) if problem.decay else None,
        state() if problem.initial_state else None,
        fake.vector(cutlass.Int32) if problem.indexed else None,
        state() if problem.final_state and forward else None,
        state() if problem.checkpoints and forward else None,
        fake.segment_table() if problem.packed else None,
        fake.vector(cutlass.Int32) if problem.packed else None,
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


def unit(config: Config | TableConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config), config, ARCH, (__name__,))


@once
def compile(config: Config | TableConfig, *options: object) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride. options: further ones of `cute.compile`."""
    return compile_kernel(*kernel(config), arch=ARCH, options=options)


def run(call: Call, *, multiprocessors: int | None = None, kernels: Kernels = compile) -> None:
    """Launches one call on torch's current stream.

    The call's tensors are as the kernel reads them. multiprocessors, their number, and kernels, which turns a config
    into what is called, stand in for a GPU in tests.
    """
    q, v, g, cu_seqlens = call.q, call.v, call.g, call.cu_seqlens
    batch, tokens, _, dim_k = call.k.shape
    heads_v, dim_v = v.shape[2:]
    problem = Problem(
        dtype_name(q.dtype),
        dim_k,
        dim_v,
        gate_dtype=None if g is None else dtype_name(g.dtype),
        decay=call.head_decay is not None,
        packed=cu_seqlens is not None,
        state_v_first=call.state_v_first,
        initial_state=call.initial is not None,
        final_state=call.final is not None,
        indexed=call.state_indices is not None,
        in_place=call.in_place,
        checkpoints=call.checkpoints is not None,
        l2norm=call.l2norm,
        exact_state=call.exact_state,
    )
    count = multiprocessors or tensors.multiprocessors(q.device)
    spread = plan(
        problem, batch, tokens, call.sequences, heads_v, count, call.num_splits, _in_rows(g)
    )
    segment_tokens = spread.segment_tokens or max(tokens, CHUNK)
    segments = counters = states = decays = None
    if cu_seqlens is not None:
        segments = q.new_empty((1 + spread.segments, COLUMNS), dtype=torch.int32)
        counters = q.new_empty(2, dtype=torch.int32)
        table = kernels(TableConfig(dtype_name(cu_seqlens.dtype)))
        table(cu_seqlens, segments, counters, segment_tokens, min(tokens, segment_tokens))
    if spread.split:
        tiles, registers = dim_v // V_TILE, dim_k * V_TILE // 128
        shape = (spread.segments, heads_v, tiles, registers, 128)
        states = q.new_empty(shape, dtype=torch.float32)
        decays = q.new_empty(shape[:2], dtype=torch.float32)
    saved = call.checkpoints
    for number, config in enumerate(configs(problem, spread)):
        forward = not config.prescan
        kernels(config)(
            q if forward else None, call.k, v, call.out, g, call.head_decay, call.initial, call.state_indices,
            call.final if forward else None,
            saved.flatten(0, 1) if forward and saved is not None else None,
            segments, None if counters is None else counters[number : number + 1], states, decays,
            call.scale, call.decay_sign * LOG2_E, segment_tokens, max(call.checkpoint_every, CHUNK), spread.ctas,
        )  # fmt: skip


def _in_rows(g: Tensor | None) -> bool:
    """Whether TMA can load gates of neighbouring heads: contiguous, with rows at multiples of 16 bytes."""
    if g is None or g.stride(2) != 1 or g.data_ptr() % 16:
        return False
    return all(stride > 0 and stride * g.element_size() % 16 == 0 for stride in g.stride()[:2])
