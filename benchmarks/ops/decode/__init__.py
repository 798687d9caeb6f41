"""Lightning decode: one or a few tokens per call."""

OPS = (
    "lightning_decode",
    "lightning_decode_80sm",
    "lightning_decode_variants",
    "lightning_decode_variants_80sm",
)
