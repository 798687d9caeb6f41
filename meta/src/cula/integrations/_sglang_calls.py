"""What SGLang 0.5.23 asks its linear-attention kernels, answered by cula: functions of tensors, without SGLang.

Each has the keywords of SGLang's own call, and takes no others: a call of a later release is a TypeError instead of a
wrong result. States are `[slots, HV, V, K]`, those of Lightning attention `[slots, H, K, V]`, of any slot stride, and
are updated in place. A row whose slot is negative, or 0, which SGLang reserves, is padding: its output is zero and no
state changes. Token rows behind the last sequence are neither read nor written. NotImplementedError says what cula
does not have, before anything changed. Nothing waits for the device. Of SGLang's arguments, these need not be read:

    layer_id, extend_prefix_lens, extend_seq_lens_cpu   sequences begin with what their slots hold, which SGLang clears
    chunk_indices, chunk_offsets                        follow from query_start_loc, which kernels read themselves
    stable_rows                                         rows of the buffer are named by intermediate_state_indices
    *_checkpoint*, track_ssm_h_batch_src                of kernels that have uses_state_checkpoints
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.delta import delta_rule_decode
from cula.integrations._engine_calls import refuse
from cula.kda import chunk_kda
from cula.lightning import (
    chunk_gated_delta_rule,
    lightning_attn_fwd_varlen,
    linear_attention_decode,
)

_CHUNK = 64  # tokens between the states that track_chunk_idx counts
_PADDING = 0


def gdn_extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, inplace_update: bool = True,
    output: Tensor | None = None, track_state: Tensor | None = None, track_chunk_idx: Tensor | None = None,
    state_checkpoint_cu_starts: Tensor | None = None, num_state_checkpoints: int = 0,
    state_checkpoint_every_n_tokens: int = 0, layer_id: int | None = None, extend_prefix_lens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Prefill of the gated delta rule over packed sequences.

    q, k `[1, L, H, K]`, not normalised; v `[1, L, HV, V]`; g, the log decay, and beta, the write strength,
    `[1, L or more, HV]`. track_state `[N, HV, V, K]` receives the state after `track_chunk_idx[n]` chunks, none where
    that is negative. output `[1, L, HV, V]` is written and returned if given. Returns `(o, None, None)`.
    """
    # A pool that SGLang has gathered for the call has a row per sequence, and none for padding.
    gathered = ssm_states.shape[0] == query_start_loc.shape[0] - 1
    snapshots = _snapshots(track_state, track_chunk_idx, ssm_states, query_start_loc)
    o, _ = chunk_gated_delta_rule(
        q, k, v, g[:, : q.shape[1]], beta[:, : q.shape[1]], state_v_first=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=query_start_loc, state_pool=ssm_states, state_indices=_slots(cache_indices, query_start_loc),
        update_state_pool=inplace_update, null_slot=None if gathered else _PADDING, out=output,
        **snapshots, impl=impl,
    )  # fmt: skip
    _hand_over(snapshots, track_state)
    return o, None, None


