"""Compiles configs and launches calls. The only host module of the kernel that imports the DSL."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from cula_core import tensors
from cula_core.cute import fake
from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.schedule import COLUMNS, SegmentTable
from cula_core.cute.types import DTYPES, INDICES
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import CHUNK, HEAD_DIM, V_TILE, Config, TableConfig
from .kernels.prefill import GatedDeltaPrefill

ARCH = "sm_90a"
WHOLE = 1 << 30  # tokens of a segment: sequences stay whole
Kernels = Callable[[Config | TableConfig], Callable[..., None]]


def kernel(config: Config | TableConfig) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
    return GatedDeltaPrefill(config), *fake_arguments(config)


def fake_arguments(config: Config) -> tuple:
    """Returns the arguments of `GatedDeltaPrefill` without the stream: only dtypes and flags are fixed."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def activation(heads: object):
        return fake.rows(config.dtype, (batch, tokens, heads, HEAD_DIM))

    def by_token(name: str):
        dtype = DTYPES[name]
        strides = tuple(cute.sym_int64() for _ in range(3))
        shape = (batch, tokens, heads)
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=dtype.width // 8)

    def state():
        return fake.states(heads, HEAD_DIM, HEAD_DIM)

    softplus = config.gate == "softplus"
    return (
        activation(cute.sym_int()),
        activation(cute.sym_int()),
        activation(cute.sym_int()),
        activation(heads),
        by_token(config.gate_dtype) if config.gate else None,
        by_token(config.strength_dtype) if config.strength else None,
        fake.vector(cutlass.Float32, heads) if softplus else None,
        fake.vector(cutlass.Float32, heads) if softplus and config.bias else None,
        state() if config.initial_state else None,
        fake.vector(cutlass.Int32) if config.indexed else None,
        fake.vector(cutlass.Int32) if config.redirected else None,
        fake.vector(cutlass.Uint8) if config.fresh else None,
        state() if config.final_state else None,
        state() if config.checkpoints else None,
        fake.segment_table() if config.packed else None,
        fake.vector(cutlass.Int32) if config.packed else None,
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Float32(20.0),
        cutlass.Int32(-1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def unit(config: Config | TableConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config), config, ARCH, (__name__,))


@once
def compile(config: Config | TableConfig, *options: object) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride. options: further ones of `cute.compile`."""
    return compile_kernel(*kernel(config), arch=ARCH, options=options)


def run(call: Call, *, multiprocessors: int | None = None, kernels: Kernels = compile) -> None:
    """Launches one call on torch's current stream.

    The call's tensors are as the kernel reads them, and there is at least one token. multiprocessors, their number, and
    kernels, which turns a config into what is called, stand in for a GPU in tests.
    """
    q, initial, pool = call.q, call.initial, call.state_pool
    tokens, heads, sequences = q.shape[1], call.out.shape[2], call.sequences
    strength = None
    if call.beta is not None:
        strength = "given"
        if call.beta_logits:
            strength = "doubled logits" if call.doubled else "logits"
    config = Config(
        dtype_name(q.dtype),
        operand=dtype_name(call.operand_dtype or torch.float16),
        gate=None if call.g is None else "softplus" if call.raw_gate else "log",
        gate_dtype="float32" if call.g is None else dtype_name(call.g.dtype),
        bias=call.dt_bias is not None,
        strength=strength,
        strength_dtype="float32" if call.beta is None else dtype_name(call.beta.dtype),
        l2norm=call.l2norm,
        packed=call.cu_seqlens is not None,
        state_v_first=call.state_v_first,
        initial_state=initial is not None,
        final_state=pool is not None or call.final_state is not None,
        indexed=call.state_indices is not None,
        redirected=call.output_state_indices is not None,
        fresh=call.has_initial_state is not None,
        in_place=pool is not None,
        checkpoints=call.checkpoints is not None,
    )
    segments = counter = None
    if call.cu_seqlens is not None:
        segments = q.new_empty((1 + sequences, COLUMNS), dtype=torch.int32)
        counter = q.new_empty(1, dtype=torch.int32)
        table = kernels(TableConfig(dtype_name(call.cu_seqlens.dtype)))
        table(call.cu_seqlens, segments, counter, WHOLE, tokens)
    count = multiprocessors or tensors.multiprocessors(q.device)
    fresh, saved = call.has_initial_state, call.checkpoints
    kernels(config)(
        q, call.k, call.v, call.out, call.g, call.beta, call.A_log, call.dt_bias, initial, call.state_indices,
        call.output_state_indices, None if fresh is None else fresh.view(torch.uint8),
        call.final_state if pool is None else pool, None if saved is None else saved.flatten(0, 1), segments, counter,
        call.scale, call.softplus_beta, call.softplus_threshold, -1 if call.null_slot is None else call.null_slot,
        max(call.checkpoint_every, CHUNK), min(sequences * heads * (HEAD_DIM // V_TILE), count),
    )  # fmt: skip
