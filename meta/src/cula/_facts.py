"""What there is to serve, the functions of every op, and the facts that a decision about a call depends on."""

from __future__ import annotations

OPS: dict[str, tuple[str, ...]] = {
    "lightning.decode": ("linear_attention_decode", "linear_attention_commit"),
    "lightning.prefill": ("lightning_attn_fwd", "lightning_attn_fwd_varlen", "chunk_simple_gla"),
    "lightning.gated_delta_rule": ("chunk_gated_delta_rule",),
    "kda.prefill": ("chunk_kda",),
    "kda.decode": ("fused_recurrent_kda",),
    "lightning.gated_delta_decode": ("fused_recurrent_gated_delta_rule",),
    "delta.decode": ("delta_rule_decode", "delta_rule_commit", "delta_rule_flush"),
    "lite.attention": ("lite_attention",),
}
# What a decision depends on beside the device: facts about every call, then the flags of each function by name.
# gate_dtype: that of g, None without; key_gate_dtype, value_gate_dtype: the same of gk and gv.
COMMON_FACTS = ("dtype", "head_dim_k", "head_dim_v", "requires_grad", "state_dtype")
_DELTA_RULE_FACTS = (
    "gate_dtype",
    "beta_dtype",
    "varlen",
    "group",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
)
# grouped_queries: whether heads of q share one of k or v; softplus: whether its numbers are others than 1 and 20.
# decay_requires_grad: whether the constant decay of a head does; checkpoints: whether states on the way are written.
_PREFILL_FACTS = (
    "decay_requires_grad",
    "use_qk_l2norm_in_kernel",
    "exact_state",
    "checkpoints",
    "num_splits",
    "segment_tokens",
)
FACTS: dict[str, tuple[str, ...]] = {
    "linear_attention_decode": ("tokens", "state_v_first", "commit", "stochastic_rounding"),
    "linear_attention_commit": ("tokens", "state_v_first", "stochastic_rounding"),
    "lightning_attn_fwd": (
        "group",
        "initial_state",
        "output_final_state",
        "state_v_first",
        *_PREFILL_FACTS,
    ),
    "lightning_attn_fwd_varlen": (
        "varlen",
        "group",
        "state_pool",
        "output_final_state",
        "state_v_first",
        "update_state_pool",
        *_PREFILL_FACTS,
    ),
    "chunk_simple_gla": (
        "gate_dtype",
        "head_decay",
        "varlen",
        "group",
        "initial_state",
        "output_final_state",
        "state_v_first",
        *_PREFILL_FACTS,
    ),
    "chunk_gated_delta_rule": (
        *_DELTA_RULE_FACTS,
        "grouped_queries",
        "softplus",
        "state_pool",
        "update_state_pool",
        "has_initial_state",
        "checkpoints",
        "use_intracard_cp",
        "segment_tokens",
        "operand_dtype",
    ),
    "chunk_kda": (
        *_DELTA_RULE_FACTS,
        "safe_gate",
        "lower_bound",
        "return_intermediate_states",
        "state_pool",
        "update_state_pool",
        "has_initial_state",
        "checkpoints",
        "use_intracard_cp",
        "segment_tokens",
    ),
    "fused_recurrent_kda": (*_DELTA_RULE_FACTS, "lower_bound"),
    "fused_recurrent_gated_delta_rule": (
        *_DELTA_RULE_FACTS,
        "key_gate_dtype",
        "value_gate_dtype",
    ),
    "delta_rule_decode": (
        "tokens",
        "varlen",
        "state_v_first",
        "commit",
        "replay",
        "convolution",
        "norm",
    ),
    "delta_rule_commit": ("tokens", "varlen", "state_v_first"),
    "delta_rule_flush": ("state_v_first",),
    "lite_attention": ("block_m", "block_n", "must_do"),
}
# Arguments that no implementation is handed, because they change nothing in what it computes.
CALLERS_ALONE: dict[str, tuple[str, ...]] = {
    "chunk_kda": ("use_graph", "max_num_seqs", "chunk_size"),
    "chunk_gated_delta_rule": ("chunk_size",),
    "chunk_simple_gla": ("cp_context",),
}
# Public functions that another one serves; where architectures are named, by a kernel on one of them or not at all.
SERVED_AS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "chunk_lightning_attn": ("chunk_simple_gla", None),
    "kda_prefill_hopper": ("chunk_kda", ("sm90",)),
}
