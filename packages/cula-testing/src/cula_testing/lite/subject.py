"""What a package is to the shared tests: its launcher, the oracle of its results, and how both are called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comparing import relative_rmse
from .calls import Call, Inputs

MAX_OUTPUT_ERROR = 5e-3
MAX_LSE_ERROR = 1e-4

Empty = Callable[[torch.Size, torch.dtype], Tensor]


def empty_on(device: torch.device | str) -> Empty:
    """Memory for results with NaN in it, or every bit of a list set; filled on the CPU."""
    return lambda shape, dtype: torch.full(
        shape, math.nan if dtype.is_floating_point else -1, dtype=dtype
    ).to(device)


@dataclass(frozen=True)
class Subject:
    """launch: `launch.forward` of the package. attention: `reference.lite_attention` of the host side."""

    launch: Callable[..., None]
    attention: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def forward(
        self, call: Call, x: Inputs, empty: Empty, **known: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, lse [B, Hq, Sq] and the list for the next call, in memory of `empty`. known: other arguments."""
        out = empty(x.q.shape, x.q.dtype)
        lse = empty(x.q[..., 0].mT.shape, torch.float32)
        write = None if x.read is None else empty(x.read.shape, torch.int32)
        held = x.held
        if held is not None:
            assert x.read is not None  # tiles stay on a list
            held = held.expand(x.read.shape).contiguous()
        direction = torch.tensor([call.direction], dtype=torch.int32, device=x.q.device)
        settings = {
            "threshold": call.threshold, "direction": direction if call.on_device else call.direction,
            "scale": call.dim**-0.5, "causal": call.causal, "block_n": call.block_n,
        }  # fmt: skip
        starts = x.starts_q, x.starts_k
        self.launch(
            x.q, x.k, x.v, out, lse, x.read, held, write, *starts, x.most[0], **settings | known
        )
        return out, lse, write

    def expected(self, call: Call, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, write mask) of the oracle in fp64."""
        return self.attention(
            x.q.double(), x.k.double(), x.v.double(), x.read, threshold=call.threshold, direction=call.direction,
            causal=call.causal, must_do=x.held, block_n=call.block_n, cu_seqlens_q=x.starts_q,
            cu_seqlens_k=x.starts_k,
            **({} if x.starts_q is None else {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]}),
        )  # fmt: skip

    def assert_right(
        self, call: Call, x: Inputs, out: Tensor, lse: Tensor, write: Tensor | None
    ) -> None:
        """Holds results to those of the oracle; a list must be the same."""
        want, want_lse, want_write = self.expected(call, x)
        error = relative_rmse(out, want)
        assert error < MAX_OUTPUT_ERROR, error
        seen = torch.isfinite(want_lse)
        assert (lse[~seen] == -math.inf).all()
        assert not out.transpose(1, 2)[~seen.view(out.transpose(1, 2).shape[:3])].any()
        if seen.any():
            assert (lse.double() - want_lse)[seen].abs().max() < MAX_LSE_ERROR
        if call.listed is not None:
            assert write is not None and torch.equal(write, want_write)
