"""A training step of the gated delta rule: the forward and the backward pass of our kernels, and of FLA's.

`fla_lifted` is FLA's pass where FLA refuses it (lifted.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cula
from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import checks
from benchmarks.ops import sequences as seq
from benchmarks.ops.lightning import delta, delta_providers, gated_prefill, lifted
from benchmarks.ops.lightning.delta import Inputs, setting
from benchmarks.ops.lightning.internals import scratch_bytes
from benchmarks.ops.lightning.lifted import LIFTED
from benchmarks.ops.tuning import TUNING_MS, tune_anew
from cula.lightning import chunk_gated_delta_rule

LIMIT = 5e-3
LEAVES = ("q", "k", "v", "gate", "beta")
FORWARD = "cula_forward"  # the forward pass alone, so that a difference of times is that of the backward pass
# Heads in so many groups, which share the memory between the backward's kernels; `cula` chooses by itself.
HALVES, WHOLE = "cula_halves", "cula_whole"
GROUPS = {HALVES: 2, WHOLE: 1}
IMPL = {**dict.fromkeys(("cula", FORWARD, *GROUPS), "cula-lightning-sm90"), "fla": "fla"}


def leaves_of(x: Inputs) -> dict[str, Tensor]:
    """The tensors that have gradients."""
    return {name: x.beta if name == "beta" else getattr(x.gated, name) for name in LEAVES}


def step(impl: str, leaves: dict[str, Tensor], x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs a forward and a backward pass, with v for the derivative of o, and returns gradients of LEAVES.

    Benchmarks run in inference mode, whose tensors cannot have gradients. So the call copies them, and runs outside
    inference mode.
    """
    return _step(functools.partial(chunk_gated_delta_rule, impl=impl), leaves, x)


def _step(
    function: Callable[..., tuple], leaves: dict[str, Tensor], x: Inputs
) -> Callable[[], tuple[Tensor, ...]]:
    with torch.inference_mode(False):
        own = [leaf.clone().requires_grad_() for leaf in leaves.values()]
        do = leaves["v"].clone()
        packing: dict[str, Tensor] = {}
        if x.gated.offsets is not None:
            packing = {"cu_seqlens": x.gated.offsets.int32, "cu_seqlens_cpu": x.gated.offsets.host}
            packing = {name: tensor.clone() for name, tensor in packing.items()}

    def run() -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            o, _ = function(*own, use_qk_l2norm_in_kernel=True, **packing)
            return torch.autograd.grad(o, own, do)

    return run


