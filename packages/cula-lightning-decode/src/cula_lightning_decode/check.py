"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from .config import HEAD_DIMS, MAX_TOKENS

_MAX_GRID = 65535
_ACTIVATIONS = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_STATES = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float | None,
    state_v_first: bool,
    out: Tensor | None,
    commit: bool,
    rounding_seed: Tensor | int | None,
) -> None:
    """Raises unless the arguments of `linear_attention_decode` fit together."""
    _check_tensor("q", q)
    if q.dim() != 4:
        _value_error("q", "4 dimensions [B, T, H, K]", _shape(q))
    _check_shared(k, v, state, decay, state_indices, state_v_first, rounding_seed, written=commit)
    if q.shape != k.shape:
        _value_error("q", f"the shape of k, {_shape(k)}", _shape(q))
    _check_activation("q", q, k)
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
            _type_error("scale", "a float or None", type(scale).__name__)
        if isinstance(scale, (int, float)) and not math.isfinite(scale):
            _value_error("scale", "a finite number", scale)
    if not isinstance(commit, bool):
        _type_error("commit", "a bool", type(commit).__name__)
    if out is not None:
        _check_tensor("out", out)
        if out.shape != v.shape:
            _value_error("out", f"the shape of v, {_shape(v)}", _shape(out))
        _check_activation("out", out, k)
    _check_no_grad(q=q, k=k, v=v, state=state, decay=decay)


def check_commit(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    num_accepted: Tensor,
    state_indices: Tensor | None,
    state_v_first: bool,
    rounding_seed: Tensor | int | None,
) -> None:
    """Raises unless the arguments of `linear_attention_commit` fit together."""
    _check_shared(k, v, state, decay, state_indices, state_v_first, rounding_seed, written=True)
    _check_rows("num_accepted", num_accepted, k)
    _check_no_grad(k=k, v=v, state=state, decay=decay)


def _check_shared(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    state_v_first: bool,
    rounding_seed: Tensor | int | None,
    *,
    written: bool,
) -> None:
    for name, tensor in (("k", k), ("v", v), ("state", state), ("decay", decay)):
        _check_tensor(name, tensor)
    device = k.device
    if device.type not in _ACTIVATIONS:
        _value_error("k", "a tensor on a CUDA device or the CPU", device)
    if k.dtype not in _ACTIVATIONS[device.type]:
        _type_error("k", _names(_ACTIVATIONS[device.type]), _name(k.dtype))
    if k.dim() != 4:
        _value_error("k", "4 dimensions [B, T, H, K]", _shape(k))
    if v.dim() != 4 or v.shape[:2] != k.shape[:2]:
        _value_error(
            "v", f"[B, T, HV, V] with B, T = {k.shape[0]}, {k.shape[1]} as in k", _shape(v)
        )
    batch, tokens, heads, dim_k = k.shape
    heads_v, dim_v = v.shape[2:]
    if not 1 <= tokens <= MAX_TOKENS:
        _value_error("k", f"1 to {MAX_TOKENS} tokens (dimension 1)", tokens)
    for name, symbol, dim in (("k", "K", dim_k), ("v", "V", dim_v)):
        if device.type == "cuda" and dim not in HEAD_DIMS:
            _value_error(name, f"a head dimension {symbol} in {HEAD_DIMS}", dim)
        if dim == 0:
            _value_error(name, f"a head dimension {symbol} of at least 1", dim)
    if heads == 0 or heads_v == 0 or heads_v % heads:
        _value_error("v", f"a number of heads HV that is a multiple of H = {heads}", heads_v)
    if batch > _MAX_GRID or heads > _MAX_GRID:
        _value_error("k", f"at most {_MAX_GRID} rows and heads", _shape(k))
    _check_activation("k", k, k)
    _check_activation("v", v, k)

    if not isinstance(state_v_first, bool):
        _type_error("state_v_first", "a bool", type(state_v_first).__name__)
    rows, columns = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    if (
        state.dim() != 4
        or state.shape[1] != heads_v
        or state.shape[2] != rows
        or state.shape[3] != columns
    ):
        layout = "[pool, HV, V, K]" if state_v_first else "[pool, HV, K, V]"
        _value_error("state", f"{layout} = [pool, {heads_v}, {rows}, {columns}]", _shape(state))
    if state.dtype not in _STATES[device.type]:
        _type_error("state", _names(_STATES[device.type]), _name(state.dtype))
    _check_device("state", state, device)
    if state.stride(3) != 1 or state.stride(2) != columns:
        _value_error(
            "state", f"dense matrices (last strides {columns}, 1)", f"strides {state.stride()}"
        )
    if device.type == "cuda":
        _check_alignment(state)

    if decay.dtype != torch.float32:
        _type_error("decay", "float32", _name(decay.dtype))
    _check_vector("decay", decay, "HV", heads_v)
    _check_device("decay", decay, device)
    if _is_readable(decay) and not bool((decay >= 0).all()):
        _value_error(
            "decay", "values >= 0 (a state is multiplied by exp(-decay))", decay.min().item()
        )

    if state_indices is not None:
        _check_rows("state_indices", state_indices, k)
        if _is_readable(state_indices):
            _check_slots(state_indices, state, written)
    elif state.shape[0] < batch:
        _value_error(
            "state",
            f"a pool of at least B = {batch} states when there are no state_indices",
            state.shape[0],
        )

    if rounding_seed is not None:
        _check_seed(rounding_seed, state)


