"""Finds the kernels of a call, and launches them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.constants import COLUMNS, LOG2_E
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import CHUNK, EVERY, V_TILE, Config, DecaysConfig, Problem, TableConfig
from .decays import Found, Sums
from .plan import configs, plan, segment_for_states, segment_length

ARCH = "sm_90a"
AnyConfig = Config | TableConfig | DecaysConfig
Kernels = Callable[[AnyConfig], Callable[..., None]]


def unit(config: AnyConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: AnyConfig) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride."""
    return kernel(unit(config))


def run(
    call: Call,
    *,
    ends: bool = False,
    multiprocessors: int | None = None,
    kernels: Kernels = compile,
) -> None:
    """Launches one call on torch's current stream.

    The call's tensors are as the kernel reads them. ends: final states alone are wanted, and what is written to the
    outputs is not said. multiprocessors, their number, and kernels, which turns a config into what is called, stand in
    for a GPU in tests.
    """
    q, v, g, cu_seqlens = call.q, call.v, call.g, call.cu_seqlens
    batch, tokens, _, dim_k = call.k.shape
    heads, dim_v = call.out.shape[2:]
    saved, fresh = call.kept_in, call.has_initial_state
    kept = None
    if saved is not None:
        saved = saved.flatten(0, 1) if saved.dim() == 5 else saved
        kept = "every" if call.checkpoint_offsets is None else "once"
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
        checkpoints=kept,
        placed=kept is not None and call.checkpoint_rows is not None,
        l2norm=call.l2norm,
        exact_state=call.exact_state,
        fresh=fresh is not None,
        state_dtype=tensors.states_dtype(call.initial, call.final),
        reverse=call.reverse,
        dots=call.dots is not None,
    )
    count = multiprocessors or tensors.multiprocessors(q.device)
    cut = call.segment_tokens
    if ends:
        cut = segment_for_states(_columns(call), tokens, count, call.reverse)
    spread = plan(
        problem, batch, tokens, call.sequences, heads, count, call.num_splits, _in_rows(g), cut
    )
    segment_tokens = spread.segment_tokens or max(tokens, CHUNK)
    piece_tokens = spread.piece_tokens or segment_tokens
    segments = states = decays = None
    if cu_seqlens is not None:
        segments = q.new_empty((1 + spread.segments, COLUMNS), dtype=torch.int32)
        table = kernels(TableConfig(dtype_name(cu_seqlens.dtype)))
        table(cu_seqlens, segments, segment_tokens, min(tokens, segment_tokens))
    if spread.split:
        tiles, units = dim_v // V_TILE, dim_k * V_TILE // (4 * 128)
        shape = (spread.segments * spread.pieces, heads, tiles, units, 128, 4)
        states = q.new_empty(shape, dtype=torch.float32)
        decays = q.new_empty(shape[:2], dtype=torch.float32)
    if fresh is not None:
        fresh = fresh.view(torch.uint8)
    where = (
        saved,
        call.checkpoint_rows if problem.placed else None,
        call.checkpoint_offsets if kept == "once" else None,
    )
    for config in configs(problem, spread, ends):
        forward = not config.prescan
        kernels(config)(
            q if forward else None, call.k, v, call.out, *((call.dot_with, call.dots) if forward else (None, None)),
            g, call.head_decay, call.initial, call.state_indices, fresh,
            call.final if forward else None,
            *(where if forward else (None, None, None)),
            segments, states, decays,
            call.scale, call.decay_sign * LOG2_E, -1 if call.null_slot is None else call.null_slot, segment_tokens,
            piece_tokens, max(call.checkpoint_every, CHUNK), spread.ctas,
        )  # fmt: skip


def gradients_of_decays(sums: Sums, *, kernels: Kernels = compile) -> Found:
    """Makes gradients of decays in fp32 on torch's current stream, as `decays.on_cpu` does."""
    (batch, heads, parts, _, tokens), cu_seqlens = sums.of_q.shape, sums.cu_seqlens
    g = sums.g.float() if sums.g is not None and sums.g.dtype == torch.float64 else sums.g
    count, segments, new = batch * -(-tokens // EVERY), None, sums.of_q.new_empty
    if cu_seqlens is not None:
        count, new = tokens // EVERY + cu_seqlens.shape[0] - 1, sums.of_q.new_zeros
        segments = sums.of_q.new_empty((1 + count, COLUMNS), dtype=torch.int32)
    dg = None if g is None else new((batch, tokens, heads))
    of_heads = None if sums.head_decay is None else new((count, heads))
    if tokens and count * heads:
        if cu_seqlens is not None:
            table = kernels(TableConfig(dtype_name(cu_seqlens.dtype)))
            table(cu_seqlens, segments, EVERY, min(tokens, EVERY))
        states = [
            None if x is None else x.flatten(0, 1).flatten(2) for x in (sums.states, sums.d_states)
        ]
        config = DecaysConfig(
            parts,
            None if states[0] is None else states[0].shape[2],
            sums.started is not None,
            sums.ended is not None,
            None if g is None else dtype_name(g.dtype),
            sums.head_decay is not None,
            cu_seqlens is not None,
        )
        kernels(config)(
            sums.of_q, sums.of_k, *states, sums.started, sums.ended, g, sums.head_decay, segments, dg, of_heads,
            sums.scale, float(sums.sign), count,
        )  # fmt: skip
    return dg, None if of_heads is None else sums.sign * of_heads.sum(0)


def fits(call: Call, multiprocessors: int) -> bool:
    """Returns whether so many multiprocessors are enough for a call, with sequences that stay whole."""
    tokens, columns = call.out.shape[1], _columns(call)
    if columns > multiprocessors:
        return False
    cut = segment_length(columns, tokens, multiprocessors, call.num_splits, call.segment_tokens)
    return cut == 0


def _columns(call: Call) -> int:
    """Returns the V tiles of all heads, and of all sequences of a dense batch."""
    batch, _, heads, dim_v = call.out.shape
    return heads * (dim_v // V_TILE) * (batch if call.cu_seqlens is None else 1)


def _in_rows(g: Tensor | None) -> bool:
    """Whether TMA can load gates of neighbouring heads: contiguous, with rows at multiples of 16 bytes."""
    if g is None or g.stride(2) != 1 or g.data_ptr() % 16:
        return False
    return all(stride > 0 and stride * g.element_size() % 16 == 0 for stride in g.stride()[:2])
