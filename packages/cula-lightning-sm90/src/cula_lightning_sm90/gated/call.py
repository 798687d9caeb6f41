"""One call of the operator: its arguments by name, as the operator's schema has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cula_core.tensors import kept_in

# The pool of an in-place call has an argument of its own, so that no tensor is passed under two names.
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor(a!)? state_pool, Tensor? state_indices, Tensor? output_state_indices, Tensor? has_initial_state, "
    "Tensor(b!)? final_state, Tensor(c!)? checkpoints, Tensor? cu_seqlens, Tensor(d!) out, float scale, bool raw_gate, "
    "bool beta_logits, bool doubled, bool state_v_first, bool l2norm, float softplus_beta, float softplus_threshold, "
    "int? null_slot, int checkpoint_every, ScalarType? operand_dtype, Tensor? cu_seqlens_cpu, str intracard_cp, "
    "Tensor? checkpoint_rows=None, Tensor? checkpoint_offsets=None, int segment_tokens=0) -> ()"
)


class Call(NamedTuple):
    """The checked arguments. It is a tuple, so that it can be passed to the operator as its arguments.

    Tensors are those of the public function. initial_state, final_state, state_pool: [rows, HS, K, V], or V, K with
    `state_v_first`. state_pool is updated in place, at the rows that state_indices and output_state_indices name, and
    replaces both others. checkpoints: states after every checkpoint_every tokens or, with checkpoint_offsets [N], after
    so many, then None is the pool; checkpoint_rows [N]: the row of each sequence's first one. raw_gate: g is what the
    softplus makes a decay of. beta_logits, doubled: of what strengths are made. cu_seqlens_cpu: a copy of cu_seqlens.
    intracard_cp: "auto", "on" or "off". segment_tokens: where to cut sequences; 0: as a plan says.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    state_pool: Tensor | None
    state_indices: Tensor | None
    output_state_indices: Tensor | None
    has_initial_state: Tensor | None
    final_state: Tensor | None
    checkpoints: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor
    scale: float
    raw_gate: bool
    beta_logits: bool
    doubled: bool
    state_v_first: bool
    l2norm: bool
    softplus_beta: float
    softplus_threshold: float
    null_slot: int | None
    checkpoint_every: int
    operand_dtype: torch.dtype | None
    cu_seqlens_cpu: Tensor | None
    intracard_cp: str
    checkpoint_rows: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    segment_tokens: int = 0

    @property
    def initial(self) -> Tensor | None:
        """The states that are read: `initial_state`, or the pool."""
        return self.initial_state if self.state_pool is None else self.state_pool

    @property
    def kept_in(self) -> Tensor | None:
        """Where states on the way are kept: `checkpoints`, or the pool."""
        return kept_in(
            self.state_pool, self.checkpoints, self.checkpoint_offsets, self.checkpoint_every
        )

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
