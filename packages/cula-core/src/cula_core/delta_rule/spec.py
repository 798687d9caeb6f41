"""Which problems of KDA prefill the kernels serve, for what a dispatcher reads of a package."""

from __future__ import annotations

from ..constants import STATE_DTYPES
from ..dtypes import dtype_name
from ..spec import missing_language
from .config import ACTIVATION_DTYPES, GATE_DTYPES, HEAD_DIM
from .target import Target

OP = "kda.prefill"
PRIORITY = 10

# What the kernel does not read is converted before.
_GATES = (*GATE_DTYPES, "float64")


def supports(
    target: Target,
    *,
    dtype: object = None,
    state_dtype: object = None,
    gate_dtype: object = None,
    beta_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    requires_grad: bool = False,
    state_pool: bool = False,
    has_initial_state: bool = False,
    checkpoints: bool = False,
    **_: object,
) -> str | None:
    """Returns why a problem is refused, or None. Facts that are not given do not count against it."""
    missing = missing_language(target.distribution)
    if missing:
        return missing
    if requires_grad:
        if not target.backward:
            return "no backward"
        inference = {
            "state_pool": state_pool,
            "has_initial_state": has_initial_state,
            "checkpoints": checkpoints,
        }
        used = [name for name, is_used in inference.items() if is_used]
        if used:
            return f"no backward with {used[0]}"
    if dtype is not None and dtype_name(dtype) not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and dtype_name(state_dtype) not in STATE_DTYPES:
        return f"states must be {', '.join(STATE_DTYPES)}, not {state_dtype}"
    for name, given in (("g", gate_dtype), ("beta", beta_dtype)):
        if given is not None and dtype_name(given) not in _GATES:
            return f"{name} must be {', '.join(_GATES)}, not {given}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim != HEAD_DIM:
            return f"{name} must be {HEAD_DIM}, not {dim}"
    return None
