"""The context of several ranks that holds where a call names none: what `with cp:` of cula.distributed sets."""

from __future__ import annotations

import threading
from contextvars import ContextVar

_around: ContextVar[tuple[object, ...]] = ContextVar("cula.distributed", default=())
# Of all threads together. torch.compile can trace a number, but no context variable.
_entered = 0
_counting = threading.Lock()


def enter(cp_context: object) -> None:
    global _entered
    with _counting:
        _entered += 1
    _around.set((*_around.get(), cp_context))


def leave() -> None:
    global _entered
    with _counting:
        _entered -= 1
    _around.set(_around.get()[:-1])


def context_of(cp_context: object) -> object:
    """What was given; None stands for the context that was entered last, if any, and False for none."""
    if cp_context is None and _entered:
        found = _around.get()
        return found[-1] if found else None
    return None if cp_context is False else cp_context


def refuse_context(function: str) -> None:
    """Raises where a context is entered: `function` would take this rank's slice for whole sequences."""
    if context_of(None) is not None:
        raise NotImplementedError(
            f"{function}: expected no context of several ranks around it; the functions with a cp_context have one"
        )
