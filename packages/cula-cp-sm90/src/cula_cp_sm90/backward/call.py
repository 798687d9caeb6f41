"""One call of the backward operator: its arguments by name, as the operator's schema has them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BackwardCall(NamedTuple):
    """The checked arguments of `backward`. It is a tuple, so that it can be passed to the operator as its arguments.

    q, k [B, T, H, K]. v [B, T, HV, V]. g [B, T, HV, K]. beta [B, T, HV]. A_log [HV]. dt_bias [HV * K] or [HV, K].
    initial_state [N, HV, K, V], or V, K with `state_v_first`. cu_seqlens [N + 1], cu_seqlens_cpu a copy of it. do
    [B, T, HV, V]: the gradient of the outputs, in the dtype of v. dht: that of the final states, laid out like
    initial_state; None: zero. gate: g holds log decays ("log"), or what a "softplus" or "safe" gate computes them from.
    bounded: log decays are in [-5, 0). operand: dtype of the operands of tensor cores. intracard_cp: "auto", "on" or
    "off". segment_tokens: where to cut sequences; 0: as a plan says. blocks, factors: of all chunks, as the forward has
    kept them; None: they are computed again.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    do: Tensor
    dht: Tensor | None
    scale: float
    gate: str
    lower_bound: float
    bounded: bool
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool
    operand: str
    intracard_cp: str = "auto"
    segment_tokens: int = 0
    blocks: Tensor | None = None
    factors: Tensor | None = None


SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor do, Tensor? dht, float scale, str gate, float lower_bound, "
    "bool bounded, bool l2norm, bool beta_sigmoid, bool neg_eigval, bool state_v_first, str operand, "
    "str intracard_cp='auto', int segment_tokens=0, Tensor? blocks=None, Tensor? factors=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
