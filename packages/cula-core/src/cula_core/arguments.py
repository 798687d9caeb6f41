"""What single arguments are checked for: the words that the contracts of the kernel packages are written in.

Every check raises TypeError (a wrong kind or dtype) or ValueError (a wrong shape, device, stride or value) with a
message `argument: expected ..., got ...`. Values are looked at on the CPU alone, where it costs no synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .dtypes import dtype_name
from .tensors import live_rows

# Dtypes of activations by kind of device: kernels serve the first, the references in torch the second.
ACTIVATIONS: Mapping[str, tuple[torch.dtype, ...]] = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OFFSETS = (torch.int32, torch.int64)
# States on the way are kept after multiples of so many tokens.
CHECKPOINT_UNIT = 64
# Segments have a multiple of so many tokens, and at least so many.
SEGMENT_UNIT, MIN_SEGMENT = 64, 1024
_SHOWN = 16


# ---- words -----------------------------------------------------------------------------------------------------------


def names(dtypes: Collection[torch.dtype]) -> str:
    """Returns the names of dtypes as a message spells them: "int32 or int64"."""
    return " or ".join(dtype_name(d) for d in dtypes)


def type_error(name: str, expected: str, got: object) -> NoReturn:
    """Raises TypeError for an argument of the wrong kind."""
    raise TypeError(f"{name}: expected {expected}, got {got}")


def value_error(name: str, expected: str, got: object) -> NoReturn:
    """Raises ValueError for an argument of the right kind that does not fit."""
    raise ValueError(f"{name}: expected {expected}, got {got}")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def is_real(x: Tensor) -> bool:
    """Whether a tensor has an address and values now: nothing is being traced."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_readable(x: Tensor) -> bool:
    """Whether a tensor's values can be read without waiting for a device."""
    return x.device.type == "cpu" and is_real(x)


def tensor(name: str, x: object) -> None:
    """Refuses anything but a tensor."""
    if not isinstance(x, Tensor):
        type_error(name, "a torch.Tensor", type(x).__name__)


def four_dims(name: str, x: Tensor, letters: str) -> None:
    """Refuses anything but a tensor of four dimensions."""
    tensor(name, x)
    if x.dim() != 4:
        value_error(name, f"4 dimensions {letters}", list(x.shape))


def floating(name: str, x: Tensor) -> None:
    """Refuses anything but a floating tensor."""
    tensor(name, x)
    if x.dtype not in FLOATING:
        type_error(name, names(FLOATING), dtype_name(x.dtype))


def device(name: str, x: Tensor, lead: Tensor, lead_name: str = "q") -> None:
    """Refuses a tensor that is not on the device of the leading one."""
    if x.device != lead.device:
        value_error(name, f"a tensor on {lead.device}, as {lead_name}", x.device)


def leading(name: str, x: Tensor, anywhere: bool = False) -> str:
    """Refuses an activation on a device, or of a dtype, that nothing serves; returns the kind of its device.

    anywhere: every device serves what the CPU does, and counts as one.
    """
    kind = "cpu" if anywhere else x.device.type
    if kind not in ACTIVATIONS:
        value_error(name, "a tensor on a CUDA device or the CPU", x.device)
    if x.dtype not in ACTIVATIONS[kind]:
        type_error(name, names(ACTIVATIONS[kind]), dtype_name(x.dtype))
    return kind


def activation(name: str, x: Tensor, lead: Tensor, lead_name: str = "q") -> None:
    """Refuses an activation that has not the dtype and the device of the leading one, or whose last dimension has
    gaps."""
    if x.dtype != lead.dtype:
        type_error(name, f"the dtype of {lead_name}, {dtype_name(lead.dtype)}", dtype_name(x.dtype))
    device(name, x, lead, lead_name)
    last_dim(name, x)


