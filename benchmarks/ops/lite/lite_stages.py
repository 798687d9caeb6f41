"""The stages of a training step of skip-list attention one by one; bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Op, Provider, Setting
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import backward, training
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.backward import Bound, Inputs
from benchmarks.ops.lite.problem import setting
from benchmarks.ops.lite.providers import lite_supports, with_sm89

TOKENS = 4096
DENSITIES = (1 / 8, 0.05)
# Work of torch around the kernels, and the launches of the package in their order.
AROUND = ("clone", "loss", "readout")
LAUNCHES = ("forward", "row_sums", "transpose", "gradients", "order_dq")


def _loss(out: Tensor, weights: Tensor) -> Tensor:
    """sum(out * weights), whose derivative with respect to out is `weights`."""
    return (out * weights).sum()


def _copies(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def _step(problem: Setting, x: Inputs) -> Bound:
    """Binds a whole step: copies of q, k and v, the forward pass, the loss, the gradients, and copies of these."""
    *given, dout, mask = training.outside(x.q, x.k, x.v, x.dout, x.mask)

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [t.requires_grad_() for t in _copies(given)]
            loss = _loss(training.lite_attend(*leaves, mask), dout)
            return tuple(_copies(torch.autograd.grad(loss, leaves)))

    return call


def _bind(stage: str, problem: Setting, x: Inputs) -> Callable[[], Any]:
    """Binds one stage, on what the stages before it left."""
    from benchmarks.ops.lite.internals import stages

    found = stages(x.q, x.k, x.v, x.dout, x.mask)
    if stage in found.launches:
        return found.launches[stage]
    if stage == "loss":
        return lambda: (_loss(found.out, x.dout), x.dout.new_ones(()).expand_as(x.dout) * x.dout)
    return functools.partial(_copies, (x.q, x.k, x.v) if stage == "clone" else found.gradients)


def moved(stage: str, problem: Setting) -> int:
    """Bytes of a stage: what it reads and writes, each tensor once. Accumulators of dq are fp32."""
    p = problem.params
    one, rows = lite.activation_bytes(problem), 4 * p["B"] * p["H"] * p["S"]
    mask = lite.mask_bytes(problem)
    known = {
        "forward": 4 * one + rows,
        "loss": 6 * one,
        "row_sums": 2 * one + rows + 2 * rows + 2 * one,
        "transpose": 2 * mask,
        "gradients": 4 * one + 2 * rows + mask + 2 * one + 2 * one,
        "order_dq": 2 * one + one,
    }
    return known.get(stage, 6 * one)


def whole(problem: Setting) -> int:
    """Bytes of q, k, v, dout, out, lse, the list and the gradients, each once."""
    return backward.moved(problem)


def _supports(stage: str, problem: Setting) -> str | None:
    if stage == "transpose" and lite.is_dense(problem):
        return "there is no list"
    return lite_supports(problem)


def _variant(stage: str) -> Provider:
    return Provider(
        stage,
        "variant",
        functools.partial(_bind, stage),
        functools.partial(moved, stage),
        supports=functools.partial(_supports, stage),
    )


def in_turn(problem: Setting, x: Inputs) -> tuple[Tensor, ...]:
    """Gradients that the launches make one after the other, once everything that an earlier run left is spoiled."""
    from benchmarks.ops.lite.internals import stages

    found = stages(x.q, x.k, x.v, x.dout, x.mask)
    for tensor in (found.out, found.lse, *found.gradients, found.row_sums):
        tensor.fill_(torch.nan)
    for name, launch in found.launches.items():
        result = launch()
        if name == "transpose" and not torch.equal(result, found.transposed):
            raise CheckFailed(f"{problem.name}: transposing the list again gives another one")
    return found.gradients


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares the gradients of a whole step, or of all launches in turn, with the reference in fp64."""
    x = backward.make_inputs(problem, device, seed=SEED)
    found = provider.bind(problem, x)() if provider.role == "ours" else in_turn(problem, x)
    return training.errors_of(problem, x, found, x.mask, whole=True)


def settings(quick: bool) -> list[Setting]:
    lists = [setting("list", TOKENS, density=d) for d in DENSITIES]
    return [setting("dense", TOKENS), *lists[: 1 if quick else None]]


# The stages are those of liteattention-sm89, and so is the step.
LITE = Provider("lite", "ours", with_sm89(_step), whole, supports=lite_supports)

NOTES = (
    "lite: a step through autograd. It copies q, k and v, runs the forward pass over all tiles, sums out times given "
    "weights, takes the gradients over the tiles of the list, and copies them. The others are its stages, each on what "
    "the stages before it left. All kernels are those of liteattention-sm89, on Hopper too.",
    "clone: copies of q, k and v. loss: the sum, and the derivative of out. readout: copies of the gradients. "
    "row_sums: the sums of out times dout, and accumulators of dq set to zero. transpose: the list per key tile, in "
    "torch. gradients: dk, dv, and dq added up by atomics. order_dq: dq in its own layout and in bf16.",
    f"Tiles of {lite.BLOCK_M} queries and {lite.BLOCK_N} keys, random data, lists of equally many random key tiles for "
    "every query tile.",
    "Alone a stage finds its inputs out of the L2; in a step some of them are still there, so the stages may add up to "
    "more than the step. What else a step has are launches of autograd between them.",
    "bytes: what a stage reads and writes, each tensor once; of lite q, k, v, out, dout, lse, the list and the "
    "gradients.",
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lite_stages",
    title="Training step of skip-list attention, stage by stage, bf16",
    settings=settings,
    providers=(LITE, *map(_variant, (AROUND[0], LAUNCHES[0], AROUND[1], *LAUNCHES[1:], AROUND[2]))),
    make_inputs=backward.make_inputs,
    set_bytes=training.read,
    check=check,
    notes=NOTES,
)
