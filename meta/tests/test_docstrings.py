"""Every public function of cula has an example in its docstring, which runs on a CPU.

The packages' tests share `cula_testing.docstrings`. These run where cula is installed alone, without development tools.
"""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import cula


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that a module, and the modules that it shows, name in `__all__`."""
    found: dict[str, Callable[..., Any]] = {}
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            found |= public_functions(value)
        elif inspect.isfunction(value):
            found[f"{module.__name__}.{name}"] = value
    return found


FUNCTIONS = public_functions(cula)


def test_functions_of_every_module_are_found() -> None:
    modules = {name.rpartition(".")[0] for name in FUNCTIONS}
    assert modules == {
        "cula",
        *(f"cula.{m}" for m in "delta distributed kda lightning lite reference varlen".split()),
        *(f"cula.compat.{m}" for m in "flash_kda flashinfer kda lightning ops utils".split()),
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_of_a_function_runs(name: str) -> None:
    docstring = inspect.getdoc(FUNCTIONS[name]) or ""
    _, section, example = docstring.partition("\nExample:\n")
    assert section, f"{name}: its docstring has no section `Example:`"
    told = doctest.DocTestParser().get_doctest(example, {}, name, None, None)
    assert any(line.want for line in told.examples), f"{name}: its example shows no result"
    report: list[str] = []
    doctest.DocTestRunner().run(told, out=report.append)
    assert not report, "".join(report)
