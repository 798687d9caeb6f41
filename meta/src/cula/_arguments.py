"""What arguments are checked for beyond the words of `cula_core.arguments`, in which the contracts are written.

The public functions take every head dimension on every device, and inputs that require gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.dtypes import dtype_name


class Dims(NamedTuple):
    """Sizes of a call: batch, tokens, query/key heads, value heads, key and value head dimensions, sequences."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    dim_k: int
    dim_v: int
    sequences: int


def token_dims(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    requires_grad: bool,
) -> Dims:
    """q, k `[B, T, H, K]`, v and out `[B, T, HV, V]` and the packing."""
    arguments.attention(q, k, v, out, None)
    arguments.not_with_gradients("out", out, requires_grad)
    batch, tokens, heads, dim_k = q.shape
    sequences = batch
    if cu_seqlens is not None:
        sequences = arguments.offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens_cpu is not None:
        arguments.offsets_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    return Dims(batch, tokens, heads, v.shape[2], dim_k, v.shape[3], sequences)


def decode_dims(k: Tensor, v: Tensor) -> Dims:
    """k `[B, T, H, K]` and v `[B, T, HV, V]`, which have four dimensions."""
    batch, tokens, heads, dim_k = k.shape
    heads_v, dim_v = v.shape[2:]
    if v.shape[:2] != k.shape[:2]:
        expected = f"[B, T, HV, V] with B, T = {batch}, {tokens} as in k"
        arguments.value_error("v", expected, list(v.shape))
    for name, letter, dim in (("k", "K", dim_k), ("v", "V", dim_v)):
        if dim < 1:
            arguments.value_error(name, f"a head dimension {letter} of at least 1", dim)
    arguments.value_heads("v", heads_v, heads)
    return Dims(batch, tokens, heads, heads_v, dim_k, dim_v, batch)


def activations(**tensors: Tensor) -> None:
    """Tensors of one dtype that the CPU serves on one device, last dimension contiguous; the first one leads."""
    first, lead = next(iter(tensors.items()))
    for name, x in tensors.items():
        arguments.tensor(name, x)
    arguments.leading(first, lead, anywhere=True)
    for name, x in tensors.items():
        arguments.activation(name, x, lead, first)


def like_tokens(name: str, x: Tensor, q: Tensor, shape: tuple[int, ...], letters: str) -> None:
    """A floating tensor of any dtype and strides with one entry, or one row, per token and head."""
    arguments.floating(name, x)
    if x.shape != shape:
        arguments.value_error(name, f"{letters} = {list(shape)}", list(x.shape))
    arguments.device(name, x, q)


def decays(name: str, x: Tensor, lead: Tensor, value_heads: int, sign: int, lead_name: str) -> None:
    """A decay per value head, whose values have one sign (1 or -1)."""
    arguments.tensor(name, x)
    allowed = arguments.exact_dtypes(lead)
    if x.dtype not in allowed:
        arguments.type_error(name, arguments.names(allowed), dtype_name(x.dtype))
    arguments.vector(name, x, "HV", value_heads)
    arguments.device(name, x, lead, lead_name)
    arguments.sign(name, x, sign)


def seed_of_rounding(seed: Tensor | int, state: Tensor) -> None:
    """A seed beside states that it can round."""
    name = "rounding_seed"
    if state.dtype != torch.bfloat16:
        got = f"a seed with a {dtype_name(state.dtype)} state"
        arguments.value_error(name, "None unless the state is bfloat16", got)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            arguments.type_error(name, "int64", dtype_name(seed.dtype))
        if tuple(seed.shape) != (1,):
            arguments.value_error(name, "one element, [1]", list(seed.shape))
        arguments.device(name, seed, state, "state")
    elif isinstance(seed, bool) or not isinstance(seed, int | torch.SymInt):
        expected = "an int, an int64 tensor of one element or None"
        arguments.type_error(name, expected, type(seed).__name__)
    elif not -(1 << 63) <= seed < 1 << 63:
        arguments.value_error(name, "a 64-bit integer", seed)


def split_count(num_splits: int | None) -> None:
    """None, or a number of segments."""
    if num_splits is None:
        return
    if type(num_splits) is not int:
        arguments.type_error("num_splits", "an int or None", type(num_splits).__name__)
    if num_splits < 1:
        arguments.value_error("num_splits", "at least 1", num_splits)
