"""What is fixed when the kernel of the gradients of chunks is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientsConfig:
    """Static facts of the kernel that computes the gradients of a chunk.

    dtype: of q, k, do and of dq, dk, dv. gate_dtype, beta_dtype: of g, dg and of dbeta. operand: of states and of what
    products take. gate: g holds log decays ("log"), or what they are computed from ("safe", "softplus"). bounded: log
    decays are in [-5, 0). rate, bias: there is an A_log, a dt_bias. index_dtype: of cu_seqlens, None for a dense batch.
    grouped: dq, dk are fp32, since those of value heads that share a query head are summed. The others are the flags of
    the public function.
    """

    dtype: str
    gate_dtype: str
    beta_dtype: str
    operand: str = "float16"
    gate: str = "safe"
    bounded: bool = True
    l2norm: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    rate: bool = True
    bias: bool = True
    index_dtype: str | None = None
    grouped: bool = False
