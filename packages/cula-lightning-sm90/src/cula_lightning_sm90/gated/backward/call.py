"""One call of the backward operator of the gated delta rule: its arguments by name, as the operator's schema has
them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BackwardCall(NamedTuple):
    """The checked arguments. It is a tuple, so that it can be passed to the operator as its arguments.

    q, k [B, T, H, K]. v [B, T, HV, V]. g, beta [B, T, HV]: log decays; strengths, or their logits with `beta_sigmoid`.
    initial_state [N, HV, K, V], or V, K with `state_v_first`. cu_seqlens [N + 1], cu_seqlens_cpu a copy of it. do
    [B, T, HV, V]: the gradient of the outputs, in the dtype of v. dht: that of the final states, laid out like
    initial_state; None: zero. operand: dtype of the operands of tensor cores. intracard_cp: "auto", "on" or "off".
    segment_tokens: where to cut sequences; 0: as a plan says. blocks, factors: of all chunks, as an earlier part of the
    same pass has left them; None: they are computed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    do: Tensor
    dht: Tensor | None
    scale: float
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool
    operand: str
    cu_seqlens_cpu: Tensor | None = None
    intracard_cp: str = "auto"
    segment_tokens: int = 0
    blocks: Tensor | None = None
    factors: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of the inputs of a call, each in the shape of its input; None for an input that is None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor | None


SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor do, "
    "Tensor? dht, float scale, bool l2norm, bool beta_sigmoid, bool neg_eigval, bool state_v_first, str operand, "
    "Tensor? cu_seqlens_cpu=None, str intracard_cp='auto', int segment_tokens=0, Tensor? blocks=None, "
    "Tensor? factors=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