def last_dim(name: str, x: Tensor) -> None:
    """Refuses a tensor whose last dimension has gaps."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        value_error(name, "a contiguous last dimension", f"strides {x.stride()}")


def vector(name: str, x: Tensor, dimension: str, size: int) -> None:
    """Refuses a tensor that is not contiguous of shape [size]; `dimension` is the letter for that size."""
    _sized(name, x, dimension, size)
    contiguous_elements(name, x)


def _sized(name: str, x: Tensor, dimension: str, size: int) -> None:
    if x.dim() != 1 or x.shape[0] != size:
        value_error(name, f"[{dimension}] = [{size}]", list(x.shape))


def contiguous_elements(name: str, x: Tensor) -> None:
    """Refuses a vector with gaps."""
    if x.shape[0] > 1 and x.stride(0) != 1:
        value_error(name, "contiguous elements", f"strides {x.stride()}")


def int32_vector(
    name: str, x: Tensor, dimension: str, size: int, lead: Tensor, lead_name: str = "q"
) -> None:
    """Refuses anything but an int32 vector, of any stride, of one entry per row or sequence."""
    tensor(name, x)
    if x.dtype != torch.int32:
        type_error(name, "int32", dtype_name(x.dtype))
    _sized(name, x, dimension, size)
    device(name, x, lead, lead_name)


def requires_grad(*tensors: object) -> bool:
    """Returns whether autograd wants a derivative of any of the tensors. Other objects are left to the checks."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )


