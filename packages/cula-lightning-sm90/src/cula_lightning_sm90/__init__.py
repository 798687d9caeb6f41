"""Lightning attention, simple GLA and gated delta rule prefill for NVIDIA Hopper: one pass over q, k and v by TMA and
WGMMA."""

from . import slices as _slices
from .gated import ops as _gated
from .gated.backward import ops as _backward
from .gated.ops import chunk_gated_delta_rule
from .ops import (
    chunk_lightning_attn,
    chunk_simple_gla,
    lightning_attn_fwd,
    lightning_attn_fwd_varlen,
)

__version__ = "0.1.0"
__all__ = [
    "chunk_gated_delta_rule",
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
]

# For a dispatcher that spreads sequences over GPUs.
begin_chunk_gated_delta_rule = _gated.begin_chunk_gated_delta_rule
begin_chunk_gated_delta_rule_backward = _backward.begin_chunk_gated_delta_rule_backward
fold_slices = _gated.fold_slices
begin_chunk_simple_gla = _slices.begin_chunk_simple_gla
begin_chunk_simple_gla_backward = _slices.begin_chunk_simple_gla_backward
