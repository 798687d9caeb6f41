"""Prefill of the gated delta rule in plain torch, token by token in fp64: the oracle of kernels.

Per sequence and head, with the state S [K, V], the log decay d_t <= 0 and the write strength b_t of token t:

    S'_t = exp(d_t) S_(t-1)
    S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T          o_t = scale * S_t^T q_t

It is KDA's recurrence with one decay for all channels of a head, and is computed as that. There are HS = max(HQ, HV)
heads of states; head s reads head s // (HS / HQ) of q, s // (HS / HK) of k and s // (HS / HV) of v.
Source: Gated Delta Networks, arXiv 2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import kept_in
from .delta_decode import row_slots
from .gates import log_decay, write_strength
from .kda import recurrent_prefill
from .lightning_decode import store_live


class Outcome(NamedTuple):
    """What a call returns and writes, unrounded.

    out: [B, T, HS, V]. states: [N, HS, K, V] (V, K with `state_v_first`) after the last token of every sequence; both
    zero for padding. pool, checkpoints: what the tensors given as `state_pool` and `state_checkpoints` hold afterwards,
    None where there was none.
    """

    out: Tensor
    states: Tensor
    pool: Tensor | None
    checkpoints: Tensor | None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """Returns what `cula.lightning.chunk_gated_delta_rule` makes of the same arguments; none of them is changed.

    Example:
        >>> import torch
        >>> from cula_core.reference.gated_delta_rule import gated_delta_rule
        >>> q, k, v = torch.randn(1, 5, 6, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 3, 16)
        >>> found = gated_delta_rule(q, k, v, use_qk_l2norm_in_kernel=True)  # nothing decays, strengths are 1
        >>> found.out.shape, found.states.shape, found.out.dtype
        (torch.Size([1, 5, 6, 16]), torch.Size([1, 6, 16, 16]), torch.float64)
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    heads = max(q.shape[2], v.shape[2])
    q, k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    like = v[..., 0]
    decay = torch.zeros_like(like) if g is None else g.to(dtype)
    if use_gate_in_kernel:
        softplus = (softplus_beta, softplus_threshold)
        decay = log_decay(decay[..., None], A_log, dt_bias, softplus=softplus)[..., 0]
    strength = torch.ones_like(like) if beta is None else beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        strength = write_strength(strength, allow_neg_eigval)

    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = slots = torch.arange(sequences, device=q.device)
    live = rows >= 0
    if state_pool is not None:
        slots, live = row_slots(state_indices, null_slot, sequences, state_pool)
    read = live if has_initial_state is None else live & has_initial_state
    begin = None
    given = initial_state if state_pool is None else state_pool
    if given is not None:
        begin = given.new_zeros(sequences, *given.shape[1:], dtype=dtype)
        begin[read] = given[slots[read]].to(dtype)
    pool = None if state_pool is None else state_pool.to(dtype, copy=True)
    checkpoints = None if state_checkpoints is None else state_checkpoints.to(dtype, copy=True)
    saved = kept_in(pool, checkpoints, checkpoint_offsets, checkpoint_every_n_tokens)
    out, states = recurrent_prefill(
        q, k, v, decay[..., None].expand_as(k), strength, initial_state=begin,
        state_indices=torch.where(live, rows, -1), cu_seqlens=cu_seqlens, scale=scale,
        l2norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first, checkpoints=saved,
        checkpoint_every=checkpoint_every_n_tokens or 0, checkpoint_rows=checkpoint_rows,
        checkpoint_offsets=checkpoint_offsets, dtype=dtype,
    )  # fmt: skip

    if pool is not None and update_state_pool:
        wanted = state_indices if output_state_indices is None else output_state_indices
        targets, kept = row_slots(wanted, null_slot, sequences, pool)
        store_live(pool, states, targets, kept & live)
    return Outcome(out, states, pool, checkpoints)
