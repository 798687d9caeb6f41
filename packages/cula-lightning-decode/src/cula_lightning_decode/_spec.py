"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from .config import ACTIVATION_DTYPES, HEAD_DIMS, MAX_TOKENS, STATE_DTYPES

NAME = "cula-lightning-decode"
OP = "lightning.decode"
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
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return f"its dependency {module} is missing: pip install --find-links dist {NAME}"
    if requires_grad:
        return "no backward"
    if dtype is not None and str(dtype).removeprefix("torch.") not in ACTIVATION_DTYPES:
        return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {dtype}"
    if state_dtype is not None and str(state_dtype).removeprefix("torch.") not in STATE_DTYPES:
        return f"the state must be {', '.join(STATE_DTYPES)}, not {state_dtype}"
    for name, dim in (("K", head_dim_k), ("V", head_dim_v)):
        if dim is not None and dim not in HEAD_DIMS:
            return f"{name} must be one of {HEAD_DIMS}, not {dim}"
    if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
        return f"1 to {MAX_TOKENS} tokens per call, not {tokens}"
    return None


def load(function: str) -> Callable:
    """A public function of the package by name."""
    import cula_lightning_decode

    return getattr(cula_lightning_decode, function)
