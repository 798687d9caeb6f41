"""The contract of `cula.lite`: every argument that does not fit raises a TypeError or ValueError that names it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula._arguments import activations
from cula_core import arguments
from cula_core.dtypes import dtype_name
from cula_core.tensors import longest_sequence


class Extent(NamedTuple):
    """Sequences, and the most queries and keys that one has."""

    sequences: int
    queries: int
    keys: int


def lite_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None,
    *,
    threshold: float | None,
    threshold_mode: str,
    direction: int | Tensor,
    scale: float | None,
    causal: bool,
    must_do: Tensor | None,
    block_m: int,
    block_n: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    use_int8: bool,
    grad_mask: Tensor | None,
    deterministic: bool,
    out: Tensor | None,
    requires_grad: bool,
) -> None:
    """Raises unless the arguments of `cula.lite.lite_attention` fit together; `operands` has seen q and v."""
    _operands(q, k, v)
    arguments.booleans(causal=causal, use_int8=use_int8, deterministic=deterministic)
    if use_int8 and requires_grad:
        arguments.value_error("use_int8", "False when gradients are required", True)
    for name, block in (("block_m", block_m), ("block_n", block_n)):
        arguments.integer(name, block)
        if block < 1:
            arguments.value_error(name, "at least 1", block)
    _direction(direction, q)
    _threshold(threshold, threshold_mode)
    arguments.number("scale", scale)
    extent = _extent(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tiles = (
        extent.sequences,
        q.shape[2],
        -(-extent.queries // block_m),
        -(-extent.keys // block_n),
    )
    if threshold is None:
        for name, mask in (("read_mask", read_mask), ("must_do", must_do)):
            if mask is not None:
                expected = "None where threshold is None, which is dense attention"
                arguments.value_error(name, expected, "a mask")
    if read_mask is not None:
        last, shape = _form("read_mask", read_mask, tiles, q)
        if tuple(read_mask.shape) != shape:
            expected = f"[B, Hq, Mt, {last}] = {list(shape)}"
            arguments.value_error("read_mask", expected, list(read_mask.shape))
    for name, mask in (("must_do", must_do), ("grad_mask", grad_mask)):
        if mask is not None:
            last, shape = _form(name, mask, tiles, q)
            aligned = (1,) * (4 - mask.dim()) + tuple(mask.shape)
            if len(aligned) != 4 or any(n not in (1, most) for n, most in zip(aligned, shape)):
                expected = f"a shape that broadcasts to [B, Hq, Mt, {last}] = {list(shape)}"
                arguments.value_error(name, expected, list(mask.shape))
    if out is not None:
        _output(out, q, v, requires_grad)


def operands(q: Tensor, v: Tensor) -> None:
    """The part of the contract that choosing an implementation needs."""
    arguments.four_dims("q", q, "[B, Sq, Hq, D]")
    arguments.four_dims("v", v, "[B, Sk, Hkv, DV]")


def _operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    arguments.four_dims("k", k, "[B, Sk, Hkv, D]")
    activations(q=q, k=k, v=v)
    batch, _, heads, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim:
        expected = f"[B, Sk, Hkv, D] with B, D = {batch}, {dim} as in q"
        arguments.value_error("k", expected, list(k.shape))
    if v.shape[:3] != k.shape[:3]:
        expected = f"[B, Sk, Hkv, DV] with B, Sk, Hkv = {list(k.shape[:3])} as in k"
        arguments.value_error("v", expected, list(v.shape))
    if dim == 0 or v.shape[3] == 0:
        arguments.value_error("q" if dim == 0 else "v", "a head dimension of at least 1", 0)
    if heads == 0 or k.shape[2] == 0 or heads % k.shape[2]:
        arguments.value_error("k", f"a number of heads Hkv that divides Hq = {heads}", k.shape[2])


def _direction(direction: int | Tensor, q: Tensor) -> None:
    expected = "1 or -1, or an int32 tensor [1]"
    if isinstance(direction, Tensor):
        if direction.dtype != torch.int32:
            arguments.type_error("direction", expected, dtype_name(direction.dtype))
        if tuple(direction.shape) != (1,):
            arguments.value_error("direction", expected, f"shape {list(direction.shape)}")
        arguments.device("direction", direction, q)
    elif isinstance(direction, bool) or not isinstance(direction, int):
        arguments.type_error("direction", expected, type(direction).__name__)
    elif direction not in (1, -1):
        arguments.value_error("direction", expected, direction)


def _threshold(threshold: float | None, mode: str) -> None:
    if not isinstance(mode, str):
        arguments.type_error("threshold_mode", "a str", type(mode).__name__)
    if mode not in ("max", "length"):
        arguments.value_error("threshold_mode", "'max' or 'length'", repr(mode))
    if threshold is None:
        return
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | torch.SymFloat):
        arguments.type_error("threshold", "a float or None", type(threshold).__name__)
    bounds = ", at most 0, or an infinity" if mode == "max" else ""
    if threshold != threshold or (bounds and 0 < threshold < math.inf):
        arguments.value_error("threshold", f"log2 units{bounds}", threshold)


def _extent(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Extent:
    """The lengths of a call. Contents of offsets are looked at on the CPU only."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        for name, value in (
            ("cu_seqlens_q", cu_seqlens_q),
            ("cu_seqlens_k", cu_seqlens_k),
            ("max_seqlen_q", max_seqlen_q),
            ("max_seqlen_k", max_seqlen_k),
        ):
            if value is not None:
                expected = "None unless cu_seqlens_q and cu_seqlens_k are given"
                arguments.value_error(name, expected, "a value")
        return Extent(q.shape[0], q.shape[1], k.shape[1])
    counts, most = [], []
    for letter, x, offsets, longest in (
        ("q", q, cu_seqlens_q, max_seqlen_q),
        ("k", k, cu_seqlens_k, max_seqlen_k),
    ):
        name = f"cu_seqlens_{letter}"
        count = arguments.offsets(name, offsets, x)
        if count < 1:
            arguments.value_error(name, "[N + 1] with N >= 1", list(offsets.shape))
        counts.append(count)
        most.append(_longest(f"max_seqlen_{letter}", longest, offsets, x.shape[1]))
    if cu_seqlens_k.dtype != cu_seqlens_q.dtype:
        expected = f"the dtype of cu_seqlens_q, {dtype_name(cu_seqlens_q.dtype)}"
        arguments.type_error("cu_seqlens_k", expected, dtype_name(cu_seqlens_k.dtype))
    if counts[0] != counts[1]:
        expected = f"the shape of cu_seqlens_q, [{counts[0] + 1}]"
        arguments.value_error("cu_seqlens_k", expected, list(cu_seqlens_k.shape))
    return Extent(counts[0], most[0], most[1])


