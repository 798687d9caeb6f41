"""What the `_spec` module of every package needs: whether its kernel language is installed, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def missing_language(distribution: str) -> str | None:
    """Returns why the kernels of a distribution cannot be compiled here, or None if CuTe DSL is installed."""
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return (
                f"its dependency {module} is missing: pip install --find-links dist {distribution}"
            )
    return None


def loader(package: str) -> Callable[[str], Callable]:
    """Returns `load(function)`, which imports a package and returns a public function of it by name."""

    def load(function: str) -> Callable:
        return getattr(import_module(package), function)

    return load
