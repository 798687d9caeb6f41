"""Lightning attention prefill: simple gated linear attention whose decay depends on the head alone.

    S_t = lambda_h S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t        lambda_h = exp(-decay_h)

Source: Lightning Attention-2, arXiv 2401.04658.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula._shared.lightning_decode import pool_slots, store_live
from cula.reference._common import outgoing_tokens
from cula.reference.simple_gla import chunk_simple_gla, chunked_simple_gla
from cula.varlen import sequence_ids


def lightning_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over a dense batch: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, decay `[HV]` >= 0.

    States and results are those of `chunk_simple_gla`; scale defaults to `K ** -0.5`.
    """
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=-decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        out=out,
    )


def lightning_attn_fwd_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_final_state: bool = True,
    state_v_first: bool = False,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over N packed sequences, `[1, T, H, K]` with cu_seqlens `[N + 1]`.

    state_pool `[pool, HV, K, V]` (`[pool, HV, V, K]` with `state_v_first`): sequence n starts from row
    `initial_state_indices[n]` (row n when no indices are given) and its final state replaces that row in place. A
    negative index is a padding slot: no row is read or written for it and its tokens give exactly zero. Live indices
    must differ. The pool is a buffer: no gradient flows through it.

    Returns `(o, state_pool)`, or without a pool `(o, final_states or None)` with every sequence started from zero.
    """
    if state_pool is None:
        return chunk_simple_gla(
            q,
            k,
            v,
            g_gamma=-decay,
            scale=scale,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            out=out,
        )

    pool = state_pool.detach()
    sequences = cu_seqlens.shape[0] - 1
    slots, live = pool_slots(initial_state_indices, sequences, pool)
    initial = torch.where(live[:, None, None, None], pool.index_select(0, slots), 0)
    o, final = chunked_simple_gla(q, k, v, None, -decay, scale, initial, state_v_first, cu_seqlens)
    store_live(pool, final.detach(), slots, live)
    if sequences > 0:
        owner = sequence_ids(cu_seqlens, q.shape[1]).clamp(min=0)
        o = torch.where(live[owner][:, None, None], o, 0)
    return outgoing_tokens(o, v, out), state_pool
