"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from cula_core.dtypes import dtype_name
from cula_core.spec import loader, missing_language

from .config import ACTIVATION_DTYPES, DTYPES, HEAD_DIMS, MAX_TOKENS

NAME = "cula-delta-decode"
OP = "delta.decode"
ARCHS = (
    "sm80",
    "sm86",
    "sm87",
    "sm89",
    "sm90",
    "sm100",
    "sm101",
    "sm103",
    "sm110",
    "sm120",
    "sm121",
)
PRIORITY = 10


def supports(
    *,
    dtype: object = None,
    state_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    tokens: int | None = None,
    requires_grad: bool = False,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it."""
    missing = missing_language(NAME)
    if missing:
        return missing
    if requires_grad:
        return "no backward"
    if dtype is not None and dtype_name(dtype) not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) not in DTYPES:
        return f"the state must be {', '.join(DTYPES)}, not {state_dtype}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim not in HEAD_DIMS:
            return f"{name} must be one of {HEAD_DIMS}, not {dim}"
    if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
        return f"1 to {MAX_TOKENS} tokens per call, not {tokens}"
    return None


load = loader("cula_delta_decode")
