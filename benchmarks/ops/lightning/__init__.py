"""Lightning and simple GLA prefill."""

OPS = ("lightning_prefill",)
