"""Compiles configs and launches calls. The only host module of the kernel that imports the DSL."""

from __future__ import annotations

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
from cula_core.cute.types import DTYPES, INDICES
from cula_core.delta_rule.config import MergeConfig, chunk_slots
from cula_core.delta_rule.kernels.merge import KdaMerge
from cula_core.delta_rule.launch import merge_arguments
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import (
    BLOCK,
    CHUNK,
    ENDS,
    HEAD_DIM,
    V_TILE,
    Config,
    Operands,
    PrepareConfig,
    RecurrenceConfig,
)
from .kernels.prepare import GatedDeltaPrepare
from .kernels.recurrence import GatedDeltaRecurrence
from .plan import Plan, Walk, plan

ARCH = "sm_90a"
Kernels = Callable[[Config], Callable[..., None]]


def kernel(config: Config) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, PrepareConfig):
        return GatedDeltaPrepare(config), *prepare_arguments(config)
    if isinstance(config, MergeConfig):
        return KdaMerge(config), *merge_arguments(config)
    return GatedDeltaRecurrence(config), *recurrence_arguments(config)


def prepare_arguments(config: PrepareConfig) -> tuple:
    """Returns q, k [B, T, heads, 128], g, beta [B, T, HS], A_log, dt_bias [HS], cu_seqlens [N + 1], blocks [slots, HS,
    BLOCK], flags, scale, beta and threshold of the softplus, seats, heads of a machine,
    share of one, chunks of a segment, steps ahead of machines, number of CTAs."""
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
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def recurrence_arguments(config: RecurrenceConfig) -> tuple:
    """Returns q, k, v, out [B, T, heads, 128], initial [rows, HS, K, V] or V, K, indices, output indices, which
    sequences begin with a state [N], final and checkpoints like initial, cu_seqlens [N + 1], states between machines
    [seats, V, K], of a scan [seats, 256, K], blocks [slots, HS, BLOCK], flags, maps [segments, HS, 256, K], marks
    of segments that forget [segments, HS], starts [segments, HS, V, K], the padding row, tokens between checkpoints,
    seats, heads of a machine, share of one, chunks of a segment, number of CTAs."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def state(rows: int = HEAD_DIM):
        return fake.states(heads, rows, HEAD_DIM)

    height = config.columns * V_TILE

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
            (cute.sym_int(), height, HEAD_DIM),
            stride=(height * HEAD_DIM, HEAD_DIM, 1),
            assumed_align=16,
        ),
        _blocks(config, heads),
        fake.vector(cutlass.Int32),
        state(2 * HEAD_DIM) if config.scan or config.cut else None,
        fake.matrix(cutlass.Int32, heads) if config.scan or config.cut else None,
        state() if config.cut else None,
        cutlass.Int32(-1),
        cutlass.Int32(1),
        cutlass.Int32(1),
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
    steps = slots if offsets is None else slots + ENDS * call.sequences
    longest = usual = -(-steps // call.sequences)
    if call.cu_seqlens_cpu is not None:
        longest = -(-tensors.longest_sequence(call.cu_seqlens_cpu) // CHUNK) + 1 + ENDS
    spread = planner(
        longest,
        usual,
        steps * heads,
        heads,
        heads // k.shape[2],
        multiprocessors or tensors.multiprocessors(q.device),
        call.intracard_cp,
    )
    first, second, segment = spread.first, spread.second, spread.segment
    segments = 0
    if second is not None:
        length = segment * CHUNK
        whole = offsets is None
        segments = batch * -(-tokens // length) if whole else tokens // length + call.sequences

    # One allocation: blocks, states between machines, what segments do and begin with, flags, marks of segments.
    sizes = (
        slots * heads * BLOCK // 2,
        first.seats * first.columns * V_TILE * HEAD_DIM,
        segments * heads * 2 * HEAD_DIM * HEAD_DIM,
        segments * heads * HEAD_DIM * HEAD_DIM,
        sum(spread.flags),
        segments * heads,
    )
    blocks, carried, maps, starts, words, marks = q.new_empty(
        sum(sizes), dtype=torch.float32
    ).split(sizes)
    blocks = blocks.view(getattr(torch, operands["operand"])).view(slots, heads, BLOCK)
    flags = words.view(torch.int32)
    config = PrepareConfig(
        **operands,
        gate=None if call.g is None else "softplus" if call.raw_gate else "log",
        gate_dtype="float32" if call.g is None else dtype_name(call.g.dtype),
        bias=call.dt_bias is not None,
        strength=strength,
        strength_dtype="float32" if call.beta is None else dtype_name(call.beta.dtype),
        cut=second is not None,
    )
    kernels(config)(
        q, k, call.g, call.beta, call.A_log, call.dt_bias, offsets, blocks, flags, call.scale, call.softplus_beta,
        call.softplus_threshold, first.seats, first.together, first.share, segment, spread.ahead, spread.prepare_ctas,
    )  # fmt: skip
    fresh, saved = call.has_initial_state, call.checkpoints
    final = call.final_state if pool is None else pool

    def walk(
        way: Walk,
        flags: Tensor,
        maps: Tensor | None = None,
        marks: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> None:
        scan = maps is not None and starts is None
        config = RecurrenceConfig(
            **operands,
            tiles=way.tiles,
            state_v_first=call.state_v_first,
            initial_state=initial is not None,
            final_state=not scan and final is not None,
            indexed=call.state_indices is not None,
            redirected=not scan and call.output_state_indices is not None,
            fresh=fresh is not None,
            in_place=not scan and pool is not None,
            checkpoints=not scan and saved is not None,
            scan=scan,
            cut=starts is not None,
        )
        kernels(config)(
            q, k, call.v, call.out, initial, call.state_indices,
            call.output_state_indices if config.redirected else None,
            None if fresh is None else fresh.view(torch.uint8), final if config.final_state else None,
            saved.flatten(0, 1) if config.checkpoints else None, offsets,
            carried.view(-1, way.columns * V_TILE, HEAD_DIM), blocks, flags, maps, marks, starts,
            -1 if call.null_slot is None else call.null_slot, max(call.checkpoint_every, CHUNK), way.seats,
            way.together, way.share, segment, way.ctas,
        )  # fmt: skip

    if second is None:
        walk(first, flags)
        return
    maps = maps.view(segments, heads, 2 * HEAD_DIM, HEAD_DIM)
    starts = starts.view(segments, heads, HEAD_DIM, HEAD_DIM)
    of_first, of_second = flags.split(spread.flags)
    marks = marks.view(torch.int32).view(segments, heads)
    walk(first, of_first, maps, marks)
    kernels(MergeConfig(index_dtype=operands["index_dtype"], fades=True))(
        maps, marks, starts, None, None, offsets, call.sequences, tokens, segment * CHUNK
    )
    walk(second, of_second, maps, marks, starts)
