"""One call of the prefill operator: its arguments by name, as the operator's schema has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..tensors import kept_in
from .config import COMES_ON, GOES_ON, HAS_STATE


class Call(NamedTuple):
    """The checked arguments of `prefill`. It is a tuple, so that it can be passed to the operator as its arguments.

    q, k [B, T, H, K]. v, out [B, T, HV, V]. g [B, T, HV, K]. beta [B, T, HV]. A_log [HV]. dt_bias [HV * K] or [HV, K].
    initial_state, final_state, state_pool: [rows, HV, K, V], or V, K with `state_v_first`; state_pool is updated in
    place and replaces both others. state_indices, output_state_indices [N]: rows of initial and of final states,
    negative or null_slot: padding; has_initial_state [N]: False where a sequence begins from zero. checkpoints [rows,
    HV, K, V], or V, K: states after every checkpoint_every tokens or, with checkpoint_offsets [N], after so many, then
    None is the pool; checkpoint_rows [N]: the row of each sequence's first one. All or none, and 0. cu_seqlens [N + 1],
    cu_seqlens_cpu a copy of it. workspace: bytes between the kernels. Aqk, Akk [B, T, HV, 64] and w, u, qg, kg [B, T,
    HV, 128]: what a backward pass reads; those that are not None are written. gate: g holds log decays ("log"), or what
    a "softplus" or "safe" gate computes them from. bounded: log decays are in [-5, 0). operand: dtype of the operands
    of tensor cores. intracard_cp: "auto", "on" or "off". segment_tokens: where to cut sequences; 0: as a plan says.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    state_pool: Tensor | None
    state_indices: Tensor | None
    final_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    out: Tensor
    workspace: Tensor | None
    Aqk: Tensor | None
    Akk: Tensor | None
    w: Tensor | None
    u: Tensor | None
    qg: Tensor | None
    kg: Tensor | None
    scale: float
    gate: str
    lower_bound: float
    bounded: bool
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool
    operand: str
    intracard_cp: str
    output_state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    null_slot: int | None = None
    checkpoints: Tensor | None = None
    checkpoint_rows: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_every: int = 0
    segment_tokens: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the pool of states is updated."""
        return self.state_pool is not None

    @property
    def initial(self) -> Tensor | None:
        """The states that are read: `initial_state`, or the pool."""
        return self.initial_state if self.state_pool is None else self.state_pool

    @property
    def final(self) -> Tensor | None:
        """The states that are written: `final_state`, or the pool."""
        return self.final_state if self.state_pool is None else self.state_pool

    @property
    def kept_in(self) -> Tensor | None:
        """Where states on the way are kept: `checkpoints`, or the pool."""
        return kept_in(
            self.state_pool, self.checkpoints, self.checkpoint_offsets, self.checkpoint_every
        )

    @property
    def packed(self) -> bool:
        """Whether sequences are packed into one row."""
        return self.cu_seqlens is not None

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.v.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def packed_sequences(self) -> int | None:
        """The number of packed sequences; None for a dense batch."""
        return self.sequences if self.packed else None

    @property
    def intra(self) -> tuple[Tensor, ...]:
        """The tensors for a backward pass that the caller wants."""
        every = (self.Aqk, self.Akk, self.w, self.u, self.qg, self.kg)
        return tuple(x for x in every if x is not None)


@dataclass(frozen=True)
class Slice:
    """A run of tokens `start .. stop - 1`, which is one of the packed sequences of a call.

    comes_on: it continues a sequence, and the state in front of it is not known at first. goes_on: what it does to a
    state is wanted before that.
    """

    start: int
    stop: int
    comes_on: bool = False
    goes_on: bool = False

    @property
    def bits(self) -> int:
        """What kernels know of it."""
        return (COMES_ON if self.comes_on else HAS_STATE) | (GOES_ON if self.goes_on else 0)


# The pool of an in-place call has an argument of its own, so that no tensor that is written has two names.
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor(a!)? state_pool, Tensor? state_indices, Tensor(b!)? final_state, Tensor? cu_seqlens, "
    "Tensor? cu_seqlens_cpu, Tensor(c!) out, Tensor(d!)? workspace, Tensor(e!)? Aqk, Tensor(f!)? Akk, "
    "Tensor(g!)? w, Tensor(h!)? u, Tensor(i!)? qg, Tensor(j!)? kg, float scale, "
    "str gate, float lower_bound, bool bounded, bool l2norm, bool beta_sigmoid, bool neg_eigval, bool state_v_first, "
    "str operand, str intracard_cp, Tensor? output_state_indices=None, Tensor? has_initial_state=None, "
    "int? null_slot=None, Tensor(k!)? checkpoints=None, Tensor? checkpoint_rows=None, "
    "Tensor? checkpoint_offsets=None, int checkpoint_every=0, int segment_tokens=0) -> ()"
)
