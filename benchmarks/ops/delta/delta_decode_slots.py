"""One token of decode with the delta rule over slots in random order and in order, beside a multiplication of the same
slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.harness.registry import CheckFailed, Provider, Setting
from benchmarks.ops import checks
from benchmarks.ops.delta import delta_decode, providers
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import GATES, Inputs, setting


def _bind(problem: Setting, x: Inputs) -> Callable[[], Any]:
    from benchmarks.ops.negate_slots import negate

    return lambda: negate(x.state, x.slots)


NEGATED = Provider(
    "inplace_slots", "variant", _bind, lambda problem: 2 * delta.state_bytes(problem)
)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Checks as `delta_decode` does; the multiplication must change the sign of every row's states, and of no other."""
    if provider is not NEGATED:
        return providers.check(provider, problem, device)
    x = delta.make_inputs(problem, device, checks.SEED, delta.SPARE)
    want = x.state.clone()
    want[x.slots.long()] *= -1
    provider.bind(problem, x)()
    if not x.state.equal(want):
        raise CheckFailed(f"{problem.name}: the states of the slots are not multiplied by -1")
    return {}


def settings(quick: bool) -> list[Setting]:
    """Every state type and layout with 64, 256 and 8 rows, in both orders."""
    return [
        setting(gate, batch, state=state, layout=layout, ordered=ordered)
        for batch in ((64,) if quick else (64, 256, 8))
        for state in (("bf16",) if quick else ("fp32", "bf16", "fp16"))
        for gate in GATES
        for layout in delta_decode.LAYOUTS
        for ordered in (False, True)
    ]


OP = dataclasses.replace(
    delta_decode.OP,
    name="delta_decode_slots",
    title="GDN and KDA decode by the order of slots, HV=32, K=V=128, one token, bf16 activations",
    settings=settings,
    providers=(providers.CULA, NEGATED, providers.CEILING),
    check=check,
    notes=(
        "Row n has slot n of its pool where a name ends in ordered, else a slot drawn at random.",
        "inplace_slots multiplies the states of the same slots by -1, and does nothing else: what memory allows in that"
        " order. inplace_ceiling is state.mul_(-1.0), all states one behind the other.",
        "cold: buffer sets rotate over more than 3x the L2.",
    ),
)
