"""`cula.ops.lightning_attn` of cuLA."""

from __future__ import annotations

from cula.compat.lightning import lightning_attn_fwd, lightning_attn_fwd_varlen

__all__ = ["lightning_attn_fwd", "lightning_attn_fwd_varlen"]
