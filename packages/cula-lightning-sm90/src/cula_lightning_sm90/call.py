"""One call of the prefill operator: its arguments by name, as the operator's schema has them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cula_core.tensors import kept_in

# The pool of an in-place call has an argument of its own, so that no tensor is passed under two names.
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? head_decay, Tensor? initial_state, Tensor(a!)? state_pool, "
    "Tensor? state_indices, Tensor(b!)? final_state, Tensor(c!)? checkpoints, Tensor? cu_seqlens, Tensor(d!) out, "
    "float scale, int decay_sign, bool state_v_first, bool l2norm, bool exact_state, int checkpoint_every, "
    "int? num_splits, Tensor? has_initial_state=None, int? null_slot=None, int segment_tokens=0, "
    "Tensor? checkpoint_rows=None, Tensor? checkpoint_offsets=None, bool reverse=False, "
    "Tensor? dot_with=None, Tensor(e!)? dots=None) -> ()"
)


class Call(NamedTuple):
    """The checked arguments of `prefill`. It is a tuple, so that it can be passed to the operator as its arguments.

    q, k [B, T, H, K]. v, out [B, T, HV, V]. g [B, T, HV], head_decay [HV]: the log decay per token is g plus decay_sign
    * head_decay. initial_state, final_state, state_pool: [rows, HV, K, V], or V, K with `state_v_first`; state_pool is
    updated in place, at the rows that state_indices [N] name (negative or null_slot: padding), and replaces both
    others. has_initial_state [N]: False where a sequence begins from zero. checkpoints [B, T // n, HV, K, V] with n =
    checkpoint_every, or None and 0; [rows, HV, K, V] with checkpoint_rows [N], the row of each sequence's first one, or
    with checkpoint_offsets [N], which keep one state per sequence, after so many tokens; then None is the pool.
    cu_seqlens [N + 1]. segment_tokens: where to cut sequences; 0: as num_splits says. reverse: time runs backwards:
    with the state S_T = initial_state behind the last token, S_t = exp(d_t) (S_(t+1) + k_t v_t^T) is final at t = 0,
    and o_t = scale * q_t (S_(t+1) + k_t v_t^T). Then the checkpoints are S_n, S_2n, ... up to the last in front of a
    token, in the rows where the states after so many tokens are otherwise; without checkpoint_offsets. v may have fewer
    heads than out, as q and k may. dots [B, HV, 4 ceil(V / 64), 2, T] fp32, written: parts of sums over V of dot_with
    [B, T, H or HV, V] times the unrounded outputs, first of their share of the state with which a chunk begins, then of
    the whole.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    head_decay: Tensor | None
    initial_state: Tensor | None
    state_pool: Tensor | None
    state_indices: Tensor | None
    final_state: Tensor | None
    checkpoints: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor
    scale: float
    decay_sign: int
    state_v_first: bool
    l2norm: bool
    exact_state: bool
    checkpoint_every: int
    num_splits: int | None
    has_initial_state: Tensor | None = None
    null_slot: int | None = None
    segment_tokens: int = 0
    checkpoint_rows: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    reverse: bool = False
    dot_with: Tensor | None = None
    dots: Tensor | None = None

    @property
    def kept_in(self) -> Tensor | None:
        """Where states on the way are kept: `checkpoints`, or the pool."""
        return kept_in(
            self.state_pool, self.checkpoints, self.checkpoint_offsets, self.checkpoint_every
        )

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
    def sequences(self) -> int:
        """The number of sequences."""
        return self.v.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
