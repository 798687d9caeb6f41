"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cula_core import arguments, tensors
from cula_core.dtypes import dtype_name

from .config import BLOCK_M, BLOCK_N, HEAD_DIMS, MAX_WORDS
from .thresholds import check_mode, check_range

# Offsets within a tile are 32-bit numbers of elements.
_MAX_STRIDE = 2**24


class Extent(NamedTuple):
    """Sequences, and the most query and key tokens that one has."""

    sequences: int
    queries: int
    keys: int


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None,
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
) -> Extent:
    """Raises unless the arguments of `lite_attention` fit together."""
    _check_activations(q, k, v, out)
    kind = q.device.type
    arguments.booleans(causal=causal, deterministic=deterministic, use_int8=use_int8)
    if use_int8 and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        arguments.value_error("use_int8", "False where a gradient is wanted", True)
    if scale is not None:
        check_number("scale", scale)
        if not -math.inf < scale < math.inf:
            arguments.value_error("scale", "a finite number", scale)
    extent = _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_blocks(block_m, block_n, kind)
    _check_direction(direction, q)
    check_mode(threshold_mode)
    tiles = (-(-extent.queries // block_m), -(-extent.keys // block_n))
    shape = (extent.sequences, q.shape[2], *tiles)
    if grad_mask is not None:
        _check_broadcast("grad_mask", grad_mask, shape, q)
    if threshold is None:
        for name, tensor in (("read_mask", read_mask), ("must_do", must_do)):
            if tensor is not None:
                arguments.value_error(
                    name, "None where threshold is None, which is dense attention", "a mask"
                )
        return extent
    check_number("threshold", threshold)
    check_range(threshold, threshold_mode)
    if kind == "cuda" and shape[3] > 32 * MAX_WORDS:
        most = 32 * MAX_WORDS * block_n
        arguments.value_error(
            "k", f"at most {most} keys per sequence with a list, block_n = {block_n}", extent.keys
        )
    if read_mask is not None:
        last, wanted = _form("read_mask", read_mask, shape, q)
        if tuple(read_mask.shape) != wanted:
            expected = f"[B, Hq, Mt, {last}] = {list(wanted)}"
            arguments.value_error("read_mask", expected, list(read_mask.shape))
    if must_do is not None:
        _check_broadcast("must_do", must_do, shape, q)
    return extent


def is_aligned(tensor: Tensor) -> bool:
    """Whether the kernel can read a real tensor: address and strides in multiples of 16 bytes, strides of tokens below
    2^24."""
    return tensors.is_aligned(tensor) and tensor.stride(1) < _MAX_STRIDE


def _check_activations(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, tensor)
    kind = arguments.leading("q", q)
    if q.dim() != 4:
        arguments.value_error("q", "4 dimensions [B, Sq, Hq, D]", list(q.shape))
    batch, _, heads, dim = q.shape
    if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != dim:
        arguments.value_error(
            "k", f"[B, Sk, Hkv, D] with B, D = {batch}, {dim} as in q", list(k.shape)
        )
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        arguments.value_error(
            "v", f"[B, Sk, Hkv, DV] with B, Sk, Hkv = {list(k.shape[:3])} as in k", list(v.shape)
        )
    if heads == 0 or k.shape[2] == 0 or heads % k.shape[2]:
        arguments.value_error(
            "q", f"a number of heads that is a multiple of Hkv = {k.shape[2]}", heads
        )
    for name, width in (("q", dim), ("v", v.shape[3])):
        if width < 1 or (kind == "cuda" and (width % 8 or width > HEAD_DIMS[-1])):
            arguments.value_error(
                name, f"a head dimension that is a multiple of 8, up to {HEAD_DIMS[-1]}", width
            )
    if out is not None:
        arguments.tensor("out", out)
        if out.shape != (*q.shape[:3], v.shape[3]):
            arguments.value_error("out", f"{[*q.shape[:3], v.shape[3]]}", list(out.shape))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", q if out is None else out)):
        arguments.activation(name, tensor, q)
    if out is not None and torch.is_grad_enabled():
        if out.requires_grad:
            arguments.value_error("out", "no gradient: it is overwritten", "requires_grad=True")
        if any(x.requires_grad for x in (q, k, v)):
            arguments.value_error("out", "None where a gradient is wanted", "a tensor")


def _check_lengths(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Extent:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        for name, value in zip(names, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
            if value is not None:
                arguments.value_error(
                    name, "None unless cu_seqlens_q and cu_seqlens_k are given", "a value"
                )
        return Extent(q.shape[0], q.shape[1], k.shape[1])
    most = []
    for name, offsets, tokens, longest_name, longest in (
        ("cu_seqlens_q", cu_seqlens_q, q.shape[1], "max_seqlen_q", max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, k.shape[1], "max_seqlen_k", max_seqlen_k),
    ):
        sequences = arguments.offsets_vector(name, offsets, q, least=1)
        lengths = None
        if arguments.is_readable(offsets):
            values = offsets.tolist()
            lengths = [b - a for a, b in zip(values, values[1:])]
            if values[0] != 0 or values[-1] != tokens or min(lengths) < 0:
                arguments.value_error(name, f"rising numbers from 0 to {tokens}", values[:16])
        if longest is None:
            if lengths is None:
                arguments.value_error(
                    longest_name, "the length of the longest sequence, an int", None
                )
            longest = max(lengths)
        arguments.integer(longest_name, longest)
        least = -(-tokens // sequences) if lengths is None else max(lengths)
        if longest < least:
            arguments.value_error(
                longest_name, "at least the length of the longest sequence", longest
            )
        most.append(longest)
    if cu_seqlens_q.dtype != cu_seqlens_k.dtype:
        arguments.type_error(
            "cu_seqlens_k",
            f"the dtype of cu_seqlens_q, {dtype_name(cu_seqlens_q.dtype)}",
            dtype_name(cu_seqlens_k.dtype),
        )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        arguments.value_error(
            "cu_seqlens_k",
            f"the shape of cu_seqlens_q, {list(cu_seqlens_q.shape)}",
            list(cu_seqlens_k.shape),
        )
    return Extent(cu_seqlens_q.shape[0] - 1, *most)


def _check_blocks(block_m: int, block_n: int, kind: str) -> None:
    for name, size, served in (("block_m", block_m, (BLOCK_M,)), ("block_n", block_n, BLOCK_N)):
        if isinstance(size, bool) or not isinstance(size, int):
            arguments.type_error(name, "an int", type(size).__name__)
        if size < 1 or (kind == "cuda" and size not in served):
            expected = " or ".join(map(str, served)) if kind == "cuda" else "at least 1"
            arguments.value_error(name, expected, size)


def _check_direction(direction: int | Tensor, q: Tensor) -> None:
    name = "direction"
    if isinstance(direction, Tensor):
        if direction.dtype != torch.int32:
            arguments.type_error(name, "an int or an int32 tensor", dtype_name(direction.dtype))
        if direction.shape != (1,):
            arguments.value_error(name, "[1]", list(direction.shape))
        arguments.device(name, direction, q)
    elif isinstance(direction, bool) or not isinstance(direction, int):
        arguments.type_error(name, "an int or an int32 tensor", type(direction).__name__)
    elif direction not in (1, -1):
        arguments.value_error(name, "1 or -1", direction)


def _form(
    name: str, mask: Tensor, tiles: tuple[int, ...], q: Tensor
) -> tuple[str, tuple[int, ...]]:
    """What the last dimension of a mask over [B, Hq, Mt, Nt] tiles counts in its form, and the shape in that form."""
    arguments.tensor(name, mask)
    if mask.dtype not in (torch.bool, torch.int32):
        arguments.type_error(name, "bool, or int32 words of 32 tiles", dtype_name(mask.dtype))
    arguments.device(name, mask, q)
    if mask.dtype == torch.bool:
        return "Nt", tiles
    return "W", (*tiles[:3], -(-tiles[3] // 32))


def _check_broadcast(name: str, mask: Tensor, tiles: tuple[int, ...], q: Tensor) -> None:
    _, shape = _form(name, mask, tiles, q)
    try:
        fits = tuple(torch.broadcast_shapes(mask.shape, shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        arguments.value_error(name, f"a shape that broadcasts to {list(shape)}", list(mask.shape))


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        arguments.type_error(name, "a number", type(value).__name__)