def no_gradients(why: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that require gradients; `why` says what has no backward and what to do."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                value_error(name, f"no gradient ({why})", "requires_grad=True")


def not_with_gradients(name: str, x: Tensor | None, requires_grad: bool) -> None:
    """Refuses memory of the caller's that is written, where gradients are wanted."""
    if x is not None and (requires_grad or (torch.is_grad_enabled() and x.requires_grad)):
        value_error(name, "None when gradients are required", "a tensor")


# ---- numbers and flags -----------------------------------------------------------------------------------------------


def segment_tokens(length: int | None, not_beside: str | None, of: str) -> None:
    """Checks the length of segments that a caller gives: a multiple of 64, at least 1024, or None.

    not_beside: the value of another argument, `of`, that contradicts it; None where that argument does not.
    """
    name = "segment_tokens"
    if length is None:
        return
    if type(length) is not int:
        type_error(name, "an int or None", type(length).__name__)
    if length < MIN_SEGMENT or length % SEGMENT_UNIT != 0:
        value_error(name, f"a multiple of {SEGMENT_UNIT}, at least {MIN_SEGMENT}, or None", length)
    if not_beside is not None:
        value_error(name, f"None with {of}={not_beside}", length)


def booleans(**flags: Any) -> None:
    """Refuses anything but True and False."""
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            type_error(name, "a bool", type(flag).__name__)


def integer(name: str, x: object) -> None:
    """Refuses anything but an integer; one that is being traced is one."""
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        type_error(name, "an int", type(x).__name__)


def number(name: str, x: object) -> None:
    """Refuses anything but a finite number or None."""
    if x is None:
        return
    if isinstance(x, bool) or not isinstance(x, (int, float, torch.SymFloat, torch.SymInt)):
        type_error(name, "a float or None", type(x).__name__)
    if isinstance(x, (int, float)) and not -math.inf < x < math.inf:
        value_error(name, "a finite number", x)


# ---- activations and packing -----------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    head_dims: Collection[int] | None,
    *,
    grouped: bool = False,
) -> int:
    """Checks q, k [B, T, H, K], v and out [B, T, HV, V]; on a GPU, K and V are among `head_dims`.

    Without head_dims, every head dimension and every dtype of the CPU is good everywhere.
    grouped: q has HQ, k HK and v HV heads, each of which divides HS = max(HQ, HV), the heads of states and of out.
    Returns the number of heads of out.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor(name, x)
    kind = leading("q", q, anywhere=head_dims is None)
    if q.dim() != 4:
        value_error("q", "4 dimensions [B, T, H, K]", list(q.shape))
    batch, tokens, heads, dim_k = q.shape
    if grouped:
        four_dims("k", k, "[B, T, HK, K]")
        if k.shape[:2] != q.shape[:2] or k.shape[3] != dim_k:
            expected = f"[B, T, HK, K] with B, T, K = {batch}, {tokens}, {dim_k} as in q"
            value_error("k", expected, list(k.shape))
    elif k.shape != q.shape:
        value_error("k", f"the shape of q, {list(q.shape)}", list(k.shape))
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] != tokens:
        expected = f"[B, T, HV, V] with B, T = {batch}, {tokens} as in q"
        value_error("v", expected, list(v.shape))
    heads_v, dim_v = v.shape[2:]
    for name, letter, dim in (("q", "K", dim_k), ("v", "V", dim_v)):
        if head_dims and kind == "cuda" and dim not in head_dims:
            served = " or ".join(map(str, head_dims))
            value_error(name, f"a head dimension {letter} of {served}", dim)
        if dim < 1:
            value_error(name, f"a head dimension {letter} of at least 1", dim)
    heads_out = heads_v
    if grouped:
        heads_out = _state_heads(heads, k.shape[2], heads_v)
    else:
        value_heads("v", heads_v, heads)
    if out is not None:
        tensor("out", out)
        shape = (batch, tokens, heads_out, dim_v)
        if out.shape != shape:
            expected = "[B, T, HS, V] =" if grouped else "the shape of v,"
            value_error("out", f"{expected} {list(shape)}", list(out.shape))
    # Without an output of the caller's v stands in, and passes like it.
    for name, x in (("q", q), ("k", k), ("v", v), ("out", v if out is None else out)):
        activation(name, x, q)
    return heads_out


def _state_heads(heads_q: int, heads_k: int, heads_v: int) -> int:
    """Checks the numbers of heads of grouped activations and returns that of their states."""
    if heads_q == 0:
        value_error("q", "at least one head", heads_q)
    if heads_v == 0 or (heads_v % heads_q and heads_q % heads_v):
        expected = f"a number of heads HV that is a multiple of HQ = {heads_q} or divides it"
        value_error("v", expected, heads_v)
    heads = max(heads_q, heads_v)
    if heads_k == 0 or heads % heads_k:
        expected = f"a number of heads HK that divides HS = max(HQ, HV) = {heads}"
        value_error("k", expected, heads_k)
    return heads


def value_heads(name: str, heads_v: int, heads: int) -> None:
    """Refuses a number of value heads that query heads cannot share evenly."""
    if heads == 0 or heads_v == 0 or heads_v % heads:
        value_error(name, f"a number of heads HV that is a multiple of H = {heads}", heads_v)


def offsets_vector(name: str, x: Tensor, q: Tensor, least: int = 0) -> int:
    """Checks all but the values of cu_seqlens [N + 1], with N of at least `least`, and returns N."""
    tensor(name, x)
    if x.dtype not in OFFSETS:
        type_error(name, names(OFFSETS), dtype_name(x.dtype))
    if x.dim() != 1 or x.shape[0] < 1 + least:
        value_error(name, f"[N + 1] with N >= {least}" if least else "[N + 1]", list(x.shape))
    contiguous_elements(name, x)
    device(name, x, q)
    if q.shape[0] != 1:
        value_error(name, "None unless B = 1", f"a tensor with B = {q.shape[0]}")
    return x.shape[0] - 1


def offsets(name: str, x: Tensor, q: Tensor) -> int:
    """Checks cu_seqlens [N + 1] of packed sequences and returns N."""
    tokens = q.shape[1]
    sequences = offsets_vector(name, x, q)
    if sequences == 0 and tokens != 0:
        value_error(name, f"[N + 1] with N >= 1 for T = {tokens}", list(x.shape))
    _offset_values(name, x, tokens)
    return sequences


def _offset_values(name: str, x: Tensor, tokens: int) -> None:
    if not is_readable(x):
        return
    values = x.tolist()
    ordered = all(a <= b for a, b in zip(values[:-1], values[1:]))
    if values[0] != 0 or values[-1] != tokens or not ordered:
        got = f"{values[:_SHOWN]}{' ...' if len(values) > _SHOWN else ''}"
        value_error(name, f"offsets that rise from 0 to T = {tokens}", got)


def offsets_copy(cu_seqlens: Tensor | None, copy: Tensor, tokens: int) -> None:
    """Refuses a `cu_seqlens_cpu` that cannot be a copy of `cu_seqlens`."""
    name = "cu_seqlens_cpu"
    if cu_seqlens is None:
        value_error(name, "None without cu_seqlens", type(copy).__name__)
    tensor(name, copy)
    if copy.dtype not in OFFSETS:
        type_error(name, names(OFFSETS), dtype_name(copy.dtype))
    if copy.device.type != "cpu":
        value_error(name, "a tensor on the CPU", copy.device)
    if copy.shape != cu_seqlens.shape:
        expected = f"the shape of cu_seqlens, {list(cu_seqlens.shape)}"
        value_error(name, expected, list(copy.shape))
    contiguous_elements(name, copy)
    _offset_values(name, copy, tokens)


def sign(name: str, x: Tensor, sign: int) -> None:
    """Refuses values of the other sign than `sign` (1 or -1), and NaN."""
    if is_readable(x):
        good = x * sign >= 0
        if not good.all():
            value_error(name, f"values {'>=' if sign > 0 else '<='} 0", x[~good][0].item())


# ---- states ----------------------------------------------------------------------------------------------------------


def states(
    name: str,
    x: Tensor,
    v: Tensor,
    dim_k: int,
    v_first: bool,
    *,
    dtypes: Collection[torch.dtype] | None = None,
    aligned: bool = True,
    lead_name: str = "q",
    heads: tuple[str, int] | None = None,
) -> None:
    """Checks states [rows, HV, K, V], or V, K, each a dense matrix of one of `state_dtypes`.

    The matrices may lie transposed. On a GPU their addresses are multiples of 16 bytes where they must be `aligned`.
    dtypes: others than these. lead_name: an argument on the device of v, which a message names. heads: the letters
    for the number of heads of a state, and that number, where it is not that of v.
    """
    dim_v = v.shape[3]
    letter, count = ("HV", v.shape[2]) if heads is None else heads
    matrix = (dim_v, dim_k) if v_first else (dim_k, dim_v)
    tensor(name, x)
    if x.dim() != 4 or x.shape[1:] != (count, *matrix):
        letters = "V, K" if v_first else "K, V"
        first = "pool" if name in ("state", "state_pool") else "N"
        sizes = f"[{first}, {count}, {matrix[0]}, {matrix[1]}]"
        value_error(name, f"[{first}, {letter}, {letters}] = {sizes}", list(x.shape))
    if dtypes is None:
        dtypes = state_dtypes(v)
    if x.dtype not in dtypes:
        type_error(name, names(dtypes), dtype_name(x.dtype))
    device(name, x, v, lead_name)
    if not _is_dense(x, *matrix) and not _is_dense(x.transpose(2, 3), *matrix[::-1]):
        expected = f"dense matrices (last strides {matrix[1]}, 1, or 1, {matrix[0]})"
        value_error(name, expected, f"strides {x.stride()}")
    if aligned and x.is_cuda:
        state_alignment(name, x)


def state_dtypes(lead: Tensor) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of states beside activations like the leading one."""
    return (*exact_dtypes(lead), torch.bfloat16, torch.float16)


