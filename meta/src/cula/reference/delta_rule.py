"""The gated delta rule: KDA with one decay per key channel, and its special case with one decay per head.

Per sequence and value head, with log decay g_t (natural log, <= 0; a K-vector or one number) and write strength beta_t:

    S'_t = diag(exp(g_t)) S_{t-1}
    S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T        o_t = scale * S_t^T q_t

Within a chunk the corrections `u_i = beta_i (v_i - S'_i^T k_i)` obey a unit lower-triangular system, which one solve
turns into `u = U - W S` with S the state the chunk starts from.
Sources: Kimi Linear, arXiv 2510.26692; Gated Delta Networks, arXiv 2412.06464; DeltaNet in parallel, arXiv 2406.06484.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.reference._checkpoints import checkpoint_writer
from cula.reference._chunks import CHUNK, Chunks, chunks_of, packed_chunks
from cula.reference._common import (
    check_one_device,
    expand_heads,
    incoming_state,
    live_states,
    only_live,
    outgoing_state,
    outgoing_tokens,
    walk_tokens,
)
from cula.reference._decay import decayed_products
from cula.varlen import chunk_offsets
from cula_core.reference.common import normalized, work_dtype
from cula_core.reference.delta_decode import row_slots
from cula_core.reference.gates import log_decay, write_strength
from cula_core.reference.lightning_decode import store_live

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: tuple[float, float] | None = None,
    state: Tensor | None = None,
) -> _Inputs:
    """q (scaled), k, v, log decay `[B, T, HV, K or 1]`, beta `[B, T, HV, 1]`: HV heads each, in the computing dtype.

    Where q has more heads than v, HV stands for the number of heads of q. g, beta: None for no decay, a strength of 1.
    """
    dtype, heads = work_dtype(q, k, v, state), max(q.shape[2], v.shape[2])
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype) for x in (q, k, v))
    per_head = (*v.shape[:2], heads)
    g = v.new_zeros(per_head) if g is None else g.to(dtype)
    beta = v.new_ones(per_head) if beta is None else beta.to(dtype)
    g = g[..., None] if g.dim() == 3 else g
    if use_qk_l2norm_in_kernel:
        q, k = normalized(q), normalized(k)
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound, softplus)
    if use_beta_sigmoid_in_kernel:
        beta = write_strength(beta, allow_neg_eigval)
    q, k, v = (expand_heads(x, heads) for x in (q * scale, k, v))
    return q, k, v, g, beta[..., None]


def _step(
    state: Tensor,
    v_t: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    gv_t: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence; state `[B, HV, K, V]`, tokens `[B, HV, ...]`. gv_t: log decay per channel of V."""
    state = g_t[..., None].exp() * state
    if gv_t is not None:
        state = gv_t[..., None, :].exp() * state
    seen = (k_t[..., None] * state).sum(-2)
    state = state + k_t[..., None] * (beta_t * (v_t - seen))[..., None, :]
    return state, (q_t[..., None] * state).sum(-2)


