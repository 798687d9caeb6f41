"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from typing import Any

from cula_core.dtypes import dtype_name
from cula_core.spec import SM80_AND_NEWER, loader, supports_decode

from .config import ACTIVATION_DTYPES, DTYPES, HEAD_DIMS, MAX_TOKENS

NAME = "cula-delta-decode"
OP = ("delta.decode", "kda.decode", "lightning.gated_delta_decode")
ARCHS = SM80_AND_NEWER
PRIORITY = 10
load = loader("cula_delta_decode")


def supports(
    *,
    gate_dtype: object = None,
    key_gate_dtype: object = None,
    value_gate_dtype: object = None,
    beta_dtype: object = None,
    **problem: Any,
) -> str | None:
    """Returns why a problem is refused, or None. Facts that are not given do not count against it."""
    reason = supports_decode(NAME, ACTIVATION_DTYPES, DTYPES, HEAD_DIMS, MAX_TOKENS, **problem)
    if reason is not None:
        return reason
    for name, dtype in (("g", gate_dtype), ("gk", key_gate_dtype), ("beta", beta_dtype)):
        if dtype is not None and dtype_name(dtype) not in DTYPES:
            return f"{name} must be {', '.join(DTYPES)}, not {dtype}"
    if value_gate_dtype is not None:
        return "takes no gates over V (gv)"
    if gate_dtype is not None and key_gate_dtype is not None:
        return "takes g or gk, not both"
    return None