def _check_alignment(state: Tensor) -> None:
    size = state.element_size()
    strides = state.stride(0) * size % 16 or state.stride(1) * size % 16
    # Only real tensors have an address; for traced ones the compiled host code sees it later.
    real = type(state) is Tensor and not torch.compiler.is_compiling()
    if strides or (real and state.data_ptr() % 16):
        _value_error(
            "state",
            "an address and strides that are multiples of 16 bytes",
            f"strides {state.stride()}",
        )


def _check_seed(seed: Tensor | int, state: Tensor) -> None:
    if state.dtype != torch.bfloat16:
        _value_error(
            "rounding_seed",
            "None unless the state is bfloat16",
            f"a seed with a {_name(state.dtype)} state",
        )
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            _type_error("rounding_seed", "int64", _name(seed.dtype))
        if seed.dim() != 1 or seed.shape[0] != 1:
            _value_error("rounding_seed", "one element, [1]", _shape(seed))
        _check_device("rounding_seed", seed, state.device)
    elif isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        _type_error(
            "rounding_seed", "an int, an int64 tensor of one element or None", type(seed).__name__
        )
    elif isinstance(seed, int) and not -(1 << 63) <= seed < 1 << 63:
        _value_error("rounding_seed", "a 64-bit integer", seed)


def _check_rows(name: str, tensor: Tensor, k: Tensor) -> None:
    """One int32 per row of the batch."""
    _check_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        _type_error(name, "int32", _name(tensor.dtype))
    _check_vector(name, tensor, "B", k.shape[0])
    _check_device(name, tensor, k.device)


def _check_slots(state_indices: Tensor, state: Tensor, written: bool) -> None:
    live = [slot for slot in state_indices.tolist() if slot >= 0]
    if live and max(live) >= state.shape[0]:
        _value_error(
            "state_indices", f"values below the {state.shape[0]} states of state", max(live)
        )
    if written and len(set(live)) < len(live):
        twice = next(slot for slot in live if live.count(slot) > 1)
        _value_error("state_indices", "rows that differ because state is updated", f"{twice} twice")


def _is_readable(tensor: Tensor) -> bool:
    """Whether the values can be looked at for free: a real CPU tensor outside every tracing mode."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _check_vector(name: str, tensor: Tensor, dimension: str, size: int) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != size:
        _value_error(name, f"[{dimension}] = [{size}]", _shape(tensor))
    if size > 1 and tensor.stride(0) != 1:
        _value_error(name, "contiguous elements", f"strides {tensor.stride()}")


def _check_activation(name: str, tensor: Tensor, k: Tensor) -> None:
    if tensor.dtype != k.dtype:
        _type_error(name, f"the dtype of k, {_name(k.dtype)}", _name(tensor.dtype))
    _check_device(name, tensor, k.device)
    if tensor.stride(3) != 1:
        _value_error(name, "a contiguous last dimension", f"strides {tensor.stride()}")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        _type_error(name, "a torch.Tensor", type(tensor).__name__)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        _value_error(name, f"a tensor on {device}, as k", tensor.device)


def _check_no_grad(**tensors: Tensor) -> None:
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                _value_error(
                    name,
                    "no gradient: decode has no backward (use torch.no_grad())",
                    "requires_grad=True",
                )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(_name(d) for d in dtypes)


def _type_error(name: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{name}: expected {expected}, got {got}")


def _value_error(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")
