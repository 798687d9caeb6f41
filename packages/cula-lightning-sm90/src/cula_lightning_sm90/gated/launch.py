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
    chunk_slots,
)
from .kernels.prepare import GatedDeltaPrepare
from .kernels.recurrence import GatedDeltaRecurrence
from .plan import Plan, plan

ARCH = "sm_90a"
Kernels = Callable[[Config], Callable[..., None]]


def kernel(config: Config) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, PrepareConfig):
        return GatedDeltaPrepare(config), *prepare_arguments(config)
    return GatedDeltaRecurrence(config), *recurrence_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, heads, 128], g, beta [B, T, HS], A_log, dt_bias [HS], cu_seqlens [N + 1], blocks [slots, HS,
    BLOCK], flags, scale, beta and threshold of the softplus, machines, share of one, steps
    ahead of them, number of CTAs."""
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
        _blocks(config, heads),
        fake.vector(cutlass.Int32),
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Float32(20.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """Returns q, k, v, out [B, T, heads, 128], initial [rows, HS, K, V] or V, K, indices, output indices, which
    sequences begin with a state [N], final and checkpoints like initial, cu_seqlens [N + 1], states
    between machines [machines, V, K], blocks [slots, HS, BLOCK], flags, the padding row, tokens between checkpoints,
    machines, share of one, number of CTAs."""
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
        _offsets(config),
        make_fake_tensor(
            cutlass.Float32,
            (cute.sym_int(), HEAD_DIM, HEAD_DIM),
            stride=(HEAD_DIM * HEAD_DIM, HEAD_DIM, 1),
            assumed_align=16,
        ),
        _blocks(config, heads),
        fake.vector(cutlass.Int32),
        cutlass.Int32(-1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def _activation(config: Operands, batch: object, tokens: object, heads: object = None):
    heads = cute.sym_int() if heads is None else heads
    return fake.rows(config.dtype, (batch, tokens, heads, HEAD_DIM))


def _offsets(config: Operands):
    return fake.vector(INDICES[config.index_dtype]) if config.index_dtype else None


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
    offsets = call.cu_seqlens
    operands = {
        "dtype": dtype_name(q.dtype),
        "operand": dtype_name(call.operand_dtype or torch.float16),
        "l2norm": call.l2norm,
        "index_dtype": None if offsets is None else dtype_name(offsets.dtype),
    }
    strength = None
    if call.beta is not None:
        strength = "given"
        if call.beta_logits:
            strength = "doubled logits" if call.doubled else "logits"
    slots = chunk_slots(batch, tokens, None if offsets is None else call.sequences)
    # Of packed sequences no length is known here.
    longest = -(-slots // call.sequences)
    spread = planner(longest, slots * heads, multiprocessors or tensors.multiprocessors(q.device))

    # One allocation: blocks, states between machines, flags.
    sizes = slots * heads * BLOCK, 2 * spread.machines * HEAD_DIM * HEAD_DIM, 2 * spread.flags
    parts = q.new_empty(sum(sizes), dtype=torch.int16).split(sizes)
    blocks = parts[0].view(getattr(torch, operands["operand"])).view(slots, heads, BLOCK)
    carried = parts[1].view(torch.float32).view(-1, HEAD_DIM, HEAD_DIM)
    flags = parts[2].view(torch.int32)
    config = PrepareConfig(
        **operands,
        gate=None if call.g is None else "softplus" if call.raw_gate else "log",
        gate_dtype="float32" if call.g is None else dtype_name(call.g.dtype),
        bias=call.dt_bias is not None,
        strength=strength,
        strength_dtype="float32" if call.beta is None else dtype_name(call.beta.dtype),
    )
    kernels(config)(
        q, k, call.g, call.beta, call.A_log, call.dt_bias, offsets, blocks, flags, call.scale, call.softplus_beta,
        call.softplus_threshold, spread.machines, spread.share, spread.ahead, spread.prepare_ctas,
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
        None if saved is None else saved.flatten(0, 1), offsets, carried, blocks, flags,
        -1 if call.null_slot is None else call.null_slot, max(call.checkpoint_every, CHUNK), spread.machines,
        spread.share, spread.ctas,
    )  # fmt: skip
