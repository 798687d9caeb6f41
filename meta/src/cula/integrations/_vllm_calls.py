"""Functions of vLLM 0.33.0 by cula: the names, parameters and results of vLLM's, on tensors as vLLM builds them.

Every one has `impl` besides, and raises before it changes anything where it does not serve a call. Pools of states are
`[blocks, HV, V, K]`, or `[blocks, H, K, V]` for Lightning attention. Block 0 is padding, and for Lightning a negative
index. Where vLLM leaves the output of padding unwritten, it is zero here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.integrations._engine_calls import decode_packed, refuse, split_qkv

_NULL_BLOCK = 0
_HALF = (torch.bfloat16, torch.float16)

# ---- gated delta rule ------------------------------------------------------------------------------------------------


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
    cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True, core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None, *, impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Prefill, as the methods `forward_*` of `ChunkGatedDeltaRule`; the schedule of chunks is not needed."""
    refuse(core_attn_out=core_attn_out, aiter_prefill_metadata=aiter_prefill_metadata)
    return fi_chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, impl=impl
    )  # fmt: skip


def fi_chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
    cu_seqlens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = True, state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None, checkpoint_every_n_tokens: int = 0, use_cp: str | bool = "auto", *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Prefill with states on the way: the i-th of sequence s goes to row `checkpoint_cu_starts[s] + i`."""
    from cula.lightning import chunk_gated_delta_rule as prefill

    kept: dict[str, Any] = {}
    if state_checkpoints is not None and checkpoint_cu_starts is not None:
        initial_state = initial_state.to(state_checkpoints.dtype)
        kept = {
            "state_checkpoints": state_checkpoints, "checkpoint_rows": checkpoint_cu_starts[:-1],
            "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        }  # fmt: skip
    return prefill(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_intracard_cp=use_cp, state_v_first=True, impl=impl, **kept,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False, *, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode of one token a row."""
    from cula.delta import delta_rule_decode

    q, k, v = (x.unsqueeze(1) for x in split_qkv(mixed_qkv, *_sizes(initial_state)))
    delta_rule_decode(
        q, k, v, a.unsqueeze(1), b.unsqueeze(1), initial_state, state_indices=ssm_state_indices, scale=scale,
        A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, null_slot=_NULL_BLOCK, out=out,
        impl=impl,
    )  # fmt: skip
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: float = 1.0,
    threshold: float = 20.0, scale: float | None = None, initial_state: Tensor | None = None,
    inplace_final_state: bool = True, cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, is_kda: bool = False, *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode of packed rows: one token each, or draft tokens with a slot each. `beta` is the softplus's."""
    refuse(is_kda=is_kda, inplace_final_state=not inplace_final_state)
    if initial_state is None or cu_seqlens is None or ssm_state_indices is None:
        raise NotImplementedError("a call without pool, slots or cu_seqlens is not served")
    o = decode_packed(
        q, k, v, a.unsqueeze(0), b.unsqueeze(0), initial_state, ssm_state_indices, cu_seqlens, num_accepted_tokens,
        A_log=A_log, dt_bias=dt_bias, softplus_beta=beta, softplus_threshold=threshold, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, null_slot=_NULL_BLOCK, impl=impl,
    )  # fmt: skip
    return o, initial_state


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state_indices: Tensor, cu_seqlens: Tensor,
    num_accepted_tokens: Tensor, state: Tensor, output_gate: Tensor, norm_weight: Tensor, out: Tensor | None = None,
    scale: float = 128**-0.5, norm_eps: float = 1e-5, output_gate_activation: str = "silu", *, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Decode of draft tokens with a slot each, and the gated RMSNorm behind it."""
    from cula.delta import GatedNorm

    out = torch.empty_like(output_gate) if out is None else out
    q, k, v = (x.unsqueeze(0) for x in split_qkv(mixed_qkv, *_sizes(state)))
    decode_packed(
        q, k, v, a.unsqueeze(0), b.unsqueeze(0), state, state_indices, cu_seqlens, num_accepted_tokens,
        A_log=A_log, dt_bias=dt_bias, scale=scale, null_slot=_NULL_BLOCK, out=out.unsqueeze(0),
        norm=GatedNorm(output_gate.unsqueeze(0), norm_weight, norm_eps, output_gate_activation), impl=impl,
    )  # fmt: skip
    return out


def _sizes(state: Tensor) -> tuple[int, int, int]:
    """HV, K and V of a pool `[blocks, HV, V, K]`."""
    if state.dim() != 4:
        raise ValueError(
            f"initial_state: expected [blocks, HV, V, K], got shape {list(state.shape)}"
        )
    return state.shape[1], state.shape[3], state.shape[2]


# ---- KDA -------------------------------------------------------------------------------------------------------------


def chunk_kda_with_fused_gate(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, g_bias: Tensor | None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    lower_bound: float | None = None, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    out: Tensor | None = None, *, impl: str = "auto", **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Prefill from the raw gate and the logits of beta."""
    from cula.kda import chunk_kda

    refuse(**kwargs)
    return chunk_kda(
        q, k, v, raw_g, raw_beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=lower_bound is not None,
        lower_bound=lower_bound, state_v_first=True, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=g_bias, out=out,
        impl=impl,
    )[:2]  # fmt: skip


