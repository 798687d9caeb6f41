"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from cula_core.dtypes import dtype_name
from cula_core.spec import loader, missing_language

from .config import ACTIVATION_DTYPES, GATE_DTYPES, HEAD_DIMS

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
    missing = missing_language(NAME)
    if missing:
        return missing
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


load = loader("cula_lightning_sm90")