def forward(impl: str, leaves: dict[str, Tensor], x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs the forward pass of `step` alone, and returns o."""
    packing: dict[str, Tensor] = {}
    if x.gated.offsets is not None:
        packing = {"cu_seqlens": x.gated.offsets.int32, "cu_seqlens_cpu": x.gated.offsets.host}
    options = {"use_qk_l2norm_in_kernel": True, "impl": impl, **packing}
    return lambda: chunk_gated_delta_rule(*leaves.values(), **options)[:1]


def limit_of(provider: str, problem: Setting) -> int:
    """Bytes that lie between the kernels of the backward pass with as many groups of heads as a provider has."""
    p = problem.params
    whole = scratch_bytes(seq.batch_of(problem), p["T"], p["H"], p.get("N"))
    return whole // GROUPS[provider]


def _bind(provider: str, problem: Setting, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    call = _call_of(provider)(IMPL[provider], leaves_of(x), x)
    if provider not in GROUPS:
        return call
    limit = {"CULA_SCRATCH_LIMIT": str(limit_of(provider, problem))}

    def limited() -> tuple[Tensor, ...]:
        with unittest.mock.patch.dict(os.environ, limit):
            return call()

    return limited


def _call_of(provider: str) -> Callable[..., Callable[[], tuple[Tensor, ...]]]:
    return forward if provider == FORWARD else step


def _supports(provider: Provider, problem: Setting) -> str | None:
    """What the provider itself says, and then cula of its backward."""
    if refused := provider.supports(problem):
        return refused
    told = cula.explain(
        "chunk_gated_delta_rule",
        dtype=torch.bfloat16,
        gate_dtype=torch.float32,
        requires_grad=True,
        impl=IMPL[provider.name],
    )
    return None if told.chosen else str(told)


def _lifted(problem: Setting, x: Inputs) -> lifted.Step:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lifted.lifted(_step(chunk_gated_delta_rule, leaves_of(x), x))


def tune(problem: Setting) -> None:
    """Tunes all kernels of FLA anew: those of the forward pass, some of which run again, and those of the backward."""
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import wy_fast

    delta_providers.FLA_DELTA.prepare(problem)
    for kernel in (
        l2norm.l2norm_bwd_kernel,
        chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64,
        chunk_o.chunk_bwd_kernel_dqkwg,
        chunk_o.chunk_bwd_kernel_dv_local,
        wy_fast.prepare_wy_repr_bwd_kernel,
    ):
        tune_anew(kernel)


def of_heads(leaves: dict[str, Tensor], heads: list[int], group: int) -> dict[str, Tensor]:
    """The parts of LEAVES, of their gradients or of o, of some heads of q and k and of the value heads that share them,
    in fp64."""
    values = [group * head + i for head in heads for i in range(group)]
    return {
        name: x[:, :, heads if name in ("q", "k") else values].double()
        for name, x in leaves.items()
    }


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """The relative RMSE of every gradient, or of o, against the reference in fp64, for the worst of some heads."""
    x = delta.make_inputs(problem, device, seed=checks.SEED)
    names = ("o",) if provider.name == FORWARD else LEAVES
    found = dict(zip(names, provider.bind(problem, x)(), strict=True))
    if provider.name != LIFTED:
        checks.require_finite(problem, **found)
    heads_q = seq.query_heads(problem)
    heads, group = checks.checked_heads(heads_q), problem.params["H"] // heads_q
    exact = of_heads(leaves_of(x), heads, group)
    want = dict(zip(names, _call_of(provider.name)("reference", exact, x)(), strict=True))
    found = of_heads(found, heads, group)
    errors = {name: checks.worst_head(found[name], want[name], 2) for name in names}
    if provider.name == LIFTED:  # they may be wrong, which is why FLA refuses
        return errors
    checks.require_within(problem, errors, dict.fromkeys(names, LIMIT))
    return errors


def moved(problem: Setting) -> int:
    """Bytes of q, k, v, gates, strengths and their gradients, and of o and its derivative, each once."""
    states = 4 * seq.sequences_of(problem) * problem.params["H"] * 128 * 128
    return 2 * (delta.moved(problem, 2) - states)


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [setting(1024)]
    dense = [setting(4096), setting(16384), setting(8192, heads=16)]
    grouped = [setting(t, heads=32, heads_q=16) for t in (4096, 16384)]
    return [*dense, *grouped, setting(8192, sequences=10, lengths="skewed"), *_published()]


def _published() -> list[Setting]:
    """What FlashQLA publishes times of its backward pass for: tokens in all, few heads and many.

    Several sequences have lengths there that were drawn at random, and here the same length.
    """
    return [
        setting(tokens, heads=2 * heads, heads_q=heads, sequences=None if count == 1 else count)
        for heads in (16, 8, 4, 2)
        for tokens in (8192, 32768)
        for count in (1, 2, 4, 8)
    ]


def _trained(
    provider: Provider, moved: Callable[[Setting], int] = moved, **changes: Any
) -> Provider:
    name = changes.get("name", provider.name)
    return dataclasses.replace(
        provider, bind=functools.partial(_bind, name), moved=moved,
        supports=functools.partial(_supports, dataclasses.replace(provider, name=name)), **changes,
    )  # fmt: skip


_FLA = _trained(delta_providers.FLA_DELTA, name="fla", prepare=tune)

OP = dataclasses.replace(
    gated_prefill.OP,
    name="gated_training",
    title="The gated delta rule and its gradients, K=V=128",
    settings=settings,
    providers=(
        _trained(gated_prefill.CULA),
        _trained(
            gated_prefill.CULA,
            lambda problem: delta.moved(problem, 2),
            name=FORWARD,
            role="variant",
        ),
        *(_trained(gated_prefill.CULA, name=name, role="variant") for name in GROUPS),
        _FLA,
        dataclasses.replace(
            _FLA,
            name=LIFTED,
            bind=_lifted,
            supports=functools.partial(lifted.supports, delta_providers.FLA_DELTA, _FLA),
        ),
    ),
    check=check,
    peaks=True,
    notes=(
        "A forward and a backward pass, without states: gradients of q, k, v, log decays and strengths, with q and k "
        "normalised inside. cula is our kernels for both, cula_forward those of the forward pass alone. cula_halves "
        "is cula with heads in two groups, which halves the memory between the backward's kernels, and cula_whole with "
        "heads in one; cula chooses by shapes. fla is FLA's for both, and fla_lifted FLA's with its refusal lifted "
        "where it refuses the backward pass for what this Triton may make of it: its errors are written down and not "
        "judged.",
        "peak_mib: the most memory that one such call takes beside what it is given, its results included.",
        "bytes: inputs, o and the gradients of both once each, for every provider.",
        f"FLA's kernels are tuned anew for every setting: all candidates, {TUNING_MS['rep']} ms each.",
        f"Checked: relative RMSE of gradients of the worst head against the reference in fp64, within {LIMIT:.0e}.",
    ),
)
