"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from .config import ACTIVATION_DTYPES, GATE_DTYPES, HEAD_DIMS, dtype_name

NAME = "cula-lightning-sm90"
OP = "lightning.prefill"
ARCHS = ("sm90",)
PRIORITY = 10

# What the kernel does not read is converted before.
_GATES = (*GATE_DTYPES, "float64")


def supports(
    *,
    dtype: object = None,
    state_dtype: object = None,
    gate_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    requires_grad: bool = False,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it; every flag is served."""
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return f"its dependency {module} is missing: pip install --find-links dist {NAME}"
    if requires_grad:
        return "no backward"
    if dtype is not None and dtype_name(dtype) not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) != "float32":
        return f"states must be float32, not {state_dtype}"
    if gate_dtype is not None and dtype_name(gate_dtype) not in _GATES:
        return f"g must be {', '.join(_GATES)}, not {gate_dtype}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim not in HEAD_DIMS:
            return f"{name} must be one of {HEAD_DIMS}, not {dim}"
    return None


def load(function: str) -> Callable:
    """A public function of the package by name."""
    import cula_lightning_sm90

    return getattr(cula_lightning_sm90, function)
