"""Lightning attention as cuLA of inclusionAI has it: `cula.lightning` there. States are `[.., V, K]`."""

from __future__ import annotations

import torch
from torch import Tensor

from cula import _check, lightning
from cula.compat._indices import int32
from cula_core import arguments

__all__ = ["lightning_attn_fwd", "lightning_attn_fwd_varlen", "linear_attention_decode"]


def lightning_attn_fwd(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """`cula.lightning.lightning_attn_fwd` with a scale of 1 and states `[B, HV, V, K]`.

    Args:
        Q, K: `[B, T, H, K]`.
        V: `[B, T, HV, V]`.
        decay: `[HV]` float32, >= 0.
        scale: factor of the output.
        initial_state: `[B, HV, V, K]`; None: zero.
        output_final_state: whether to return the final states.
        chunk_size: 16, 32 or 64, which changes nothing.

    Returns:
        `(o, final_state)`.

    Raises:
        TypeError, ValueError, RuntimeError: as our function, which has Q, K and V as q, k and v.

    Example:
        >>> import torch
        >>> from cula.compat.lightning import lightning_attn_fwd
        >>> Q, K, V = torch.randn(3, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> o, state = lightning_attn_fwd(Q, K, V, torch.tensor([0.01, 0.5]), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    if chunk_size != 64:
        _check.chunk_size(chunk_size)
    return lightning.lightning_attn_fwd(
        Q, K, V, decay, scale, initial_state, output_final_state, True
    )


def lightning_attn_fwd_varlen(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float = 1.0,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = 64,
    persistent: bool = True,
) -> tuple[Tensor, Tensor]:
    """`cula.lightning.lightning_attn_fwd_varlen` with a scale of 1 on a pool `[pool, HV, V, K]`, updated in place.

    Args:
        Q, K: `[1, T, H, K]`.
        V: `[1, T, HV, V]`.
        decay: `[HV]` float32, >= 0.
        cu_seqlens: `[N + 1]`.
        scale: factor of the output.
        state_pool: `[pool, HV, V, K]`. None: a new one of N rows of zeros, in float32.
        initial_state_indices: `[N]`, the row of every sequence; negative: padding. None: sequence n uses row n.
        chunk_size: 16, 32 or 64, which changes nothing.
        persistent: ignored.

    Returns:
        `(o, state_pool)`.

    Raises:
        TypeError, ValueError, RuntimeError: as our function, which has Q, K and V as q, k and v.

    Example:
        >>> import torch
        >>> from cula.compat.lightning import lightning_attn_fwd_varlen
        >>> Q, K, V = torch.randn(3, 1, 100, 2, 32)  # each [1, T, H, D]
        >>> cu_seqlens = torch.tensor([0, 60, 100], dtype=torch.int32)
        >>> o, pool = lightning_attn_fwd_varlen(Q, K, V, torch.tensor([0.01, 0.5]), cu_seqlens)
        >>> o.shape, pool.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([2, 2, 32, 32]))
    """
    if chunk_size != 64:
        _check.chunk_size(chunk_size)
    if state_pool is None:
        for name, x, letters in (("K", K, "[1, T, H, K]"), ("V", V, "[1, T, HV, V]")):
            arguments.four_dims(name, x, letters)
        arguments.tensor("cu_seqlens", cu_seqlens)
        sequences = max(cu_seqlens.numel() - 1, 0)
        state_pool = torch.zeros(sequences, V.shape[2], V.shape[3], K.shape[3], device=V.device)
    if initial_state_indices is not None:
        initial_state_indices = int32("initial_state_indices", initial_state_indices)
    o, _ = lightning.lightning_attn_fwd_varlen(
        Q,
        K,
        V,
        decay,
        cu_seqlens,
        scale,
        state_pool,
        initial_state_indices,
        state_v_first=True,
    )
    return o, state_pool


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    out: Tensor,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: Tensor,
    decay_scales: Tensor,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """One token of Lightning attention for each of B rows, which writes `out` and updates the pool `s`.

    Args:
        q, k, v, out: `[B, H, D]` or `[B, 1, H, D]`.
        s: the pool `[pool, H, D, D]`, V before K, also as `[pool * H, D, D]` or `[pool, H, D * D]`.
        softmax_scale: factor of the output.
        stride_q, stride_k, stride_v, stride_s, stride_o: ignored, tensors know theirs.
        s_offsets: `[B]`, the row of the pool; negative: padding, whose output is zero.
        decay_scales: `[H]` float32, >= 0.
        HEAD_DIM: D.
        K_SPLIT_DIM: D; the sum over K is not split.
        V_SPLIT_DIM: ignored.

    Raises:
        NotImplementedError: K_SPLIT_DIM is less than HEAD_DIM.
        TypeError, ValueError, RuntimeError: as `cula.lightning.linear_attention_decode`, which has s as state.

    Example:
        >>> import torch
        >>> from cula.compat.lightning import linear_attention_decode
        >>> q, k, v = torch.randn(3, 2, 4, 32)  # each [B, H, D]
        >>> s, out, rows = torch.zeros(5, 4, 32, 32), torch.empty(2, 4, 32), torch.tensor([3, 0], dtype=torch.int32)
        >>> linear_attention_decode(q, k, v, s, out, 1.0, 0, 0, 0, 0, 0, rows, torch.full((4,), 0.1), 32, 32, 32)
        >>> s.flatten(1).any(1).nonzero().flatten().tolist()
        [0, 3]
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("s", s), ("out", out)):
        arguments.tensor(name, x)
    if K_SPLIT_DIM < HEAD_DIM:
        raise NotImplementedError(f"K_SPLIT_DIM: expected HEAD_DIM = {HEAD_DIM}, got {K_SPLIT_DIM}")
    if q.dim() < 3 or q.shape[-1] != HEAD_DIM:
        arguments.value_error(
            "q", f"[B, H, D] or [B, 1, H, D] with D = HEAD_DIM = {HEAD_DIM}", list(q.shape)
        )
    q, k, v, out = (x.unsqueeze(1) if x.dim() == 3 else x for x in (q, k, v, out))
    if q.shape[1] != 1:
        arguments.value_error("q", "one token per row, [B, H, D] or [B, 1, H, D]", list(q.shape))
    heads = q.shape[2]
    if s.dim() == 3 and s.shape[1:] == (heads, HEAD_DIM * HEAD_DIM):
        s = s.unflatten(2, (HEAD_DIM, HEAD_DIM))
    elif s.dim() == 3 and s.shape[0] % heads == 0:
        s = s.unflatten(0, (-1, heads))
    lightning.linear_attention_decode(
        q,
        k,
        v,
        s,
        decay_scales,
        state_indices=int32("s_offsets", s_offsets),
        scale=softmax_scale,
        state_v_first=True,
        out=out,
    )
