"""Finds the kernels of a backward pass of the gated delta rule, and launches them."""

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
from cula_core.dtypes import dtype_name
from cula_core.once import once

from ..launch import ARCH
from .call import BackwardCall, Gradients
from .config import SUMS, ChunkConfig, GradientsConfig, PrepareConfig

Config = ChunkConfig | WalkConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    if isinstance(config, WalkConfig):
        return walks.unit(config, ARCH)
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
    memory = walks.Scratch(call, together)
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    for start in range(0, heads, together):
        own = _of_heads(call, found, slice(start, min(start + together, heads)), shared)
        _run(*own, memory, multiprocessors, kernels)


def _of_heads(
    call: BackwardCall, found: Gradients, heads: slice, shared: int
) -> tuple[BackwardCall, Gradients]:
    """Returns the part of a call and of its results that belongs to some value heads.

    shared: value heads that share a head of q and k.
    """
    keys = slice(heads.start // shared, heads.stop // shared)

    def part(name: str, x: Tensor | None) -> Any:
        if x is None:
            return None
        if name in ("initial_state", "dht"):
            return x[:, heads]
        return x[:, :, keys if name in ("q", "k") else heads]

    names = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")
    own = call._replace(**{name: part(name, getattr(call, name)) for name in names})
    return own, Gradients(*(part(name, x) for name, x in zip(names, found)))


def _run(
    call: BackwardCall,
    found: Gradients,
    memory: walks.Scratch,
    multiprocessors: int,
    kernels: Kernels,
) -> None:
    """Does the heads of a call together."""
    heads_k, heads = call.q.shape[2], call.v.shape[2]
    kept, slots = memory.of_heads(heads), memory.slots
    peaks, segments = walks.peaks_of(call), walks.segments_of(call)
    facts: dict[str, Any] = {
        "dtype": dtype_name(call.q.dtype), "gate_dtype": dtype_name(call.g.dtype),
        "beta_dtype": dtype_name(call.beta.dtype), "operand": call.operand, "l2norm": call.l2norm,
        "beta_sigmoid": call.beta_sigmoid, "neg_eigval": call.neg_eigval,
        "index_dtype": None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
    }  # fmt: skip
    kernels(PrepareConfig(**facts))(
        call.q, call.k, call.g, call.beta, call.cu_seqlens, segments, kept.blocks, call.do, kept.factors, peaks,
        call.scale, walks.longest_of(call), slots,
    )  # fmt: skip
    walks.walk_both(kernels, multiprocessors, call, kept, peaks, segments, found.dh0)
    ctas, sums = min(multiprocessors, slots * heads_k), None
    if heads_k < heads:
        sums = call.q.new_empty((ctas, *SUMS), dtype=torch.float32)
    kernels(GradientsConfig(**facts, grouped=sums is not None))(
        call.q, call.k, call.g, call.do, kept.factors, peaks, kept.states, kept.d_states, kept.z, kept.minus_y,
        call.cu_seqlens, *found[:5], sums, call.scale, slots, ctas,
    )  # fmt: skip
