"""Lightning decode on the whole card: H=64, K=V=128, bf16 activations."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops import in_place
from benchmarks.ops.decode import problem as decode
from benchmarks.ops.decode.problem import setting
from benchmarks.ops.decode.providers import PROVIDERS, check

BATCHES = (1, 4, 16, 32, 64, 128, 256)
QUICK_BATCHES = (1, 64, 256)
# States of these batches stay in the L2 of a big card from one step to the next if nothing else runs between them.
RESIDENT_BATCHES = (1, 4)
TOKENS = (2, 4, 8)
TOKEN_BATCHES = (1, 16, 64, 256)
INDEXED_BATCHES = (64, 256)


def settings(quick: bool) -> list[Setting]:
    """Single-token steps of both state types and layouts, several tokens per call, verification, pool indices."""
    batches = QUICK_BATCHES if quick else BATCHES
    single = [
        setting(b, state=state, layout=layout, l2=l2)
        for state in ("fp32", "bf16")
        for layout in ("kv", "vk")
        for b in batches
        for l2 in (("resident", "cold") if b in RESIDENT_BATCHES else ("cold",))
    ]
    if quick:
        return single + [setting(64, tokens=4), setting(64, tokens=4, commit=False)]
    several = [setting(b, tokens=t) for t in TOKENS for b in TOKEN_BATCHES]
    verify = [setting(b, tokens=t, commit=False) for t in (1, *TOKENS) for b in TOKEN_BATCHES]
    indexed = [
        setting(b, layout=layout, indexed=True) for layout in ("kv", "vk") for b in INDEXED_BATCHES
    ]
    return single + several + verify + indexed


NOTES = (
    "cula updates the state in place; fla writes a new state, always fp32, and is tuned anew for every setting.",
    in_place.NOTE,
    "cold: buffer sets rotate over more than 3x the L2; resident: the same buffers every call.",
)

OP = Op(
    name="lightning_decode",
    title="Lightning decode, H=64, K=V=128, bf16 activations",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=decode.make_inputs,
    set_bytes=decode.state_bytes,
    check=check,
    notes=NOTES,
)
