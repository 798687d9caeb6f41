"""Inputs, providers, check, bytes and arithmetic of a training step of skip-list attention through autograd.

    out = softmax(q k^T / sqrt(D)) v over all tiles, and dq, dk, dv of it, given dout, over the tiles of a list

Problems are those of `problem.py`, whose lists are those of the backward pass here: the forward pass visits all tiles.
With a full list, and with none, the gradients are exact; otherwise the terms of tiles that are not listed are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.checks import SEED, require_finite, require_within, worst_head
from benchmarks.ops.lite import backward
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.backward import GRADIENT_LIMIT, Bound, Inputs
from benchmarks.ops.lite.providers import dense_supports, lite_supports, torch_runs

# What peers may be off, who choose their own arithmetic.
PEER_LIMIT = 1e-2

# (q, k, v, mask) -> out
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def read(problem: Setting) -> int:
    """Bytes of q, k, v, dout and the mask, each once."""
    return 4 * lite.activation_bytes(problem) + lite.mask_bytes(problem)


def flops(problem: Setting) -> int:
    """Operations of both passes: 4 B H S^2 D of the forward one, and 10 B H S^2 D times the density."""
    p = problem.params
    return 4 * p["B"] * p["H"] * p["S"] ** 2 * p["D"] + backward.flops(problem)


def outside(*tensors: Tensor | None) -> list[Any]:
    """Copies that autograd may use. Benchmarks run in inference mode, whose tensors cannot have gradients."""
    with torch.inference_mode(False):
        return [None if t is None else t.clone() for t in tensors]


def _step(attend: Attend) -> Callable[[Setting, Inputs], Bound]:
    """Binds a forward and a backward pass, which run outside inference mode."""

    def bind(problem: Setting, x: Inputs) -> Bound:
        *leaves, dout, mask = outside(x.q, x.k, x.v, x.dout, x.mask)
        for leaf in leaves:
            leaf.requires_grad_()

        def call() -> tuple[Tensor, ...]:
            with torch.inference_mode(False), torch.enable_grad():
                return torch.autograd.grad(attend(*leaves, mask), leaves, dout)

        return call

    return bind


def lite_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over all tiles, with gradients over those of the mask."""
    from liteattention_sm89 import lite_attention

    tiles = {"block_m": lite.BLOCK_M, "block_n": lite.BLOCK_N}
    return lite_attention(q, k, v, threshold=None, grad_mask=mask, **tiles)[0]


def _listed_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over the tiles of the mask, with gradients over the same."""
    from liteattention_sm89 import lite_attention

    tiles = {"block_m": lite.BLOCK_M, "block_n": lite.BLOCK_N}
    return lite_attention(q, k, v, mask, threshold=lite.KEEP_ALL, **tiles)[0]


def _dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return lite_attend(q, k, v, None)


def _torch_attend(backend: str) -> Attend:
    """Torch's attention with one backend, on [B, H, S, D] views."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        views = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(*views)
        return out.transpose(1, 2)

    return attend


def _backward_bind(problem: Setting, x: Inputs) -> Bound:
    """Binds the operator that autograd calls, after a forward pass over all tiles."""
    from benchmarks.ops.lite.internals import backward_operator
    from liteattention_sm89 import lite_attention

    p, tiles = problem.params, (lite.BLOCK_M, lite.BLOCK_N)
    out, lse, _ = lite_attention(x.q, x.k, x.v, threshold=None, block_m=tiles[0], block_n=tiles[1])
    differentiate = backward_operator()
    given = (x.dout, None, x.q, x.k, x.v, out, lse, x.mask, None, None)
    how = (p["S"], p["S"], p["D"] ** -0.5, False, *tiles, False)
    return lambda: differentiate(*given, *how)


def _listed_supports(problem: Setting) -> str | None:
    return (
        lite_supports(problem) if problem.params["kind"] == "list" else "there is nothing to skip"
    )


def _unlisted(problem: Setting) -> int:
    return backward.moved(problem) - lite.mask_bytes(problem)


LITE = Provider("lite", "ours", _step(lite_attend), backward.moved, supports=lite_supports)
# The forward pass skips as well, so that the gradients are exact.
LITE_LISTED = Provider(
    "lite_listed", "variant", _step(_listed_attend), backward.moved, supports=_listed_supports
)
# What follows the forward pass of `lite`, without autograd.
LITE_BACKWARD = Provider(
    "lite_backward", "variant", _backward_bind, backward.moved, supports=lite_supports
)
LITE_DENSE = Provider(
    "lite_dense", "peer", _step(_dense_attend), _unlisted, supports=dense_supports
)
TORCH_FLASH, TORCH_CUDNN = (
    Provider(
        name,
        "peer",
        _step(_torch_attend(backend)),
        _unlisted,
        supports=torch_runs(backend, training=True),
    )
    for name, backend in (("torch_flash", "FLASH_ATTENTION"), ("torch_cudnn", "CUDNN_ATTENTION"))
)
PROVIDERS = (LITE, LITE_LISTED, LITE_BACKWARD, LITE_DENSE, TORCH_FLASH, TORCH_CUDNN)


def errors_of(
    problem: Setting,
    x: Inputs,
    gradients: tuple[Tensor, ...],
    mask: Tensor | None,
    whole: bool,
    limit: float = GRADIENT_LIMIT,
) -> dict[str, float]:
    """Errors of dq, dk and dv against the reference in fp64, for the worst of up to three heads; none exceeds a limit.

    `mask` lists the tiles of the gradients, `whole` says that the forward pass was over all tiles.
    """
    heads = lite.checked_heads(problem.params["B"], problem.params["H"])
    forward = lite.oracle(problem, x, None, heads) if whole else None
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    errors = {}
    want = backward.oracle(problem, x, mask, heads, forward)
    for (name, got), exact in zip(found.items(), want, strict=True):
        require_finite(problem, **{name: got})
        errors[name] = worst_head(torch.stack([got[b, :, h] for b, h in heads]), exact, 0)
    require_within(problem, errors, dict.fromkeys(errors, limit))
    return errors


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares gradients of up to three heads with the reference in fp64, on fresh inputs."""
    x = backward.make_inputs(problem, device, seed=SEED)
    found = provider.bind(problem, x)()
    skips = provider.name in (LITE.name, LITE_LISTED.name, LITE_BACKWARD.name)
    limit = PEER_LIMIT if provider.name.startswith("torch") else GRADIENT_LIMIT
    whole = provider.name != LITE_LISTED.name
    return errors_of(problem, x, found, x.mask if skips else None, whole, limit)
