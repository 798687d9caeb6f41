"""KDA prefill, its kernels and its gradients, and a model of what it costs."""

OPS = (
    "kda_prefill",
    "kda_prefill_cut",
    "kda_prefill_flashkda",
    "kda_prefill_kernels",
    "kda_prefill_parts",
    "kda_prefill_schedule",
    "kda_training",
)

# Names of the errors of the first head alone, in which nothing is as small as in the last one.
FIRST = {kind: f"{kind} of the first head" for kind in ("output", "state")}
