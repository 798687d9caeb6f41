"""Finds the kernels of a call, and launches them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.constants import LOG2_E
from cula_core.dtypes import dtype_name
from cula_core.once import once
from liteattention_sm89 import masks

from .config import (
    BLOCK_M,
    CLASSES,
    KEYS_ORDERED_FROM,
    NUMBERS,
    ORDERED_FROM,
    STEP,
    UNIT,
    BackwardConfig,
    Config,
    ConvertConfig,
    ForwardConfig,
    OrderConfig,
    QueriesConfig,
    SumsConfig,
)

ARCH = "sm_90a"


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: Config) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride."""
    return kernel(unit(config))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    read: Tensor | None,
    must_do: Tensor | None,
    write: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    *,
    threshold: float,
    direction: int | Tensor,
    scale: float,
    causal: bool,
    block_n: int,
    int8: bool = False,
    max_seqlen_k: int | None = None,
    kernels: Callable[[Config], Callable[..., None]] = compile,
    multiprocessors: int | None = None,
    ordered_from: int = ORDERED_FROM,
) -> None:
    """Launches one call on torch's current stream; arguments are those of `liteattention_sm89`, checked, scale > 0.

    lse [B, Hq, Sq]. What `_spec.supports` refuses does not come here: int8. The kernels, their number of
    multiprocessors, and the number of query tiles from which on long lists come first, are for tests.
    """
    assert not int8
    on_device = isinstance(direction, Tensor)
    packed, batch = _packed(cu_seqlens_q, q)
    longest = q.shape[1] if packed is None else max_seqlen_q
    tiles = batch * q.shape[2] * -(-longest // BLOCK_M)
    ordered = read is not None and tiles >= ordered_from
    config = ForwardConfig(
        dtype_name(q.dtype), q.shape[3], causal, read is not None, block_n, must_do is not None, on_device, ordered,
        packed,
    )  # fmt: skip
    count = multiprocessors or tensors.multiprocessors(q.device)
    scale_log2 = scale * LOG2_E
    starts = cu_seqlens_q, cu_seqlens_k
    keys = k.shape[1] if packed is None or max_seqlen_k is None else max_seqlen_k
    order = OrderConfig(causal, block_n, packed=packed) if ordered else None
    work = _work(kernels, order, tiles, q.device, read, *starts, longest, keys, 1)
    kernels(config)(
        q, k, v, out, lse, read, must_do, write, *starts, direction if on_device else None, work, scale_log2,
        threshold / scale_log2, 1 if on_device else direction, None if packed is None else longest, min(count, tiles),
    )  # fmt: skip


def _packed(starts: Tensor | None, q: Tensor) -> tuple[str | None, int]:
    """Returns the dtype of cu_seqlens, and the number of sequences."""
    if starts is None:
        return None, q.shape[0]
    return dtype_name(starts.dtype), starts.shape[0] - 1


def _work(
    kernels: Callable[[Config], Callable[..., None]],
    order: OrderConfig | None,
    tiles: int,
    device: torch.device,
    mask: Tensor | None,
    *facts: Tensor | int | None,
) -> Tensor:
    """Returns what CTAs draw from: a counter at zero, and where there is an order the tiles in it.

    facts: what `LiteOrder` takes beside the mask and the memory.
    """
    words = 1 if order is None else NUMBERS + tiles + CLASSES * -(-tiles // 32)
    work = torch.zeros(words, dtype=torch.int32, device=device)
    if order is not None:
        kernels(order)(mask, work, *facts)
    return work


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    causal: bool,
    block_n: int,
    deterministic: bool,
    kernels: Callable[[Config], Callable[..., None]] = compile,
    ordered_from: int | None = None,
    multiprocessors: int | None = None,
    apart: bool | None = None,
) -> None:
    """Writes dq, dk and dv on torch's current stream; scale > 0, lse and dlse [B, Hq, Sq], mask [B, Hq, Mt, W].

    Workspace: 8 bytes per row and head, of up to 64 more rows for every packed sequence, and unless gradients of q
    have a kernel of their own 4 bytes per element of dq, of which each row has 64 or 128. They have one where results
    must not depend on time, and for lists of 64 keys, of which it skips each and not pairs. The kernels, the number of
    tiles of 128 keys or rows from which on long lists come first, that of multiprocessors, and `apart`, whether there
    is such a kernel, are for tests.
    """
    if apart is None:
        apart = deterministic or (mask is not None and block_n == UNIT)
    rows, heads, dim = q.shape[1:]
    dtype = dtype_name(q.dtype)
    packed, batch = _packed(cu_seqlens_q, q)
    most, units = (rows, k.shape[1]), -(-rows // UNIT)
    longest: tuple[int | None, int | None] = (None, None)
    if packed is not None:
        most = longest = max_seqlen_q, max_seqlen_k
        units = rows // UNIT + batch  # each sequence begins with one of its own
    tiles = batch * k.shape[2] * -(-most[1] // STEP)
    ordered = mask is not None and tiles >= (ordered_from or KEYS_ORDERED_FROM)
    main = BackwardConfig(
        dtype, dim, causal, mask is not None, block_n, ordered, packed, keys_only=apart
    )

    def workspace(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    lse_log2, delta = workspace(2, q.shape[0], heads, units * UNIT)
    acc = None if apart else workspace(q.shape[0], rows, heads, main.width)
    ends = cu_seqlens_q, longest[0]
    kernels(SumsConfig(dtype, dim, dlse is not None, packed, not apart))(
        out, dout, lse, dlse, lse_log2, delta, acc, *ends
    )
    across = None
    if mask is not None:
        across = masks.transpose(mask, -(-most[0] // BLOCK_M), -(-most[1] // block_n))
    starts, work = (cu_seqlens_q, cu_seqlens_k), None
    if ordered:
        order = OrderConfig(causal, block_n, True, packed)
        work = _work(kernels, order, tiles, q.device, across, *starts, *most, heads // k.shape[2])
    scales = scale, scale * LOG2_E
    kernels(main)(
        q, k, v, dout, lse_log2, delta, across, *starts, work, acc, dk, dv, *scales, longest[1]
    )  # fmt: skip
    if acc is not None:
        kernels(ConvertConfig(dtype, dim, packed))(acc, dq, scale, *ends)
        return
    tiles = batch * heads * -(-most[0] // BLOCK_M)
    ordered = mask is not None and tiles >= (ordered_from or ORDERED_FROM)
    config = QueriesConfig(dtype, dim, causal, mask is not None, block_n, ordered, packed)
    of_rows = OrderConfig(causal, block_n, packed=packed) if ordered else None
    work = _work(kernels, of_rows, tiles, q.device, mask, *starts, *most, 1)
    ctas = min(multiprocessors or tensors.multiprocessors(q.device), tiles)
    kernels(config)(
        q, k, v, dout, lse_log2, delta, mask, *starts, work, dq, *scales, longest[0], ctas
    )  # fmt: skip
