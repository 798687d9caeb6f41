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

from .config import BLOCK_M, ForwardConfig

ARCH = "sm_90a"


def unit(config: ForwardConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: ForwardConfig) -> Callable[..., None]:
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
    kernels: Callable[[ForwardConfig], Callable[..., None]] = compile,
    multiprocessors: int | None = None,
) -> None:
    """Launches one call on torch's current stream; arguments are those of `liteattention_sm89`, checked, scale > 0.

    lse [B, Hq, Sq]. What `_spec.supports` refuses does not come here: packed sequences, and int8. The kernels and their
    number of multiprocessors are for tests without a GPU.
    """
    assert cu_seqlens_q is None and cu_seqlens_k is None and not int8
    on_device = isinstance(direction, Tensor)
    config = ForwardConfig(
        dtype_name(q.dtype), q.shape[3], causal, read is not None, block_n, must_do is not None, on_device
    )  # fmt: skip
    count = multiprocessors or tensors.multiprocessors(q.device)
    tiles = q.shape[0] * q.shape[2] * -(-q.shape[1] // BLOCK_M)
    scale_log2 = scale * LOG2_E
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    kernels(config)(
        q, k, v, out, lse, read, must_do, write, direction if on_device else None, counter, scale_log2,
        threshold / scale_log2, 1 if on_device else direction, min(count, tiles),
    )  # fmt: skip