def _walk_chunks(
    inputs: _Inputs,
    chunks: Chunks,
    initial: Tensor,
    keep_states: bool = False,
    checkpoint: Callable[[int, Tensor], None] = lambda chunk, state: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(o [B, T, HV, V], final [N, HV, K, V], state before each chunk [NC or 0, B, HV, K, V])`.

    checkpoint: told every chunk and the states `[B, HV, K, V]` after it.
    """
    q, k, v, g, beta = inputs
    batch, heads, size = v.shape[0], v.shape[2], chunks.size
    o = v.new_zeros(batch, v.shape[1] + 1, heads, v.shape[-1])
    before = [v.new_zeros(0, batch, *initial.shape[1:])]
    state, final = chunks.begin(initial)
    for group in chunks.groups(batch * heads * size * (k.shape[-1] + v.shape[-1])):
        qc, kc, vc, gc, bc = (chunks.gather(x, group) for x in (q, k, v, g, beta))
        (overlap, scores), sums = decayed_products((kc, qc), kc, gc)
        grown = sums.since_start.exp()
        # unitriangular: the solve reads the diagonal as 1 and so needs only the strictly lower part of beta * overlap
        right = bc * torch.cat([vc, grown * kc], dim=-1)
        u, w = torch.linalg.solve_triangular(
            bc * overlap, right, upper=False, unitriangular=True
        ).split([v.shape[-1], k.shape[-1]], dim=-1)
        readers = torch.cat([w, grown * qc], dim=-2)
        writers = (kc * sums.until_end.exp()).transpose(-1, -2)
        kept = sums.total.exp().transpose(-1, -2)
        outputs = []
        for i, chunk in enumerate(range(group.start, group.stop)):
            state = chunks.enter(chunk, state, initial)
            if keep_states:
                before.append(state[None])
            predicted, carried = (readers[i] @ state).split(size, dim=-2)
            correction = u[i] - predicted
            outputs.append(carried + scores[i] @ correction)
            state = kept[i] * state + writers[i] @ correction
            final = chunks.leave(chunk, state, final)
            checkpoint(chunk, state)
        o = chunks.scatter(o, torch.stack(outputs), group)
    return o[:, :-1], chunks.end(final), torch.cat(before)


def _walk_packed(
    inputs: tuple[Tensor, ...], cu_seqlens: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """`(o, final)` of packed sequences, token by token; `cu_seqlens` is not read by the host."""
    v, *others = inputs
    # Sequences lie one behind the other from token 0: as a chunk of one token, token t is the t-th.
    tokens = packed_chunks(v.shape[1], cu_seqlens, size=1)
    state, final = tokens.begin(initial)
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        state = tokens.enter(t, state, initial)
        state, o = _step(state, v[:, t], *(x[:, t] for x in others))
        final = tokens.leave(t, state, final)
        outputs.append(torch.where(tokens.valid[t], o, 0)[:, None])
    return torch.cat(outputs, dim=1), tokens.end(final)


def _recurrent(
    inputs: tuple[Tensor, ...],
    like: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Results of the recurrence over v, q, k and gates: outputs like those of `like`, states like the initial ones."""
    v, *others = inputs
    initial = incoming_state(initial_state, others[1], v, cu_seqlens, state_v_first)
    if cu_seqlens is None:
        o, final = walk_tokens(_step, tuple(others), v, initial, None)
    else:
        o, final = _walk_packed(inputs, cu_seqlens, initial)
    o = outgoing_tokens(o, like, out)
    if not output_final_state:
        return o, None
    return o, outgoing_state(final, state_v_first, initial_state)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **activation: Any,
) -> tuple[Tensor, Tensor | None]:
    """Token-by-token oracle of `chunk_kda`; it takes the same activation flags and reads `cu_seqlens` on the host.

    Example:
        >>> import torch
        >>> from cula.reference import recurrent_kda
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, 16, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> o, state = recurrent_kda(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]))
    """
    q, k, values, g, beta = _prepare(q, k, v, g, beta, scale, **activation)
    initial = incoming_state(initial_state, k, values, cu_seqlens, state_v_first)
    o, final = walk_tokens(_step, (q, k, g, beta), values, initial, cu_seqlens)
    final = outgoing_state(final, state_v_first, initial_state)
    return o.to(v.dtype), final if output_final_state else None


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` one token after another, for the few tokens of decoding; differentiable.

    Arguments and results as `chunk_kda` has them. Unlike the oracle it does not read `cu_seqlens` on the host.

    Example:
        >>> import torch
        >>> from cula.reference import fused_recurrent_kda, recurrent_kda
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, 16, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> torch.allclose(fused_recurrent_kda(q, k, v, g, beta)[0], recurrent_kda(q, k, v, g, beta)[0])
        True
    """
    q, k, values, g, beta = _prepare(
        q,
        k,
        v,
        g,
        beta,
        scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        state=initial_state,
    )
    inputs = (values, q, k, g, beta)
    return _recurrent(inputs, v, initial_state, output_final_state, state_v_first, cu_seqlens, out)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` one token after another, for the few tokens of decoding; differentiable.

    Decays per head (g), per channel of K (gk) and per channel of V (gv) multiply; those that are None decay nothing.

    Example:
        >>> import torch
        >>> from cula.reference import fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> o, _ = fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)
        >>> torch.allclose(o, recurrent_gated_delta_rule(q, k, v, g, beta)[0])
        True
    """
    q, k, values, decay, beta = _prepare(
        q,
        k,
        v,
        g,
        beta,
        scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        A_log=A_log,
        dt_bias=dt_bias,
        state=initial_state,
    )
    if gk is not None:
        decay = decay + gk.to(decay.dtype)
    of_values = () if gv is None else (gv.to(decay.dtype),)
    inputs = (values, q, k, decay, beta, *of_values)
    return _recurrent(inputs, v, initial_state, output_final_state, state_v_first, cu_seqlens, out)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **activation: Any,
) -> tuple[Tensor, Tensor | None]:
    """Token-by-token oracle of `chunk_gated_delta_rule`: the KDA recurrence with one decay per head, g `[B, T, HV]`.

    Example:
        >>> import torch
        >>> from cula.reference import recurrent_gated_delta_rule
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> recurrent_gated_delta_rule(q, k, v, g, beta)[0].shape
        torch.Size([1, 100, 2, 16])
    """
    return recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        state_v_first,
        cu_seqlens,
        **activation,
    )


