"""Lightning attention prefill: simple gated linear attention whose decay depends on the head alone.

    S_t = lambda_h S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t        lambda_h = exp(-decay_h)

Source: Lightning Attention-2, arXiv 2401.04658.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.reference._common import live_states, only_live, outgoing_tokens
from cula.reference.simple_gla import chunk_simple_gla, chunked_simple_gla
from cula_core.reference.lightning_decode import pool_slots, store_live


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
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over a dense batch: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, decay `[HV]` >= 0.

    States, results and the other arguments are those of `chunk_simple_gla`; scale defaults to `K ** -0.5`.

    Example:
        >>> import torch
        >>> from cula.reference import lightning_attn_fwd
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)  # each [B, T, H, D]
        >>> lightning_attn_fwd(q, k, v, torch.full((2,), 0.1))[0].shape
        torch.Size([1, 100, 2, 16])
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
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_checkpoints=state_checkpoints,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
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
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention over N packed sequences, `[1, T, H, K]` with cu_seqlens `[N + 1]`.

    state_pool `[pool, HV, K, V]` (`[pool, HV, V, K]` with `state_v_first`): sequence n starts from row
    `initial_state_indices[n]` (row n when no indices are given) and its final state replaces that row in place. A
    negative index, or null_slot, is a padding slot: no row is read or written for it and its tokens give exactly zero.
    Where has_initial_state `[N]` is False, a sequence begins from zero. Live indices must differ. The pool is a buffer
    then: no gradient flows through it. With `update_state_pool=False` it is only read, and gradients reach it.
    With checkpoint_rows or checkpoint_offsets `[N]` state_checkpoints is `[rows, HV, K, V]`, or the updated pool where
    it is None: see `cula.lightning`. The other arguments are those of `chunk_simple_gla`.

    Returns `(o, state_pool)`; without a pool (every sequence starts from zero), or with one that is only read,
    `(o, final_states or None)`, in which a padding slot has zeros.

    Example:
        >>> import torch
        >>> from cula.reference import lightning_attn_fwd_varlen
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)  # each [1, T, H, D]
        >>> cu_seqlens = torch.tensor([0, 60, 100])
        >>> o, states = lightning_attn_fwd_varlen(q, k, v, torch.full((2,), 0.1), cu_seqlens)
        >>> o.shape, states.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([2, 2, 16, 16]))
    """
    pool = slots = live = initial = None
    if state_pool is not None:
        pool = state_pool.detach() if update_state_pool else state_pool
        slots, live = pool_slots(initial_state_indices, cu_seqlens.shape[0] - 1, pool, null_slot)
        read = live if has_initial_state is None else live & has_initial_state
        initial = live_states(pool, slots, read)
    saved = (
        pool if state_checkpoints is None and checkpoint_offsets is not None else state_checkpoints
    )
    o, final = chunked_simple_gla(
        q,
        k,
        v,
        None,
        -decay,
        scale,
        initial,
        state_v_first,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        saved,
        checkpoint_every_n_tokens,
        live,
        checkpoint_rows,
        checkpoint_offsets,
    )
    if pool is None or slots is None or live is None:
        return outgoing_tokens(o, v, out), final if output_final_state else None
    o = outgoing_tokens(only_live(o, live, cu_seqlens), v, out)
    if update_state_pool:
        store_live(pool, final.detach(), slots, live)
        return o, state_pool
    return o, torch.where(live[:, None, None, None], final, 0) if output_final_state else None
