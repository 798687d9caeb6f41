"""Long KDA prefill with the longest sequence cut into every sensible number of segments, beside cula's own choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.kda import internals, kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result, setting
from benchmarks.ops.kda.providers import CEILING, CULA, bind_inside

PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def _cut(parts: int) -> AbstractContextManager[Any]:
    return internals.cut_into(parts)


def _call(parts: int, problem: Setting, x: Inputs) -> Callable[[], Result]:
    return bind_inside(functools.partial(_cut, parts), problem, x)


def _supports(parts: int, problem: Setting) -> str | None:
    if refused := CULA.supports(problem):
        return refused
    sizes = internals.sizes(internals.package())
    if parts > 1 and kda.longest(problem) < parts * sizes.min_segment:
        return f"segments have at least {sizes.min_segment // sizes.chunk} chunks"
    return None


def _variant(name: str, parts: int) -> Provider:
    return Provider(
        name,
        "variant",
        functools.partial(_call, parts),
        kda.moved,
        supports=functools.partial(_supports, parts),
    )


VARIANTS = {f"parts_{parts}": parts for parts in PARTS}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares variants with the fp64 oracle too, and the others as usual."""
    if provider.role != "variant":
        return kda_providers.check(provider, problem, device)
    with _cut(VARIANTS[provider.name]):
        return kda_providers.check(CULA, problem, device)


def settings(quick: bool) -> list[Setting]:
    """The long settings of kda_prefill."""
    return [setting(16384, heads=8)] if quick else kda_prefill.few_heads()


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_parts",
    title="KDA prefill in segments, K=V=128",
    settings=settings,
    providers=(CULA, *(_variant(*item) for item in VARIANTS.items()), CEILING),
    check=check,
    notes=(
        "parts_n: the longest sequence is cut into n segments, others into segments of that length; with 1 none is. "
        "Kernels run one after the other. "
        "cula chooses from shapes alone.",
        *kda_prefill.NOTES[:2],
    ),
)
