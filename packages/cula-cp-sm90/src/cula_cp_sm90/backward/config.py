"""What is fixed when the kernel of the gradients of chunks is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cula_core.delta_rule.config import TokensConfig


@dataclass(frozen=True)
class GradientsConfig(TokensConfig):
    """Static facts of the kernel that computes the gradients of a chunk, whose dtypes are those of the inputs.

    grouped: dq, dk are fp32, since those of value heads that share a query head are summed.
    """

    grouped: bool = False
