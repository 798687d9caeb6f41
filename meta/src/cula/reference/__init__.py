"""Every operation in plain torch: token-by-token oracles, and chunked forms that serve where no kernel does.

They run on any device, compute in fp32 (fp64 for fp64 input), and take arguments that were already checked.
"""

from cula.reference.delta_decode import (
    delta_rule_commit,
    delta_rule_decode,
    delta_rule_flush,
)
from cula.reference.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from cula.reference.lightning import lightning_attn_fwd, lightning_attn_fwd_varlen
from cula.reference.lite import lite_attention
from cula.reference.simple_gla import chunk_simple_gla, recurrent_simple_gla
from cula_core.reference.lightning_decode import linear_attention_commit, linear_attention_decode

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_simple_gla",
    "delta_rule_commit",
    "delta_rule_decode",
    "delta_rule_flush",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "linear_attention_commit",
    "linear_attention_decode",
    "lite_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kda",
    "recurrent_simple_gla",
]
