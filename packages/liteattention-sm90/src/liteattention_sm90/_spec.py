"""What dispatchers read about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from cula_core.dtypes import dtype_name
from cula_core.spec import loader, missing_language

from .config import BLOCK_M, BLOCK_N, DTYPES, MAX_DIM, MAX_TILES

NAME = "liteattention-sm90"
OP = "lite.attention"
ARCHS = ("sm90",)
PRIORITY = 5


def supports(
    *,
    capability: tuple[int, int] | None = None,
    dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    tiles: int | None = None,
    use_int8: bool = False,
    **_: object,
) -> str | None:
    """Why a problem is refused, or None. Facts that are not given do not count against it.

    tiles: of keys, in a row of the list. Gradients are served as attention is, deterministic or not.
    """
    missing = missing_language(NAME)
    if missing:
        return missing
    if capability is not None and tuple(capability) != (9, 0):
        return "needs compute capability 9.0, not {}.{}".format(*capability)
    if dtype is not None and dtype_name(dtype) not in DTYPES:
        return f"q, k and v must be {' or '.join(DTYPES)}, not {dtype_name(dtype)}"
    for name, dim in (("the head dimension", head_dim_k), ("that of v", head_dim_v)):
        if dim is not None and (dim % 8 or not 8 <= dim <= MAX_DIM):
            return f"{name} must be a multiple of 8 up to {MAX_DIM}, not {dim}"
    if block_m not in (None, BLOCK_M):
        return f"block_m must be {BLOCK_M}, not {block_m}"
    if block_n is not None and block_n not in BLOCK_N:
        return f"block_n must be {' or '.join(map(str, BLOCK_N))}, not {block_n}"
    if use_int8:
        return "no scores from 8-bit integers"
    if tiles is not None and not 1 <= tiles <= MAX_TILES:
        return f"1 to {MAX_TILES} key tiles, not {tiles}"
    return None


load = loader("liteattention_sm90")
