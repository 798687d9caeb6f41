"""What single arguments are checked for: the words that the contracts in `_check` are written in.

Every check raises TypeError (wrong kind or dtype) or ValueError (wrong shape, device, stride or value) with a message
`argument: expected ..., got ...`. Contents are looked at on the CPU alone; elsewhere shapes, strides and dtypes decide.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from cula import varlen

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHECKPOINT_UNIT = 64


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
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Dims:
    """q, k `[B, T, H, K]`, v `[B, T, HV, V]` and the packing."""
    activations(q=q, k=k, v=v)
    if q.dim() != 4:
        value_error("q", "shape [B, T, H, K]", list(q.shape))
    if k.shape != q.shape:
        value_error("k", f"the shape of q, {list(q.shape)}", list(k.shape))
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        value_error(
            "v", f"shape [B, T, HV, V] with B, T = {list(q.shape[:2])} as in q", list(v.shape)
        )
    dims = head_dims("q", q, v)
    sequences = dims.batch
    if cu_seqlens is not None:
        sequences = packing("cu_seqlens", cu_seqlens, dims, q.device)
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            value_error("cu_seqlens_cpu", "None without cu_seqlens", "a tensor")
        if packing("cu_seqlens_cpu", cu_seqlens_cpu, dims, torch.device("cpu")) != sequences:
            value_error(
                "cu_seqlens_cpu",
                f"the shape of cu_seqlens, [{sequences + 1}]",
                list(cu_seqlens_cpu.shape),
            )
    return dims._replace(sequences=sequences)


def head_dims(name: str, q: Tensor, v: Tensor) -> Dims:
    batch, tokens, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    if heads == 0 or dim_k == 0:
        value_error(name, "at least one head and one channel", list(q.shape))
    if dim_v == 0:
        value_error("v", "a head dimension of at least 1", list(v.shape))
    if value_heads == 0 or value_heads % heads:
        value_error("v", f"a number of heads HV that is a multiple of H = {heads}", value_heads)
    return Dims(batch, tokens, heads, value_heads, dim_k, dim_v, batch)


def packing(name: str, cu_seqlens: Tensor, dims: Dims, device: torch.device) -> int:
    """Number of sequences. Contents are compared with the tokens on the CPU only."""
    tensor(name, cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        type_error(name, "int32 or int64", dtype_name(cu_seqlens.dtype))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        value_error(name, "shape [N + 1]", list(cu_seqlens.shape))
    if cu_seqlens.device != device:
        value_error(name, f"a tensor on {device}", cu_seqlens.device)
    if cu_seqlens.shape[0] > 1 and cu_seqlens.stride(0) != 1:
        value_error(name, "a contiguous tensor", f"stride {cu_seqlens.stride(0)}")
    if dims.batch != 1:
        value_error("q", f"a packed batch of B = 1 because {name} is given", f"B = {dims.batch}")
    if varlen.readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0:
            value_error(name, "a first entry of 0", ends[0])
        if any(a > b for a, b in zip(ends, ends[1:])):
            value_error(
                name, "entries that do not decrease", ends if len(ends) <= 16 else "a decrease"
            )
        if ends[-1] != dims.tokens:
            value_error(name, f"a last entry of T = {dims.tokens}", ends[-1])
    return cu_seqlens.shape[0] - 1


def seed_of_rounding(seed: Tensor | int, state: Tensor) -> None:
    if state.dtype != torch.bfloat16:
        value_error(
            "rounding_seed",
            "None unless the state is bfloat16",
            f"a seed with a {dtype_name(state.dtype)} state",
        )
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            type_error("rounding_seed", "int64", dtype_name(seed.dtype))
        if tuple(seed.shape) != (1,):
            value_error("rounding_seed", "one element, shape [1]", list(seed.shape))
        same_device("rounding_seed", seed, state)
    elif isinstance(seed, bool) or not isinstance(seed, int | torch.SymInt):
        type_error(
            "rounding_seed", "an int, an int64 tensor of one element or None", type(seed).__name__
        )
    elif not -(1 << 63) <= seed < 1 << 63:
        value_error("rounding_seed", "a 64-bit integer", seed)


def activations(**tensors: Tensor) -> None:
    """Tensors of one floating dtype on one device, last dimension contiguous; the first one sets dtype and device."""
    first, lead = "", None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            type_error(name, "a torch.Tensor", type(x).__name__)
        if lead is None:
            first, lead = name, x
            if x.dtype not in ACTIVATIONS:
                type_error(name, "bfloat16, float16, float32 or float64", dtype_name(x.dtype))
        elif x.dtype != lead.dtype:
            type_error(name, f"{dtype_name(lead.dtype)}, the dtype of {first}", dtype_name(x.dtype))
        elif x.device != lead.device:
            value_error(name, f"a tensor on {lead.device}, the device of {first}", x.device)
        last_dim(name, x)


def like_tokens(
    name: str,
    x: Tensor,
    q: Tensor,
    shape: tuple[int, ...],
    symbols: str,
    *,
    any_strides: bool = False,
) -> None:
    """A floating tensor of any dtype with one entry, or one row, per token and head."""
    floating(name, x)
    if tuple(x.shape) != tuple(shape):
        value_error(name, f"shape {symbols} = {list(shape)}", list(x.shape))
    same_device(name, x, q)
    if not any_strides:
        last_dim(name, x)


def per_head(name: str, x: Tensor, q: Tensor, value_heads: int) -> None:
    tensor(name, x)
    expected = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    if x.dtype not in expected:
        type_error(name, " or ".join(map(dtype_name, expected)), dtype_name(x.dtype))
    if x.dim() != 1 or x.shape[0] != value_heads:
        value_error(name, f"shape [HV] = [{value_heads}]", list(x.shape))
    same_device(name, x, q)
    last_dim(name, x)


def decay_rates(decay: Tensor, q: Tensor, value_heads: int) -> None:
    per_head("decay", decay, q, value_heads)
    sign("decay", decay, 1, "a state is multiplied by exp(-decay); FLA's g_gamma is -decay")


def sign(name: str, x: Tensor, sign: int, hint: str) -> None:
    """Looks at the values on the CPU only; NaN is refused with the wrong sign."""
    if _is_readable(x) and not bool((x * sign >= 0).all()):
        worst = (x * sign).min().item() * sign
        value_error(name, f"values {'>=' if sign > 0 else '<='} 0 ({hint})", worst)


def initial_states(state: Tensor | None, q: Tensor, dims: Dims, state_v_first: bool) -> None:
    if state is None:
        return
    state_stack("initial_state", state, q, dims, state_v_first, "N", state_dtypes(q))
    if state.shape[0] != dims.sequences:
        value_error(
            "initial_state", f"one state per sequence, N = {dims.sequences}", state.shape[0]
        )


def state_dtypes(q: Tensor) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)


def state_stack(
    name: str,
    state: Tensor,
    q: Tensor,
    dims: Dims,
    state_v_first: bool,
    rows: str,
    allowed: tuple[torch.dtype, ...],
) -> None:
    """A stack of states in the layout that `state_v_first` names; a transposed view of the other layout will do."""
    tensor(name, state)
    if state.dtype not in allowed:
        type_error(name, " or ".join(map(dtype_name, allowed)), dtype_name(state.dtype))
    matrix = (dims.dim_v, dims.dim_k) if state_v_first else (dims.dim_k, dims.dim_v)
    if state.dim() != 4 or state.shape[1] != dims.value_heads or tuple(state.shape[2:]) != matrix:
        layout = f"[{rows}, HV, V, K]" if state_v_first else f"[{rows}, HV, K, V]"
        value_error(
            name,
            f"shape {layout} = [{rows}, {dims.value_heads}, {matrix[0]}, {matrix[1]}]",
            list(state.shape),
        )
    same_device(name, state, q)
    if state.stride(3) != 1 and state.stride(2) != 1 and state.numel() > 1:
        value_error(name, "matrices with one contiguous dimension", f"strides {state.stride()}")


def pool_rows(
    name: str,
    indices: Tensor | None,
    q: Tensor,
    count: int,
    symbol: str,
    pool_name: str,
    pool: Tensor,
    *,
    written: bool,
) -> None:
    """int32 rows of a pool; on the CPU their values are looked at, and live rows that are written must differ."""
    if indices is None:
        if pool.shape[0] < count:
            value_error(
                pool_name,
                f"at least {symbol} = {count} states because {name} is None",
                pool.shape[0],
            )
        return
    int32_vector(name, indices, q, count, symbol)
    if not _is_readable(indices):
        return
    live = [row for row in indices.tolist() if row >= 0]
    if live and max(live) >= pool.shape[0]:
        value_error(name, f"values below the {pool.shape[0]} states of {pool_name}", max(live))
    if written and len(set(live)) < len(live):
        twice = next(row for row in live if live.count(row) > 1)
        value_error(name, f"rows that differ because {pool_name} is updated", f"{twice} twice")


def _is_readable(x: Tensor) -> bool:
    """Whether the values of a tensor may be looked at: not while a tracing mode records what is done with them."""
    return varlen.readable(x) and torch._C._len_torch_dispatch_stack() == 0


def int32_vector(name: str, x: Tensor, q: Tensor, count: int, symbol: str) -> None:
    tensor(name, x)
    if x.dtype != torch.int32:
        type_error(name, "int32", dtype_name(x.dtype))
    if x.dim() != 1 or x.shape[0] != count:
        value_error(name, f"shape [{symbol}] = [{count}]", list(x.shape))
    same_device(name, x, q)
    last_dim(name, x)


def state_checkpoints(
    buffer: Tensor | None,
    every: int | None,
    q: Tensor,
    dims: Dims,
    state_v_first: bool,
    requires_grad: bool,
) -> None:
    """The buffer for the states after every n tokens, and n: both or neither."""
    if every is not None:
        if isinstance(every, bool) or not isinstance(every, int):
            type_error("checkpoint_every_n_tokens", "an int or None", type(every).__name__)
        if every < 1 or every % CHECKPOINT_UNIT:
            expected = f"a positive multiple of {CHECKPOINT_UNIT}"
            value_error("checkpoint_every_n_tokens", expected, every)
    if buffer is None:
        if every is not None:
            value_error(
                "state_checkpoints", "a tensor because checkpoint_every_n_tokens is given", None
            )
        return
    tensor("state_checkpoints", buffer)
    if every is None:
        value_error("checkpoint_every_n_tokens", "an int because state_checkpoints is given", None)
    allowed = state_dtypes(q)
    if buffer.dtype not in allowed:
        names = " or ".join(map(dtype_name, allowed))
        type_error("state_checkpoints", names, dtype_name(buffer.dtype))
    matrix = (dims.dim_v, dims.dim_k) if state_v_first else (dims.dim_k, dims.dim_v)
    shape = (dims.batch, dims.tokens // every, dims.value_heads, *matrix)
    if tuple(buffer.shape) != shape:
        layout = "[B, T // n, HV, V, K]" if state_v_first else "[B, T // n, HV, K, V]"
        value_error("state_checkpoints", f"shape {layout} = {list(shape)}", list(buffer.shape))
    same_device("state_checkpoints", buffer, q)
    if not buffer.is_contiguous():
        value_error("state_checkpoints", "a contiguous tensor", f"strides {buffer.stride()}")
    if requires_grad or (torch.is_grad_enabled() and buffer.requires_grad):
        value_error("state_checkpoints", "None when gradients are required", "a tensor")


def split_count(num_splits: int | None) -> None:
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        type_error("num_splits", "an int or None", type(num_splits).__name__)
    if num_splits < 1:
        value_error("num_splits", "an int >= 1 or None", num_splits)


def output(out: Tensor | None, v: Tensor, requires_grad: bool) -> None:
    if out is None:
        return
    tensor("out", out)
    if out.dtype != v.dtype:
        type_error("out", f"{dtype_name(v.dtype)}, the dtype of v", dtype_name(out.dtype))
    if out.shape != v.shape:
        value_error("out", f"the shape of v, {list(v.shape)}", list(out.shape))
    same_device("out", out, v)
    last_dim("out", out)
    if requires_grad or (torch.is_grad_enabled() and out.requires_grad):
        value_error("out", "None when gradients are required", "a tensor")


def no_gradients(**tensors: Tensor) -> None:
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                value_error(
                    name,
                    "no gradient, the state is updated in place (use torch.no_grad())",
                    "requires_grad=True",
                )


def scale_factor(scale: float | None) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(
        scale, int | float | torch.SymFloat | torch.SymInt
    ):
        type_error("scale", "a float or None", type(scale).__name__)
    if not -math.inf < scale < math.inf:
        value_error("scale", "a finite number", scale)


def booleans(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            type_error(name, "a bool", type(flag).__name__)


def tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        type_error(name, "a torch.Tensor", type(x).__name__)


def floating(name: str, x: Any) -> None:
    tensor(name, x)
    if x.dtype not in ACTIVATIONS:
        type_error(name, "bfloat16, float16, float32 or float64", dtype_name(x.dtype))


def same_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        value_error(name, f"a tensor on {q.device}", x.device)


def last_dim(name: str, x: Tensor) -> None:
    if x.dim() and x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
        value_error(name, "a contiguous last dimension", f"strides {tuple(x.stride())}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_error(name: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{name}: expected {expected}, got {got}")


def value_error(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")
