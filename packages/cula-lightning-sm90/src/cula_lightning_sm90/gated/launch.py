"""Finds the kernels of a call, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core import arguments, tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.delta_rule.config import MergeConfig, chunk_slots
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import (
    BLOCK,
    CHUNK,
    ENDS,
    HEAD_DIM,
    Config,
    PrepareConfig,
    RecurrenceConfig,
)
from .plan import Plan, Walk, plan, workspace_words

ARCH = "sm_90a"
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: Config) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride."""
    return kernel(unit(config))


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
    operands: dict[str, Any] = {
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
    most = tokens
    if call.cu_seqlens_cpu is not None:
        most = tensors.longest_sequence(call.cu_seqlens_cpu)
        longest = -(-most // CHUNK) + 1 + ENDS
    spread = planner(
        longest,
        usual,
        steps * heads,
        heads,
        heads // k.shape[2],
        multiprocessors or tensors.multiprocessors(q.device),
        "off" if call.segment_tokens else call.intracard_cp,
        call.segment_tokens // CHUNK if most > call.segment_tokens else 0,
    )
    first, second, segment = spread.first, spread.second, spread.segment

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    flags = sum(spread.flags)
    words = workspace_words(flags, slots * heads, first)
    if words >= 1 << 31:
        arguments.value_error(
            "q, v",
            f"less than {(1 << 31) // (BLOCK // 2):,} chunks of {CHUNK} tokens times heads of states in a call",
            f"{slots * heads:,}; fewer heads at a time give the same results",
        )
    workspace = new(words, dtype=torch.int32)
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
        q, k, call.g, call.beta, call.A_log, call.dt_bias, offsets, workspace, call.scale, call.softplus_beta,
        call.softplus_threshold, flags, slots, heads, first.seats, first.together, first.share, segment, spread.ahead,
        spread.prepare_ctas,
    )  # fmt: skip
    fresh, saved = call.has_initial_state, call.kept_in
    kept = None
    if saved is not None:
        saved = saved.flatten(0, 1) if saved.dim() == 5 else saved
        kept = "every" if call.checkpoint_offsets is None else "once"
    final = call.final_state if pool is None else pool

    def walk(
        way: Walk,
        first_flag: int,
        own_flags: int,
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
            checkpoints=kept if not scan else None,
            placed=not scan and kept is not None and call.checkpoint_rows is not None,
            scan=scan,
            cut=starts is not None,
            state_dtype=tensors.states_dtype(initial, None if scan else final),
        )
        kernels(config)(
            q, k, call.v, call.out, initial, call.state_indices,
            call.output_state_indices if config.redirected else None,
            None if fresh is None else fresh.view(torch.uint8), final if config.final_state else None,
            saved if config.checkpoints else None, call.checkpoint_rows if config.placed else None,
            call.checkpoint_offsets if config.checkpoints == "once" else None, offsets, workspace,
            maps, marks, starts, -1 if call.null_slot is None else call.null_slot, max(call.checkpoint_every, CHUNK),
            flags, first_flag, own_flags, slots, way.seats, way.together, way.share, segment, way.ctas,
        )  # fmt: skip

    if second is None:
        walk(first, 0, flags)
        return
    # What segments do to states, whether they forget them, and what they begin with.
    length = segment * CHUNK
    whole = offsets is None
    segments = batch * -(-tokens // length) if whole else tokens // length + call.sequences
    maps = new(segments, heads, 2 * HEAD_DIM, HEAD_DIM)
    marks = new(segments, heads, dtype=torch.int32)
    starts = new(segments, heads, HEAD_DIM, HEAD_DIM)
    of_first, of_second = spread.flags
    walk(first, 0, of_first, maps, marks)
    kernels(MergeConfig(index_dtype=operands["index_dtype"], fades=True))(
        maps, marks, starts, None, None, None, offsets, -1, call.sequences, tokens, length
    )
    walk(second, of_first, of_second, maps, marks, starts)
