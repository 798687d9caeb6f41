"""Inputs, providers, check, bytes and arithmetic of the gradients of skip-list attention.

    dq, dk, dv of out = softmax(q k^T / sqrt(D) over the listed key tiles) v, given dout, out and lse

Problems are those of `problem.py`. The forward pass, which leaves out and lse, runs before the timed call; everything
else that the backward pass needs is part of the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Provider, Setting
from benchmarks.ops.checks import SEED, require_finite, require_within, worst_head
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.providers import (
    dense_supports,
    lite_supports,
    sm89_supports,
    torch_supports,
    with_sm89,
)

GRADIENT_LIMIT = 5e-3

Gradients = tuple[Tensor, Tensor, Tensor]
Bound = Callable[[], Gradients]


@dataclass
class Inputs(lite.Inputs):
    """The inputs of the forward pass, and dout [B, S, H, D] bf16."""

    dout: Tensor


def make_inputs(problem: Setting, device: Any, seed: int) -> Inputs:
    """Fresh random data of one buffer set."""
    x = lite.make_inputs(problem, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    dout = torch.empty_like(x.q).normal_(generator=generator)
    return Inputs(x.q, x.k, x.v, x.mask, dout)


def read(problem: Setting) -> int:
    """Bytes of q, k, v, out, dout, lse and the mask, each once."""
    p = problem.params
    rows = 4 * p["B"] * p["H"] * p["S"]
    return 5 * lite.activation_bytes(problem) + rows + lite.mask_bytes(problem)


def moved(problem: Setting) -> int:
    """The fewest bytes of a call, which are those of `read`, of dq, dk and dv."""
    return read(problem) + 3 * lite.activation_bytes(problem)


def flops(problem: Setting) -> int:
    """Operations of the five products over the listed tiles: 10 B H S^2 D for all tiles, half of that if causal."""
    return lite.flops(problem) * 5 // 2


def _lite_bind(
    dense: bool = False, deterministic: bool = False
) -> Callable[[Setting, Inputs], Bound]:
    """Binds the operator that autograd calls; `dense` leaves out the list."""

    def bind(problem: Setting, x: Inputs) -> Bound:
        from benchmarks.ops.lite.internals import backward_operator
        from liteattention_sm89 import lite_attention

        p, mask = problem.params, None if dense else x.mask
        threshold = None if mask is None else lite.KEEP_ALL
        causal, tiles = p["causal"], (lite.BLOCK_M, lite.BLOCK_N)
        out, lse, _ = lite_attention(
            x.q, x.k, x.v, mask, threshold=threshold, causal=causal, block_m=tiles[0], block_n=tiles[1]
        )  # fmt: skip
        differentiate = backward_operator()
        given = (x.dout, None, x.q, x.k, x.v, out, lse, mask, None, None)
        how = (p["S"], p["S"], p["D"] ** -0.5, causal, *tiles, deterministic)
        return lambda: differentiate(*given, *how)

    return bind


def _torch_bind(problem: Setting, x: Inputs) -> Bound:
    """Binds the operator behind torch's attention with the flash backend; [B, H, S, D] views of the same memory."""
    causal = problem.params["causal"]
    q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
    attend, differentiate = _torch_operators()
    out, lse, starts_q, starts_k, rows, keys, seed, offset, _ = attend(q, k, v, 0.0, causal)
    rest = (out, lse, starts_q, starts_k, rows, keys, 0.0, causal, seed, offset)

    def call() -> Gradients:
        dq, dk, dv = differentiate(dout, q, k, v, *rest)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return call


def _torch_operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    aten: Any = torch.ops.aten
    return (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    )


def _unlisted(problem: Setting) -> int:
    return moved(problem) - lite.mask_bytes(problem)


# What users get: on Hopper the kernels of liteattention-sm90.
LITE = Provider("lite", "ours", _lite_bind(), moved, supports=lite_supports)
# The same with the kernels of liteattention-sm89 there too, of the forward pass as well.
LITE_SM89 = Provider("lite_sm89", "variant", with_sm89(_lite_bind()), moved, supports=sm89_supports)
# Instead of atomics, a kernel of its own, which computes scores once more, makes dq: one of liteattention-sm89.
LITE_DETERMINISTIC = Provider(
    "lite_deterministic", "variant", _lite_bind(deterministic=True), moved, supports=lite_supports
)
# Our own dense kernel on the inputs of a problem with lists, which shows what skipping saves.
LITE_DENSE = Provider(
    "lite_dense", "peer", _lite_bind(dense=True), _unlisted, supports=dense_supports
)
TORCH_FLASH = Provider("torch_flash", "peer", _torch_bind, _unlisted, supports=torch_supports)
PROVIDERS = (LITE, LITE_SM89, LITE_DETERMINISTIC, LITE_DENSE, TORCH_FLASH)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares gradients of up to three heads with the package's reference in fp64, on fresh inputs.

    The deterministic provider must give the same bits twice.
    """
    x = make_inputs(problem, device, seed=SEED)
    call = provider.bind(problem, x)
    # The allocator will probably put the gradients where these tensors are, so that no earlier results are left there.
    spoiled = [torch.full_like(x.q, torch.nan) for _ in range(3)]
    del spoiled
    found = dict(zip(("dq", "dk", "dv"), call(), strict=True))
    heads = lite.checked_heads(problem.params["B"], problem.params["H"])
    mask = None if provider.name == LITE_DENSE.name else x.mask
    errors = {}
    for (name, got), want in zip(found.items(), oracle(problem, x, mask, heads), strict=True):
        require_finite(problem, **{name: got})
        errors[name] = worst_head(torch.stack([got[b, :, h] for b, h in heads]), want, 0)
    require_within(problem, errors, dict.fromkeys(errors, GRADIENT_LIMIT))
    if provider.name == LITE_DETERMINISTIC.name:
        for (name, got), again in zip(found.items(), call(), strict=True):
            if not torch.equal(got, again):
                raise CheckFailed(f"{problem.name}: {name} differs from call to call")
    return errors


def oracle(
    problem: Setting,
    x: Inputs,
    mask: Tensor | None,
    heads: list[tuple[int, int]],
    forward: lite.Expected | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv of (batch row, head) pairs in fp64, [P, S, D] each; without a mask they are over all tiles.

    `forward` has out and lse of these heads where the forward pass was over other tiles than those of the mask.
    """
    from benchmarks.ops.lite.internals import masked_gradients

    tensors = [
        torch.stack([t[b, :, h] for b, h in heads], 1)[None].double()
        for t in (x.q, x.k, x.v, x.dout)
    ]
    if mask is not None:
        mask = torch.stack([mask[b, h] for b, h in heads])[None]
    known = {}
    if forward is not None:
        known = {"out": forward.out.transpose(0, 1)[None], "lse": forward.lse[None]}
    gradients = masked_gradients(
        *tensors, mask, causal=problem.params["causal"], block_m=lite.BLOCK_M, block_n=lite.BLOCK_N, **known
    )  # fmt: skip
    return tuple(g[0].transpose(0, 1) for g in gradients)
