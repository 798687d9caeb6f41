"""A training step of Lightning attention: the forward and the backward pass of our kernels, and of FLA's.

`fla_lifted` is FLA's pass where FLA refuses it, which it does with gates per token (lifted.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cula
from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import checks
from benchmarks.ops import sequences as seq
from benchmarks.ops.lightning import lifted, lightning_prefill
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.lifted import LIFTED
from benchmarks.ops.lightning.problem import DIM, Inputs, setting
from benchmarks.ops.lightning.providers import CULA, FLA
from benchmarks.ops.tuning import TUNING_MS, tune_anew
from cula.lightning import chunk_simple_gla

LIMIT = 5e-3
LEAVES = {"decay": ("q", "k", "v"), "gate": ("q", "k", "v", "gate")}
IMPL = {"cula": "cula-lightning-sm90", "fla": "fla"}


def step(impl: str, problem: Setting, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs a forward and a backward pass, with v for the derivative of o, and returns gradients of LEAVES.

    Benchmarks run in inference mode, whose tensors cannot have gradients. So the call copies them, and runs outside
    inference mode.
    """
    return _step(functools.partial(chunk_simple_gla, impl=impl), problem, x)


def _step(
    function: Callable[..., tuple], problem: Setting, x: Inputs
) -> Callable[[], tuple[Tensor, ...]]:
    with torch.inference_mode(False):
        leaves = [
            getattr(x, name).clone().requires_grad_() for name in LEAVES[problem.params["mode"]]
        ]
        do, g_gamma = x.v.clone(), None if x.decay is None else -x.decay
        packing: dict[str, Tensor] = {}
        if x.offsets is not None:
            packing = {"cu_seqlens": x.offsets.int32, "cu_seqlens_cpu": x.offsets.host}
            packing = {name: tensor.clone() for name, tensor in packing.items()}

    def run() -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            o, _ = function(*leaves, g_gamma=g_gamma, **packing)
            return torch.autograd.grad(o, leaves, do)

    return run


def _bind(provider: str, problem: Setting, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    return step(IMPL[provider], problem, x)


def _lifted(problem: Setting, x: Inputs) -> lifted.Step:
    from fla.ops.simple_gla import chunk_simple_gla

    return lifted.lifted(_step(chunk_simple_gla, problem, x))


def _supports(provider: Provider, problem: Setting) -> str | None:
    """What the provider itself says, and then cula of its backward."""
    if refused := provider.supports(problem):
        return refused
    gate = torch.float32 if problem.params["mode"] == "gate" else None
    told = cula.explain(
        "chunk_simple_gla",
        dtype=torch.bfloat16,
        gate_dtype=gate,
        requires_grad=True,
        impl=IMPL[provider.name],
    )
    return None if told.chosen else str(told)


def tune(problem: Setting) -> None:
    """Tunes all kernels of FLA anew: those of the forward pass, some of which run again, and those of the backward."""
    from fla.ops.common import chunk_h, chunk_o

    FLA.prepare(problem)
    for kernel in (
        chunk_h.chunk_bwd_kernel_dh,
        chunk_o.chunk_bwd_kernel_dqkwg,
        chunk_o.chunk_bwd_kernel_dv,
    ):
        tune_anew(kernel)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """The relative RMSE of every gradient against the reference in fp64, for the worst of some heads."""
    x = lightning.make_inputs(problem, device, seed=checks.SEED)
    leaves = LEAVES[problem.params["mode"]]
    found = dict(zip(leaves, provider.bind(problem, x)(), strict=True))
    if provider.name != LIFTED:
        checks.require_finite(problem, **found)
    heads = checks.checked_heads(problem.params["H"])
    of_heads = {name: getattr(x, name)[:, :, heads].double() for name in leaves}
    decay = None if x.decay is None else x.decay[heads]
    exact = dataclasses.replace(x, decay=decay, **of_heads)
    want = dict(zip(leaves, step("reference", problem, exact)(), strict=True))
    errors = {name: checks.worst_head(found[name][:, :, heads], want[name], 2) for name in leaves}
    if provider.name != LIFTED:  # they may be wrong, which is why FLA refuses
        checks.require_within(problem, errors, dict.fromkeys(leaves, LIMIT))
    return errors


def moved(problem: Setting) -> int:
    """Bytes of q, k, v, gates and their gradients, and of o and its derivative, each once."""
    tokens = seq.batch_of(problem) * problem.params["T"] * problem.params["H"]
    return 8 * 2 * tokens * DIM + 8 * tokens * (problem.params["mode"] == "gate")


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [setting(1024)]
    dense = [setting(t, heads=h) for t, h in ((4096, 64), (16384, 64), (8192, 16), (8192, 32))]
    gated = [setting(t, mode="gate") for t in (4096, 16384)]
    return [*dense, setting(8192, sequences=10, lengths="skewed"), *gated]


def _trained(provider: Provider, **changes: Any) -> Provider:
    return dataclasses.replace(
        provider, bind=functools.partial(_bind, provider.name), moved=moved,
        supports=functools.partial(_supports, provider), **changes,
    )  # fmt: skip


_FLA = _trained(FLA, prepare=tune)

OP = dataclasses.replace(
    lightning_prefill.OP,
    name="lightning_training",
    title="Lightning attention and its gradients, K=V=128",
    settings=settings,
    providers=(
        _trained(CULA),
        _FLA,
        dataclasses.replace(
            _FLA,
            name=LIFTED,
            bind=_lifted,
            supports=functools.partial(lifted.supports, FLA, _FLA),
        ),
    ),
    check=check,
    peaks=True,
    notes=(
        "A forward and a backward pass, without states: gradients of q, k and v, and of gates per token. cula is our "
        "kernels for both, fla is FLA's for both, and fla_lifted FLA's with its refusal lifted where it refuses the "
        "backward pass for what this Triton may make of it: its errors are written down and not judged.",
        "peak_mib: the most memory that one such call takes beside what it is given, its results included.",
        "bytes: q, k, v, o, gates and the gradients of all of them once each, for every provider.",
        f"FLA's kernels are tuned anew for every setting: all candidates, {TUNING_MS['rep']} ms each.",
        f"Checked: relative RMSE of gradients of the worst head against the reference in fp64, within {LIMIT:.0e}.",
    ),
)
