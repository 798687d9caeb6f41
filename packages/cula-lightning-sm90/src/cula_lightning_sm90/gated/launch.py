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
from .config import (
    BLOCK,
    CHUNK,
    HEAD_DIM,
    Config,
    Operands,
    PrepareConfig,
    RecurrenceConfig,
    TableConfig,
    chunk_slots,
)
from .kernels.prepare import GatedDeltaPrepare
from .kernels.recurrence import GatedDeltaRecurrence
from .plan import Plan, flag_count, plan

ARCH = "sm_90a"
WHOLE = 1 << 30  # tokens of a segment: sequences stay whole
Kernels = Callable[[Config], Callable[..., None]]


def kernel(config: Config) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
    if isinstance(config, PrepareConfig):
        return GatedDeltaPrepare(config), *prepare_arguments(config)
    return GatedDeltaRecurrence(config), *recurrence_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, heads, 128], g, beta [B, T, HS], A_log, dt_bias [HS], the segment table, blocks [slots, HS,
    BLOCK], flags, scale, beta and threshold of the softplus, chains at once, number of CTAs."""
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
        fake.segment_table() if config.packed else None,
        _blocks(config, heads),
        fake.vector(cutlass.Int32),
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Float32(20.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """Returns q, k, v, out [B, T, heads, 128], initial [rows, HS, K, V] or V, K, indices, output indices, which
    sequences begin with a state [N], final and checkpoints like initial, the segment table, counter [1], blocks [slots,
    HS, BLOCK], flags, the padding row, tokens between checkpoints, chains at once, number of CTAs."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def state():
        return fake.states(heads, HEAD_DIM, HEAD_DIM)

    return (
        *(_activation(config, batch, tokens) for _ in range(3)),
        _activation(config, batch, tokens, heads),
        state() if config.initial_state else None,
        fake.vector(cutlass.Int32) if config.indexed else None,
        fake.vector(cutlass.Int32) if config.redirected else None,
        fake.vector(cutlass.Uint8) if config.fresh else None,
        state() if config.final_state else None,
        state() if config.checkpoints else None,
        fake.segment_table() if config.packed else None,
        fake.vector(cutlass.Int32) if config.packed else None,
        _blocks(config, heads),
        fake.vector(cutlass.Int32),
        cutlass.Int32(-1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def _activation(config: Operands, batch: object, tokens: object, heads: object = None):
    heads = cute.sym_int() if heads is None else heads
    return fake.rows(config.dtype, (batch, tokens, heads, HEAD_DIM))


def _blocks(config: Operands, heads: object):
    stride = (cute.sym_int64(divisibility=BLOCK), BLOCK, 1)
    shape = (cute.sym_int(), heads, BLOCK)
    return make_fake_tensor(DTYPES[config.operand], shape, stride=stride, assumed_align=128)


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config), config, ARCH, (__name__,))


@once
def compile(config: Config, *options: object) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride. options: further ones of `cute.compile`."""
    return compile_kernel(*kernel(config), arch=ARCH, options=options)


def run(
    call: Call,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels = compile,
    planner: Callable[..., Plan] = plan,
) -> None:
    """Launches one call on torch's current stream.

    The call's tensors are as the kernels read them, and there is at least one token. multiprocessors, their number,
    kernels, which turns a config into what is called, and the planner stand in for a GPU in tests.
    """
    q, k, initial, pool = call.q, call.k, call.initial, call.state_pool
    batch, tokens, heads = *q.shape[:2], call.out.shape[2]
    packed = call.cu_seqlens is not None
    operands = {
        "dtype": dtype_name(q.dtype),
        "operand": dtype_name(call.operand_dtype or torch.float16),
        "l2norm": call.l2norm,
        "packed": packed,
    }
    strength = None
    if call.beta is not None:
        strength = "given"
        if call.beta_logits:
            strength = "doubled logits" if call.doubled else "logits"
    slots = chunk_slots(batch, tokens, call.sequences if packed else None)
    chunks, chains, total = -(-tokens // CHUNK), call.sequences * heads, slots * heads
    spread = planner(chunks, chains, total, multiprocessors or tensors.multiprocessors(q.device))

    # One allocation less: flags lie behind the blocks.
    words = flag_count(chunks, chains, total, spread.machines, packed)
    memory = q.new_empty(total * BLOCK + 2 * words, dtype=torch.int16)
    blocks = memory[: total * BLOCK].view(getattr(torch, operands["operand"]))
    blocks = blocks.view(slots, heads, BLOCK)
    flags = memory[total * BLOCK :].view(torch.int32)
    segments = counter = None
    if call.cu_seqlens is not None:
        segments = q.new_empty((1 + call.sequences, COLUMNS), dtype=torch.int32)
        counter = q.new_empty(1, dtype=torch.int32)
        table = kernels(TableConfig(dtype_name(call.cu_seqlens.dtype)))
        table(call.cu_seqlens, segments, counter, WHOLE, tokens)
    config = PrepareConfig(
        **operands,
        gate=None if call.g is None else "softplus" if call.raw_gate else "log",
        gate_dtype="float32" if call.g is None else dtype_name(call.g.dtype),
        bias=call.dt_bias is not None,
        strength=strength,
        strength_dtype="float32" if call.beta is None else dtype_name(call.beta.dtype),
    )
    kernels(config)(
        q, k, call.g, call.beta, call.A_log, call.dt_bias, segments, blocks, flags, call.scale, call.softplus_beta,
        call.softplus_threshold, spread.machines, spread.prepare_ctas,
    )  # fmt: skip
    walk = RecurrenceConfig(
        **operands,
        tiles=spread.tiles,
        state_v_first=call.state_v_first,
        initial_state=initial is not None,
        final_state=pool is not None or call.final_state is not None,
        indexed=call.state_indices is not None,
        redirected=call.output_state_indices is not None,
        fresh=call.has_initial_state is not None,
        in_place=pool is not None,
        checkpoints=call.checkpoints is not None,
    )
    fresh, saved = call.has_initial_state, call.checkpoints
    kernels(walk)(
        q, k, call.v, call.out, initial, call.state_indices, call.output_state_indices,
        None if fresh is None else fresh.view(torch.uint8), call.final_state if pool is None else pool,
        None if saved is None else saved.flatten(0, 1), segments, counter, blocks, flags,
        -1 if call.null_slot is None else call.null_slot, max(call.checkpoint_every, CHUNK), spread.machines,
        spread.ctas,
    )  # fmt: skip