def kda_extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_is_raw: bool = False,
    return_intermediate_states: bool = False, is_spec_decode: bool = False, track_ssm_h_src: Tensor | None = None,
    track_state: Tensor | None = None, track_chunk_idx: Tensor | None = None, chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None, state_checkpoint_cu_starts: Tensor | None = None,
    num_state_checkpoints: int = 0, state_checkpoint_every_n_tokens: int = 0,
    state_checkpoint_indices: Tensor | None = None, track_ssm_h_batch_src: Tensor | None = None,
    layer_id: int | None = None, extend_prefix_lens: Tensor | None = None,
    extend_seq_lens_cpu: list[int] | None = None, impl: str = "auto",
) -> Tensor | tuple[Tensor, None]:  # fmt: skip
    """Prefill of KDA over packed sequences.

    q, k `[1, L, HV, K]`, v `[1, L, HV, V]`; g `[1, L or more, HV, K]` or `[.., HV * K]`, raw where there is an A_log;
    beta `[1, L or more, HV]`, logits with beta_is_raw. track_state as in `gdn_extend`. Returns o, or `(o, None)` with
    return_intermediate_states.
    """
    before_chunks = track_ssm_h_src is not None and track_ssm_h_src.numel() > 0
    refuse(
        is_spec_decode=is_spec_decode,
        return_intermediate_states=return_intermediate_states
        and before_chunks
        and track_state is None,
    )
    snapshots = _snapshots(track_state, track_chunk_idx, ssm_states, query_start_loc)
    gate, tokens = A_log is not None, q.shape[1]
    g = g[:, :tokens] if g.dim() == 4 else g[:, :tokens].unflatten(-1, (v.shape[2], k.shape[3]))
    o = chunk_kda(
        q, k, v, g, beta[:, :tokens], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=gate,
        use_beta_sigmoid_in_kernel=beta_is_raw, safe_gate=gate and lower_bound is not None,
        lower_bound=lower_bound if gate else None, A_log=A_log if gate else None,
        dt_bias=dt_bias if gate else None, state_v_first=True, cu_seqlens=query_start_loc,
        state_pool=ssm_states, initial_state_indices=_slots(cache_indices, query_start_loc), null_slot=_PADDING,
        **snapshots, impl=impl,
    )[0]  # fmt: skip
    _hand_over(snapshots, track_state)
    return (o, None) if return_intermediate_states else o


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, *,
    A_log: Tensor, dt_bias: Tensor, scale: float, ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int,
    head_v_dim: int, lower_bound: float | None = None, replayssm_d: Tensor | None = None,
    replayssm_k: Tensor | None = None, replayssm_g: Tensor | None = None, replayssm_write_pos: Tensor | None = None,
    replayssm_force_flush: Tensor | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """One token for each of B rows, of the gated delta rule or, with dt_bias of HV * K numbers, of KDA.

    mixed_qkv `[B, 2 * H * K + HV * V]`, of any row stride; a, of dt_bias.numel() numbers per row, and b, of HV, are the
    raw gates. Returns `[1, B, HV, V]`.
    """
    refuse(
        replayssm_d=replayssm_d,
        replayssm_k=replayssm_k,
        replayssm_g=replayssm_g,
        replayssm_write_pos=replayssm_write_pos,
    )
    width, head_k_dim = num_v_heads * head_v_dim, ssm_states.shape[-1]
    keys = (mixed_qkv.shape[1] - width) // 2
    q, k, v = mixed_qkv.unsqueeze(1).split((keys, keys, width), -1)
    o = delta_rule_decode(
        q.unflatten(-1, (-1, head_k_dim)), k.unflatten(-1, (-1, head_k_dim)),
        v.unflatten(-1, (num_v_heads, head_v_dim)),
        _gate(a, dt_bias.numel(), len(q)).unsqueeze(1), _gate(b, num_v_heads, len(q)).unsqueeze(1), ssm_states,
        state_indices=cache_indices.to(torch.int32), scale=scale, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, null_slot=_PADDING, impl=impl,
    )  # fmt: skip
    return o.transpose(0, 1)


def decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
    A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
    lower_bound: float | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """As `packed_decode`, with q, k `[1, B, H, K]` and v `[1, B, HV, V]` apart, and the default scale."""
    rows, heads_v = v.shape[1:3]
    o = delta_rule_decode(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
        _gate(a, dt_bias.numel(), rows).unsqueeze(1), _gate(b, heads_v, rows).unsqueeze(1), ssm_states,
        state_indices=cache_indices.to(torch.int32), A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, null_slot=_PADDING, impl=impl,
    )  # fmt: skip
    return o.transpose(0, 1)


