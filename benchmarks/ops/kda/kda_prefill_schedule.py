"""KDA prefill with its two kernels beside each other and one after the other, beside what cula chooses of the two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.registry import CheckFailed, Provider, Setting
from benchmarks.ops.kda import internals, kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result
from benchmarks.ops.kda.providers import CEILING, CULA, bind_inside
from benchmarks.ops.kda.work import H200
from benchmarks.ops.sequences import batch_of, has


def _call(beside: str, problem: Setting, x: Inputs) -> Callable[[], Result]:
    return bind_inside(functools.partial(internals.scheduled, beside), problem, x)


def _beside_supports(problem: Setting) -> str | None:
    if refused := CULA.supports(problem):
        return refused
    gate_dtype = torch.float32 if has(problem, "fp32gate") else torch.bfloat16
    if not internals.may_run_beside(kda.is_bounded(problem), gate_dtype):
        return "only kernels for bounded gates of 16 bits run beside each other"
    if planned(problem, "on").beside is None:
        return f"{internals.package()} has no plan with both kernels beside each other"
    return None


def planned(problem: Setting, beside: str) -> Any:
    """How a call is spread over this machine's GPU, or without one over an H200."""
    p, name = problem.params, str(internals.package())
    card = internals.multiprocessors() or H200.sms
    shape = (batch_of(problem), p["T"], p["H"], p.get("N"), card, kda.longest(problem))
    return internals.plan(name, *shape, beside=beside)


BESIDE = Provider(
    "cula_beside",
    "variant",
    functools.partial(_call, "on"),
    kda.moved,
    supports=_beside_supports,
)
APART = Provider(
    "cula_apart",
    "variant",
    functools.partial(_call, "off"),
    kda.moved,
    supports=CULA.supports,
)
SCHEDULES = {CULA.name: "auto", BESIDE.name: "on", APART.name: "off"}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares with the fp64 oracle, and says whether both kernels ran beside each other.

    A variant that ran with the other schedule fails.
    """
    if provider.role == "ceiling":
        return kda_providers.check(provider, problem, device)
    wanted = SCHEDULES[provider.name]
    with internals.scheduled(wanted) as plans:
        errors = kda_providers.check(CULA, problem, device)
    found = {"off" if plan.beside is None else "on" for plan in plans}
    if len(found) != 1 or wanted not in {"auto", *found}:
        raise CheckFailed(
            f"{problem.name}: expected one schedule, {wanted}, of {provider.name}, got {sorted(found)}"
        )
    return errors | {"beside": float(found == {"on"})}


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_schedule",
    title="KDA prefill by either schedule, K=V=128",
    providers=(CULA, BESIDE, APART, CEILING),
    check=check,
    notes=(
        *kda_prefill.NOTES[:3],
        "cula chooses between both kernels beside each other and one after the other, from shapes alone; `beside` in "
        "its errors is 1 where it chose the former. cula_beside always has them beside each other, where there are "
        "such kernels, and sequences whole. cula_apart always has them one after the other, and decides whether to cut "
        "sequences.",
        "cula has one workspace for all calls, and is given the lengths of packed sequences on the host too.",
        f"Relative RMSE of the worst checked head: within {kda.LIMIT:.0e}.",
        *kda_prefill.NOTES[-2:],
    ),
)
