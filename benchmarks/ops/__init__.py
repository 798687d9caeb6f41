"""The ops that can be measured, in one folder per family; a family's `OPS` names the modules that define an `OP`."""

FAMILIES = ("decode", "delta", "lightning", "kda", "lite")

# Ops that no GPU has a result of, with the reason; `tables.py --check` refuses any other op without a result file.
WITHOUT_RESULTS: dict[str, str] = {}

# The settings of an op whose times under a sustained load are measured.
HEADLINES: dict[str, tuple[str, ...]] = {
    "lightning_decode": ("B64-T1-fp32-kv-cold", "B256-T1-fp32-kv-cold"),
    "delta_decode": ("gdn-B64-T1-fp32-vk", "kda-B64-T1-fp32-vk"),
    "lightning_prefill": ("B1-T16384-H64", "B1-T16384-H64-gate"),
    "kda_prefill": ("B1-T16384-H64", "B1-T65536-H8"),
    "gated_prefill": ("B1-T16384-H64", "B1-T65536-H8"),
    "lite_attention": (
        "dense-B1-S16384-H24-D128",
        "list12.5-B1-S16384-H24-D128",
        "list50-B1-S16384-H24-D128",
    ),
    "lite_backward": (
        "dense-B1-S16384-H24-D128",
        "list5-B1-S8192-H16-D128",
        "list12.5-B1-S16384-H24-D128",
    ),
}
