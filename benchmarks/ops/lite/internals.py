"""What the benchmarks use of liteattention_sm89 beyond its main functions; no other file here imports that."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liteattention_sm89 import masks
from liteattention_sm89.choice import forced, launcher
from liteattention_sm89.config import BLOCK_M, BLOCK_N
from liteattention_sm89.diffusers import apply_lite_attention
from liteattention_sm89.quality import compare, density
from liteattention_sm89.reference import masked_gradients
from liteattention_sm89.replay import calibrated, replay, threshold_for

__all__ = [
    "Stages",
    "apply_lite_attention",
    "asked",
    "backward_operator",
    "calibrated",
    "compare",
    "density",
    "forced",
    "kernel_of",
    "masked_gradients",
    "replay",
    "stages",
    "threshold_for",
]

Launch = Callable[..., Any]


def backward_operator() -> Callable[..., Any]:
    """The operator that autograd calls for gradients."""
    return torch.ops.liteattention_sm89.backward.default


def asked(kernel: str | None) -> contextlib.AbstractContextManager[None]:
    """`forced`, but None leaves the choice to the package and to LITEATTENTION_KERNEL."""
    return contextlib.nullcontext() if kernel is None else forced(kernel)


def kernel_of(q: Tensor) -> str:
    """The architecture of the kernel that serves a forward pass with queries, and as many keys, like q [B, S, H, D].

    On the CPU it is "reference".
    """
    if not q.is_cuda:
        return "reference"
    launch = launcher("forward", q, BLOCK_N[0], q.shape[1], packed=False)
    return launch.__module__.partition(".")[0].removeprefix("liteattention_")


@dataclass(frozen=True)
class Stages:
    """The launches of both passes by name, in their order, on tensors that they share; each can run again.

    `transpose` returns what `transposed` holds, on which the launch of `gradients` runs.
    """

    launches: dict[str, Callable[[], Any]]
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]
    row_sums: Tensor
    transposed: Tensor | None


class _Recorder:
    """Compiles what `launch` asks for, and keeps every launch under the name of its stage."""

    def __init__(self) -> None:
        self.launches: dict[str, functools.partial[Any]] = {}

    def kernel(self, stage: str, compiled: Launch) -> Launch:
        def run(*arguments: Any) -> None:
            self.launches[stage] = functools.partial(compiled, *arguments)
            compiled(*arguments)

        return run

    def forward(self, *facts: Any) -> Launch:
        return self.kernel("forward", _launch().compile_forward(*facts))

    def sums(self, *facts: Any) -> Launch:
        return self.kernel("row_sums", _launch().compile_sums(*facts))

    def backward(self, *facts: Any) -> Launch:
        return self.kernel("gradients", _launch().compile_backward(*facts))

    def gather(self, *facts: Any) -> Launch:
        return self.kernel("order_dq", _launch().compile_gather(*facts))


def stages(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor | None) -> Stages:
    """Runs attention over all tiles and its gradients over those of `mask`, and returns the launches of both.

    Shapes as in `lite_attention`, all tensors dense, key tiles of the default size, gradients of q by atomics.
    """
    launch, recorder = _launch(), _Recorder()
    batch, tokens, heads, dim = q.shape
    out, *gradients = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    lse = torch.full((batch, heads, tokens), torch.nan, dtype=torch.float32, device=q.device)
    how = {"scale": dim**-0.5, "causal": False, "block_n": BLOCK_N[0]}
    launch.forward(
        q, k, v, out, lse, *(None,) * 5, tokens,
        threshold=0.0, direction=1, kernel_for=recorder.forward, max_seqlen_k=tokens, **how,
    )  # fmt: skip
    launch.backward(
        q, k, v, out, lse, dout, None, mask, None, None, tokens, tokens, *gradients,
        deterministic=False, kernels=recorder, **how,
    )  # fmt: skip
    launches: dict[str, Callable[[], Any]] = dict(recorder.launches)
    transposed = recorder.launches["gradients"].args[5]
    if mask is not None:
        tiles = -(-tokens // BLOCK_M), -(-tokens // BLOCK_N[0])
        launches["transpose"] = functools.partial(masks.transpose, mask, *tiles)
    order = ("forward", "row_sums", "transpose", "gradients", "order_dq")
    ordered = {name: launches[name] for name in order if name in launches}
    sums = recorder.launches["row_sums"].args[4]
    return Stages(ordered, out, lse, tuple(gradients), sums, transposed)


def _launch() -> Any:
    from liteattention_sm89 import launch

    return launch
