"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from .config import CHUNK, HEAD_DIMS, dtype_name

_ACTIVATIONS = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_GATES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OFFSETS = (torch.int32, torch.int64)
_SHOWN = 16


def check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    decay_name: str,
    scale: float | None,
    state: Tensor | None,
    state_name: str,
    indices: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    flags: tuple[bool, bool, bool],
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    num_splits: int | None,
    out: Tensor | None,
) -> None:
    """Raises unless the arguments of a prefill fit together.

    decay_name: what the caller knows head_decay by, "decay" or "g_gamma". state_name: "initial_state", one row per
    sequence, or "state_pool". flags: update_state_pool, use_qk_l2norm_in_kernel, exact_state.
    """
    _check_activations(q, k, v, out)
    batch, tokens, _, dim_k = q.shape
    heads_v, dim_v = v.shape[2:]
    device = q.device
    sequences = batch
    if cu_seqlens is not None:
        sequences = _check_offsets("cu_seqlens", cu_seqlens, batch, tokens, device)

    if g is not None:
        _check_tensor("g", g)
        if g.dtype not in _GATES:
            _type_error("g", _names(_GATES), dtype_name(g.dtype))
        if g.shape != v.shape[:3]:
            _value_error("g", f"[B, T, HV] = {list(v.shape[:3])}", _shape(g))
        _check_device("g", g, device)
    if head_decay is None:
        if decay_name == "decay":
            _type_error(decay_name, "a torch.Tensor", "NoneType")
    else:
        _check_tensor(decay_name, head_decay)
        if head_decay.dtype != torch.float32:
            _type_error(decay_name, "float32", dtype_name(head_decay.dtype))
        _check_vector(decay_name, head_decay, "HV", heads_v)
        _check_device(decay_name, head_decay, device)
        if _is_readable(head_decay):
            _check_signs(decay_name, head_decay)
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
            _type_error("scale", "a float or None", type(scale).__name__)
        if isinstance(scale, (int, float)) and not math.isfinite(scale):
            _value_error("scale", "a finite number", scale)
    names = ("update_state_pool", "use_qk_l2norm_in_kernel", "exact_state")
    _check_bools(names, flags)
    _check_bools(("output_final_state", "state_v_first"), (output_final_state, state_v_first))

    matrix = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    state_dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    if state is not None:
        _check_state(state_name, state, heads_v, matrix, state_v_first, q)
        rows = state.shape[0]
        if state_name == "initial_state" and rows != sequences:
            _value_error(state_name, f"one state for each of {sequences} sequences", rows)
        if state_name == "state_pool" and indices is None and rows < sequences:
            what = f"a pool of at least N = {sequences} states when there are no indices"
            _value_error(state_name, what, rows)
        state_dtype = state.dtype
    if indices is not None:
        _check_indices(indices, state, sequences, device)
    if checkpoints is not None or checkpoint_every is not None:
        _check_checkpoints(
            checkpoints, checkpoint_every, q, heads_v, matrix, state_v_first, state_dtype
        )
    if num_splits is not None:
        if type(num_splits) is not int:
            _type_error("num_splits", "an int or None", type(num_splits).__name__)
        if num_splits < 1:
            _value_error("num_splits", "at least 1", num_splits)
    if torch.is_grad_enabled():
        _check_no_grad(("q", q), ("k", k), ("v", v), ("g", g), (decay_name, head_decay))
        _check_no_grad((state_name, state), ("state_checkpoints", checkpoints), ("out", out))


def check_layer(layer_idx: int, num_layers: int) -> None:
    """Raises unless `layer_idx` is one of `num_layers` layers."""
    for name, number in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            _type_error(name, "an int", type(number).__name__)
    if num_layers < 1:
        _value_error("num_layers", "at least 1", num_layers)
    if not 0 <= layer_idx < num_layers:
        _value_error("layer_idx", f"0 to {num_layers - 1}", layer_idx)


def check_packed(cu_seqlens: Tensor) -> None:
    """For functions that only take packed sequences; the rest is checked with the other arguments."""
    _check_tensor("cu_seqlens", cu_seqlens)


def check_offsets_copy(cu_seqlens: Tensor | None, copy: Tensor) -> None:
    """Raises unless `cu_seqlens_cpu` can be a copy of `cu_seqlens`."""
    name = "cu_seqlens_cpu"
    if cu_seqlens is None:
        _value_error(name, "None without cu_seqlens", type(copy).__name__)
    _check_tensor(name, copy)
    if copy.dtype not in _OFFSETS:
        _type_error(name, _names(_OFFSETS), dtype_name(copy.dtype))
    if copy.device.type != "cpu":
        _value_error(name, "a tensor on the CPU", copy.device)
    if isinstance(cu_seqlens, Tensor) and copy.shape != cu_seqlens.shape:
        _value_error(name, f"the shape of cu_seqlens, {_shape(cu_seqlens)}", _shape(copy))


