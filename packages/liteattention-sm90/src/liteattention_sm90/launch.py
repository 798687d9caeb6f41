"""Finds the kernel of a call, and launches it."""

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

from .config import BLOCK_M, CLASSES, NUMBERS, ORDERED_FROM, ForwardConfig, OrderConfig

ARCH = "sm_90a"


def unit(config: ForwardConfig | OrderConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: ForwardConfig | OrderConfig) -> Callable[..., None]:
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
    kernels: Callable[[ForwardConfig | OrderConfig], Callable[..., None]] = compile,
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
    words = NUMBERS + tiles + CLASSES * -(-tiles // 32) if ordered else 1
    work = torch.zeros(words, dtype=torch.int32, device=q.device)
    if ordered:
        kernels(OrderConfig(causal, block_n))(read, work, q.shape[1], k.shape[1])
    kernels(config)(
        q, k, v, out, lse, read, must_do, write, direction if on_device else None, work, scale_log2,
        threshold / scale_log2, 1 if on_device else direction, min(count, tiles),
    )  # fmt: skip
