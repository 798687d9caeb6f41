"""`launch.forward` of a `lite_helpers.Call`, for tests that pass kernels or have a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lite_helpers import Call, Inputs
from torch import Tensor

from liteattention_sm89 import launch

Empty = Callable[[torch.Size, torch.dtype], Tensor]


def empty_on(device: torch.device | str) -> Empty:
    """Memory for results with NaN in it, or every bit of a list set; filled on the CPU."""
    return lambda shape, dtype: torch.full(
        shape, math.nan if dtype.is_floating_point else -1, dtype=dtype
    ).to(device)


def forward(
    call: Call, x: Inputs, empty: Empty, **known: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse [B, Hq, Sq] and the list for the next call, in memory of `empty`. known: other arguments."""
    out = empty(x.q.shape, x.q.dtype)
    lse = empty(x.q[..., 0].mT.shape, torch.float32)
    write = None if x.read is None else empty(x.read.shape, torch.int32)
    held = None if x.held is None else x.held.expand(x.read.shape).contiguous()
    direction = torch.tensor([call.direction], dtype=torch.int32, device=x.q.device)
    settings = {
        "threshold": call.threshold, "direction": direction if call.on_device else call.direction,
        "scale": call.dim**-0.5, "causal": call.causal, "block_n": call.block_n,
    }  # fmt: skip
    starts = x.starts_q, x.starts_k
    launch.forward(
        x.q, x.k, x.v, out, lse, x.read, held, write, *starts, x.most[0], **settings | known
    )
    return out, lse, write