def is_aligned(tensor: Tensor) -> bool:
    """Whether TMA can address a real tensor: address and all strides but the last are multiples of 16 bytes."""
    size = tensor.element_size()
    return not tensor.data_ptr() % 16 and not any(s * size % 16 for s in tensor.stride()[:-1])


def _check_activations(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
    device, dtype, shape = q.device, q.dtype, q.shape
    kind = device.type
    if kind not in _ACTIVATIONS:
        _value_error("q", "a tensor on a CUDA device or the CPU", device)
    if dtype not in _ACTIVATIONS[kind]:
        _type_error("q", _names(_ACTIVATIONS[kind]), dtype_name(dtype))
    if len(shape) != 4:
        _value_error("q", "4 dimensions [B, T, H, K]", _shape(q))
    if k.shape != shape:
        _value_error("k", f"the shape of q, {_shape(q)}", _shape(k))
    batch, tokens, heads, dim_k = shape
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] != tokens:
        _value_error("v", f"[B, T, HV, V] with B, T = {batch}, {tokens} as in q", _shape(v))
    heads_v, dim_v = v.shape[2:]
    for name, letter, dim in (("q", "K", dim_k), ("v", "V", dim_v)):
        if kind == "cuda" and dim not in HEAD_DIMS:
            _value_error(name, f"a head dimension {letter} in {HEAD_DIMS}", dim)
        if dim < 1:
            _value_error(name, f"a head dimension {letter} of at least 1", dim)
    if heads == 0 or heads_v == 0 or heads_v % heads:
        _value_error("v", f"a number of heads HV that is a multiple of H = {heads}", heads_v)
    if out is not None:
        _check_tensor("out", out)
        if out.shape != v.shape:
            _value_error("out", f"the shape of v, {_shape(v)}", _shape(out))
    # Without an output of the caller's v stands in, and passes like it.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", v if out is None else out)):
        if tensor.dtype != dtype:
            _type_error(name, f"the dtype of q, {dtype_name(dtype)}", dtype_name(tensor.dtype))
        _check_device(name, tensor, device)
        if tensor.stride(3) != 1 and tensor.shape[3] != 1:
            _value_error(name, "a contiguous last dimension", f"strides {tensor.stride()}")


def _check_offsets(
    name: str, offsets: Tensor, batch: int, tokens: int, device: torch.device
) -> int:
    """Checks cu_seqlens and returns the number of sequences."""
    _check_tensor(name, offsets)
    if offsets.dtype not in _OFFSETS:
        _type_error(name, _names(_OFFSETS), dtype_name(offsets.dtype))
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        _value_error(name, "[N + 1]", _shape(offsets))
    if offsets.shape[0] > 1 and offsets.stride(0) != 1:
        _value_error(name, "contiguous elements", f"strides {offsets.stride()}")
    _check_device(name, offsets, device)
    if batch != 1:
        _value_error(name, "None unless B = 1", f"a tensor with B = {batch}")
    sequences = offsets.shape[0] - 1
    if sequences == 0 and tokens != 0:
        _value_error(name, f"[N + 1] with N >= 1 for T = {tokens}", _shape(offsets))
    if _is_readable(offsets):
        values = offsets.tolist()
        ordered = all(a <= b for a, b in zip(values[:-1], values[1:]))
        if values[0] != 0 or values[-1] != tokens or not ordered:
            got = f"{values[:_SHOWN]}{' ...' if len(values) > _SHOWN else ''}"
            _value_error(name, f"offsets that rise from 0 to T = {tokens}", got)
    return sequences


def _check_signs(name: str, head_decay: Tensor) -> None:
    """decay >= 0, g_gamma <= 0: states never grow. NaN is neither."""
    good = head_decay >= 0 if name == "decay" else head_decay <= 0
    if not good.all():
        bad = head_decay[~good][0].item()
        _value_error(name, f"values {'>=' if name == 'decay' else '<='} 0", bad)


def _check_state(
    name: str, state: Tensor, heads_v: int, matrix: tuple[int, int], v_first: bool, q: Tensor
) -> None:
    _check_tensor(name, state)
    if state.dim() != 4 or state.shape[1:] != (heads_v, *matrix):
        letters = "V, K" if v_first else "K, V"
        first = "pool" if name == "state_pool" else "N"
        sizes = f"[{first}, {heads_v}, {matrix[0]}, {matrix[1]}]"
        _value_error(name, f"[{first}, HV, {letters}] = {sizes}", _shape(state))
    _check_state_dtype(name, state, q)
    _check_device(name, state, q.device)
    if not _is_dense(state, *matrix) and not _is_dense(state.transpose(2, 3), *matrix[::-1]):
        expected = f"dense matrices (last strides {matrix[1]}, 1, or 1, {matrix[0]})"
        _value_error(name, expected, f"strides {state.stride()}")
    if state.is_cuda:
        _check_alignment(name, state)


