"""Lightning decode on 80 multiprocessors (a green context), from which a card with 78 of them can be estimated."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

from benchmarks.harness import gpu
from benchmarks.harness.registry import Setting
from benchmarks.ops import part_of_card
from benchmarks.ops.decode import internals, lightning_decode
from benchmarks.ops.decode.problem import setting
from benchmarks.ops.part_of_card import SMS


def settings(quick: bool) -> list[Setting]:
    """Single-token steps, both layouts in fp32 and the default one in bf16, and four tokens per call."""
    batches = lightning_decode.QUICK_BATCHES if quick else lightning_decode.BATCHES
    single = [
        setting(b, state=state, layout=layout, l2=l2)
        for state, layout in (("fp32", "kv"), ("fp32", "vk"), ("bf16", "kv"))
        for b in batches
        for l2 in (("resident", "cold") if b in lightning_decode.RESIDENT_BATCHES else ("cold",))
    ]
    return single + [setting(b, tokens=4) for b in batches if b >= 64]


def narrow_card(sms: int = SMS) -> AbstractContextManager[gpu.Place]:
    """A green context of `sms` multiprocessors, in which the kernel package chooses tiles for a card of that size."""
    return part_of_card.narrow_card(internals.multiprocessors, sms)


OP = dataclasses.replace(
    lightning_decode.OP,
    name="lightning_decode_80sm",
    title=f"Lightning decode on {SMS} multiprocessors, H=64, K=V=128, bf16 activations",
    settings=settings,
    place=narrow_card,
    notes=(
        *lightning_decode.NOTES,
        f"Every provider ran in a green context of {SMS} multiprocessors.",
    ),
)
