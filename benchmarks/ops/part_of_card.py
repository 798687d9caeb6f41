"""Running on a part of the card: its multiprocessors, and kernel packages that plan for as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from benchmarks.harness import gpu

# Multiprocessors of the part that stands in for a card with 78 of them.
SMS = 80


@contextmanager
def narrow_card(
    multiprocessors: Callable[[int], AbstractContextManager[None]], sms: int
) -> Iterator[gpu.Place]:
    """A green context of `sms` multiprocessors, in which a kernel package plans as `multiprocessors(sms)` makes it."""
    with gpu.green(sms) as place, multiprocessors(sms):
        yield place


@contextmanager
def planned_for(count: int, tensors: Any, launch: Any) -> Iterator[None]:
    """Inside the block the package of the module `launch` chooses tiles as for `count` multiprocessors.

    tensors: the module whose function `multiprocessors` the package asks.
    """
    launch.kernel_for.cache_clear()
    try:
        with mock.patch.object(tensors, "multiprocessors", lambda device: count):
            yield
    finally:
        launch.kernel_for.cache_clear()