def _is_dense(state: Tensor, rows: int, columns: int) -> bool:
    return (columns == 1 or state.stride(3) == 1) and (rows == 1 or state.stride(2) == columns)


def _check_state_dtype(name: str, state: Tensor, q: Tensor) -> None:
    if state.dtype == torch.float32:
        return
    if q.dtype == torch.float64:
        if state.dtype != torch.float64:
            _type_error(name, "float32 or float64", dtype_name(state.dtype))
    else:
        _type_error(name, "float32", dtype_name(state.dtype))


def _check_alignment(name: str, state: Tensor) -> None:
    size = state.element_size()
    strides = state.stride(0) * size % 16 or state.stride(1) * size % 16
    # Only real tensors have an address; the launcher sees that of a traced one.
    if strides or (_is_real(state) and state.data_ptr() % 16):
        expected = "an address and strides that are multiples of 16 bytes"
        _value_error(name, expected, f"strides {state.stride()}")


def _check_indices(
    indices: Tensor, state: Tensor | None, sequences: int, device: torch.device
) -> None:
    name = "initial_state_indices"
    if state is None:
        _value_error(name, "None without a state_pool", type(indices).__name__)
    _check_tensor(name, indices)
    if indices.dtype != torch.int32:
        _type_error(name, "int32", dtype_name(indices.dtype))
    _check_vector(name, indices, "N", sequences)
    _check_device(name, indices, device)
    if _is_readable(indices) and sequences and indices.max() >= state.shape[0]:
        expected = f"indices below the {state.shape[0]} rows of state_pool"
        _value_error(name, expected, indices.max().item())


def _check_checkpoints(
    checkpoints: Tensor | None,
    every: int | None,
    q: Tensor,
    heads_v: int,
    matrix: tuple[int, int],
    v_first: bool,
    state_dtype: torch.dtype,
) -> None:
    name = "checkpoint_every_n_tokens"
    if every is None:
        _value_error(name, "a multiple of 64 beside state_checkpoints", None)
    if type(every) is not int:
        _type_error(name, "an int or None", type(every).__name__)
    if every < 1 or every % CHUNK:
        _value_error(name, f"a positive multiple of {CHUNK}", every)
    name = "state_checkpoints"
    if checkpoints is None:
        _value_error(name, "a tensor beside checkpoint_every_n_tokens", None)
    _check_tensor(name, checkpoints)
    shape = (q.shape[0], q.shape[1] // every, heads_v, *matrix)
    if checkpoints.shape != shape:
        letters = "V, K" if v_first else "K, V"
        _value_error(name, f"[B, T // n, HV, {letters}] = {list(shape)}", _shape(checkpoints))
    if checkpoints.dtype != state_dtype:
        _type_error(name, dtype_name(state_dtype), dtype_name(checkpoints.dtype))
    _check_device(name, checkpoints, q.device)
    if not checkpoints.is_contiguous():
        _value_error(name, "a contiguous tensor", f"strides {checkpoints.stride()}")
    if checkpoints.is_cuda and _is_real(checkpoints) and checkpoints.data_ptr() % 16:
        _value_error(name, "an address that is a multiple of 16 bytes", checkpoints.data_ptr())


def _check_vector(name: str, tensor: Tensor, dimension: str, size: int) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != size:
        _value_error(name, f"[{dimension}] = [{size}]", _shape(tensor))
    if size > 1 and tensor.stride(0) != 1:
        _value_error(name, "contiguous elements", f"strides {tensor.stride()}")


def _check_bools(names: tuple[str, ...], flags: tuple[bool, ...]) -> None:
    for name, flag in zip(names, flags):
        if flag is not True and flag is not False:
            _type_error(name, "a bool", type(flag).__name__)


def _check_no_grad(*tensors: tuple[str, Tensor | None]) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            why = "no backward; cula.lightning with flash-linear-attention has one"
            _value_error(name, f"no gradient ({why})", "requires_grad=True")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        _type_error(name, "a torch.Tensor", type(tensor).__name__)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        _value_error(name, f"a tensor on {device}, as q", tensor.device)


def _is_real(tensor: Tensor) -> bool:
    """Whether the tensor has an address and values now: nothing is being traced."""
    return (
        type(tensor) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _is_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _is_real(tensor)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dtype_name(d) for d in dtypes)


def _type_error(name: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{name}: expected {expected}, got {got}")


def _value_error(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")
