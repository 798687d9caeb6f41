"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.delta_decode.slots import check_null_slot
from cula_core.dtypes import dtype_name

from .config import HEAD_DIMS, MAX_TOKENS

_MAX_GRID = 65535
_NO_BACKWARD = "decode has no backward; use torch.no_grad()"
_STATES = {"cuda": (torch.float32, torch.bfloat16, torch.float16), "cpu": arguments.FLOATING}


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
    null_slot: int | None,
) -> None:
    """Raises unless the arguments of `linear_attention_decode` fit together."""
    arguments.tensor("q", q)
    if q.dim() != 4:
        arguments.value_error("q", "4 dimensions [B, T, H, K]", list(q.shape))
    _check_shared(
        k, v, state, decay, state_indices, state_v_first, rounding_seed, null_slot, written=commit
    )
    if q.shape != k.shape:
        arguments.value_error("q", f"the shape of k, {list(k.shape)}", list(q.shape))
    arguments.activation("q", q, k, "k")
    arguments.number("scale", scale)
    arguments.booleans(commit=commit)
    if out is not None:
        arguments.tensor("out", out)
        if out.shape != v.shape:
            arguments.value_error("out", f"the shape of v, {list(v.shape)}", list(out.shape))
        arguments.activation("out", out, k, "k")
    arguments.no_gradients(_NO_BACKWARD, q=q, k=k, v=v, state=state, decay=decay)


def check_commit(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    num_accepted: Tensor,
    state_indices: Tensor | None,
    state_v_first: bool,
    rounding_seed: Tensor | int | None,
    null_slot: int | None,
) -> None:
    """Raises unless the arguments of `linear_attention_commit` fit together."""
    _check_shared(
        k, v, state, decay, state_indices, state_v_first, rounding_seed, null_slot, written=True
    )
    arguments.int32_vector("num_accepted", num_accepted, "B", k.shape[0], k, "k")
    arguments.no_gradients(_NO_BACKWARD, k=k, v=v, state=state, decay=decay)


def _check_shared(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    state_v_first: bool,
    rounding_seed: Tensor | int | None,
    null_slot: int | None,
    *,
    written: bool,
) -> None:
    for name, tensor in (("k", k), ("v", v), ("state", state), ("decay", decay)):
        arguments.tensor(name, tensor)
    kind = arguments.leading("k", k)
    if k.dim() != 4:
        arguments.value_error("k", "4 dimensions [B, T, H, K]", list(k.shape))
    if v.dim() != 4 or v.shape[:2] != k.shape[:2]:
        arguments.value_error(
            "v", f"[B, T, HV, V] with B, T = {k.shape[0]}, {k.shape[1]} as in k", list(v.shape)
        )
    batch, tokens, heads, dim_k = k.shape
    heads_v, dim_v = v.shape[2:]
    if not 1 <= tokens <= MAX_TOKENS:
        arguments.value_error("k", f"1 to {MAX_TOKENS} tokens (dimension 1)", tokens)
    for name, symbol, dim in (("k", "K", dim_k), ("v", "V", dim_v)):
        if kind == "cuda" and dim not in HEAD_DIMS:
            arguments.value_error(name, f"a head dimension {symbol} in {HEAD_DIMS}", dim)
        if dim == 0:
            arguments.value_error(name, f"a head dimension {symbol} of at least 1", dim)
    arguments.value_heads("v", heads_v, heads)
    if batch > _MAX_GRID or heads > _MAX_GRID:
        arguments.value_error("k", f"at most {_MAX_GRID} rows and heads", list(k.shape))
    arguments.activation("k", k, k, "k")
    arguments.activation("v", v, k, "k")

    arguments.booleans(state_v_first=state_v_first)
    rows, columns = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    if (
        state.dim() != 4
        or state.shape[1] != heads_v
        or state.shape[2] != rows
        or state.shape[3] != columns
    ):
        layout = "[pool, HV, V, K]" if state_v_first else "[pool, HV, K, V]"
        arguments.value_error(
            "state", f"{layout} = [pool, {heads_v}, {rows}, {columns}]", list(state.shape)
        )
    if state.dtype not in _STATES[kind]:
        arguments.type_error("state", arguments.names(_STATES[kind]), dtype_name(state.dtype))
    arguments.device("state", state, k, "k")
    if state.stride(3) != 1 or state.stride(2) != columns:
        arguments.value_error(
            "state", f"dense matrices (last strides {columns}, 1)", f"strides {state.stride()}"
        )
    if kind == "cuda":
        arguments.state_alignment("state", state)

    if decay.dtype != torch.float32:
        arguments.type_error("decay", "float32", dtype_name(decay.dtype))
    arguments.vector("decay", decay, "HV", heads_v)
    arguments.device("decay", decay, k, "k")
    if arguments.is_readable(decay) and not bool((decay >= 0).all()):
        arguments.value_error(
            "decay", "values >= 0 (a state is multiplied by exp(-decay))", decay.min().item()
        )

    check_null_slot(null_slot)
    if state_indices is not None:
        arguments.int32_vector("state_indices", state_indices, "B", batch, k, "k")
        if arguments.is_readable(state_indices):
            _check_slots(state_indices, state, written, null_slot)
    elif state.shape[0] < batch:
        arguments.value_error(
            "state",
            f"a pool of at least B = {batch} states when there are no state_indices",
            state.shape[0],
        )

    if rounding_seed is not None:
        _check_seed(rounding_seed, state, k)


def _check_seed(seed: Tensor | int, state: Tensor, k: Tensor) -> None:
    if state.dtype != torch.bfloat16:
        arguments.value_error(
            "rounding_seed",
            "None unless the state is bfloat16",
            f"a seed with a {dtype_name(state.dtype)} state",
        )
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            arguments.type_error("rounding_seed", "int64", dtype_name(seed.dtype))
        if seed.dim() != 1 or seed.shape[0] != 1:
            arguments.value_error("rounding_seed", "one element, [1]", list(seed.shape))
        arguments.device("rounding_seed", seed, k, "k")
    elif isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        arguments.type_error(
            "rounding_seed", "an int, an int64 tensor of one element or None", type(seed).__name__
        )
    elif isinstance(seed, int) and not -(1 << 63) <= seed < 1 << 63:
        arguments.value_error("rounding_seed", "a 64-bit integer", seed)


def _check_slots(
    state_indices: Tensor, state: Tensor, written: bool, null_slot: int | None
) -> None:
    live = [slot for slot in state_indices.tolist() if slot >= 0 and slot != null_slot]
    if live and max(live) >= state.shape[0]:
        arguments.value_error(
            "state_indices", f"values below the {state.shape[0]} states of state", max(live)
        )
    if written and len(set(live)) < len(live):
        twice = next(slot for slot in live if live.count(slot) > 1)
        arguments.value_error(
            "state_indices", "rows that differ because state is updated", f"{twice} twice"
        )
