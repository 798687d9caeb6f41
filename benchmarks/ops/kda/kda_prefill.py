"""KDA prefill with its gate and its norms inside: dense and packed, many heads and few; K=V=128."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops import copying
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda.problem import FEATURES, setting
from benchmarks.ops.kda.providers import FLA_LIMIT, PROVIDERS, check
from benchmarks.ops.sequences import main_sizes
from benchmarks.ops.tuning import TUNING_MS

K = 1024
FEW_HEADS = (4, 8, 16)
FEW_TOKENS = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
# 2 x 16K, 32K + 1K, 64K + 5 x 1K and 8 x 4K tokens.
FEW_PACKED = (
    (2, 32 * K, "uniform"),
    (2, 33 * K, "long"),
    (6, 69 * K, "long"),
    (8, 32 * K, "uniform"),
)
MORE_HEADS = 32
MORE_TOKENS = (16 * K, 64 * K)
FEATURE_TOKENS = 4 * K

# Shell pattern of the settings over which documents give the mean speed: 64 heads, no feature.
MAIN = "*-H64"


def few_heads() -> list[Setting]:
    """Long sequences of few heads, which leave multiprocessors idle unless sequences are cut."""
    dense = [setting(t, heads=h) for h in FEW_HEADS for t in FEW_TOKENS]
    packed = [
        setting(t, heads=h, sequences=n, lengths=lengths)
        for h in FEW_HEADS
        for n, t, lengths in FEW_PACKED
    ]
    return dense + packed + [setting(t, heads=MORE_HEADS) for t in MORE_TOKENS]


def settings(quick: bool) -> list[Setting]:
    """The main settings, few heads, then single features."""
    if quick:
        return [
            setting(4096),
            setting(8192, sequences=10, lengths="random"),
            setting(16384, heads=8),
            setting(FEATURE_TOKENS, feature="unbounded"),
        ]
    main = [setting(**size) for size in main_sizes()]
    return main + few_heads() + [setting(FEATURE_TOKENS, feature=f) for f in FEATURES]


NOTES = (
    "Gates and norms of q and k are computed inside, with a safe gate of lower bound -5; beta is ready. Every provider "
    "returns final states.",
    "bytes: inputs, initial and final states and o once each, for every provider; no workspace.",
    "cula is cula-cp-sm90 on Hopper and cula-kda-sm100 on Blackwell.",
    "cula decides whether to cut sequences (use_intracard_cp='auto'); cula_serial never does, cula_cp always; these "
    "two run where packed sequences or few heads leave a choice.",
    "cula has one workspace for all calls. It plans packed sequences in every call, and is given their lengths on the "
    "host too, as fla is.",
    f"fla is chunk_kda, tuned anew for every setting: all its candidates, {TUNING_MS['rep']} ms each. It plans packed "
    "sequences once, outside the time. Its own cutting of sequences is off, as it is by default.",
    f"Relative RMSE of the worst checked head: cula within {kda.LIMIT:.0e}, fla within {FLA_LIMIT:.0e}.",
    copying.NOTE,
    "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
)

OP = Op(
    name="kda_prefill",
    title="KDA prefill, K=V=128",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=kda.make_inputs,
    set_bytes=kda.read,
    check=check,
    notes=NOTES,
)
