"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from cula_core.constants import STATE_DTYPES
from cula_core.dtypes import dtype_name
from cula_core.spec import loader, missing_language

from .config import ACTIVATION_DTYPES, GATE_DTYPES, HEAD_DIMS
from .gated.config import HEAD_DIM, Operands

NAME = "cula-lightning-sm90"
OP = ("lightning.prefill", "lightning.gated_delta_rule")
ARCHS = ("sm90",)
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
    requires_grad: bool = False,
    function: str = "",
    operand_dtype: object = None,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it; every flag is served."""
    gated = function == "chunk_gated_delta_rule"
    missing = missing_language(NAME)
    if missing:
        return missing
    if requires_grad and gated:
        return "no backward"
    if dtype is not None and dtype_name(dtype) not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) not in STATE_DTYPES:
        return f"states must be {', '.join(STATE_DTYPES)}, not {state_dtype}"
    for name, gate in (("g", gate_dtype), ("beta", beta_dtype)):
        if gate is not None and dtype_name(gate) not in _GATES:
            return f"{name} must be {', '.join(_GATES)}, not {gate}"
    dims, allowed = ((HEAD_DIM,), f"{HEAD_DIM}") if gated else (HEAD_DIMS, f"one of {HEAD_DIMS}")
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim not in dims:
            return f"{name} must be {allowed}, not {dim}"
    if gated and operand_dtype is not None and dtype is not None:
        return Operands(dtype_name(dtype), dtype_name(operand_dtype)).illegal()
    return None


load = loader("cula_lightning_sm90")
