"""Finds the kernels of a backward pass, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.delta_rule.backward import walks
from cula_core.delta_rule.backward.config import PeaksConfig, WalkConfig
from cula_core.delta_rule.backward.groups import in_groups
from cula_core.delta_rule.backward.launch import Walks, begin, walk_unit
from cula_core.delta_rule.backward.launch import run_front as launch_front
from cula_core.delta_rule.backward.plan import Spread
from cula_core.delta_rule.config import HEAD_DIM, MergeConfig, PrepareConfig
from cula_core.once import once
from cula_core.reference.kda_backward import Gradients

from ..arch import TARGET
from .call import BackwardCall
from .config import GradientsConfig

Config = PrepareConfig | PeaksConfig | WalkConfig | MergeConfig | GradientsConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    if isinstance(config, WalkConfig | MergeConfig | PeaksConfig):
        return walk_unit(config, arch)
    own = isinstance(config, GradientsConfig)
    module = f"{__package__}.build" if own else "cula_core.delta_rule.build"
    return Unit(module, config, arch, ())


@once
def compile(config: Config, arch: str) -> Callable[..., None]:
    """Returns a callable for one config and architecture, reused for every size and stride."""
    return kernel(unit(config, arch))


@once
def kernels_of(device: torch.device) -> Kernels:
    """Returns what to call for a config on a device."""
    arch = TARGET.compiles_for[torch.cuda.get_device_capability(device)]
    return lambda config: compile(config, arch)


def run(
    call: BackwardCall,
    found: Gradients,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels | None = None,
    scratch: int | None = None,
) -> None:
    """Writes the gradients of a call, on torch's current stream; `in_groups` says how.

    Tests without a GPU pass the number of multiprocessors and `kernels`.
    """
    kernels = kernels or kernels_of(call.q.device)
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    for part in in_groups(call, found, scratch):
        _run(*part, multiprocessors, kernels)


def run_front(
    call: BackwardCall,
    dh0: Tensor | None,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels | None = None,
    scratch: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Writes the gradients of initial states alone, or none, and returns blocks and factors: what `run_front` of
    `cula_core` says."""
    kernels = kernels or kernels_of(call.q.device)
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    found = Gradients._make([*[None] * 7, dh0])  # dh0 is the last one
    start = partial(_walks, multiprocessors=multiprocessors, kernels=kernels)
    return launch_front(call, found, start, scratch)


def _facts(call: BackwardCall) -> dict[str, Any]:
    return walks.facts_of(call) | {
        "gate": call.gate, "bounded": call.bounded, "rate": call.A_log is not None, "bias": call.dt_bias is not None,
    }  # fmt: skip


def _walks(
    call: BackwardCall, found: Gradients, kept: walks.Kept, multiprocessors: int, kernels: Kernels
) -> Walks:
    """Launches what goes before the walks of heads that are done together, and returns these."""

    def prepare(spread: Spread, segments: Tensor | None, peaks: Tensor, slots: int) -> None:
        again = call.blocks is None
        kernels(PrepareConfig(**_facts(call), rooted=True, peaks=again))(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, segments, kept.blocks, None,
            None, call.do if again else None, kept.factors, peaks if again else None, call.scale, call.lower_bound,
            spread.segment_tokens, spread.segment_tokens, 0, slots,
        )  # fmt: skip

    return begin(call, found, kept, multiprocessors, kernels, prepare)


def _run(
    call: BackwardCall, found: Gradients, kept: walks.Kept, multiprocessors: int, kernels: Kernels
) -> None:
    """Does the heads of a call together."""
    both = _walks(call, found, kept, multiprocessors, kernels)
    both.run()
    heads, slots, peaks = call.v.shape[2], kept.slots, both.peaks
    grouped = call.q.shape[2] != heads
    dq, dk = found.dq, found.dk
    if grouped:
        dq, dk = (call.v.new_empty(call.v.shape, dtype=torch.float32) for _ in range(2))
    rates = biases = None
    if call.A_log is not None:
        rates = call.q.new_empty((slots, heads), dtype=torch.float32)
    if call.dt_bias is not None:
        biases = call.q.new_empty((slots, heads, HEAD_DIM), dtype=torch.float32)
    kernels(GradientsConfig(**_facts(call), grouped=grouped))(
        call.q, call.k, call.g, call.do, call.A_log, call.dt_bias, kept.factors, peaks, kept.states, kept.d_states,
        kept.z, kept.minus_y, call.cu_seqlens, dq, dk, found.dv, found.dg, found.dbeta, rates, biases, call.scale,
        call.lower_bound, 0, slots, min(multiprocessors, slots * heads),
    )  # fmt: skip
    # Sums in an order that does not depend on when a kernel wrote its parts.
    if grouped:
        for parts, whole in ((dq, found.dq), (dk, found.dk)):
            whole.copy_(parts.unflatten(2, (call.q.shape[2], -1)).sum(3))
    if rates is not None:
        torch.sum(rates, 0, out=found.dA_log)
    if biases is not None and found.ddt_bias is not None:
        torch.sum(biases, 0, out=found.ddt_bias.view(heads, HEAD_DIM))
