"""Every tile that the decode kernel can be built with, beside the one that the package selects."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.decode import lightning_decode
from benchmarks.ops.decode import problem as decode
from benchmarks.ops.decode import providers as decode_providers
from benchmarks.ops.decode.internals import Config, Problem, candidates, compiled_here
from benchmarks.ops.decode.problem import Inputs, setting
from benchmarks.ops.tiles import tile_name

BATCHES = (1, 16, 64, 256)
LAYOUTS = tuple(itertools.product(("fp32", "bf16"), ("kv", "vk")))


def problem_of(chosen: Setting) -> Problem:
    """The facts of a setting that the kernel knows at compile time."""
    p = chosen.params
    state_dtype = str(decode.DTYPES[p["state"]]).removeprefix("torch.")
    return Problem(
        dtype="bfloat16",
        state_dtype=state_dtype,
        head_dim_k=decode.DIM,
        head_dim_v=decode.DIM,
        tokens=p["T"],
        state_v_first=decode.v_first(chosen),
        indexed=p["indexed"],
        mode="decode" if p["commit"] else "verify",
    )


def configurations(chosen: Setting) -> dict[str, Config]:
    """All candidates of a setting by name; the one that `cula` selects on this machine is among them."""
    return {tile_name(c): c for c in candidates(problem_of(chosen))}


def _call(name: str, chosen: Setting, x: Inputs, out: Tensor | None = None) -> Callable[[], Any]:
    kernel = compiled_here(configurations(chosen)[name])
    out = torch.empty_like(x.v) if out is None else out
    scale = decode.DIM**-0.5
    return lambda: kernel(x.q, x.k, x.v, x.state, x.decay, x.indices, None, None, out, scale, None)


def _result(name: str, chosen: Setting, x: Inputs) -> tuple[Tensor, Tensor]:
    out = torch.full_like(x.v, float("nan"))
    _call(name, chosen, x, out)()
    return out, x.state


def _variant(name: str) -> Provider:
    return Provider(
        name,
        "variant",
        lambda chosen, x: _call(name, chosen, x),
        decode.moved,
        supports=lambda chosen: None if name in configurations(chosen) else "not a candidate",
    )


def check(provider: Provider, chosen: Setting, device: Any) -> dict[str, float]:
    """Compares variants with the fp64 recurrence too, and the others as usual."""
    if provider.role != "variant":
        return decode_providers.check(provider, chosen, device)
    return decode.check_decode(lambda p, x: _result(provider.name, p, x), chosen, device)


def settings(quick: bool) -> list[Setting]:
    """Cold single-token steps of both state types and layouts."""
    batches = (64,) if quick else BATCHES
    return [setting(b, state=state, layout=layout) for state, layout in LAYOUTS for b in batches]


NAMES = sorted(
    {
        name
        for state, layout in LAYOUTS
        for name in configurations(setting(1, state=state, layout=layout))
    }
)

OP = dataclasses.replace(
    lightning_decode.OP,
    name="lightning_decode_variants",
    title="Lightning decode, every tile, H=64, K=V=128, bf16 activations",
    settings=settings,
    providers=(decode_providers.CULA, *map(_variant, NAMES), decode_providers.CEILING),
    check=check,
    notes=(
        "cula is the tile that the package selects; the others are the candidates() of its config module.",
    ),
)
