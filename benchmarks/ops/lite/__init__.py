"""Skip-list attention, its gradients, and its quality against its speed."""

OPS = (
    "lite_attention",
    "lite_backward",
    "lite_training",
    "lite_stages",
    "lite_sweeps",
)
