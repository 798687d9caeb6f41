"""What the `_spec` modules of packages share: architectures, whether the kernel language is installed, how a package is
loaded, and which problems a decode kernel serves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec

from .dtypes import dtype_name

SM80_AND_NEWER = tuple(f"sm{n}" for n in (80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121))


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


def supports_decode(
    distribution: str,
    dtypes: Collection[str],
    state_dtypes: Collection[str],
    head_dims: Collection[int],
    max_tokens: int,
    *,
    dtype: object = None,
    state_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    tokens: int | None = None,
    requires_grad: bool = False,
    **_: object,
) -> str | None:
    """Returns why a decode kernel refuses a problem, or None. Facts that are not given do not count against it."""
    missing = missing_language(distribution)
    if missing:
        return missing
    if requires_grad:
        return "no backward"
    if dtype is not None and dtype_name(dtype) not in dtypes:
        return f"activations must be {' or '.join(dtypes)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) not in state_dtypes:
        return f"the state must be {', '.join(state_dtypes)}, not {state_dtype}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim not in head_dims:
            return f"{name} must be one of {head_dims}, not {dim}"
    if tokens is not None and not 1 <= tokens <= max_tokens:
        return f"1 to {max_tokens} tokens per call, not {tokens}"
    return None
