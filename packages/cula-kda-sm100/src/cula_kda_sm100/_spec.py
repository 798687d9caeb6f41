# Vendored from packages/cula-cp-sm90/src/cula_cp_sm90/_spec.py by "nox -s vendor": edit the master.
"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from .arch import ARCHS as ARCHS
from .arch import NAME as NAME
from .config import ACTIVATION_DTYPES, GATE_DTYPES, HEAD_DIM, dtype_name

OP = "kda.prefill"
PRIORITY = 10

# What the kernel does not read is converted before.
_GATES = (*GATE_DTYPES, "float64")


def supports(
    *,
    dtype: object = None,
    state_dtype: object = None,
    gate_dtype: object = None,
    beta_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    return_intermediate_states: bool = False,
    requires_grad: bool = False,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it."""
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return f"its dependency {module} is missing: pip install --find-links dist {NAME}"
    if requires_grad:
        return "no backward"
    if return_intermediate_states:
        return "keeps no states on the way (return_intermediate_states)"
    if dtype is not None and dtype_name(dtype) not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) != "float32":
        return f"states must be float32, not {state_dtype}"
    for name, given in (("g", gate_dtype), ("beta", beta_dtype)):
        if given is not None and dtype_name(given) not in _GATES:
            return f"{name} must be {', '.join(_GATES)}, not {given}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim != HEAD_DIM:
            return f"{name} must be {HEAD_DIM}, not {dim}"
    return None


def load(function: str) -> Callable:
    """A public function of the package by name."""
    return getattr(import_module(__package__), function)