def _by_chunks(
    inputs: _Inputs,
    like: Tensor,
    out: Tensor | None,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    state_pool: Tensor | None,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    update_state_pool: bool,
    null_slot: int | None,
    has_initial_state: Tensor | None,
    state_checkpoints: Tensor | None,
    checkpoint_every_n_tokens: int | None,
    checkpoint_rows: Tensor | None,
    checkpoint_offsets: Tensor | None,
    keep_states: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Outputs, final states or the pool, and with `keep_states` the state before each chunk `[NT, B, HV, K, V]`.

    Where states come from and go to is as in `cula.lightning.chunk_gated_delta_rule`.
    """
    pool = state_pool.detach() if state_pool is not None and update_state_pool else state_pool
    slots = live = None
    if pool is not None:
        sequences = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots, live = row_slots(state_indices, null_slot, sequences, pool)
        read = live if has_initial_state is None else live & has_initial_state
        initial_state = live_states(pool, slots, read)
    elif initial_state is not None and has_initial_state is not None:
        initial_state = torch.where(has_initial_state[:, None, None, None], initial_state, 0)
    initial = incoming_state(initial_state, inputs[1], inputs[2], cu_seqlens, state_v_first)
    chunks = chunks_of(like.shape[1], like.device, cu_seqlens)
    saved = (
        pool if state_checkpoints is None and checkpoint_offsets is not None else state_checkpoints
    )
    checkpoint = checkpoint_writer(
        chunks, saved, checkpoint_every_n_tokens, state_v_first, live, checkpoint_rows, checkpoint_offsets
    )  # fmt: skip
    o, final, before = _walk_chunks(inputs, chunks, initial, keep_states, checkpoint)
    if keep_states:
        before = torch.where(chunks.valid.any(-1)[:, None, None, None, None], before, 0)
    o = outgoing_tokens(o if live is None else only_live(o, live, cu_seqlens), like, out)
    final = outgoing_state(final, state_v_first, initial_state)
    if pool is None or slots is None or live is None:
        return o, final if output_final_state else None, before
    if not update_state_pool:
        final = torch.where(live[:, None, None, None], final, 0)
        return o, final if output_final_state else None, before
    if output_state_indices is not None:
        slots, kept = row_slots(output_state_indices, null_slot, len(live), pool)
        live = live & kept
    store_live(pool, final.detach(), slots, live)
    return o, state_pool, before


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    update_state_pool: bool = True,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention, 64 tokens at a time; differentiable.

    q, k `[B, T, H, K]`; v `[B, T, HV, V]`; g `[B, T, HV, K]` natural-log decay; beta `[B, T, HV]`. Packed input has
    B = 1 and cu_seqlens `[N + 1]`. initial_state `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`. scale
    defaults to `K ** -0.5`.

    use_gate_in_kernel: g is raw and goes through `log_decay` with A_log `[HV]` and dt_bias `[HV * K]`;
    lower_bound picks the form. use_beta_sigmoid_in_kernel: beta holds logits, and allow_neg_eigval doubles their
    sigmoid. use_qk_l2norm_in_kernel: q and k are normalised per head. safe_gate, disable_recompute,
    use_intracard_cp and segment_tokens promise or tune something to a kernel and change no value here. Pools and
    checkpoints are as in `cula.kda.chunk_kda`.

    Returns `(o, final_state)`: o `[B, T, HV, V]` in v's dtype, the state in the dtype of initial_state, or without one
    in fp32 (fp64 for fp64 input), or None; and
    with return_intermediate_states a third result, the state before each chunk of 64, `[B, NT, HV, K, V]` in the
    state's layout and dtype. For packed input NT is the capacity bound and surplus entries are zero, unless
    `cu_seqlens_cpu` tells the exact count.

    Example:
        >>> import torch
        >>> from cula.reference import chunk_kda, recurrent_kda
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, 16, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> torch.allclose(chunk_kda(q, k, v, g, beta)[0], recurrent_kda(q, k, v, g, beta)[0])
        True
    """
    check_one_device(cp_context)
    inputs = _prepare(
        q,
        k,
        v,
        g,
        beta,
        scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    # fmt: off
    states: dict[str, Any] = {
        "initial_state": initial_state, "output_final_state": output_final_state, "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens, "state_pool": state_pool, "state_indices": initial_state_indices,
        "output_state_indices": output_state_indices, "update_state_pool": update_state_pool, "null_slot": null_slot,
        "has_initial_state": has_initial_state, "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_rows": checkpoint_rows,
        "checkpoint_offsets": checkpoint_offsets,
    }
    # fmt: on
    o, final, before = _by_chunks(inputs, v, out, **states, keep_states=return_intermediate_states)
    if not return_intermediate_states:
        return o, final
    if cu_seqlens_cpu is not None:
        before = before[: int(chunk_offsets(cu_seqlens_cpu, CHUNK)[-1])]
    return o, final, outgoing_state(before.transpose(0, 1), state_v_first, initial_state)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
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
    use_intracard_cp: bool | str = "auto",
    operand_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, 64 tokens at a time: one decay per head, g `[B, T, HS]`; differentiable.

    q `[B, T, HQ, K]`, k `[B, T, HK, K]`, v `[B, T, HV, V]`, results `[B, T, HS, V]` with HS = max(HQ, HV), a multiple
    of HQ, HK and HV. g, beta: None for no decay and a strength of 1. Pools, checkpoints and all else are as in
    `cula.lightning.chunk_gated_delta_rule`. `cu_seqlens_cpu` and `chunk_indices` are neither needed nor read;
    `use_intracard_cp`, `operand_dtype` and `segment_tokens` change nothing here.

    Example:
        >>> import torch
        >>> from cula.reference import chunk_gated_delta_rule, recurrent_gated_delta_rule
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16, dtype=torch.float64), dim=-1)
        >>> v = torch.randn(1, 100, 2, 16, dtype=torch.float64)
        >>> g, beta = -torch.rand(1, 100, 2, dtype=torch.float64), torch.rand(1, 100, 2, dtype=torch.float64)
        >>> expected, _ = recurrent_gated_delta_rule(q, k, v, g, beta)
        >>> torch.allclose(chunk_gated_delta_rule(q, k, v, g, beta)[0], expected)
        True
    """
    check_one_device(cp_context)
    inputs = _prepare(
        q,
        k,
        v,
        g,
        beta,
        scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        A_log=A_log,
        dt_bias=dt_bias,
        softplus=(softplus_beta, softplus_threshold),
    )
    # fmt: off
    states: dict[str, Any] = {
        "initial_state": initial_state, "output_final_state": output_final_state, "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens, "state_pool": state_pool, "state_indices": state_indices,
        "output_state_indices": output_state_indices, "update_state_pool": update_state_pool, "null_slot": null_slot,
        "has_initial_state": has_initial_state, "state_checkpoints": state_checkpoints,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_rows": checkpoint_rows,
        "checkpoint_offsets": checkpoint_offsets,
    }
    # fmt: on
    return _by_chunks(inputs, v, out, **states)[:2]
