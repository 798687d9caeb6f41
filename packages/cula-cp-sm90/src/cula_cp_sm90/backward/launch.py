"""Finds the kernels of a backward pass, and launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.constants import COLUMNS
from cula_core.delta_rule.config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    PrepareConfig,
    chunk_slots,
)
from cula_core.dtypes import dtype_name
from cula_core.once import once
from cula_core.reference.kda_backward import Gradients

from ..arch import TARGET
from .call import BackwardCall
from .config import (
    ROW_BYTES,
    SCRATCH_BYTES,
    STATE_BYTES,
    GradientsConfig,
    WalkConfig,
    heads_at_once,
)

Config = PrepareConfig | WalkConfig | GradientsConfig
Kernels = Callable[[Config], Callable[..., None]]


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    shared = isinstance(config, PrepareConfig)
    return Unit(
        "cula_core.delta_rule.build" if shared else f"{__package__}.build", config, arch, ()
    )


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

    The call has tensors as the kernels read them, as many query heads as value heads, and log decays in [-5, 0); found:
    memory of the results. scratch: bytes between the kernels that are not exceeded as long as a few heads fit; heads
    are independent, and are done in groups. Tests without a GPU pass the number of multiprocessors and `kernels`.
    """
    batch, tokens, heads = call.v.shape[:3]
    slots = chunk_slots(batch, tokens, call.packed_sequences)
    group = heads_at_once(slots, heads, scratch)
    launch = _Launch(
        kernels or kernels_of(call.q.device),
        multiprocessors or tensors.multiprocessors(call.q.device),
        slots,
        _Scratch(call, slots, group),
    )
    for start in range(0, heads, group):
        launch.run(*_of_heads(call, found, slice(start, min(start + group, heads))))


def _of_heads(call: BackwardCall, found: Gradients, heads: slice) -> tuple[BackwardCall, Gradients]:
    """Returns the part of a call and of its results that belongs to some heads."""
    if heads == slice(0, call.v.shape[2]):
        return call, found

    def part(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if name in ("A_log", "dt_bias"):
            return x.view(call.v.shape[2], -1)[heads].flatten()
        return x[:, heads] if name in ("initial_state", "dht") else x[:, :, heads]

    names = ("q", "k", "v", "g", "beta", "do", "A_log", "dt_bias", "initial_state", "dht")
    own = call._replace(**{name: part(name, getattr(call, name)) for name in names})
    return own, Gradients(*(part(name, x) for name, x in zip(call._fields, found)))


class _Scratch:
    """Memory between the kernels, for a group of heads: blocks and factors of chunks, kept states and rows of both
    walks."""

    def __init__(self, call: BackwardCall, slots: int, heads: int) -> None:
        operand = getattr(torch, call.operand)

        def empty(size: int, *inner: int, dtype: torch.dtype = operand) -> Tensor:
            return call.q.new_empty((slots, heads, *inner, size), dtype=dtype)

        tiles = TARGET.v_tiles
        self.blocks = empty(BLOCK_BYTES // 2)
        self.factors = empty(CHUNK, 3, dtype=torch.float32)
        self.states, self.d_states = (empty(STATE_BYTES // 2 // tiles, tiles) for _ in range(2))
        self.z, self.minus_y = (empty(ROW_BYTES // 2 // tiles, tiles) for _ in range(2))

    def of_heads(self, heads: int) -> Iterator[Tensor]:
        """Yields the tensors for as many heads, which are the group's or fewer."""
        for x in (self.blocks, self.factors, self.states, self.z, self.d_states, self.minus_y):
            yield (
                x
                if x.shape[1] == heads
                else x.flatten(0, 1)[: x.shape[0] * heads].unflatten(0, (-1, heads))
            )


class _Launch:
    """The kernels of a group of heads, one after the other."""

    def __init__(
        self, kernels: Kernels, multiprocessors: int, slots: int, scratch: _Scratch
    ) -> None:
        self._kernels, self._multiprocessors = kernels, multiprocessors
        self._slots, self._scratch = slots, scratch

    def run(self, call: BackwardCall, found: Gradients) -> None:
        batch, tokens, heads = call.v.shape[:3]
        blocks, factors, states, z, d_states, minus_y = self._scratch.of_heads(heads)
        sequences, longest = call.sequences, max(tokens, CHUNK)
        segments = None
        if call.packed:
            segments = call.q.new_empty((1 + sequences, COLUMNS), dtype=torch.int32)
        peaks = _peaks(call)
        index_dtype = None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype)
        gates: dict[str, Any] = {
            "operand": call.operand, "gate": call.gate, "l2norm": call.l2norm, "beta_sigmoid": call.beta_sigmoid,
            "neg_eigval": call.neg_eigval, "rate": call.A_log is not None, "bias": call.dt_bias is not None,
            "index_dtype": index_dtype,
        }  # fmt: skip
        dtypes = [dtype_name(x.dtype) for x in (call.q, call.g, call.beta)]
        prepare = PrepareConfig(*dtypes, bounded=call.bounded, rooted=True, **gates)
        self._kernels(prepare)(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, segments, blocks, None, None,
            call.do, factors, peaks, call.scale, call.lower_bound, longest, longest, 0, self._slots,
        )  # fmt: skip
        alone = TARGET.v_tiles * sequences * heads <= self._multiprocessors
        tiles = 1 if alone else TARGET.v_tiles
        ctas = min(self._multiprocessors, sequences * heads * TARGET.v_tiles // tiles)

        def walk(
            back: bool,
            v: Tensor,
            start: Tensor | None,
            end: Tensor | None,
            kept: Tensor,
            rows: Tensor,
        ) -> None:
            config = WalkConfig(
                dtypes[0], back, call.operand, tiles, call.packed, start is not None, end is not None,
                call.state_v_first,
            )  # fmt: skip
            self._kernels(config)(
                blocks, v, None if back else factors, peaks if back else None, start, end, kept, rows, segments,
                longest, ctas,
            )  # fmt: skip

        walk(False, call.v, call.initial_state, None, states, z)
        walk(True, call.do, call.dht, found.dh0, d_states, minus_y)
        rates = biases = None
        if call.A_log is not None:
            rates = call.q.new_empty((self._slots, heads), dtype=torch.float32)
        if call.dt_bias is not None:
            biases = call.q.new_empty((self._slots, heads, HEAD_DIM), dtype=torch.float32)
        self._kernels(GradientsConfig(*dtypes, **gates))(
            call.q, call.k, call.g, call.do, call.A_log, call.dt_bias, factors, peaks, states, d_states, z, minus_y,
            call.cu_seqlens, found.dq, found.dk, found.dv, found.dg, found.dbeta, rates, biases, call.scale,
            call.lower_bound, 0, self._slots, min(self._multiprocessors, self._slots * heads),
        )  # fmt: skip
        # In the order of the chunks, whatever the kernel's order was.
        if rates is not None:
            torch.sum(rates, 0, out=found.dA_log)
        if biases is not None:
            torch.sum(biases, 0, out=found.ddt_bias.view(heads, HEAD_DIM))


def _peaks(call: BackwardCall) -> Tensor:
    """Returns the bits of the largest magnitude of every sequence and head, so far that of the final states'
    gradients."""
    if call.dht is None:
        shape = (call.sequences, call.v.shape[2])
        return torch.zeros(shape, dtype=torch.int32, device=call.q.device)
    return call.dht.abs().amax((-2, -1)).view(torch.int32)
