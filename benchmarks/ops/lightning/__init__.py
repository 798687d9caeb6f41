"""Lightning and simple GLA prefill, and the gated delta rule of others beside it."""

OPS = (
    "lightning_prefill",
    "lightning_prefill_delta",
    "lightning_training",
    "gated_prefill",
    "gated_training",
)
