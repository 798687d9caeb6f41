"""The paths below `cula.ops` that tests and benchmarks of cuLA import from."""

from __future__ import annotations

from cula.compat.kda import fused_sigmoid_gating_delta_rule_update, kda_decode
from cula.compat.lightning import linear_attention_decode

__all__ = ["fused_sigmoid_gating_delta_rule_update", "kda_decode", "linear_attention_decode"]
