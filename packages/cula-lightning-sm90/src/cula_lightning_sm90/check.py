"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.delta_rule.contract import (
    check_checkpoints,
    check_has_initial_state,
    check_null_slot,
)
from cula_core.dtypes import dtype_name

from .config import HEAD_DIMS


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
    segment_tokens: int | None,
    out: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    null_slot: int | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """Raises unless the arguments of a prefill fit together.

    decay_name: what the caller knows head_decay by, "decay" or "g_gamma". state_name: "initial_state", one row per
    sequence, or "state_pool". flags: update_state_pool, use_qk_l2norm_in_kernel, exact_state.
    """
    arguments.attention(q, k, v, out, HEAD_DIMS)
    heads_v = v.shape[2]
    sequences = q.shape[0]
    if cu_seqlens is not None:
        sequences = arguments.offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens_cpu is not None:
        arguments.offsets_copy(cu_seqlens, cu_seqlens_cpu, q.shape[1])

    if g is not None:
        arguments.floating("g", g)
        if g.shape != v.shape[:3]:
            arguments.value_error("g", f"[B, T, HV] = {list(v.shape[:3])}", list(g.shape))
        arguments.device("g", g, q)
        arguments.sign("g", g, -1)
    if head_decay is None:
        if decay_name == "decay":
            arguments.type_error(decay_name, "a torch.Tensor", "NoneType")
    else:
        arguments.tensor(decay_name, head_decay)
        if head_decay.dtype != torch.float32:
            arguments.type_error(decay_name, "float32", dtype_name(head_decay.dtype))
        arguments.vector(decay_name, head_decay, "HV", heads_v)
        arguments.device(decay_name, head_decay, q)
        # decay >= 0, g_gamma <= 0: states never grow.
        arguments.sign(decay_name, head_decay, 1 if decay_name == "decay" else -1)
    arguments.number("scale", scale)
    update, l2norm, exact_state = flags
    arguments.booleans(
        update_state_pool=update,
        use_qk_l2norm_in_kernel=l2norm,
        exact_state=exact_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
    )
    pooled = state_name == "state_pool"
    pool = state if pooled else None
    check_null_slot(null_slot, pool)
    arguments.state_or_pool(
        None if pooled else state, pool, indices, q, v, sequences, state_v_first, update,
        null_slot=null_slot,
    )  # fmt: skip
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, pool, sequences, q)
    check_checkpoints(
        checkpoints, checkpoint_every, checkpoint_rows, checkpoint_offsets, q, v, sequences, state_v_first, state,
        pool if update else None, cu_seqlens,
    )  # fmt: skip
    if num_splits is not None:
        if type(num_splits) is not int:
            arguments.type_error("num_splits", "an int or None", type(num_splits).__name__)
        if num_splits < 1:
            arguments.value_error("num_splits", "at least 1", num_splits)
    not_beside = None if num_splits is None else str(num_splits)
    arguments.segment_tokens(segment_tokens, not_beside, of="num_splits")
    trained = wants_gradients(q, k, v, g, head_decay, state)
    arguments.not_with_gradients("out", out, trained)
    arguments.not_with_gradients("state_checkpoints", checkpoints, trained)
    if update:
        arguments.not_with_gradients(state_name, state, trained)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Returns whether one of the tensors does."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_layer(layer_idx: int, num_layers: int) -> None:
    """Raises unless `layer_idx` is one of `num_layers` layers."""
    for name, number in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            arguments.type_error(name, "an int", type(number).__name__)
    if num_layers < 1:
        arguments.value_error("num_layers", "at least 1", num_layers)
    if not 0 <= layer_idx < num_layers:
        arguments.value_error("layer_idx", f"0 to {num_layers - 1}", layer_idx)


def check_packed(cu_seqlens: Tensor) -> None:
    """Checks that sequences are packed, for functions that need it; the rest is checked with the other arguments."""
    arguments.tensor("cu_seqlens", cu_seqlens)
