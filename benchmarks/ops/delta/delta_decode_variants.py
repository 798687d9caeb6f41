"""Every tile that the decode kernel of the delta rule can be built with, beside the one that the package selects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.delta import delta_decode, internals, providers
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.internals import Config, Gate, Problem
from benchmarks.ops.delta.problem import GATES, Inputs, Result, setting
from benchmarks.ops.tiles import tile_name

BATCHES = (64, 8, 1, 256)
SEVERAL_BATCHES = (64, 8)
# A multiprocessor holds as many threads of 40 registers each. With [K, V] states the number of CTAs that share it is
# tried too, because their kernels need more registers than that unless they are told.
THREADS_OF_40_REGISTERS = 1536


def problem_of(chosen: Setting) -> Problem:
    """The facts of a setting that the kernel knows at compile time."""
    p = chosen.params
    mode = p["mode"]
    return Problem(
        dtype="bfloat16",
        state_dtype=str(delta.DTYPES[p["state"]]).removeprefix("torch."),
        head_dim_k=delta.DIM,
        head_dim_v=delta.DIM,
        tokens=p["T"],
        state_v_first=delta.v_first(chosen),
        gate=Gate(
            "softplus",
            delta.has_channels(chosen),
            "bfloat16",
            True,
            "float32",
            "logits",
            "bfloat16",
        ),
        slots=2 if mode == "slots" else 1,
        ends=mode == "write",
        every_token=mode == "slots",
        replay=mode == "step",
        counted=mode in ("slots", "step"),
    )


@functools.cache
def _configurations(problem: Problem) -> dict[str, Config]:
    found = internals.candidates(problem)
    if not problem.state_v_first:
        found += [
            dataclasses.replace(c, resident=THREADS_OF_40_REGISTERS // c.threads) for c in found
        ]
    found.append(internals.select(problem, "sm_90a"))
    return {tile_name(c): c for c in found}


def configurations(chosen: Setting) -> dict[str, Config]:
    """All tiles of a setting by name; the one that `cula` selects is among them."""
    return _configurations(problem_of(chosen))


def _call(name: str, chosen: Setting, x: Inputs, out: Tensor | None = None) -> Callable[[], Any]:
    out = torch.empty_like(x.v) if out is None else out
    task = providers.our_task(chosen)
    _, arguments = internals.launched(providers.cula_call(task, chosen, x, out))
    kernel = internals.compiled_here(configurations(chosen)[name])
    return lambda: kernel(*arguments)


def _result(name: str, chosen: Setting, x: Inputs) -> Result:
    out = torch.full_like(x.v, float("nan"))
    _call(name, chosen, x, out)()
    return providers.finished(providers.our_task(chosen), chosen, x, out)


def _variant(name: str) -> Provider:
    return Provider(
        name,
        "variant",
        lambda chosen, x: _call(name, chosen, x),
        providers.CULA.moved,
        supports=lambda chosen: None if name in configurations(chosen) else "not a candidate",
    )


def check(provider: Provider, chosen: Setting, device: Any) -> dict[str, float]:
    """Compares variants with the fp64 recurrence too, and the others as usual."""
    if provider.role != "variant":
        return providers.check(provider, chosen, device)
    task = providers.our_task(chosen)
    return delta.check_task(task, lambda p, x: _result(provider.name, p, x), chosen, device)


def settings(quick: bool) -> list[Setting]:
    """One token of both state types and layouts, four and eight tokens, and steps; `quick` has 64 rows alone."""
    batches, several_batches = ((64,), (64,)) if quick else (BATCHES, SEVERAL_BATCHES)
    single = [
        setting(gate, batch, state=state, layout=layout)
        for batch in batches
        for state in ("fp32", "bf16")
        for gate in GATES
        for layout in delta_decode.LAYOUTS
    ]
    several = [
        setting(gate, batch, tokens, mode=mode)
        for batch in several_batches
        for tokens, mode in ((4, "write"), (4, "verify"), (4, "step"), (8, "write"), (8, "step"))
        for gate in GATES
    ]
    return (
        single + several + [setting(g, b, 1, mode="step") for b in several_batches for g in GATES]
    )


NAMES = sorted({name for chosen in settings(False) for name in configurations(chosen)})

# The kernels of a setting are compiled together, before the first of them is needed.
CULA = dataclasses.replace(
    providers.CULA,
    prepare=lambda chosen: internals.compile_ahead(configurations(chosen).values()),
)

OP = dataclasses.replace(
    delta_decode.OP,
    name="delta_decode_variants",
    title="GDN and KDA decode, every tile, HV=32, K=V=128, bf16 activations",
    settings=settings,
    providers=(CULA, *map(_variant, NAMES), providers.CEILING),
    check=check,
    notes=(
        "cula is the tile that the package selects; the others are the candidates() of its plan module, those for "
        "[K, V] states also with so many CTAs for each multiprocessor that a thread has 40 registers.",
    ),
)