def target_verify(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor, cache_steps: int, retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None, cache_ring: bool = False, replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None, replayssm_g: Tensor | None = None, replayssm_beta: Tensor | None = None,
    stable_rows: bool = False, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Chains of up to cache_steps (1..8) draft tokens per row; the pool is only read.

    q, k `[1, L, H, K]`, v `[1, L, HV, V]`; a, b as in `packed_decode`, for L or more tokens. The state after token t of
    row n goes to `intermediate_states_buffer[intermediate_state_indices[n], t]` `[rows, cache_steps, HV, V, K]`.
    Returns `[1, L, HV, V]`.
    """
    refuse(cache_ring=cache_ring, retrieve_parent_token=retrieve_parent_token)
    rows, steps, *state = intermediate_states_buffer.shape
    if intermediate_states_buffer.stride(0) != steps * intermediate_states_buffer.stride(1):
        raise NotImplementedError(
            "an intermediate_states_buffer with gaps between its rows is not served"
        )
    tokens = q.shape[1]
    # As null_slot, slot 0 would also be that of the first draft token in the buffer.
    state_indices = _slots(cache_indices, query_start_loc) - 1
    first = _slots(intermediate_state_indices, query_start_loc)[:, None] * steps
    return delta_rule_decode(
        q, k, v, _gate(a, dt_bias.numel(), tokens).unsqueeze(0), _gate(b, v.shape[2], tokens).unsqueeze(0),
        ssm_states[1:], state_indices=state_indices, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, commit=False, token_states=intermediate_states_buffer.view(rows * steps, *state),
        token_state_indices=first + torch.arange(cache_steps, dtype=torch.int32, device=q.device),
        cu_seqlens=query_start_loc, max_tokens=cache_steps, impl=impl,
    )  # fmt: skip


def seg_la_fwd(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, decay_scales: Tensor, meta: Any,
    caches: Tensor | None = None, cache_indices: Tensor | None = None, track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None, softmax_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Lightning attention: prefill over packed sequences, or decode if there is a token per row.

    q, k, v `[L, H, D]`; float32 is rounded to bfloat16. s `[slots, H, D, D]`; decay_scales of H numbers, >= 0. Of meta,
    which is SGLang's SegLaMeta, batch_size, q_offsets, s_offsets, s_scales (0: the sequence begins from zero) and mask
    are read. The state after `track_lens[n]` tokens, a multiple of 64, goes to slot `track_state_indices[n]` too; none
    does where the first is 0 or the second negative. Returns `[L, H, D]` in the dtype of q.
    """
    refuse(caches=caches, mask=meta.mask)
    dtype = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    short_q, short_k, short_v = (x.to(dtype) for x in (q, k, v))
    decay, tokens = decay_scales.reshape(-1), len(q)
    if tokens == meta.batch_size:
        o = linear_attention_decode(
            short_q[:, None], short_k[:, None], short_v[:, None], s, decay,
            state_indices=meta.s_offsets[:tokens].to(torch.int32), scale=softmax_scale, null_slot=_PADDING, impl=impl,
        )[:, 0]  # fmt: skip
    else:
        sequences = len(meta.q_offsets) - 1
        begins = meta.s_scales[:sequences].to(torch.bool)
        kept: dict[str, Any] = {}
        if track_lens is not None and track_state_indices is not None:
            kept = {
                "checkpoint_offsets": track_lens[:sequences],
                "checkpoint_rows": track_state_indices[:sequences],
            }
        o, _ = lightning_attn_fwd_varlen(
            short_q[None], short_k[None], short_v[None], decay, meta.q_offsets, softmax_scale, s,
            _slots(meta.s_offsets, meta.q_offsets), has_initial_state=begins, null_slot=_PADDING, **kept, impl=impl,
        )  # fmt: skip
        o = o[0]
    return o.to(q.dtype)


def prefills(q: Tensor, meta: Any) -> bool:
    """Whether a call of `seg_la_fwd` has more than a token per row."""
    return len(q) > meta.batch_size


# ---- what they share -------------------------------------------------------------------------------------------------


def _snapshots(
    track_state: Tensor | None, track_chunk_idx: Tensor | None, pool: Tensor, query_start_loc: Tensor
) -> dict[str, Any]:  # fmt: skip
    """Where a prefill keeps states for SGLang's prefix cache: in track_state, unless the pool has another dtype."""
    if track_state is None or track_chunk_idx is None:
        return {}
    kept = track_state
    if track_state.dtype != pool.dtype:
        kept = torch.empty_like(track_state, dtype=pool.dtype)
    offsets = track_chunk_idx[: query_start_loc.shape[0] - 1] * _CHUNK
    return {"state_checkpoints": kept, "checkpoint_offsets": offsets}


def _hand_over(snapshots: dict[str, Any], track_state: Tensor | None) -> None:
    """Copies the states that were kept elsewhere; rows without one stay undefined."""
    kept = snapshots.get("state_checkpoints")
    if kept is not None and track_state is not None and kept is not track_state:
        track_state.copy_(kept)


def _slots(indices: Tensor, query_start_loc: Tensor) -> Tensor:
    """The slot of every sequence, of indices that may be more."""
    return indices[: query_start_loc.shape[0] - 1].to(torch.int32)


def _gate(x: Tensor, width: int, tokens: int) -> Tensor:
    """Raw gates as `[tokens, width]`; SGLang has them with and without a dimension of 1 and one of heads."""
    return x.reshape(-1, width)[:tokens]
