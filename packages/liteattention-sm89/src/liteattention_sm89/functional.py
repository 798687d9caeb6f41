"""Calls with the names, layouts and argument names of flash-attn, for code that was written for it.

With `threshold=None`, the default, they are dense attention; with a threshold the caller carries the list of tiles from
call to call, as in `lite_attention`. What flash-attn offers and these kernels do not is taken at its neutral value and
refused otherwise, so that no call is answered with something else than was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cula_core import arguments

from .check import check_number
from .config import BLOCK_N
from .ops import lite_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    read_mask: Tensor | None = None,
    threshold: float | None = None,
    threshold_mode: str = "max",
    direction: int | Tensor = 1,
    must_do: Tensor | None = None,
    block_n: int = BLOCK_N[0],
    use_int8: bool = False,
    return_softmax_lse: bool = False,
    return_mask: bool = False,
    out: Tensor | None = None,
    dropout_p: float = 0.0,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over all key tiles, or over the listed ones, in the signature of flash-attn.

    `dropout_p` is a keyword here, as in flash-attn 3: the fourth argument is the scale.

    Args:
        q: `[B, Sq, Hq, D]` bfloat16 or float16, D a multiple of 8 up to 256, last dimension contiguous; on the CPU any
            D, float32 and float64 too.
        k: `[B, Sk, Hkv, D]` in the dtype of q, Hq a multiple of Hkv; query head h reads head h // (Hq // Hkv).
        v: `[B, Sk, Hkv, DV]`; where DV is not D, the GPU reads copies with zeros behind the heads that are narrower.
        softmax_scale: factor of the scores, not 0; None: D ** -0.5.
        causal: key j is visible to query i if j <= i + Sk - Sq, as in flash-attn since 2.1.
        threshold: None: dense attention, without lists. Otherwise log2 units, as of `lite_attention`: tiles are dropped
            from the list for the next call.
        read_mask, threshold_mode, direction, must_do, block_n, use_int8: as of `lite_attention`; masks only with a
            threshold. A query tile is 128 queries.
        return_softmax_lse: return also the log-sum-exp, float32 `[B, Hq, Sq]`, natural log, -inf where a row sees
            nothing.
        return_mask: return also the list for the next call, int32 `[B, Hq, Mt, W]`; needs a threshold.
        out: `[B, Sq, Hq, DV]`, written and returned.
        dropout_p, window_size, softcap, alibi_slopes, return_attn_probs: 0, (-1, -1), 0, None and False only.
        deterministic: gradients of q without atomics, see `lite_attention`.

    Returns:
        out `[B, Sq, Hq, DV]`, or a tuple of out and what was asked for: `(out, lse)`, `(out, mask)`,
        `(out, lse, mask)`.

    Raises:
        TypeError, ValueError: an argument does not fit, or asks for what there is not; nothing was changed.
        RuntimeError: the GPU is older than compute capability 8.0.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 100, 2, 64)  # each [B, S, H, D]
        >>> out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 100]))
        >>> heads_first = (x.transpose(1, 2) for x in (q, k, v))
        >>> plain = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        >>> torch.allclose(out, plain.transpose(1, 2), atol=1e-5)
        True
    """
    return _attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal, read_mask=read_mask, threshold=threshold,
        threshold_mode=threshold_mode, direction=direction, must_do=must_do, block_n=block_n, use_int8=use_int8,
        out=out, return_softmax_lse=return_softmax_lse, return_mask=return_mask, dropout_p=dropout_p,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    read_mask: Tensor | None = None,
    threshold: float | None = None,
    threshold_mode: str = "max",
    direction: int | Tensor = 1,
    must_do: Tensor | None = None,
    block_n: int = BLOCK_N[0],
    use_int8: bool = False,
    return_softmax_lse: bool = False,
    return_mask: bool = False,
    out: Tensor | None = None,
    dropout_p: float = 0.0,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` of N sequences without padding, one behind the other.

    Args:
        q: `[Tq, Hq, D]`. k: `[Tk, Hkv, D]`. v: `[Tk, Hkv, DV]`. T is the sum of the lengths.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[N + 1]` on the device of q: sequence n begins at entry n and ends
            before entry n + 1. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: the longest lengths, ints.
        seqused_q, seqused_k: None, or `[N]` ints on the CPU that say that every token counts, beside cu_seqlens on the
            CPU. Sequences of which fewer count are not served: pack those that do.
        out: `[Tq, Hq, DV]`, written and returned.
        causal: aligned within each sequence.
        The others: as of `flash_attn_func`. Masks are `[N, Hq, Mt, W]`, with Mt and W of the longest lengths.

    Returns:
        out `[Tq, Hq, DV]`, or a tuple as of `flash_attn_func`, with lse `[Hq, Tq]` and mask `[N, Hq, Mt, W]`.

    Raises: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import flash_attn_func, flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 100, 2, 64)  # each [T, H, D]
        >>> cu_seqlens = torch.tensor([0, 60, 60, 100])  # three sequences, one of them empty
        >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 60, 60, causal=True)
        >>> last = flash_attn_func(q[None, 60:], k[None, 60:], v[None, 60:], causal=True)
        >>> out.shape, torch.allclose(out[60:], last[0], atol=1e-5)
        (torch.Size([100, 2, 64]), True)
    """
    _check_dims("q", q, "[Tq, Hq, D]")
    for name, tensor in (("k", k), ("v", v)):
        _check_dims(name, tensor, "[Tk, Hkv, D]")
    if out is not None:
        _check_dims("out", out, "[Tq, Hq, D]")
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        arguments.tensor(name, offsets)
    _check_used("seqused_q", seqused_q, cu_seqlens_q)
    _check_used("seqused_k", seqused_k, cu_seqlens_k)
    found = _attend(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        read_mask=read_mask, threshold=threshold, threshold_mode=threshold_mode, direction=direction, must_do=must_do,
        block_n=block_n, use_int8=use_int8, out=None if out is None else out.unsqueeze(0),
        return_softmax_lse=return_softmax_lse, return_mask=return_mask, dropout_p=dropout_p,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    attended, *others = found if isinstance(found, tuple) else (found,)
    attended = attended.squeeze(0) if out is None else out
    return (attended, *others) if others else attended


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` of `qkv` `[B, S, 3, H, D]`, read where it is. options: the keywords of `flash_attn_func`.

    Returns: as `flash_attn_func`. Raises: as `flash_attn_func`, ValueError for a `qkv` of another shape included.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import flash_attn_func, flash_attn_qkvpacked_func
        >>> qkv = torch.randn(1, 100, 3, 2, 64)  # [B, S, 3, H, D]
        >>> out = flash_attn_qkvpacked_func(qkv, causal=True)
        >>> out.shape, torch.equal(out, flash_attn_func(*qkv.unbind(2), causal=True))
        (torch.Size([1, 100, 2, 64]), True)
    """
    _check_dims("qkv", qkv, "[B, S, 3, H, D]")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, causal, **options)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` of q `[B, Sq, Hq, D]` and `kv` `[B, Sk, 2, Hkv, D]`, read where it is.

    options: the keywords of `flash_attn_func`. Returns: as `flash_attn_func`. Raises: as `flash_attn_func`, ValueError
    for a `kv` of another shape included.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import flash_attn_func, flash_attn_kvpacked_func
        >>> q, kv = torch.randn(1, 10, 4, 64), torch.randn(1, 100, 2, 2, 64)  # [B, Sq, Hq, D], [B, Sk, 2, Hkv, D]
        >>> out = flash_attn_kvpacked_func(q, kv)
        >>> out.shape, torch.equal(out, flash_attn_func(q, *kv.unbind(2)))
        (torch.Size([1, 10, 4, 64]), True)
    """
    _check_dims("kv", kv, "[B, Sk, 2, Hkv, D]")
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, causal, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` of `qkv` `[T, 3, H, D]`, read where it is, whose queries and keys have the same lengths.

    cu_seqlens: `[N + 1]`. max_seqlen: the longest length. options: the keywords of `flash_attn_varlen_func`.

    Returns: as `flash_attn_varlen_func`. Raises: as that, ValueError for a `qkv` of another shape included.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
        >>> qkv, cu_seqlens = torch.randn(100, 3, 2, 64), torch.tensor([0, 60, 100])  # [T, 3, H, D], two sequences
        >>> out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 60)
        >>> same = flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, 60, 60)
        >>> out.shape, torch.equal(out, same)
        (torch.Size([100, 2, 64]), True)
    """
    _check_dims("qkv", qkv, "[T, 3, H, D]")
    arguments.tensor("cu_seqlens", cu_seqlens)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale, causal, **options
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, threshold: float | None, return_softmax_lse: bool,
    return_mask: bool, dropout_p: float, window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, return_attn_probs: bool, **more: Any,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The call of `lite_attention` behind every function of this module, and what of its results was asked for."""
    for name, flag in (
        ("return_softmax_lse", return_softmax_lse),
        ("return_mask", return_mask),
        ("return_attn_probs", return_attn_probs),
    ):
        if flag is not True and flag is not False:
            arguments.type_error(name, "a bool", type(flag).__name__)
    if return_attn_probs:
        arguments.value_error(
            "return_attn_probs", "False: return_softmax_lse=True gives the log-sum-exp", True
        )
    if return_mask and threshold is None:
        arguments.value_error(
            "return_mask", "False where threshold is None, which is dense attention", True
        )
    for name, number, what in (
        ("dropout_p", dropout_p, "dropout"),
        ("softcap", softcap, "soft cap"),
    ):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            arguments.type_error(name, "a number", type(number).__name__)
        if number != 0:
            arguments.value_error(name, f"0.0, there is no {what}", number)
    if not isinstance(window_size, (tuple, list)):
        arguments.type_error("window_size", "two ints", type(window_size).__name__)
    if tuple(window_size) != (-1, -1):
        arguments.value_error("window_size", "(-1, -1), there is no window but causal", window_size)
    if alibi_slopes is not None:
        arguments.value_error("alibi_slopes", "None, there is no bias", type(alibi_slopes).__name__)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
        # 0 would be the dropout_p of a call in the order of flash-attn 2.
        if softmax_scale == 0 or not -math.inf < softmax_scale < math.inf:
            told = "a finite number, not 0 (dropout_p is a keyword)"
            arguments.value_error("softmax_scale", told, softmax_scale)
    attended, lse, mask = lite_attention(
        q, k, v, scale=softmax_scale, threshold=threshold, deterministic=deterministic, **more
    )
    found = [attended]
    if return_softmax_lse:
        found.append(lse)
    if return_mask:
        assert mask is not None
        found.append(mask)
    return tuple(found) if len(found) > 1 else attended


def _check_used(name: str, used: Tensor | None, offsets: Tensor) -> None:
    """Whether every token of the sequences between the offsets counts, as far as that can be read."""
    if used is None:
        return
    arguments.tensor(name, used)
    told = "None or the lengths of cu_seqlens, both on the CPU: every token of a sequence counts"
    if not (arguments.is_readable(used) and arguments.is_readable(offsets)):
        arguments.value_error(name, told, f"tensors on {used.device} and {offsets.device}")
    if used.tolist() != offsets.diff().tolist():
        arguments.value_error(name, told, used.tolist())


def _check_dims(name: str, tensor: Tensor, shape: str) -> None:
    """Whether the tensor has the dimensions of the shape, and those that are numbers there."""
    arguments.tensor(name, tensor)
    wanted = shape.strip("[]").split(", ")
    fits = tensor.dim() == len(wanted)
    if not fits or any(n.isdigit() and size != int(n) for n, size in zip(wanted, tensor.shape)):
        arguments.value_error(name, shape, list(tensor.shape))
