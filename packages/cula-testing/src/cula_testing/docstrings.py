"""Examples in docstrings: every function and class that a package shows has one, which runs on a CPU."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType
from typing import Any

import pytest


def public_names(module: ModuleType) -> dict[str, Any]:
    """Returns what a module, and the modules that it shows, have in `__all__`, by dotted name."""
    found: dict[str, Any] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            found |= public_names(value)
        else:
            found[f"{module.__name__}.{name}"] = value
    return found


def assert_example_runs(name: str, value: Any) -> None:
    """Holds a function or class to a section `Example:` at the end of its docstring, which uses it and shows results.

    A method that packages show as a function stands in their base, which knows none of them, so its example finds it.
    """
    function = name.rpartition(".")[2]
    # Not what a class inherits.
    _, section, example = inspect.cleandoc(value.__doc__ or "").partition("\nExample:\n")
    assert section, f"{name}: its docstring has no section `Example:`"
    known = {function: value} if inspect.ismethod(value) else {}
    told = doctest.DocTestParser().get_doctest(example, known, name, None, None)
    assert any(function in line.source for line in told.examples), f"{name}: its example lacks it"
    assert any(line.want for line in told.examples), f"{name}: its example shows no result"
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(told, out=report.append)
    assert not failed, "".join(report)


class Examples:
    """The example of every public name of a package."""

    package: ModuleType

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes with what the package shows."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", public_names(self.package))

    def test_example_runs(self, name: str) -> None:
        assert_example_runs(name, public_names(self.package)[name])
