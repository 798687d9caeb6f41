# Vendored from packages/cula-cp-sm90/src/cula_cp_sm90/check.py by "nox -s vendor": edit the master.
"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from .config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    MIN_SEGMENT_CHUNKS,
    OPERAND_DTYPES,
    dtype_name,
    workspace_bytes,
)

# A gate computed with a lower bound from here on, or a promise of `safe_gate`, bounds log decays.
SAFE_LOWER_BOUND = -5.0

_ACTIVATIONS = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OFFSETS = (torch.int32, torch.int64)
_WORKSPACE_ALIGNMENT = 128
_SHOWN = 16


def check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    indices: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: object,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_intracard_cp: bool | str,
    out: Tensor | None,
    operand_dtype: torch.dtype | None,
    workspace: Tensor | None,
    flags: dict[str, bool],
) -> None:
    """Raises unless the arguments of a prefill fit together. flags: the booleans by name."""
    _check_activations(q, k, v, out)
    batch, tokens, _, dim_k = q.shape
    heads_v, dim_v = v.shape[2:]
    sequences = None
    if cu_seqlens is not None:
        sequences = _check_offsets("cu_seqlens", cu_seqlens, batch, tokens, q.device)
    if cu_seqlens_cpu is not None:
        _check_offsets_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    for name, tensor, shape, letters in (
        ("g", g, (*v.shape[:3], dim_k), "[B, T, HV, K]"),
        ("beta", beta, tuple(v.shape[:3]), "[B, T, HV]"),
    ):
        _check_floating(name, tensor)
        if tensor.shape != shape:
            _value_error(name, f"{letters} = {list(shape)}", _shape(tensor))
        _check_device(name, tensor, q.device)
    _check_last_dim("g", g)
    _check_number("scale", scale)

    for name, flag in flags.items():
        if flag is not True and flag is not False:
            _type_error(name, "a bool", type(flag).__name__)
    if flags["allow_neg_eigval"] and not flags["use_beta_sigmoid_in_kernel"]:
        other = "use_beta_sigmoid_in_kernel"
        _value_error("allow_neg_eigval", f"{other}=True with it", f"{other}=False")
    _check_gate(q, heads_v, lower_bound, A_log, dt_bias, flags)
    _check_unsupported(cp_context, flags["return_intermediate_states"])

    v_first = flags["state_v_first"]
    matrix = (dim_v, dim_k) if v_first else (dim_k, dim_v)
    count = batch if sequences is None else sequences
    if initial_state is not None:
        name = "initial_state"
        _check_state(name, initial_state, heads_v, matrix, v_first, q)
        if initial_state.shape[0] != count:
            _value_error(name, f"one state for each of {count} sequences", initial_state.shape[0])
    if state_pool is not None:
        name = "state_pool"
        if initial_state is not None:
            _value_error(name, "None beside an initial_state", type(state_pool).__name__)
        _check_state(name, state_pool, heads_v, matrix, v_first, q)
        if indices is None and state_pool.shape[0] < count:
            what = f"a pool of at least N = {count} states when there are no indices"
            _value_error(name, what, state_pool.shape[0])
    if indices is not None:
        _check_indices(indices, state_pool, count, q.device)

    if operand_dtype not in (None, *(getattr(torch, name) for name in OPERAND_DTYPES)):
        names = ", ".join(f"torch.{name}" for name in OPERAND_DTYPES)
        _type_error("operand_dtype", f"{names} or None", repr(operand_dtype))
    _check_intracard_cp(use_intracard_cp, tokens, cu_seqlens, cu_seqlens_cpu)
    if workspace is not None:
        whole = workspace_bytes(batch, tokens, heads_v, sequences)
        _check_workspace(workspace, heads_v, whole if use_intracard_cp is True else None, q.device)
    if torch.is_grad_enabled():
        _check_no_grad(("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("A_log", A_log))
        _check_no_grad(("dt_bias", dt_bias), ("initial_state", initial_state))
        _check_no_grad(("state_pool", state_pool), ("out", out))


def check_sizes(batch: int, tokens: int, value_heads: int, sequences: int | None) -> None:
    """The arguments of `kda_workspace_bytes`."""
    for name, size, least in (
        ("batch", batch, 0),
        ("tokens", tokens, 0),
        ("value_heads", value_heads, 1),
        ("sequences", sequences, 0),
    ):
        if size is None and name == "sequences":
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            kind = "an int or None" if name == "sequences" else "an int"
            _type_error(name, kind, type(size).__name__)
        if size < least:
            _value_error(name, f"at least {least}", size)
    if sequences is not None and batch != 1:
        _value_error("sequences", "None unless batch = 1", f"{sequences} with batch = {batch}")


def longest_sequence(offsets: Tensor) -> int:
    """Tokens of the longest of packed sequences; the offsets are on the CPU."""
    values = offsets.tolist()
    return max((b - a for a, b in zip(values[:-1], values[1:])), default=0)


def is_aligned(tensor: Tensor) -> bool:
    """Whether vectors of 16 bytes, and TMA, can address a real tensor: so are its address and all strides but the
    last."""
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
        if kind == "cuda" and dim != HEAD_DIM:
            _value_error(name, f"a head dimension {letter} of {HEAD_DIM}", dim)
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
        _check_last_dim(name, tensor)


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
    _check_offset_values(name, offsets, tokens)
    return sequences


def _check_offset_values(name: str, offsets: Tensor, tokens: int) -> None:
    if not _is_readable(offsets):
        return
    values = offsets.tolist()
    ordered = all(a <= b for a, b in zip(values[:-1], values[1:]))
    if values[0] != 0 or values[-1] != tokens or not ordered:
        got = f"{values[:_SHOWN]}{' ...' if len(values) > _SHOWN else ''}"
        _value_error(name, f"offsets that rise from 0 to T = {tokens}", got)


def _check_offsets_copy(cu_seqlens: Tensor | None, copy: Tensor, tokens: int) -> None:
    """Raises unless `cu_seqlens_cpu` can be a copy of `cu_seqlens`."""
    name = "cu_seqlens_cpu"
    if cu_seqlens is None:
        _value_error(name, "None without cu_seqlens", type(copy).__name__)
    _check_tensor(name, copy)
    if copy.dtype not in _OFFSETS:
        _type_error(name, _names(_OFFSETS), dtype_name(copy.dtype))
    if copy.device.type != "cpu":
        _value_error(name, "a tensor on the CPU", copy.device)
    if copy.shape != cu_seqlens.shape:
        _value_error(name, f"the shape of cu_seqlens, {_shape(cu_seqlens)}", _shape(copy))
    _check_offset_values(name, copy, tokens)


def _check_gate(
    q: Tensor,
    heads_v: int,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: dict[str, bool],
) -> None:
    """A_log [HV], dt_bias [HV * K] or [HV, K] and lower_bound, which belong to a gate that is computed here."""
    inside, safe = flags["use_gate_in_kernel"], flags["safe_gate"]
    _check_number("lower_bound", lower_bound)
    if lower_bound is None:
        if inside and safe:
            _value_error("lower_bound", "a float with use_gate_in_kernel and safe_gate", None)
    else:
        if not (inside or safe):
            what = "None unless use_gate_in_kernel or safe_gate is True"
            _value_error("lower_bound", what, lower_bound)
        if not lower_bound < 0:
            _value_error("lower_bound", "a number below 0", lower_bound)
        if safe and lower_bound < SAFE_LOWER_BOUND:
            what = f"a number in [{SAFE_LOWER_BOUND:g}, 0) with safe_gate"
            _value_error("lower_bound", what, lower_bound)
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is None:
            continue
        _check_floating(name, tensor)
        if not inside:
            _value_error(name, "None unless use_gate_in_kernel is True", type(tensor).__name__)
        _check_device(name, tensor, q.device)
    if A_log is not None:
        _check_vector("A_log", A_log, "HV", heads_v)
    elif inside and lower_bound is None:
        _value_error("A_log", "a tensor with use_gate_in_kernel and no lower_bound", None)
    if dt_bias is not None:
        dim_k = q.shape[3]
        if dt_bias.shape != (heads_v * dim_k,) and dt_bias.shape != (heads_v, dim_k):
            what = f"[HV * K] = [{heads_v * dim_k}] or [HV, K] = [{heads_v}, {dim_k}]"
            _value_error("dt_bias", what, _shape(dt_bias))
        _check_last_dim("dt_bias", dt_bias)


def _check_unsupported(cp_context: object, return_intermediate_states: bool) -> None:
    if return_intermediate_states:
        raise NotImplementedError(
            "return_intermediate_states: expected False, got True; this kernel keeps no states on the way"
        )
    if cp_context is not None:
        raise NotImplementedError(
            f"cp_context: expected None, got {type(cp_context).__name__}; sequences are not split over several GPUs, "
            "only within one (use_intracard_cp)"
        )


def _check_state(
    name: str, state: Tensor, heads_v: int, matrix: tuple[int, int], v_first: bool, q: Tensor
) -> None:
    _check_tensor(name, state)
    if state.dim() != 4 or state.shape[1:] != (heads_v, *matrix):
        letters = "V, K" if v_first else "K, V"
        first = "pool" if name == "state_pool" else "N"
        sizes = f"[{first}, {heads_v}, {matrix[0]}, {matrix[1]}]"
        _value_error(name, f"[{first}, HV, {letters}] = {sizes}", _shape(state))
    wide = q.dtype == torch.float64
    if state.dtype != torch.float32 and not (wide and state.dtype == torch.float64):
        expected = "float32 or float64" if wide else "float32"
        _type_error(name, expected, dtype_name(state.dtype))
    _check_device(name, state, q.device)
    if not _is_dense(state, *matrix) and not _is_dense(state.transpose(2, 3), *matrix[::-1]):
        expected = f"dense matrices (last strides {matrix[1]}, 1, or 1, {matrix[0]})"
        _value_error(name, expected, f"strides {state.stride()}")
    if state.is_cuda:
        _check_alignment(name, state)


def _is_dense(state: Tensor, rows: int, columns: int) -> bool:
    return (columns == 1 or state.stride(3) == 1) and (rows == 1 or state.stride(2) == columns)


def _check_alignment(name: str, state: Tensor) -> None:
    size = state.element_size()
    strides = state.stride(0) * size % 16 or state.stride(1) * size % 16
    # Only real tensors have an address; the launcher sees that of a traced one.
    if strides or (_is_real(state) and state.data_ptr() % 16):
        expected = "an address and strides that are multiples of 16 bytes"
        _value_error(name, expected, f"strides {state.stride()}")


def _check_indices(
    indices: Tensor, state_pool: Tensor | None, sequences: int, device: torch.device
) -> None:
    name = "initial_state_indices"
    if state_pool is None:
        _value_error(name, "None without a state_pool", type(indices).__name__)
    _check_tensor(name, indices)
    if indices.dtype != torch.int32:
        _type_error(name, "int32", dtype_name(indices.dtype))
    _check_vector(name, indices, "N", sequences)
    _check_device(name, indices, device)
    if _is_readable(indices) and sequences and indices.max() >= state_pool.shape[0]:
        expected = f"indices below the {state_pool.shape[0]} rows of state_pool"
        _value_error(name, expected, indices.max().item())


def _check_intracard_cp(
    choice: bool | str, tokens: int, cu_seqlens: Tensor | None, copy: Tensor | None
) -> None:
    name = "use_intracard_cp"
    if choice is False or (isinstance(choice, str) and choice == "auto"):
        return
    if choice is not True:
        _value_error(name, "'auto', True or False", repr(choice))
    longest = tokens
    for offsets in (copy, cu_seqlens):
        if offsets is not None and _is_readable(offsets):
            longest = longest_sequence(offsets)
            break
    least = 2 * MIN_SEGMENT_CHUNKS * CHUNK
    if longest < least:
        expected = f"'auto' or False unless a sequence has at least {least} tokens"
        _value_error(name, expected, f"True with at most {longest}")


def _check_workspace(
    workspace: Tensor, heads_v: int, whole: int | None, device: torch.device
) -> None:
    """whole: bytes that a call needs in one piece, if it must go so."""
    name = "workspace"
    _check_tensor(name, workspace)
    if workspace.dtype != torch.uint8:
        _type_error(name, "uint8", dtype_name(workspace.dtype))
    if workspace.dim() != 1:
        _value_error(name, "1 dimension", _shape(workspace))
    if workspace.shape[0] > 1 and workspace.stride(0) != 1:
        _value_error(name, "contiguous elements", f"strides {workspace.stride()}")
    _check_device(name, workspace, device)
    size, least = workspace.shape[0], heads_v * BLOCK_BYTES
    if size < least:
        what = f"at least {least} bytes, one chunk of {CHUNK} tokens of every value head"
        _value_error(name, what, size)
    if whole is not None and size < whole:
        _value_error(name, f"at least {whole} bytes with use_intracard_cp=True", size)
    # Memory of the CPU is not used, and torch does not align it so.
    if workspace.is_cuda and _is_real(workspace):
        past = workspace.data_ptr() % _WORKSPACE_ALIGNMENT
        if past:
            expected = f"an address that is a multiple of {_WORKSPACE_ALIGNMENT} bytes"
            _value_error(name, expected, f"one that is {past} bytes past it")


def _check_number(name: str, number: float | None) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymFloat)):
        _type_error(name, "a float or None", type(number).__name__)
    if isinstance(number, (int, float)) and not math.isfinite(number):
        _value_error(name, "a finite number", number)


def _check_vector(name: str, tensor: Tensor, dimension: str, size: int) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != size:
        _value_error(name, f"[{dimension}] = [{size}]", _shape(tensor))
    if size > 1 and tensor.stride(0) != 1:
        _value_error(name, "contiguous elements", f"strides {tensor.stride()}")


def _check_no_grad(*tensors: tuple[str, Tensor | None]) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            why = "no backward; cula.kda.chunk_kda has one with flash-linear-attention"
            _value_error(name, f"no gradient ({why})", "requires_grad=True")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        _type_error(name, "a torch.Tensor", type(tensor).__name__)


def _check_floating(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in _FLOATING:
        _type_error(name, _names(_FLOATING), dtype_name(tensor.dtype))


def _check_last_dim(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        _value_error(name, "a contiguous last dimension", f"strides {tensor.stride()}")


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
