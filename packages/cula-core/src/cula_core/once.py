"""A cache for what must be computed once even if several threads ask for it at the same time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps every result of a function of hashable arguments, like `functools.cache`.

    A second thread that asks for the same arguments waits for the first; other arguments do not wait. A call that
    raises keeps nothing.
    """
    results: dict[Hashable, Any] = {}
    locks: dict[Hashable, threading.Lock] = {}
    guard = threading.Lock()

    @functools.wraps(function)
    def cached(*arguments: Hashable) -> Any:
        try:
            return results[arguments]
        except KeyError:
            pass
        with guard:
            lock = locks.setdefault(arguments, threading.Lock())
        with lock:
            if arguments not in results:
                results[arguments] = function(*arguments)
        return results[arguments]

    return cached
