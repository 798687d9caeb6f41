"""`cula.ops.la_decode` of cuLA."""

from __future__ import annotations

from cula.compat.lightning import linear_attention_decode

__all__ = ["linear_attention_decode"]
