"""How much work the compiler puts into a kernel, and which kernels are worth more of it.

A test session builds its kernels at the quick level: they compile in a third of the time, and run up to four times as
long. What ran for more than SLOW_SECONDS of processor time is compiled again at the full level when the tests are over,
so that the next session finds it in the cache, where the full level is always preferred. Results have the same bits at
both.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

SLOW_SECONDS = 1.0


@dataclass(frozen=True)
class Level:
    """Flags of the compiler. wanted: those that are left out where it does not take them."""

    flags: tuple[str, ...]
    wanted: tuple[str, ...] = ()


QUICK = Level(("-O0",))
FULL = Level(
    ("-O1",), ("-fno-tree-pta",)
)  # the second flag halves the time, and the code is the same


@dataclass
class QuickBuild:
    """What a library of the quick level was made of, and how long its kernels ran in this process."""

    ptx: str
    host_object: bytes | None
    seconds: float = 0.0


_lock = threading.Lock()
_first = FULL
_quick_builds: dict[Path, QuickBuild] = {}


def first() -> Level:
    """The level of kernels that the cache does not hold."""
    return _first


def quick_first() -> None:
    """Lets this process build its kernels at the quick level from now on."""
    global _first
    _first = QUICK


def remember(path: Path, ptx: str, host_object: bytes | None) -> None:
    """Begins to count how long the kernels of a library of the quick level run."""
    with _lock:
        _quick_builds.setdefault(path, QuickBuild(ptx, host_object))


def book(path: Path, seconds: float) -> None:
    """Adds to the time that the kernels of a library ran; those of the full level are not counted."""
    with _lock:
        if path in _quick_builds:
            _quick_builds[path].seconds += seconds


def counted() -> frozenset[Path]:
    """The libraries whose time is counted so far."""
    with _lock:
        return frozenset(_quick_builds)


def take_slow(but: frozenset[Path] = frozenset()) -> list[QuickBuild]:
    """The libraries of the quick level that ran for long, without some; the count of these goes on, of others begins
    anew."""
    with _lock:
        every = [_quick_builds.pop(path) for path in _quick_builds.keys() - but]
    return [one for one in every if one.seconds > SLOW_SECONDS]
