"""The argument contract of prefill of the gated delta rule, in which all channels of a head decay alike."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import arguments
from ..delta_decode.gates import check_gate, check_parameters, check_softplus, check_strength
from ..delta_decode.slots import (
    Limits,
    Sizes,
    check_dtype,
    check_grid,
    check_indices,
    check_null_slot,
    check_slot_values,
)
from .contract import (
    check_checkpoints,
    check_cp_context,
    check_has_initial_state,
    check_operand_dtype,
    check_segments,
    check_split_choice,
)

_NO_BACKWARD = (
    "no backward; cula.lightning.chunk_gated_delta_rule has one with flash-linear-attention"
)


def check_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    softplus_beta: float,
    softplus_threshold: float,
    state_pool: Tensor | None,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    update_state_pool: bool,
    null_slot: int | None,
    has_initial_state: Tensor | None,
    state_checkpoints: Tensor | None,
    checkpoint_every_n_tokens: int | None,
    checkpoint_rows: Tensor | None,
    checkpoint_offsets: Tensor | None,
    use_intracard_cp: bool | str,
    operand_dtype: torch.dtype | None,
    out: Tensor | None,
    segment_tokens: int | None = None,
    limits: Limits | None = None,
    requires_grad: bool = False,
    **flags: bool,
) -> None:
    """Raises unless the arguments of `chunk_gated_delta_rule` fit together. flags: the remaining booleans by name.

    limits: those of kernels, which have no backward. requires_grad: whether an input does, where there are no limits.
    """
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        update_state_pool=update_state_pool,
        **flags,
    )
    sizes = _sizes(q, k, v, out, cu_seqlens, cu_seqlens_cpu, limits)
    if chunk_indices is not None:
        _check_chunk_indices(chunk_indices, cu_seqlens, q)
    arguments.number("scale", scale)
    check_cp_context(cp_context)
    if limits is None:
        check_split_choice(use_intracard_cp, segment_tokens)
    else:
        check_segments(use_intracard_cp, segment_tokens, q.shape[1], cu_seqlens, cu_seqlens_cpu)
    check_operand_dtype(operand_dtype)

    _check_decay(g, use_gate_in_kernel, sizes, A_log, dt_bias)
    check_softplus(softplus_beta, softplus_threshold)
    if use_beta_sigmoid_in_kernel and beta is None:
        arguments.value_error("use_beta_sigmoid_in_kernel", "False without beta", True)
    check_strength(sizes, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, arguments.FLOATING)

    heads = (sizes.heads_name, sizes.heads_v)
    states = initial_state if state_pool is None else state_pool
    arguments.initial_states(
        initial_state, state_pool, state_indices is None, q, v, sizes.rows, state_v_first,
        aligned=limits is not None, heads=heads,
    )  # fmt: skip
    _check_slots(
        state_pool, state_indices, output_state_indices, update_state_pool, null_slot, sizes
    )
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, states, sizes.rows, sizes.lead, sizes.lead_name)
    check_checkpoints(
        state_checkpoints, checkpoint_every_n_tokens, checkpoint_rows, checkpoint_offsets, q, v, sizes.rows,
        state_v_first, states, state_pool if update_state_pool else None, cu_seqlens, heads=heads,
        aligned=limits is not None,
    )  # fmt: skip

    if limits is not None:
        arguments.no_gradients(
            _NO_BACKWARD,
            **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias},
            **{"initial_state": initial_state, "state_pool": state_pool, "out": out},
            state_checkpoints=state_checkpoints,
        )
        return
    arguments.not_with_gradients("out", out, requires_grad)
    arguments.not_with_gradients("state_checkpoints", state_checkpoints, requires_grad)
    if requires_grad and update_state_pool and state_pool is not None:
        arguments.value_error(
            "state_pool",
            "no gradients with it, it is updated in place (see update_state_pool)",
            "an input that requires them",
        )


def _sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    limits: Limits | None,
) -> Sizes:
    """Checks activations and packing. Where kernels do not bind it, plain torch serves every device alike."""
    head_dims = None if limits is None else limits.head_dims
    heads = arguments.attention(q, k, v, out, head_dims, grouped=True)
    batch, tokens, _, dim_k = q.shape
    sequences = batch
    if cu_seqlens is not None:
        sequences = arguments.offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens_cpu is not None:
        arguments.offsets_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    check_grid("q", sequences, heads, "sequences", limits)
    kind = "cpu" if limits is None else q.device.type
    return Sizes(
        kind, sequences, tokens, k.shape[2], heads, dim_k, v.shape[3], None, q, "q", limits, "HS"
    )


def _check_chunk_indices(x: Tensor, cu_seqlens: Tensor | None, q: Tensor) -> None:
    name = "chunk_indices"
    arguments.tensor(name, x)
    if cu_seqlens is None:
        arguments.value_error(name, "None without cu_seqlens", "a tensor")
    check_dtype(name, x, arguments.OFFSETS)
    if x.dim() != 2 or x.shape[1] != 2:
        arguments.value_error(name, "[NT, 2]", list(x.shape))
    arguments.device(name, x, q)


def _check_decay(
    g: Tensor | None, raw: bool, sizes: Sizes, A_log: Tensor | None, dt_bias: Tensor | None
) -> None:
    """Checks the log decay, or what it is made of."""
    if g is None:
        if raw:
            arguments.value_error("use_gate_in_kernel", "False without g", True)
    else:
        shape = (*sizes.lead.shape[:2], sizes.heads_v)
        check_gate("g", g, f"[B, T, {sizes.heads_name}]", (shape,), sizes, arguments.FLOATING)
        if not raw:
            arguments.sign("g", g, -1)
    check_parameters(sizes, False, raw, A_log, dt_bias)
    if raw and A_log is None:
        arguments.value_error("A_log", "a tensor with use_gate_in_kernel", None)


def _check_slots(
    pool: Tensor | None,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    updated: bool,
    null_slot: int | None,
    sizes: Sizes,
) -> None:
    """Checks which rows of a pool, whose states are known to be right, sequences begin at and end in."""
    check_null_slot(null_slot)
    tables = {"state_indices": state_indices, "output_state_indices": output_state_indices}
    for name, x in (*tables.items(), ("null_slot", null_slot)):
        if x is not None and pool is None:
            arguments.value_error(name, "None without a state_pool", type(x).__name__)
    for name, x in tables.items():
        if x is not None:
            check_indices(name, x, sizes, ("N",), (sizes.rows,))
    if output_state_indices is not None and not updated:
        expected = "None unless update_state_pool is True"
        arguments.value_error("output_state_indices", expected, "a tensor")
    if pool is not None:
        check_slot_values(
            pool, state_indices, output_state_indices, None, None, None, sizes, updated, null_slot,
            "state_pool",
        )  # fmt: skip