def _flashkda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float,
    initial_state: Tensor, cu_seqlens: Tensor, out: Tensor, final_state: Tensor, workspace: Tensor,
    checkpoint_state: Tensor | None = None, checkpoint_offsets: Tensor | None = None, *, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill into buffers of the caller, with norm and gate inside."""
    refuse(checkpoint_state=checkpoint_state, checkpoint_offsets=checkpoint_offsets)
    if final_state.shape != initial_state.shape:
        expected = f"the shape of initial_state, {list(initial_state.shape)}"
        raise ValueError(f"final_state: expected {expected}, got {list(final_state.shape)}")
    _, final = chunk_kda_with_fused_gate(
        q, k, v, g, beta, A_log, dt_bias, None, initial_state, True, lower_bound, True, cu_seqlens, out, impl=impl
    )  # fmt: skip
    assert final is not None
    return out, final_state.copy_(final)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor | None,
    lower_bound: float | None, initial_state: Tensor, cu_seqlens: Tensor, ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None, out: Tensor | None = None, fuse_gate: bool | None = None, *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode of packed rows: one token each, or draft tokens with a slot each. fuse_gate changes no result."""
    o = decode_packed(
        q, k, v, raw_g, raw_beta, initial_state, ssm_state_indices, cu_seqlens, num_accepted_tokens, A_log=A_log,
        dt_bias=dt_bias, lower_bound=lower_bound, null_slot=_NULL_BLOCK, out=out, impl=impl,
    )  # fmt: skip
    return o, initial_state


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    initial_state: Tensor, state_indices: Tensor, scale: float | None = None, out: Tensor | None = None, *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode of one token a row."""
    from cula.delta import delta_rule_decode

    q, k, v = (x.unsqueeze(1) for x in split_qkv(mixed_qkv, *_sizes(initial_state)))
    o = delta_rule_decode(
        q, k, v, raw_g.transpose(0, 1), raw_beta.transpose(0, 1), initial_state, state_indices=state_indices,
        scale=scale, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, null_slot=_NULL_BLOCK,
        out=None if out is None else out.transpose(0, 1), impl=impl,
    )  # fmt: skip
    return o.transpose(0, 1) if out is None else out, initial_state


# ---- Lightning attention ---------------------------------------------------------------------------------------------


def linear_attention_prefill_and_mix(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any,
    slope_rate: Tensor, block_size: int, decode_fn: Callable[..., Tensor], prefix_fn: Callable[..., Tensor],
    layer_idx: int | None = None, *, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Prefill of all sequences behind the decodes, which decode_fn computes; rows `[L, H * D]`, decodes first.

    Takes the place of `prefix_fn`, one sequence at a time. q is scaled already. What is float32 beside a 16-bit
    kv_cache is rounded to its dtype.
    """
    from cula.lightning import lightning_attn_fwd_varlen

    first, decodes = attn_metadata.num_decode_tokens, attn_metadata.num_decodes
    bounds = (
        attn_metadata.query_start_loc[decodes : decodes + attn_metadata.num_prefills + 1] - first
    )
    rows = getattr(attn_metadata, "state_indices_tensor_p", None)
    rows = state_indices_tensor[decodes:] if rows is None else rows
    new_q, new_k, new_v = (_rounded(x[first:], kv_cache).unsqueeze(0) for x in (q, k, v))
    o, _ = lightning_attn_fwd_varlen(
        new_q, new_k, new_v, slope_rate.flatten(), bounds, 1.0, kv_cache, rows[: bounds.shape[0] - 1], impl=impl
    )  # fmt: skip
    prefilled = o[0].flatten(1).to(q.dtype)
    if first == 0:
        return prefilled
    decoded = decode_fn(q, k, v, kv_cache, state_indices_tensor, attn_metadata)
    return torch.cat((decoded, prefilled))


def linear_attention_decode(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, slope_rate: Tensor, state_indices_tensor: Tensor,
    q_start: int = 0, q_end: int | None = None, slot_start: int = 0, slot_end: int | None = None,
    block_size: int = 32, *, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Decode of one token a row; rows `[B, H * D]`. Scaling and dtypes as in `linear_attention_prefill_and_mix`."""
    from cula.lightning import linear_attention_decode as decode

    dtype = q.dtype
    q, k, v = (_rounded(x[q_start:q_end], kv_cache).unsqueeze(1) for x in (q, k, v))
    o = decode(
        q, k, v, kv_cache, slope_rate.flatten(), state_indices=state_indices_tensor[slot_start:slot_end], scale=1.0,
        impl=impl,
    )  # fmt: skip
    return o.flatten(1).to(dtype)


def _rounded(x: Tensor, cache: Tensor) -> Tensor:
    return x.to(cache.dtype) if x.dtype == torch.float32 and cache.dtype in _HALF else x
