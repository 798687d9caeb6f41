"""Linear attention with one decay per head: simple gated linear attention, and Lightning as its constant-decay case.

Per sequence and head, with log decay g_t (natural log, <= 0):

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

Sources: Gated Linear Attention, arXiv 2312.06635; Lightning Attention-2, arXiv 2401.04658.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.reference._checkpoints import checkpoint_writer
from cula.reference._chunks import chunks_of
from cula.reference._common import (
    check_one_device,
    expand_heads,
    incoming_state,
    outgoing_state,
    outgoing_tokens,
    walk_tokens,
)
from cula.reference._decay import decayed_products
from cula_core.reference.common import normalized, work_dtype


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    normalise: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (scaled), k, v and the log decay `[B, T, HV, 1]`, all with HV heads in the computing dtype."""
    dtype, heads = work_dtype(q, k, v), v.shape[2]
    q, k = q.to(dtype), k.to(dtype)
    if normalise:
        q, k = normalized(q), normalized(k)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    decay = torch.zeros(*v.shape[:3], 1, dtype=dtype, device=v.device)
    if g is not None:
        decay = decay + g.to(dtype)[..., None]
    if g_gamma is not None:
        decay = decay + g_gamma.to(dtype)[:, None]
    return (
        expand_heads(q * scale, heads),
        expand_heads(k, heads),
        v.to(dtype),
        decay,
    )


def recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Token-by-token oracle of `chunk_simple_gla`; same arguments, but it reads `cu_seqlens` on the host.

    Example:
        >>> import torch
        >>> from cula.reference import recurrent_simple_gla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16, dtype=torch.float64)  # each [B, T, H, D]
        >>> g = -torch.rand(1, 100, 2, dtype=torch.float64)
        >>> o, state = recurrent_simple_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]))
    """
    rows, cols, values, decay = _prepare(q, k, v, g, g_gamma, scale)
    initial = incoming_state(initial_state, cols, values, cu_seqlens, state_v_first)

    def step(
        state: Tensor, v_t: Tensor, q_t: Tensor, k_t: Tensor, g_t: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = g_t[..., None].exp() * state + k_t[..., None] * v_t[..., None, :]
        return state, (q_t[..., None] * state).sum(-2)

    o, final = walk_tokens(step, (rows, cols, decay), values, initial, cu_seqlens)
    final = outgoing_state(final, state_v_first, initial_state)
    return o.to(v.dtype), final if output_final_state else None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    exact_state: bool = False,
    state_checkpoints: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    segment_tokens: int | None = None,
    cp_context: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple gated linear attention, 64 tokens at a time; differentiable.

    q, k `[B, T, H, K]`; v `[B, T, HV, V]`; g `[B, T, HV]` and g_gamma `[HV]` are natural-log decays, added when both
    are given, no decay when neither is. Packed input has B = 1 and cu_seqlens `[N + 1]`; `cu_seqlens_cpu` is neither
    needed nor read. initial_state `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`. scale defaults to
    `K ** -0.5`. use_qk_l2norm_in_kernel: q and k are normalised per head. state_checkpoints
    `[B, T // n, HV, K, V]` receives the states after every n = checkpoint_every_n_tokens tokens, without gradients.
    exact_state, num_splits and segment_tokens have no effect.

    Returns `(o, final_state)`: o `[B, T, HV, V]` in v's dtype, the state in the dtype of initial_state, or without
    one in fp32 (fp64 for fp64 input), or None.

    Example:
        >>> import torch
        >>> from cula.reference import chunk_simple_gla, recurrent_simple_gla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16, dtype=torch.float64)  # each [B, T, H, D]
        >>> g = -torch.rand(1, 100, 2, dtype=torch.float64)
        >>> torch.allclose(chunk_simple_gla(q, k, v, g)[0], recurrent_simple_gla(q, k, v, g)[0])
        True
    """
    check_one_device(cp_context)
    o, final = chunked_simple_gla(
        q,
        k,
        v,
        g,
        g_gamma,
        scale,
        initial_state,
        state_v_first,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        state_checkpoints,
        checkpoint_every_n_tokens,
    )
    return outgoing_tokens(o, v, out), final if output_final_state else None


def chunked_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    normalise: bool,
    checkpoints: Tensor | None,
    every: int | None,
    live: Tensor | None = None,
    rows: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output of `chunk_simple_gla` in the computing dtype, and its final state.

    Checkpoints, which only `live` sequences write, have the rows and offsets of `checkpoint_writer`.
    """
    queries, keys, values, decay = _prepare(q, k, v, g, g_gamma, scale, normalise)
    initial = incoming_state(initial_state, keys, values, cu_seqlens, state_v_first)
    chunks = chunks_of(v.shape[1], v.device, cu_seqlens)
    checkpoint = checkpoint_writer(chunks, checkpoints, every, state_v_first, live, rows, offsets)
    batch, heads, head_dim = v.shape[0], v.shape[2], k.shape[-1] + v.shape[-1]

    o = values.new_zeros(batch, v.shape[1] + 1, heads, v.shape[-1])
    state, final = chunks.begin(initial)
    for group in chunks.groups(batch * heads * chunks.size * head_dim):
        qc, kc, vc, gc = (chunks.gather(x, group) for x in (queries, keys, values, decay))
        (scores,), sums = decayed_products((qc,), kc, gc)
        written = (kc * sums.until_end.exp()).transpose(-1, -2) @ vc
        kept = sums.total.exp()
        entering = []
        for i, chunk in enumerate(range(group.start, group.stop)):
            state = chunks.enter(chunk, state, initial)
            entering.append(state)
            state = kept[i] * state + written[i]
            final = chunks.leave(chunk, state, final)
            checkpoint(chunk, state)
        read = (qc * sums.since_start.exp()) @ torch.stack(entering)
        o = chunks.scatter(o, read + scores @ vc, group)

    return o[:, :-1], outgoing_state(chunks.end(final), state_v_first, initial_state)
