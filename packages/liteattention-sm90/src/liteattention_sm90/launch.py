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
    cu_seqlens_q: None,
    cu_seqlens_k: None,
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

    lse [B, Hq, Sq]. What `_spec.supports` refuses does not come here: packed sequences, and int8. The kernels, their
    number of multiprocessors, and the number of query tiles from which on long lists come first, are for tests.
    """
    assert cu_seqlens_q is None and cu_seqlens_k is None and not int8
    on_device = isinstance(direction, Tensor)
    tiles = q.shape[0] * q.shape[2] * -(-q.shape[1] // BLOCK_M)
    ordered = read is not None and tiles >= ordered_from
    config = ForwardConfig(
        dtype_name(q.dtype), q.shape[3], causal, read is not None, block_n, must_do is not None, on_device, ordered
    )  # fmt: skip
    count = multiprocessors or tensors.multiprocessors(q.device)
    scale_log2 = scale * LOG2_E
    work = _work(tiles, q.device) if ordered else torch.zeros(1, dtype=torch.int32, device=q.device)
    if ordered:
        kernels(OrderConfig(causal, block_n))(read, work, q.shape[1], k.shape[1], 1)
    kernels(config)(
        q, k, v, out, lse, read, must_do, write, direction if on_device else None, work, scale_log2,
        threshold / scale_log2, 1 if on_device else direction, min(count, tiles),
    )  # fmt: skip


def _work(tiles: int, device: torch.device) -> Tensor:
    """Returns what `LiteOrder` writes to, its counters at zero."""
    words = NUMBERS + tiles + CLASSES * -(-tiles // 32)
    return torch.zeros(words, dtype=torch.int32, device=device)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    cu_seqlens_q: None,
    cu_seqlens_k: None,
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
) -> None:
    """Writes dq, dk and dv on torch's current stream; scale > 0, lse and dlse [B, Hq, Sq], mask [B, Hq, Mt, W].

    Workspace: 8 bytes per row and head, and unless deterministic 4 bytes per element of dq, of which each row has 64 or
    128. What `_spec.supports` refuses does not come here: packed sequences. The kernels, the number of tiles of 128
    keys or rows from which on long lists come first, and that of multiprocessors, are for tests.
    """
    assert cu_seqlens_q is None and cu_seqlens_k is None
    batch, rows, heads, dim = q.shape
    dtype = dtype_name(q.dtype)
    tiles = batch * k.shape[2] * -(-k.shape[1] // STEP)
    ordered = mask is not None and tiles >= (ordered_from or KEYS_ORDERED_FROM)
    main = BackwardConfig(dtype, dim, causal, mask is not None, block_n, ordered, deterministic)

    def workspace(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    lse_log2, delta = workspace(2, batch, heads, -(-rows // UNIT) * UNIT)
    acc = None if deterministic else workspace(batch, rows, heads, main.width)
    kernels(SumsConfig(dtype, dim, dlse is not None, not deterministic))(
        out, dout, lse, dlse, lse_log2, delta, acc
    )
    across = None
    if mask is not None:
        across = masks.transpose(mask, -(-rows // BLOCK_M), -(-k.shape[1] // block_n))
    work = None
    if ordered:
        work = _work(tiles, q.device)
        group = heads // k.shape[2]
        kernels(OrderConfig(causal, block_n, True))(across, work, rows, k.shape[1], group)
    scales = scale, scale * LOG2_E
    kernels(main)(q, k, v, dout, lse_log2, delta, across, work, acc, dk, dv, *scales)
    if acc is not None:
        kernels(ConvertConfig(dtype, dim))(acc, dq, scale)
        return
    tiles = batch * heads * -(-rows // BLOCK_M)
    ordered = mask is not None and tiles >= (ordered_from or ORDERED_FROM)
    config = QueriesConfig(dtype, dim, causal, mask is not None, block_n, ordered)
    work = _work(tiles, q.device) if ordered else torch.zeros(1, dtype=torch.int32, device=q.device)
    if ordered:
        kernels(OrderConfig(causal, block_n))(mask, work, rows, k.shape[1], 1)
    ctas = min(multiprocessors or tensors.multiprocessors(q.device), tiles)
    kernels(config)(q, k, v, dout, lse_log2, delta, mask, work, dq, *scales, ctas)
