"""What the kernels of a backward pass read of a call, and hand to each other."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...constants import COLUMNS
from ...dtypes import dtype_name
from ...tensors import longest_sequence
from ..config import chunk_slots
from .plan import Spread, plan


class Walked(Protocol):
    """What walks and groups of heads read of a call. q [B, T, H, K]. v, do [B, T, HV, V]. initial_state, and dht, the
    gradient of final states, [N, HV, K, V] (V, K with `state_v_first`) in fp32, or None. cu_seqlens [N + 1], None for a
    dense batch; cu_seqlens_cpu: a copy of it, or None. operand: dtype of the operands of tensor cores. intracard_cp,
    segment_tokens: whether sequences are cut, and where, as a call of the forward pass has them."""

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
    def cu_seqlens_cpu(self) -> Tensor | None: ...
    @property
    def state_v_first(self) -> bool: ...
    @property
    def operand(self) -> str: ...
    @property
    def intracard_cp(self) -> str: ...
    @property
    def segment_tokens(self) -> int: ...


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


def packed_sequences_of(call: Walked) -> int | None:
    """Returns the number of packed sequences; None for a dense batch."""
    return None if call.cu_seqlens is None else sequences_of(call)


def slots_of(call: Walked) -> int:
    """Returns how many chunks a call may have."""
    batch, tokens = call.v.shape[:2]
    return chunk_slots(batch, tokens, packed_sequences_of(call))


def spread_of(call: Walked, multiprocessors: int) -> Spread:
    """Returns how the walks of a call are spread out."""
    batch, tokens, heads = call.v.shape[:3]
    copy = None if call.cu_seqlens is None else call.cu_seqlens_cpu
    return plan(
        batch, tokens, heads, packed_sequences_of(call), multiprocessors, call.intracard_cp,
        None if copy is None else longest_sequence(copy), call.segment_tokens,
    )  # fmt: skip


def blocks_of(call: Any) -> Tensor | None:
    """Returns the blocks that a forward pass has kept for a call, if there are any."""
    return getattr(call, "blocks", None)


def peaks_of(call: Walked) -> Tensor:
    """Returns the bits of the largest magnitude of every sequence and head, so far that of the final states'
    gradients."""
    if call.dht is None:
        shape = (sequences_of(call), call.v.shape[2])
        return torch.zeros(shape, dtype=torch.int32, device=call.v.device)
    return call.dht.abs().amax((-2, -1)).view(torch.int32)


def segments_of(call: Walked, spread: Spread) -> Tensor | None:
    """Returns memory for the table of packed segments."""
    if call.cu_seqlens is None:
        return None
    return call.v.new_empty((1 + spread.segments, COLUMNS), dtype=torch.int32)


def facts_of(call: Any) -> dict[str, Any]:
    """Returns the static facts that chunk-parallel kernels share, of a call with q, g, beta and their flags besides."""
    return {
        "dtype": dtype_name(call.q.dtype), "gate_dtype": dtype_name(call.g.dtype),
        "beta_dtype": dtype_name(call.beta.dtype), "operand": call.operand, "l2norm": call.l2norm,
        "beta_sigmoid": call.beta_sigmoid, "neg_eigval": call.neg_eigval,
        "index_dtype": None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
    }  # fmt: skip
