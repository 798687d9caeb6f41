"""Skip-list softmax attention (LiteAttention, arXiv 2511.11062).

`lite_attention` is the functional form: the caller carries the mask of key tiles from one call to the next. The modules
`LiteAttention` and `SeqParallelLiteAttention`, which carry it themselves, and `LiteAttentionRegistry` are those of the
kernel package, found here where that is installed.
"""

from __future__ import annotations

from operator import index
from typing import Any

from torch import Tensor

from cula import _check
from cula._installed import how_to_install
from cula._registry import implementations, resolve

__all__ = ["lite_attention"]

_CLASSES = ("LiteAttention", "SeqParallelLiteAttention", "LiteAttentionRegistry")


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
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
    threshold: float = -10.0,
    threshold_mode: str = "max",
    direction: int = 1,
    scale: float | None = None,
    must_do: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Non-causal attention over the listed key tiles, and the list for the next call.

    A query tile is `block_m` queries of a head, a key tile `block_n` keys. The listed tiles are visited in the order of
    `direction`; all of them enter the output. A visited tile stays on the list if it is the first one, if `must_do`
    says so, or if for any of its rows `(tile's best score) - (best score of the tiles before) > threshold`, scores in
    log2 units. A tile that is dropped does not come back, so alternate `direction` between calls.

    Args:
        q: `[B, Sq, Hq, D]`, bfloat16, float16, float32 or float64; last dimension contiguous.
        k: `[B, Sk, Hkv, D]`, Hq a multiple of Hkv; query head h reads key head `h // (Hq // Hkv)`.
        v: `[B, Sk, Hkv, DV]`.
        read_mask: bool `[B, Hq, ceil(Sq / block_m), ceil(Sk / block_n)]`, the tiles to visit. None: all.
        threshold: log2 units, at most 0; more negative keeps more, -inf everything. +inf keeps the first tile only.
        threshold_mode: what 2**threshold limits, as a share of the row's largest probability at that time. "max": what
            a dropped key holds. "length": what all dropped keys of a row hold together; tiles are then judged by
            `min(0, threshold - log2(Sk))`, and the threshold may be any number, +inf acting as 0.
        direction: 1 visits tiles in ascending order, -1 in descending order.
        scale: factor of the scores, finite; None: `D ** -0.5`.
        must_do: bool, broadcastable to `read_mask`: tiles that stay whenever they are visited. None: none.
        block_m, block_n: tile sizes in tokens.
        impl: "auto" or the name of an implementation; see `cula.explain`.

    Returns:
        `(out, lse, write_mask)`: out `[B, Sq, Hq, DV]` in the dtype of q; lse `[B, Hq, Sq]`, the natural log of the sum
        of exponentials, float32 (float64 for float64); write_mask, a subset of read_mask. A query tile that lists
        nothing gives 0, -inf and an empty row.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RuntimeError: the implementation asked for cannot serve; the message says why.
    """
    requires_grad = _check.requires_grad(q, k, v)
    _check.lite_attention(
        q,
        k,
        v,
        read_mask,
        threshold=threshold,
        threshold_mode=threshold_mode,
        direction=direction,
        scale=scale,
        must_do=must_do,
        block_m=block_m,
        block_n=block_n,
    )
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
    return run(
        q,
        k,
        v,
        read_mask,
        threshold=threshold,
        threshold_mode=threshold_mode,
        direction=direction,
        scale=scale,
        must_do=must_do,
        block_m=block_m,
        block_n=block_n,
    )
