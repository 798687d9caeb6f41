"""Skip-list softmax attention (LiteAttention, arXiv 2511.11062).

`lite_attention` is the functional form: the caller carries the mask of key tiles from one call to the next. The modules
`LiteAttention`, which carries it itself, and `LiteAttentionRegistry` are those of the kernel package, found here where
that is installed, and `SeqParallelLiteAttention` is its class with a process group added.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from cula import _check, _check_lite
from cula._installed import how_to_install
from cula._registry import implementations, resolve, to_be_checked

__all__ = ["lite_attention"]

_CLASSES = ("LiteAttention", "LiteAttentionRegistry")


def __getattr__(name: str) -> Any:
    if name == "SeqParallelLiteAttention":
        from cula.distributed.lite import SeqParallelLiteAttention

        return SeqParallelLiteAttention
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return of_the_package(name)


def of_the_package(name: str) -> Any:
    """What the kernel package calls `name`. ImportError, with what to install, where there is none."""
    package = next((i for i in implementations("lite.attention") if i.kernel), None)
    if package is None:
        raise ImportError(f"cula.lite.{name} comes with a kernel: {how_to_install('cula[sm89]')}")
    return package.load(name)


def lite_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None = None,
    *,
    threshold: float | None = -10.0,
    threshold_mode: str = "max",
    direction: int | Tensor = 1,
    scale: float | None = None,
    causal: bool = False,
    must_do: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    use_int8: bool = False,
    grad_mask: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention over the listed key tiles, and the list for the next call.

    A query tile is `block_m` queries of a head, a key tile `block_n` keys. The listed tiles are visited in the order of
    `direction`; all of them enter the output. A visited tile stays on the list if it is the first one, if `must_do`
    says so, or if for any of its rows `(tile's best score) - (best score of the tiles before) > threshold`, scores in
    log2 units. A tile that is dropped does not come back, so alternate `direction` between calls.

    Where q is float32 and autocast is on, q, k and v are cast to its dtype.

    The function of the kernel package, `liteattention_sm89.lite_attention`, has the same arguments but `impl`.

    Args:
        q: `[B, Sq, Hq, D]`, last dimension contiguous. Kernels serve bfloat16 and float16 with D a multiple of 8 up to
            256; the reference also float32, float64 and any D.
        k: `[B, Sk, Hkv, D]`, Hq a multiple of Hkv; query head h reads key head `h // (Hq // Hkv)`.
        v: `[B, Sk, Hkv, DV]`. Kernels have the limits of D for it, and where they differ read copies with zeros behind
            the heads that are narrower.
        read_mask: the tiles to visit, in one of two forms. bool `[B, Hq, Mt, Nt]` with Mt = ceil(Sq / block_m) and
            Nt = ceil(Sk / block_n), or int32 words `[B, Hq, Mt, W]` with W = ceil(Nt / 32): bit n % 32 of word n // 32
            lists tile n. Kernels read words; bool is converted before and after. None: all tiles.
        threshold: log2 units, at most 0; more negative keeps more, -inf everything. +inf keeps the first tile only.
            None: dense attention, without masks.
        threshold_mode: what 2**threshold limits, as a share of the row's largest probability at that time. "max": what
            a dropped key holds. "length": what all dropped keys of a row hold together; tiles are then judged by
            `min(0, threshold - log2(Sk))`, Sk being max_seqlen_k for packed sequences, and the threshold may be any
            number, +inf acting as 0.
        direction: 1 visits tiles in ascending order, -1 in descending order. An int32 tensor `[1]` on the device of q
            is read when the kernel runs, so that a captured CUDA graph can alternate.
        scale: factor of the scores, finite; None: `D ** -0.5`.
        causal: key j is visible to query i if j <= i + Sk - Sq.
        must_do: tiles that stay whenever they are visited; bool or words, broadcastable to that form of `read_mask`.
        block_m, block_n: tile sizes in tokens; kernels serve 128, and 64 or 128.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[N + 1]` on the device of q: N sequences, one behind the other in
            B = 1. Masks have N in the place of B, and tiles are counted from the start of each sequence.
        max_seqlen_q, max_seqlen_k: the longest lengths, which fix Mt and Nt; needed for offsets on a GPU.
        use_int8: scores from q and k rounded to 8-bit integers, with one scale per 16 queries and per 64 keys. Kernels
            only, and not where a gradient is wanted.
        grad_mask: the tiles, of those visited, that get a gradient; in the forms of `must_do`. Kernels only. None: all,
            which is exact.
        deterministic: gradients of q without atomics, the same from run to run.
        out: `[B, Sq, Hq, DV]`, written and returned; not where a gradient is wanted.
        impl: "auto" or the name of an implementation; see `cula.explain`.

    Returns:
        `(out, lse, write_mask)`: out `[B, Sq, Hq, DV]` in the dtype of q; lse `[B, Hq, Sq]`, packed `[Hq, Sq]`, the
        natural log of the sum of exponentials, float32 (float64 for float64); write_mask, a subset of read_mask in its
        form, words if that is None, or None for dense attention. A row that sees nothing gives 0 and -inf.

    Raises:
        TypeError, ValueError: an argument does not fit, or the reference serves and does not have what is asked for.
        RuntimeError: the implementation asked for cannot serve; the message says why.

    Example:
        >>> import torch
        >>> from cula.lite import lite_attention
        >>> q, k, v = torch.randn(3, 1, 300, 2, 32)  # each [B, S, H, D]
        >>> out, lse, mask = lite_attention(q, k, v, threshold=-6.0)  # every tile, and the list for the next call
        >>> out, lse, fewer = lite_attention(q, k, v, mask, threshold=-6.0, direction=-1)
        >>> out.shape, mask.shape, (fewer & ~mask).any().item()  # a list only shrinks
        (torch.Size([1, 300, 2, 32]), torch.Size([1, 2, 3, 1]), False)
    """
    requires_grad = _check.requires_grad(q, k, v)
    options: dict[str, Any] = {
        "threshold": threshold,
        "threshold_mode": threshold_mode,
        "direction": direction,
        "scale": scale,
        "causal": causal,
        "must_do": must_do,
        "block_m": block_m,
        "block_n": block_n,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "use_int8": use_int8,
        "grad_mask": grad_mask,
        "deterministic": deterministic,
        "out": out,
    }
    _check_lite.operands(q, v)
    if q.dtype is torch.float32:
        q, k, v = _check.cast_by_autocast(q, k, v)
    run = resolve(
        "lite_attention",
        impl,
        q.device,
        q.dtype,
        index(q.shape[3]),
        index(v.shape[3]),
        requires_grad,
        None,
        block_m,
        block_n,
        must_do is not None,
    )
    if to_be_checked(run):
        _check_lite.lite_attention(q, k, v, read_mask, **options, requires_grad=requires_grad)
    return run(q, k, v, read_mask, **options)
