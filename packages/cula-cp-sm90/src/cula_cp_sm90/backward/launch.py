"""Finds the kernels of a backward pass, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.delta_rule.backward import walks
from cula_core.delta_rule.backward.config import SCRATCH_BYTES, WalkConfig, heads_at_once
from cula_core.delta_rule.config import HEAD_DIM, PrepareConfig
from cula_core.dtypes import dtype_name
from cula_core.once import once
from cula_core.reference.kda_backward import Gradients

from ..arch import TARGET
from .call import BackwardCall
from .config import GradientsConfig

Config = PrepareConfig | WalkConfig | GradientsConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    if isinstance(config, WalkConfig):
        return walks.unit(config, arch)
    shared = isinstance(config, PrepareConfig)
    module = "cula_core.delta_rule.build" if shared else f"{__package__}.build"
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
    scratch: int = SCRATCH_BYTES,
) -> None:
    """Writes the gradients of a call, on torch's current stream.

    The call has tensors as the kernels read them; found: memory of the results. scratch: bytes between the kernels that
    are not exceeded as long as a few heads fit; heads are independent, and are done in groups. Tests without a GPU pass
    the number of multiprocessors and `kernels`.
    """
    heads = call.v.shape[2]
    shared = heads // call.q.shape[2]
    together = heads_at_once(walks.slots_of(call), heads, scratch, shared)
    launch = _Launch(
        kernels or kernels_of(call.q.device),
        multiprocessors or tensors.multiprocessors(call.q.device),
        walks.Scratch(call, together),
    )
    for start in range(0, heads, together):
        launch.run(*_of_heads(call, found, slice(start, min(start + together, heads)), shared))


def _of_heads(
    call: BackwardCall, found: Gradients, heads: slice, shared: int
) -> tuple[BackwardCall, Gradients]:
    """Returns the part of a call and of its results that belongs to some value heads.

    shared: value heads that share a query head.
    """
    if heads == slice(0, call.v.shape[2]):
        return call, found

    def part(name: str, x: Tensor | None) -> Any:
        if x is None:
            return None
        if name in ("A_log", "dt_bias"):
            return x.view(call.v.shape[2], -1)[heads].flatten()
        if name in ("initial_state", "dht"):
            return x[:, heads]
        own = slice(heads.start // shared, heads.stop // shared) if name in ("q", "k") else heads
        return x[:, :, own]

    names = ("q", "k", "v", "g", "beta", "do", "A_log", "dt_bias", "initial_state", "dht")
    own = call._replace(**{name: part(name, getattr(call, name)) for name in names})
    return own, Gradients(*(part(name, x) for name, x in zip(call._fields, found)))


class _Launch:
    """The kernels of some heads, one after the other."""

    def __init__(self, kernels: Kernels, multiprocessors: int, scratch: walks.Scratch) -> None:
        self._kernels, self._multiprocessors = kernels, multiprocessors
        self._scratch = scratch

    def run(self, call: BackwardCall, found: Gradients) -> None:
        heads, slots = call.v.shape[2], self._scratch.slots
        kept = self._scratch.of_heads(heads)
        peaks, segments, longest = (
            walks.peaks_of(call),
            walks.segments_of(call),
            walks.longest_of(call),
        )
        facts = _facts(call)
        self._kernels(PrepareConfig(**facts, rooted=True))(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, segments, kept.blocks, None,
            None, call.do, kept.factors, peaks, call.scale, call.lower_bound, longest, longest, 0, slots,
        )  # fmt: skip
        walks.walk_both(
            self._kernels, self._multiprocessors, call, kept, peaks, segments, found.dh0
        )
        grouped = call.q.shape[2] != heads
        dq, dk = found.dq, found.dk
        if grouped:
            dq, dk = (call.v.new_empty(call.v.shape, dtype=torch.float32) for _ in range(2))
        rates = biases = None
        if call.A_log is not None:
            rates = call.q.new_empty((slots, heads), dtype=torch.float32)
        if call.dt_bias is not None:
            biases = call.q.new_empty((slots, heads, HEAD_DIM), dtype=torch.float32)
        self._kernels(GradientsConfig(**facts, grouped=grouped))(
            call.q, call.k, call.g, call.do, call.A_log, call.dt_bias, kept.factors, peaks, kept.states, kept.d_states,
            kept.z, kept.minus_y, call.cu_seqlens, dq, dk, found.dv, found.dg, found.dbeta, rates, biases, call.scale,
            call.lower_bound, 0, slots, min(self._multiprocessors, slots * heads),
        )  # fmt: skip
        # Sums in an order that does not depend on when a kernel wrote its parts.
        if grouped:
            for parts, whole in ((dq, found.dq), (dk, found.dk)):
                whole.copy_(parts.unflatten(2, (call.q.shape[2], -1)).sum(3))
        if rates is not None:
            torch.sum(rates, 0, out=found.dA_log)
        if biases is not None and found.ddt_bias is not None:
            torch.sum(biases, 0, out=found.ddt_bias.view(heads, HEAD_DIM))


def _facts(call: BackwardCall) -> dict[str, Any]:
    """Returns the static facts that the chunk-parallel kernels share."""
    return {
        "dtype": dtype_name(call.q.dtype), "gate_dtype": dtype_name(call.g.dtype),
        "beta_dtype": dtype_name(call.beta.dtype), "operand": call.operand, "gate": call.gate,
        "bounded": call.bounded, "l2norm": call.l2norm, "beta_sigmoid": call.beta_sigmoid,
        "neg_eigval": call.neg_eigval, "rate": call.A_log is not None, "bias": call.dt_bias is not None,
        "index_dtype": None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
    }  # fmt: skip
