"""A cache for what must be computed once even if several threads ask for it at the same time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any


def once(function: Callable[..., Any]) -> functools._lru_cache_wrapper[Any]:
    """Keeps every result of a function of hashable arguments, as `functools.cache` does and as fast.

    A second thread that asks for the same arguments waits for the first; other arguments do not wait. A call that
    raises keeps nothing. A forked process waits for no thread that it does not have.
    """
    results: dict[Hashable, Any] = {}
    locks: dict[Hashable, threading.Lock] = {}
    guard = threading.Lock()

    @functools.cache
    @functools.wraps(function)
    def cached(*arguments: Hashable) -> Any:
        with guard:
            lock = locks.setdefault(arguments, threading.Lock())
        with lock:
            if arguments not in results:
                results[arguments] = function(*arguments)
            return results[arguments]

    def renew() -> None:
        nonlocal guard
        guard = threading.Lock()
        locks.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    forget = cached.cache_clear

    def cache_clear() -> None:
        forget()
        results.clear()

    cached.cache_clear = cache_clear  # type: ignore[method-assign]
    return cached
