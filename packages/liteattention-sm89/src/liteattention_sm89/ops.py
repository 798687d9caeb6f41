"""The torch operator and the public function. The kernel is imported when a CUDA tensor comes."""

from __future__ import annotations

import torch
from torch import Tensor

from cula_core.operators import register_fake
from cula_core.shortcuts import shortcut
from cula_core.tensors import DENSE, is_plain_cuda_call

from . import masks, reference
from .autograd import TINY
from .check import check_attention, is_aligned
from .choice import launcher
from .config import BLOCK_M, BLOCK_N
from .thresholds import effective

torch.library.define(
    "liteattention_sm89::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? read_mask, Tensor? must_do, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? direction_at, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? write_mask, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float threshold, str threshold_mode, int direction, float scale, bool causal, int block_n, "
    "bool use_int8) -> ()",
)


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, read_mask: Tensor | None, must_do: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, direction_at: Tensor | None, out: Tensor,
    lse: Tensor, write_mask: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, threshold: float,
    threshold_mode: str, direction: int, scale: float, causal: bool, block_n: int, use_int8: bool,
) -> None:  # fmt: skip
    if scale < TINY:  # the kernel takes the best score of a row from the largest product
        q, scale = (q * -1, -scale) if scale <= -TINY else (torch.zeros_like(q), 1.0)
    q, k, v = (x if is_aligned(x) else x.clone(memory_format=DENSE) for x in (q, k, v))
    target = out if is_aligned(out) else torch.empty_like(out, memory_format=DENSE)
    run = launcher("forward", q, block_n, max_seqlen_k, cu_seqlens_q is not None, use_int8)
    run(
        q, k, v, target, lse, read_mask, must_do, write_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        threshold=effective(threshold, threshold_mode, max_seqlen_k),
        direction=direction if direction_at is None else direction_at, scale=scale, causal=causal, block_n=block_n,
        int8=use_int8, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


torch.library.impl("liteattention_sm89::forward", "CUDA", _forward_cuda)
register_fake("liteattention_sm89::forward")

_forward = torch.ops.liteattention_sm89.forward.default


@shortcut
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
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N[0],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    use_int8: bool = False,
    grad_mask: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention over the listed key tiles, and the list for the next call (LiteAttention, arXiv 2511.11062).

    A query tile is block_m queries of a head, a key tile block_n keys. The listed tiles are visited in the order of
    `direction`, and all of them enter the output. A visited tile stays on the list if it is the first one, if `must_do`
    has it, or if for any row of the query tile `(tile's best score) - (best score of the tiles before) > threshold`,
    scores in log2 units. A tile that is dropped does not come back, so alternate `direction` between calls.

    Args:
        q: `[B, Sq, Hq, D]` bfloat16 or float16, D a multiple of 8 up to 256; on the CPU any D, float32 and float64 too.
            Any strides with a contiguous last dimension; address and other strides that are no multiples of 16 bytes
            cost a copy on the GPU.
        k: `[B, Sk, Hkv, D]`, Hq a multiple of Hkv; query head h reads head h // (Hq // Hkv).
        v: `[B, Sk, Hkv, DV]`, DV within the limits of D. Where they differ, the GPU reads copies with zeros behind the
            heads that are narrower.
        read_mask: the tiles to visit, in one of two forms. int32 words `[B, Hq, Mt, W]`, Mt = ceil(Sq / block_m),
            W = ceil(Nt / 32), Nt = ceil(Sk / block_n): bit n % 32 of word n // 32 lists key tile n; see `masks`. Or
            bool `[B, Hq, Mt, Nt]`, which is packed first. None: all tiles.
        threshold: log2 units, <= 0; more negative keeps more, -inf all that any row sees, 0 those that raise the best
            score of some row; +inf is allowed too and keeps the first only. None: dense attention, without masks.
        threshold_mode: what 2**threshold limits, as a share of the row's largest probability at that time. "max": what
            a dropped key holds. "length": what all dropped keys of a row hold together; tiles are then judged by
            `min(0, threshold - log2(Sk))`, Sk the keys of the call (max_seqlen_k if packed), and the threshold may be
            any number, +inf acting as 0.
        direction: 1 visits tiles in ascending order, -1 in descending order; an int32 tensor `[1]` on the device of q
            is read by the kernel, so that a captured CUDA graph can alternate.
        scale: factor of the scores; None: D ** -0.5.
        causal: key j is visible to query i if j <= i + Sk - Sq.
        must_do: tiles that stay whenever they are visited, words or bool, broadcast to the shape of their form.
        block_m: 128. block_n: 64 or 128. On the CPU any.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[N + 1]` on the device of q pack N sequences into B = 1; masks then
            have N in the place of B, and tiles are counted from the start of each sequence.
        max_seqlen_q, max_seqlen_k: the longest lengths, which fix Mt and Nt; needed with packed sequences on a GPU.
        use_int8: scores from q and k rounded to 8-bit integers: one scale per 16 queries of a head and per 64 keys,
            which are centred first; lse takes that into account. Not where a gradient is wanted.
        grad_mask: the tiles, of those visited, that get a gradient, words or bool like `must_do`. None: all, which is
            exact. Fewer are an approximation, see `mass`.
        deterministic: gradients of q without atomics, in two kernels. With atomics they may differ in the last bits
            from run to run. `torch.use_deterministic_algorithms` asks for it too.
        out: `[B, Sq, Hq, DV]`, written and returned; not where a gradient is wanted.

    Returns:
        `(out, lse, write_mask)`: out `[B, Sq, Hq, DV]` in the dtype of q; lse float32 `[B, Hq, Sq]`, packed `[Hq, Tq]`,
        natural log; write_mask, a subset of read_mask in its form, words if that is None, or None for dense attention.
        A row that sees nothing has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.
        RuntimeError: the GPU is older than compute capability 8.0.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import lite_attention, masks
        >>> q, k = torch.ones(2, 1, 256, 2, 64)  # each [B, S, H, D]: two query tiles, four key tiles
        >>> v = torch.randn(1, 256, 2, 64)
        >>> k[:, 64:] = 0.0  # the scores of all keys but the first 64 are lower by 8, in log2 units by 11.5
        >>> out, lse, mask = lite_attention(q, k, v, threshold=-10.0)  # every tile, and the list for the next call
        >>> out.shape, lse.shape, mask.shape
        (torch.Size([1, 256, 2, 64]), torch.Size([1, 2, 256]), torch.Size([1, 2, 2, 1]))
        >>> masks.unpack(mask, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 0, 0, 0]]
        >>> fewer, _, _ = lite_attention(q, k, v, mask, threshold=-10.0, direction=-1)
        >>> torch.allclose(fewer, out, atol=0.01)
        True
    """
    extent = check_attention(
        q, k, v, read_mask, threshold, threshold_mode, direction, scale, causal, must_do, block_m, block_n,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, use_int8, grad_mask, deterministic, out,
    )  # fmt: skip
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tiles = -(-extent.queries // block_m), -(-extent.keys // block_n)
    limit = 0.0 if threshold is None else float(threshold)
    mask_shape = extent.sequences, q.shape[2], tiles[0], masks.words(tiles[1])
    as_bool = False
    if read_mask is not None and read_mask.dtype == torch.bool:
        read_mask, as_bool = masks.pack(read_mask), True
    must_do, grad_mask = (_as_words(m, mask_shape, tiles[1]) for m in (must_do, grad_mask))

    def as_given(mask: Tensor | None) -> Tensor | None:
        return masks.unpack(mask, tiles[1]) if as_bool and mask is not None else mask

    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    plain = is_plain_cuda_call(q)
    on_cpu = not plain and q.device.type == "cpu"
    if on_cpu and (grad_mask is None or not wants_gradient):
        result = reference.lite_attention(
            q, k, v, read_mask, threshold=effective(limit, threshold_mode, extent.keys),
            direction=int(direction) if isinstance(direction, Tensor) else direction, scale=scale,
            causal=causal, must_do=must_do, block_m=block_m, block_n=block_n,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=extent.queries,
            max_seqlen_k=extent.keys, use_int8=use_int8,
        )  # fmt: skip
        attended = result[0] if out is None else out.copy_(result[0])
        return attended, result[1], as_given(None if threshold is None else result[2])
    width, target = v.shape[3], out
    padded = width != q.shape[3]
    if padded:
        # Kernels have one width. Zeros behind a head change neither scores nor the outputs in front of them.
        wider = max(width, q.shape[3])
        q, k, v = (torch.nn.functional.pad(x, (0, wider - x.shape[3])) for x in (q, k, v))
        out = None

    def of_values(attended: Tensor) -> Tensor:
        if not padded:
            return attended
        own = attended[..., :width]
        return own.contiguous() if target is None else target.copy_(own)

    if threshold is not None:
        if read_mask is None:
            read_mask = masks.full(extent.sequences, q.shape[2], *tiles, device=q.device)
        read_mask = _with_whole_rows(read_mask)
        if must_do is not None:
            must_do = _with_whole_rows(must_do)
    step, at = (1, direction) if isinstance(direction, Tensor) else (direction, None)
    if wants_gradient:
        if grad_mask is not None:
            grad_mask = grad_mask.clone(memory_format=DENSE)
        attended, lse, write_mask = torch.ops.liteattention_sm89.attend.default(
            q, k, v, read_mask, must_do, grad_mask, cu_seqlens_q, cu_seqlens_k, at, extent.queries, extent.keys, limit,
            threshold_mode, step, scale, causal, block_m, block_n, deterministic,
        )  # fmt: skip
        if threshold is None:
            write_mask = None
        return of_values(attended), lse if cu_seqlens_q is None else lse[0], as_given(write_mask)
    if out is None:
        out = torch.empty_like(q, memory_format=DENSE)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    write_mask = None if read_mask is None else torch.empty_like(read_mask, memory_format=DENSE)
    if q.numel() > 0 and extent.queries > 0:
        run = _forward_cuda if plain else _forward
        run(
            q, k, v, read_mask, must_do, cu_seqlens_q, cu_seqlens_k, at, out, lse, write_mask, extent.queries,
            extent.keys, limit, threshold_mode, step, scale, causal, block_n, use_int8,
        )  # fmt: skip
    elif write_mask is not None:
        write_mask.zero_()
    return of_values(out), lse if cu_seqlens_q is None else lse[0], as_given(write_mask)


def _as_words(mask: Tensor | None, shape: tuple[int, ...], tiles: int) -> Tensor | None:
    """A mask in either form that broadcasts to words of `shape`, as those. tiles: of the keys."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = masks.pack(mask.expand(*mask.shape[:-1], tiles))
    return mask.expand(shape)


def _with_whole_rows(mask: Tensor) -> Tensor:
    """The mask with the words of a row side by side."""
    return mask if mask.stride(3) == 1 else mask.clone(memory_format=DENSE)
