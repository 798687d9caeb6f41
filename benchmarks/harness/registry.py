"""What an op declares (its settings, providers, inputs, byte counts and check), and how an op is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from benchmarks import ops


class CheckFailed(AssertionError):
    """A provider's result is wrong; nothing is timed then."""


class CannotRun(Exception):
    """A peer turns out not to run a setting, or not to give its result; it is skipped there, with this reason."""


@dataclass(frozen=True)
class Setting:
    """A problem. `l2` is "cold", where calls rotate over sets that exceed the L2, or "resident", with one set."""

    name: str
    params: Mapping[str, Any]
    l2: str = "cold"

    def __post_init__(self) -> None:
        if self.l2 not in ("cold", "resident"):
            raise ValueError(f"l2: expected 'cold' or 'resident', got {self.l2!r}")


@dataclass(frozen=True)
class Provider:
    """An implementation.

    role: "ours", "peer", "variant" (of ours) or "ceiling". bind(setting, inputs) returns the call that is timed, which
    takes no arguments. moved(setting) counts the bytes that this implementation must move per call. supports(setting)
    returns None, or the reason why the implementation cannot run. prepare(setting) runs once before the first call.
    """

    name: str
    role: str
    bind: Callable[[Setting, Any], Callable[[], Any]]
    moved: Callable[[Setting], int]
    supports: Callable[[Setting], str | None] = lambda setting: None
    prepare: Callable[[Setting], None] = lambda setting: None


@dataclass(frozen=True)
class Op:
    """A benchmarked op.

    settings(quick) lists the problems. make_inputs(setting, device, seed) builds one buffer set. set_bytes(setting) is
    the size of the part of a set that every call touches. check(provider, setting, device) raises CheckFailed on a
    wrong result, or CannotRun, and returns the errors it found. place() opens the part of the card to run on; None is
    all of it. flops(setting) counts the arithmetic of a call, for ops that are limited by it; their rows have tflops.
    peaks: rows have the memory that a call takes. notes are written into the result file.
    """

    name: str
    title: str
    settings: Callable[[bool], list[Setting]]
    providers: tuple[Provider, ...]
    make_inputs: Callable[[Setting, Any, int], Any]
    set_bytes: Callable[[Setting], int]
    check: Callable[[Provider, Setting, Any], dict[str, float]]
    place: Callable[[], AbstractContextManager[Any]] | None = None
    flops: Callable[[Setting], int] | None = None
    peaks: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        ours = [p.name for p in self.providers if p.role == "ours"]
        if len(ours) != 1:
            raise ValueError(f"providers: expected exactly one with role 'ours', got {ours}")

    def floor_bytes(self, setting: Setting) -> int:
        """The fewest bytes that the op can move, which are those of our own implementation."""
        return next(p for p in self.providers if p.role == "ours").moved(setting)


def modules() -> dict[str, str]:
    """The module of every registered op, by the op's name; none of these modules is imported."""
    found = {}
    for family in ops.FAMILIES:
        package = importlib.import_module(f"{ops.__name__}.{family}")
        found |= {name: f"{package.__name__}.{name}" for name in package.OPS}
    return found


def names() -> list[str]:
    """The names of all registered ops."""
    return sorted(modules())


def get(name: str) -> Op:
    """The op of that name; ValueError lists the known ones."""
    if name not in names():
        raise ValueError(f"op: expected one of {', '.join(names())}, got {name!r}")
    return importlib.import_module(modules()[name]).OP


def select(settings: Iterable[Setting], patterns: Iterable[str] | None) -> list[Setting]:
    """The settings whose name matches any shell pattern, in their own order; ValueError if a pattern matches none."""
    settings = list(settings)
    if not patterns:
        return settings
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(s.name, pattern) for s in settings):
            raise ValueError(
                f"settings: {pattern!r} matches none of {', '.join(s.name for s in settings)}"
            )
    return [s for s in settings if any(fnmatchcase(s.name, p) for p in patterns)]


def choose(op: Op, against: Iterable[str] | None) -> tuple[Provider, ...]:
    """All providers that are no peers, and the named peers: all peers where `against` is None, none for ["none"]."""
    if against is None:
        return op.providers
    wanted = set(against) - {"none"}
    unknown = wanted - {p.name for p in op.providers if p.role == "peer"}
    if unknown:
        raise ValueError(f"against: {op.name} has no peer named {', '.join(sorted(unknown))}")
    return tuple(p for p in op.providers if p.role != "peer" or p.name in wanted)
