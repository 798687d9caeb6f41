"""Decode of the gated delta rule and KDA on a pool of states: one read and one write of the state for 1 to 8 tokens."""

from cula_core.delta_decode.rings import fill_convolution_ring, new_convolution_ring
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_core.reference.delta_decode import Replay

from .ops import delta_rule_commit, delta_rule_decode, delta_rule_flush, new_replay
from .recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_kda

__version__ = "0.1.0"
__all__ = [
    "GatedNorm",
    "Replay",
    "ShortConvolution",
    "delta_rule_commit",
    "delta_rule_decode",
    "delta_rule_flush",
    "fill_convolution_ring",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "new_convolution_ring",
    "new_replay",
]
