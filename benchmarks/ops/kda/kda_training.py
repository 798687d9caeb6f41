"""KDA prefill and its gradients, beside FLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cula
from benchmarks.harness.registry import CheckFailed, Provider, Setting
from benchmarks.ops.checks import SEED, checked_heads, require_finite, worst_head
from benchmarks.ops.kda import kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.internals import package
from benchmarks.ops.kda.problem import Inputs, setting
from benchmarks.ops.kda.providers import CULA, FLA
from benchmarks.ops.tuning import TUNING_MS, tune_anew
from cula.kda import chunk_kda

LIMIT, FLA_LIMIT = 5e-3, 5e-2
KEPT = "cula_kept"  # the forward pass keeps its blocks for the backward pass
# The tensors that have gradients, and the dimension of each that counts heads.
LEAVES = {"q": 2, "k": 2, "v": 2, "gate": 2, "beta": 2, "A_log": 0, "dt_bias": 0}


def step(
    impl: str, problem: Setting, x: Inputs, **arguments: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs a forward and a backward pass, with v for the derivative of o, and returns gradients of LEAVES.

    Benchmarks run in inference mode, whose tensors cannot have gradients. So the call copies them, and runs outside
    inference mode. arguments: more of them for `chunk_kda`.
    """
    with torch.inference_mode(False):
        leaves = [getattr(x, name).clone().requires_grad_() for name in LEAVES]
        do = x.v.clone()
        packing: dict[str, Tensor] = {}
        if x.offsets is not None:
            packing = {"cu_seqlens": x.offsets.int32, "cu_seqlens_cpu": x.offsets.host}
            packing = {name: tensor.clone() for name, tensor in packing.items()}
    q, k, v, g, beta, A_log, dt_bias = leaves
    options = kda_providers.gate_arguments(problem, x) | {"impl": impl, **packing}
    options |= {"g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, **arguments}

    def run() -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            o, _ = chunk_kda(q, k, v, **options)
            return torch.autograd.grad(o, leaves, do)

    return run


def impl(provider: str) -> str:
    """The name that cula has for a provider."""
    return "fla" if provider == "fla" else (package() or "").replace("_", "-")


def _bind(provider: str, problem: Setting, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    return step(impl(provider), problem, x, disable_recompute=provider == KEPT)


def _supports(provider: Provider, problem: Setting) -> str | None:
    """What is missing, as cula says it too."""
    if refused := provider.supports(problem):
        return refused
    told = cula.explain(
        "chunk_kda", dtype=torch.bfloat16, requires_grad=True, impl=impl(provider.name)
    )
    return None if told.chosen else str(told)


def tune(problem: Setting) -> None:
    """Tunes all kernels of FLA anew: those of the forward pass, some of which run again, and those of the backward."""
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h
    from fla.ops.kda import chunk_bwd, chunk_intra, gate
    from fla.ops.utils import cumsum

    FLA.prepare(problem)
    for kernel in (
        l2norm.l2norm_bwd_kernel,
        gate.kda_gate_bwd_kernel,
        chunk_bwd.chunk_kda_bwd_kernel_dAv,
        chunk_bwd.chunk_kda_bwd_kernel_wy_dqkg_fused,
        chunk_intra.chunk_kda_bwd_kernel_intra,
        chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64,
        cumsum.chunk_local_cumsum_vector_kernel,
    ):
        tune_anew(kernel)


def of_heads(leaves: dict[str, Tensor], heads: list[int]) -> dict[str, Tensor]:
    """The parts of LEAVES, or of their gradients, that belong to some heads, in fp64; dt_bias becomes [heads, K]."""
    leaves = leaves | {"dt_bias": leaves["dt_bias"].view(-1, kda.DIM)}
    at = torch.tensor(heads, device=leaves["q"].device)
    return {name: leaves[name].index_select(dim, at).double() for name, dim in LEAVES.items()}


def heads_of(x: Inputs, heads: list[int]) -> Inputs:
    """The inputs of some heads in fp64."""
    return dataclasses.replace(x, **of_heads({name: getattr(x, name) for name in LEAVES}, heads))


def errors_of(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """The relative RMSE of every gradient against the reference in fp64, for the worst of some heads."""
    x = kda.make_inputs(problem, device, seed=SEED)
    found = dict(zip(LEAVES, provider.bind(problem, x)(), strict=True))
    require_finite(problem, **found)
    heads = checked_heads(problem.params["H"])
    want = dict(zip(LEAVES, step("reference", problem, heads_of(x, heads))(), strict=True))
    found = of_heads(found, heads)
    return {name: worst_head(found[name], want[name], dim) for name, dim in LEAVES.items()}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares gradients with limits."""
    errors = errors_of(provider, problem, device)
    limit = FLA_LIMIT if provider.name == "fla" else LIMIT
    for name, error in errors.items():
        if not error <= limit:
            told = f"gradient of {name} of {provider.name}: {error:.2e}, limit {limit:.2e}"
            raise CheckFailed(f"{problem.name}: {told}")
    return errors


def moved(problem: Setting) -> int:
    """Bytes of q, k, v, g, beta and their gradients, and of o and its derivative, each once."""
    return 2 * kda.moved(problem)


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [setting(1024)]
    dense = [setting(4096), setting(16384), setting(4096, heads=32), setting(8192, heads=16)]
    return [*dense, setting(8192, sequences=10, lengths="skewed")]


def _trained(provider: Provider, **changes: Any) -> Provider:
    return dataclasses.replace(
        provider,
        bind=functools.partial(_bind, changes.get("name", provider.name)),
        moved=moved,
        supports=functools.partial(_supports, provider),
        **changes,
    )


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_training",
    title="KDA prefill and its gradients, K=V=128",
    settings=settings,
    providers=(
        _trained(CULA),
        _trained(CULA, name=KEPT, role="variant"),
        _trained(FLA, prepare=tune),
    ),
    check=check,
    peaks=True,
    notes=(
        "A forward and a backward pass: gradients of q, k, v, g, beta, A_log and dt_bias. peak_mib: the most memory "
        "that one such call takes beside what it is given, its results included. cula_kept: with disable_recompute, "
        "the forward pass keeps blocks for the backward pass.",
        "bytes: inputs, o and the gradients of both once each, for every provider.",
        f"FLA's kernels are tuned anew for every setting: all candidates, {TUNING_MS['rep']} ms each.",
        *kda_prefill.NOTES[:1],
        "Checked: relative RMSE of gradients of the worst head against the reference in fp64. fla within "
        f"{FLA_LIMIT:.0e}; cula within {LIMIT:.0e}.",
    ),
)
