"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from cula_core.dtypes import dtype_name
from cula_core.spec import SM80_AND_NEWER, loader, missing_language

from .config import BLOCK_M, BLOCK_N, DTYPES, HEAD_DIMS

NAME = "liteattention-sm89"
OP = "lite.attention"
ARCHS = SM80_AND_NEWER
PRIORITY = 10


def supports(
    *,
    dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it."""
    missing = missing_language(NAME)
    if missing:
        return missing
    name = dtype_name(dtype)
    if dtype is not None and name not in DTYPES:
        return f"q, k and v must be {' or '.join(DTYPES)}, not {name}"
    for name, dim in (("the head dimension", head_dim_k), ("that of v", head_dim_v)):
        if dim is not None and (dim % 8 or dim > HEAD_DIMS[-1]):
            return f"{name} must be a multiple of 8 up to {HEAD_DIMS[-1]}, not {dim}"
    if block_m not in (None, BLOCK_M):
        return f"block_m must be {BLOCK_M}, not {block_m}"
    if block_n is not None and block_n not in BLOCK_N:
        return f"block_n must be {' or '.join(map(str, BLOCK_N))}, not {block_n}"
    return None


load = loader("liteattention_sm89")
