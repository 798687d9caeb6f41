"""Decode of the gated delta rule (GDN) and of KDA: one or a few tokens per call, and speculative decoding."""

OPS = (
    "delta_decode",
    "delta_decode_80sm",
    "delta_decode_fused",
    "delta_decode_slots",
    "delta_decode_variants",
    "delta_decode_variants_80sm",
)
