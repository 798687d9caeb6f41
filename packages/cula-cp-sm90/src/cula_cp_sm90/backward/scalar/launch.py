"""Finds the kernels of a backward pass of the gated delta rule, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.constants import COLUMNS
from cula_core.delta_rule.config import CHUNK, chunk_slots
from cula_core.dtypes import dtype_name
from cula_core.once import once

from ...arch import TARGET
from ..config import SCRATCH_BYTES, WalkConfig, heads_at_once
from ..launch import _peaks, _Scratch
from ..launch import unit as unit_of_kda
from .call import BackwardCall, Gradients
from .config import SUMS, ScalarConfig, ScalarGradientsConfig, ScalarPrepareConfig

Config = ScalarConfig | WalkConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    if isinstance(config, WalkConfig):
        return unit_of_kda(config, arch)
    return Unit(f"{__package__}.build", config, arch, ())


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

    The call has tensors as the kernels read them. found: memory of the results. scratch: bytes between the kernels
    that are not exceeded as long as a few heads fit; heads are independent, and are done in groups. Tests without a GPU
    pass the number of multiprocessors and `kernels`.
    """
    batch, tokens, heads = call.v.shape[:3]
    shared = heads // call.q.shape[2]
    slots = chunk_slots(batch, tokens, call.packed_sequences)
    group = heads_at_once(slots, heads, scratch)
    group += -group % shared  # whole heads of keys
    memory = _Scratch(call, slots, min(group, heads))
    kernels = kernels or kernels_of(call.q.device)
    multiprocessors = multiprocessors or tensors.multiprocessors(call.q.device)
    for start in range(0, heads, group):
        own = slice(start, min(start + group, heads))
        keys = slice(own.start // shared, own.stop // shared)
        part = call._replace(
            q=call.q[:, :, keys],
            k=call.k[:, :, keys],
            **{name: getattr(call, name)[:, :, own] for name in ("v", "g", "beta", "do")},
            **{name: _of_states(getattr(call, name), own) for name in ("initial_state", "dht")},
        )
        results = Gradients(
            found.dq[:, :, keys], found.dk[:, :, keys], *(x[:, :, own] for x in found[2:5]), _of_states(found.dh0, own)
        )  # fmt: skip
        _run(part, results, slots, memory, multiprocessors, kernels)


def _of_states(states: Tensor | None, heads: slice) -> Tensor | None:
    return None if states is None else states[:, heads]


def _run(
    call: BackwardCall, found: Gradients, slots: int, scratch: _Scratch, multiprocessors: int, kernels: Kernels
) -> None:  # fmt: skip
    """Does the heads of a call together."""
    tokens, heads = call.v.shape[1:3]
    blocks, factors, states, z, d_states, minus_y = scratch.of_heads(heads)
    sequences, longest = call.sequences, max(tokens, CHUNK)
    segments = None
    if call.packed:
        segments = call.q.new_empty((1 + sequences, COLUMNS), dtype=torch.int32)
    peaks = _peaks(call)
    dtypes = [dtype_name(x.dtype) for x in (call.q, call.g, call.beta)]
    options: dict[str, Any] = {
        "operand": call.operand, "l2norm": call.l2norm, "beta_sigmoid": call.beta_sigmoid, "neg_eigval": call.neg_eigval,
        "index_dtype": None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
    }  # fmt: skip
    kernels(ScalarPrepareConfig(*dtypes, **options))(
        call.q, call.k, call.g, call.beta, call.cu_seqlens, segments, blocks, call.do, factors, peaks, call.scale,
        longest, slots,
    )  # fmt: skip
    v_tiles = TARGET.v_tiles
    tiles = 1 if v_tiles * sequences * heads <= multiprocessors else v_tiles
    ctas = min(multiprocessors, sequences * heads * v_tiles // tiles)

    def walk(back: bool, v: Tensor, start: Tensor | None, end: Tensor | None, kept: Tensor, rows: Tensor) -> None:
        config = WalkConfig(
            dtypes[0], back, call.operand, tiles, call.packed, start is not None, end is not None, call.state_v_first
        )
        kernels(config)(
            blocks, v, None if back else factors, peaks if back else None, start, end, kept, rows, segments, longest,
            ctas,
        )  # fmt: skip

    walk(False, call.v, call.initial_state, None, states, z)
    walk(True, call.do, call.dht, found.dh0, d_states, minus_y)
    heads_k = call.q.shape[2]
    ctas, sums = min(multiprocessors, slots * heads_k), None
    if heads_k < heads:
        sums = call.q.new_empty((ctas, *SUMS), dtype=torch.float32)
    kernels(ScalarGradientsConfig(*dtypes, **options, grouped=sums is not None))(
        call.q, call.k, call.g, call.do, factors, peaks, states, d_states, z, minus_y, call.cu_seqlens, *found[:5], sums,
        call.scale, slots, ctas,
    )  # fmt: skip
