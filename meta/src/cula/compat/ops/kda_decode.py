"""`cula.ops.kda_decode` of cuLA."""

from __future__ import annotations

from cula.compat.kda import fused_sigmoid_gating_delta_rule_update, kda_decode

__all__ = ["fused_sigmoid_gating_delta_rule_update", "kda_decode"]
