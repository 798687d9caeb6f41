"""Lightning and simple GLA prefill: dense and packed, many heads and few; K=V=128."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops import copying
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.problem import MODES, setting
from benchmarks.ops.lightning.providers import PROVIDERS, check
from benchmarks.ops.sequences import main_sizes
from benchmarks.ops.tuning import TUNING_MS

FEW_HEADS = (8, 16, 32)
FEW_TOKENS = (16384, 65536)
DENSE_FEATURES = ("gva", "fp16", "state", "l2norm", "exact", "checkpoints")
PACKED_FEATURES = ("gva", "fp16", "pool", "l2norm", "exact", "checkpoints")

# Shell pattern of the settings over which documents give the mean speed: 64 heads, per-head decay, no feature.
MAIN = "*-H64"


def main_settings(mode: str) -> list[Setting]:
    """Ten dense and eighteen packed problems of 64 heads."""
    return [setting(**size, mode=mode) for size in main_sizes()]


def settings(quick: bool) -> list[Setting]:
    """The main settings and long sequences of few heads, in both modes, then single features with decay."""
    if quick:
        return [
            setting(4096),
            setting(8192, sequences=10, lengths="random"),
            setting(16384, heads=8, mode="gate"),
        ]
    few = [setting(t, heads=h, mode=mode) for mode in MODES for h in FEW_HEADS for t in FEW_TOKENS]
    features = [setting(16384, feature=f) for f in DENSE_FEATURES]
    features += [setting(8192, sequences=10, lengths="random", feature=f) for f in PACKED_FEATURES]
    return main_settings("decay") + main_settings("gate") + few + features


NOTES = (
    "Every provider returns final states. bytes: q, k, v, o, gates and states once each, for every provider.",
    f"fla is chunk_simple_gla, tuned anew for every setting: all its candidates, {TUNING_MS['rep']} ms each.",
    "fla plans packed sequences once, outside the time; the length of the plan, which it reads back in every call, is "
    "kept on the host, because a CUDA graph cannot hold that.",
    "fla: where a sequence ends inside a chunk of 64 tokens, final states of heads with a log decay beyond 1.4 per "
    "token are not finite; its check leaves out those states.",
    "cula takes cu_seqlens from the device, and its plan of packed sequences is part of every call.",
    copying.NOTE,
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="lightning_prefill",
    title="Lightning prefill, K=V=128",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=lightning.make_inputs,
    set_bytes=lightning.read,
    check=check,
    notes=NOTES,
)
