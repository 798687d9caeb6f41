"""Launches both walks of a backward pass, and says what its kernels read of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...compiled.artifacts import Unit
from ...constants import COLUMNS
from ...dtypes import dtype_name
from ..config import CHUNK, chunk_slots
from .config import V_TILES, WalkConfig


class Walked(Protocol):
    """What walks and groups of heads read of a call. q [B, T, H, K]. v, do [B, T, HV, V]. initial_state, and dht, the
    gradient of final states, [N, HV, K, V] (V, K with `state_v_first`) in fp32, or None. cu_seqlens [N + 1], None for a
    dense batch. operand: dtype of the operands of tensor cores."""

    @property
    def q(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def do(self) -> Tensor: ...
    @property
    def initial_state(self) -> Tensor | None: ...
    @property
    def dht(self) -> Tensor | None: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...
    @property
    def state_v_first(self) -> bool: ...
    @property
    def operand(self) -> str: ...


class Kept(NamedTuple):
    """What lies between the kernels, of every slot of a chunk and value head: blocks, factors of tokens, states and z
    of the walk forward, gradients of states and -y of the walk back."""

    blocks: Tensor
    factors: Tensor
    states: Tensor
    z: Tensor
    d_states: Tensor
    minus_y: Tensor

    @property
    def slots(self) -> int:
        """How many chunks there may be."""
        return self.factors.shape[0]


def sequences_of(call: Walked) -> int:
    """Returns the number of sequences."""
    return call.v.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def slots_of(call: Walked) -> int:
    """Returns how many chunks a call may have."""
    batch, tokens = call.v.shape[:2]
    return chunk_slots(batch, tokens, None if call.cu_seqlens is None else sequences_of(call))


def peaks_of(call: Walked) -> Tensor:
    """Returns the bits of the largest magnitude of every sequence and head, so far that of the final states'
    gradients."""
    if call.dht is None:
        shape = (sequences_of(call), call.v.shape[2])
        return torch.zeros(shape, dtype=torch.int32, device=call.v.device)
    return call.dht.abs().amax((-2, -1)).view(torch.int32)


def segments_of(call: Walked) -> Tensor | None:
    """Returns memory for the table of packed sequences."""
    if call.cu_seqlens is None:
        return None
    return call.v.new_empty((1 + sequences_of(call), COLUMNS), dtype=torch.int32)


def longest_of(call: Walked) -> int:
    """Returns a length that no sequence exceeds, and no chunk."""
    return max(call.v.shape[1], CHUNK)


def facts_of(call: Any) -> dict[str, Any]:
    """Returns the static facts that chunk-parallel kernels share, of a call with q, g, beta and their flags besides."""
    return {
        "dtype": dtype_name(call.q.dtype), "gate_dtype": dtype_name(call.g.dtype),
        "beta_dtype": dtype_name(call.beta.dtype), "operand": call.operand, "l2norm": call.l2norm,
        "beta_sigmoid": call.beta_sigmoid, "neg_eigval": call.neg_eigval,
        "index_dtype": None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
    }  # fmt: skip


def unit(config: WalkConfig, arch: str) -> Unit:
    """Returns a walk as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, arch, ())


def walk_both(
    kernels: Callable[[WalkConfig], Callable[..., None]],
    multiprocessors: int,
    call: Walked,
    kept: Kept,
    peaks: Tensor,
    segments: Tensor | None,
    dh0: Tensor | None,
) -> None:
    """Launches both walks; dh0: memory for the gradients of initial states. Neither reads what the other writes: chains
    of a few heads, which leave most of the card to others, run side by side."""
    chains = V_TILES * sequences_of(call) * call.v.shape[2]
    tiles = 1 if chains <= multiprocessors else V_TILES
    ctas = min(multiprocessors, chains // tiles)

    def walk(
        back: bool, v: Tensor, start: Tensor | None, end: Tensor | None, *written: Tensor
    ) -> None:
        config = WalkConfig(
            dtype_name(v.dtype), back, call.operand, tiles, segments is not None, start is not None, end is not None,
            call.state_v_first,
        )  # fmt: skip
        kernels(config)(
            kept.blocks, v, None if back else kept.factors, peaks if back else None, start, end, *written, segments,
            longest_of(call), ctas,
        )  # fmt: skip

    def forward() -> None:
        walk(False, call.v, call.initial_state, None, kept.states, kept.z)

    def backward() -> None:
        walk(True, call.do, call.dht, dh0, kept.d_states, kept.minus_y)

    if call.v.is_cuda and 2 * ctas <= multiprocessors:
        current, side = (
            torch.cuda.current_stream(call.v.device),
            torch.cuda.Stream(call.v.device),
        )
        side.wait_stream(current)
        with torch.cuda.stream(side):
            forward()
        backward()
        current.wait_stream(side)
    else:
        forward()
        backward()
