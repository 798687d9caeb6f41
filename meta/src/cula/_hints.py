"""Where else a fact that a function does not have may belong; for messages alone."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator

from cula._facts import COMMON_FACTS, FACTS

_MODULES = ("lightning", "kda", "delta", "lite")
_MOST = 4  # what more functions have points to none of them
_COMPAT = ("compat.kda", "compat.lightning", "compat.flash_kda", "compat.flashinfer")


def facts_of(function: str) -> tuple[str, ...]:
    """The facts about a call of a public function, each once."""
    return tuple(dict.fromkeys((*COMMON_FACTS, "tokens", "varlen", *FACTS[function])))


def elsewhere(function: str, names: Iterable[str]) -> str:
    """The end of a sentence about names that are no facts of a function: whose facts or arguments all of them are.

    Empty where nobody or nearly everybody has them all, and where one is an argument of the function itself, which
    decides nothing.
    """
    wanted = set(names)
    kind, having = "facts", [other for other in FACTS if wanted <= {*facts_of(other)}]
    if not having:
        arguments = dict(_arguments())
        if any(wanted & arguments.get(f"cula.{name}.{function}", set()) for name in _MODULES):
            return ""
        kind, having = "arguments", [path for path, known in arguments.items() if wanted <= known]
    if not 0 < len(having) <= _MOST:
        return ""
    return f"; {', '.join(sorted(wanted))}: {kind} of {', '.join(having)}"


def _arguments() -> Iterator[tuple[str, set[str]]]:
    """Path and parameters of every public function of cula, then of those with the names of other libraries."""
    for name in (*_MODULES, *_COMPAT):
        module = importlib.import_module(f"cula.{name}")
        for function in module.__all__:
            value = getattr(module, function)
            if inspect.isfunction(value):
                yield f"cula.{name}.{function}", set(inspect.signature(value).parameters)
