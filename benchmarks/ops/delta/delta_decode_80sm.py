"""Decode with the gated delta rule and with KDA on 80 multiprocessors (a green context)."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

from benchmarks.harness import gpu
from benchmarks.harness.registry import Setting
from benchmarks.ops import part_of_card
from benchmarks.ops.delta import delta_decode, internals
from benchmarks.ops.delta.problem import GATES, setting
from benchmarks.ops.part_of_card import SMS


def settings(quick: bool) -> list[Setting]:
    """One token in both layouts and two state types, four tokens, and steps."""
    single = [
        setting(gate, batch, state=state, layout=layout)
        for batch in ((64,) if quick else (64, 8, 256, 1))
        for state in ("fp32", "bf16")
        for gate in GATES
        for layout in delta_decode.LAYOUTS
    ]
    several = [setting(g, 64, 4, mode=m) for m in ("write", "verify", "step") for g in GATES]
    steps = [setting(g, 64, 1, mode="step") for g in GATES]
    return single + (several[:2] if quick else several + steps)


def narrow_card(sms: int = SMS) -> AbstractContextManager[gpu.Place]:
    """A green context of `sms` multiprocessors, in which the kernel package chooses tiles for a card of that size."""
    return part_of_card.narrow_card(internals.multiprocessors, sms)


OP = dataclasses.replace(
    delta_decode.OP,
    name="delta_decode_80sm",
    title=f"GDN and KDA decode on {SMS} multiprocessors, HV=32, K=V=128, bf16 activations",
    settings=settings,
    place=narrow_card,
    notes=(
        *delta_decode.NOTES,
        f"Every provider ran in a green context of {SMS} multiprocessors.",
    ),
)
