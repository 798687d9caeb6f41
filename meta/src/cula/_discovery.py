"""Which implementations there are: installed kernel packages, FLA and the reference.

Kernel packages advertise a `_spec` module in the entry-point group "cula.kernels". The import names of the first-party
packages are probed as well, because a source tree on PYTHONPATH has no metadata. A spec that cannot be used is kept
with its error.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import NamedTuple

from cula import _implementations
from cula._facts import OPS
from cula._implementations import FLA_PRIORITY, Implementation
from cula._installed import importable
from cula_core.spec import SM80_AND_NEWER


class FirstParty(NamedTuple):
    """A kernel package of this repository: its import name and what it serves, known even where it is missing."""

    module: str
    ops: tuple[str, ...]
    archs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the distribution and of the implementation."""
        return self.module.replace("_", "-")


@dataclass(frozen=True)
class Broken:
    """A kernel package that is installed but whose spec cannot be used."""

    name: str
    error: str


GROUP = "cula.kernels"
FIRST_PARTY = (
    FirstParty("cula_lightning_decode", ("lightning.decode",), SM80_AND_NEWER),
    FirstParty(
        "cula_delta_decode",
        ("delta.decode", "kda.decode", "lightning.gated_delta_decode"),
        SM80_AND_NEWER,
    ),
    FirstParty(
        "cula_lightning_sm90", ("lightning.prefill", "lightning.gated_delta_rule"), ("sm90",)
    ),
    FirstParty("cula_cp_sm90", ("kda.prefill",), ("sm90",)),
    FirstParty("cula_kda_sm100", ("kda.prefill",), ("sm100", "sm103")),
    FirstParty("liteattention_sm89", ("lite.attention",), SM80_AND_NEWER),
    FirstParty("liteattention_sm90", ("lite.attention",), ("sm90",)),
)


@functools.cache
def discover() -> tuple[tuple[Implementation, ...], tuple[Broken, ...]]:
    """All implementations, best first, and what could not be used."""
    found: list[Implementation] = []
    bad: list[Broken] = []
    seen: set[str] = set()
    for module_name in _spec_modules():
        try:
            implementation = _from_spec(importlib.import_module(module_name))
        except (
            Exception
        ) as error:  # an installed package that fails to import must not take the others with it
            bad.append(
                Broken(module_name.removesuffix("._spec"), f"{type(error).__name__}: {error}")
            )
            continue
        if implementation.name in seen:
            bad.append(
                Broken(
                    module_name.removesuffix("._spec"), f"the name {implementation.name!r} is taken"
                )
            )
            continue
        seen.add(implementation.name)
        found.append(implementation)
    found += (_implementations.fla(OPS), _implementations.reference(OPS))
    return tuple(sorted(found, key=lambda i: (i.priority, i.name))), tuple(bad)


def _spec_modules() -> list[str]:
    """Names of the spec modules of installed kernel packages, each once."""
    names = [point.value for point in entry_points(group=GROUP)]
    names += [f"{first.module}._spec" for first in FIRST_PARTY if importable(first.module)]
    return list(dict.fromkeys(names))


def _from_spec(spec: ModuleType) -> Implementation:
    missing = [
        name
        for name in ("NAME", "OP", "ARCHS", "PRIORITY", "supports", "load")
        if not hasattr(spec, name)
    ]
    if missing:
        raise AttributeError(f"{spec.__name__} lacks {', '.join(missing)}")
    ops = (spec.OP,) if isinstance(spec.OP, str) else tuple(spec.OP)
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(
            f"{spec.__name__}.OP: expected one of {', '.join(OPS)}, got {', '.join(unknown)}"
        )
    if spec.NAME in ("auto", "fla", "reference"):
        raise ValueError(f"{spec.__name__}.NAME: {spec.NAME!r} is reserved")
    if not isinstance(spec.PRIORITY, int) or not 0 <= spec.PRIORITY < FLA_PRIORITY:
        raise ValueError(
            f"{spec.__name__}.PRIORITY: expected an int in [0, {FLA_PRIORITY}), got {spec.PRIORITY!r}"
        )
    return Implementation(
        spec.NAME, ops, tuple(spec.ARCHS), spec.PRIORITY, spec.supports, spec.load
    )