def _longest(name: str, given: int | None, offsets: Tensor, tokens: int) -> int:
    """The length of the longest sequence, as given, or as the offsets have it where they can be read."""
    if arguments.is_readable(offsets):
        least = longest_sequence(offsets)
        given = least if given is None else given
    else:
        least = -(-tokens // (offsets.shape[0] - 1))
    if given is None:
        arguments.value_error(name, "the length of the longest sequence, an int", None)
    arguments.integer(name, given)
    if given < least:
        arguments.value_error(name, "at least the length of the longest sequence", given)
    return given


def _form(name: str, mask: Any, tiles: tuple[int, ...], q: Tensor) -> tuple[str, tuple[int, ...]]:
    """What the last dimension of a mask over [B, Hq, Mt, Nt] tiles counts in its form, and the shape in that form."""
    arguments.tensor(name, mask)
    if mask.dtype not in (torch.bool, torch.int32):
        expected = "bool, or int32 words of 32 tiles"
        arguments.type_error(name, expected, dtype_name(mask.dtype))
    arguments.device(name, mask, q)
    if mask.dtype == torch.bool:
        return "Nt", tiles
    return "W", (*tiles[:3], -(-tiles[3] // 32))


def _output(out: Tensor, q: Tensor, v: Tensor, requires_grad: bool) -> None:
    arguments.tensor("out", out)
    arguments.not_with_gradients("out", out, requires_grad)
    shape = (*q.shape[:3], v.shape[3])
    if out.shape != shape:
        arguments.value_error("out", f"[B, Sq, Hq, DV] = {list(shape)}", list(out.shape))
    arguments.activation("out", out, q)
