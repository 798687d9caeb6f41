"""Finds the kernels of a backward pass of the gated delta rule, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from cula_core.delta_rule.config import MergeConfig
from cula_core.once import once

from ..launch import ARCH
from . import plan
from .call import BackwardCall, Gradients
from .config import SUMS, ChunkConfig, GradientsConfig, PrepareConfig

Config = ChunkConfig | PeaksConfig | WalkConfig | MergeConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    if isinstance(config, WalkConfig | MergeConfig | PeaksConfig):
        return walk_unit(config, ARCH)
    return Unit(f"{__package__}.build", config, ARCH, ())


@once
def compile(config: Config) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride."""
    return kernel(unit(config))


def run(
    call: BackwardCall,
    found: Gradients,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels = compile,
    scratch: int | None = None,
) -> None:
    """Writes the gradients of a call, on torch's current stream; `in_groups` and `plan.groups` say how.

    Tests without a GPU pass the number of multiprocessors and `kernels`.
    """
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    batch, tokens, heads = call.v.shape[:3]
    packed = call.cu_seqlens is not None
    least = plan.groups(batch, tokens, call.q.shape[2], heads, packed, multiprocessors)
    for part in in_groups(call, found, scratch, least):
        _run(*part, multiprocessors, kernels)


def run_front(
    call: BackwardCall,
    dh0: Tensor | None,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels = compile,
    scratch: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Writes the gradients of initial states alone, or none, and returns blocks and factors: what `run_front` of
    `cula_core` says."""
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    found = Gradients._make([*[None] * 5, dh0])  # dh0 is the last one
    start = partial(_walks, multiprocessors=multiprocessors, kernels=kernels)
    return launch_front(call, found, start, scratch)


def _walks(
    call: BackwardCall, found: Gradients, kept: walks.Kept, multiprocessors: int, kernels: Kernels
) -> Walks:
    """Launches what goes before the walks of heads that are done together, and returns these."""

    def prepare(spread: Spread, segments: Tensor | None, peaks: Tensor, slots: int) -> None:
        kernels(PrepareConfig(**walks.facts_of(call)))(
            call.q, call.k, call.g, call.beta, call.cu_seqlens, segments, kept.blocks, call.do, kept.factors, peaks,
            call.scale, spread.segment_tokens, slots,
        )  # fmt: skip

    return begin(call, found, kept, multiprocessors, kernels, prepare)


def _run(
    call: BackwardCall, found: Gradients, kept: walks.Kept, multiprocessors: int, kernels: Kernels
) -> None:
    """Does the heads of a call together."""
    heads_k, heads, slots = call.q.shape[2], call.v.shape[2], kept.slots
    both = _walks(call, found, kept, multiprocessors, kernels)
    both.run()
    ctas, sums = min(multiprocessors, slots * heads_k), None
    if heads_k < heads:
        sums = call.q.new_empty((ctas, *SUMS), dtype=torch.float32)
    kernels(GradientsConfig(**walks.facts_of(call), grouped=sums is not None))(
        call.q, call.k, call.g, call.do, kept.factors, both.peaks, kept.states, kept.d_states, kept.z, kept.minus_y,
        call.cu_seqlens, *found[:5], sums, call.scale, slots, ctas,
    )  # fmt: skip