def exact_dtypes(lead: Tensor) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of numbers per head beside activations like the leading one. The last is that of states where
    none are given."""
    return (torch.float32, torch.float64) if lead.dtype == torch.float64 else (torch.float32,)


def _is_dense(x: Tensor, rows: int, columns: int) -> bool:
    return (columns == 1 or x.stride(3) == 1) and (rows == 1 or x.stride(2) == columns)


def state_alignment(name: str, x: Tensor) -> None:
    """Refuses states whose matrices do not all begin at a multiple of 16 bytes."""
    size = x.element_size()
    strides = x.stride(0) * size % 16 or x.stride(1) * size % 16
    # Only real tensors have an address; the launcher sees that of a traced one.
    if strides or (is_real(x) and x.data_ptr() % 16):
        expected = "an address and strides that are multiples of 16 bytes"
        value_error(name, expected, f"strides {x.stride()}")


def state_or_pool(
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    indices: Tensor | None,
    q: Tensor,
    v: Tensor,
    sequences: int,
    v_first: bool,
    updated: bool,
    aligned: bool = True,
    null_slot: int | None = None,
) -> None:
    """Checks an initial_state with a row for every sequence, or a state_pool and the rows that are used of it.

    updated: these rows are written, so that no two sequences may have the same. aligned: see `states`. null_slot: a row
    that means padding.
    """
    initial_states(
        initial_state, state_pool, indices is None, q, v, sequences, v_first, aligned=aligned
    )
    if indices is not None:
        name = "initial_state_indices"
        if state_pool is None:
            value_error(name, "None without a state_pool", type(indices).__name__)
        int32_vector(name, indices, "N", sequences, q)
        pool_rows(name, indices, "state_pool", state_pool.shape[0], updated, null_slot)


def initial_states(
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    in_order: bool,
    q: Tensor,
    v: Tensor,
    sequences: int,
    v_first: bool,
    *,
    aligned: bool = True,
    heads: tuple[str, int] | None = None,
) -> None:
    """Checks an initial_state with a row for every sequence, or a state_pool, which needs one where sequence n has row
    n (`in_order`). aligned, heads: see `states`.
    """
    dim_k = q.shape[3]
    if initial_state is not None:
        name = "initial_state"
        states(name, initial_state, v, dim_k, v_first, aligned=aligned, heads=heads)
        if initial_state.shape[0] != sequences:
            expected = f"one state for each of {sequences} sequences"
            value_error(name, expected, initial_state.shape[0])
    if state_pool is not None:
        name = "state_pool"
        if initial_state is not None:
            value_error(name, "None beside an initial_state", type(state_pool).__name__)
        states(name, state_pool, v, dim_k, v_first, aligned=aligned, heads=heads)
        if in_order and state_pool.shape[0] < sequences:
            expected = f"a pool of at least N = {sequences} states when there are no indices"
            value_error(name, expected, state_pool.shape[0])


def pool_rows(
    name: str,
    indices: Tensor,
    pool_name: str,
    rows: int,
    updated: bool = True,
    null_slot: int | None = None,
) -> None:
    """Refuses indices beyond the pool, and a row twice where it is `updated`; negative ones and null_slot are
    padding."""
    if not is_readable(indices) or not indices.numel():
        return
    live = indices[live_rows(indices, null_slot)]
    if live.numel() and live.max() >= rows:
        value_error(name, f"indices below the {rows} rows of {pool_name}", live.max().item())
    if updated and live.unique().numel() < live.numel():
        value_error(name, f"a row of {pool_name} once at most", indices[:_SHOWN].tolist())


def checkpoint_interval(every: int) -> None:
    """Refuses a number of tokens after which no kernel keeps states."""
    name = "checkpoint_every_n_tokens"
    if type(every) is not int:
        type_error(name, "an int or None", type(every).__name__)
    if every < 1 or every % CHECKPOINT_UNIT:
        value_error(name, f"a positive multiple of {CHECKPOINT_UNIT}", every)


def checkpoints(
    buffer: Tensor | None,
    every: int | None,
    q: Tensor,
    dim_v: int,
    v_first: bool,
    dtype: torch.dtype,
    heads: tuple[str, int],
    *,
    aligned: bool = False,
) -> None:
    """Checks the buffer for the states after every n tokens, in the dtype of states, and n: both or neither.

    heads: the letters for the number of heads of a state, and that number. aligned: see `states`.
    """
    if buffer is None and every is None:
        return
    name = "checkpoint_every_n_tokens"
    if every is None:
        value_error(name, f"a multiple of {CHECKPOINT_UNIT} beside state_checkpoints", None)
    checkpoint_interval(every)
    name = "state_checkpoints"
    if buffer is None:
        value_error(name, "a tensor beside checkpoint_every_n_tokens", None)
    tensor(name, buffer)
    batch, tokens, _, dim_k = q.shape
    matrix, letters = ((dim_v, dim_k), "V, K") if v_first else ((dim_k, dim_v), "K, V")
    shape = (batch, tokens // every, heads[1], *matrix)
    if buffer.shape != shape:
        expected = f"[B, T // n, {heads[0]}, {letters}] = {list(shape)}"
        value_error(name, expected, list(buffer.shape))
    if buffer.dtype != dtype:
        type_error(name, dtype_name(dtype), dtype_name(buffer.dtype))
    device(name, buffer, q)
    if not buffer.is_contiguous():
        value_error(name, "a contiguous tensor", f"strides {buffer.stride()}")
    if aligned and buffer.is_cuda and is_real(buffer) and buffer.data_ptr() % 16:
        value_error(name, "an address that is a multiple of 16 bytes", buffer.data_ptr())
