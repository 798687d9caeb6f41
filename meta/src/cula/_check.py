"""The argument contracts of the public functions, one function each.

They run before anything is launched or written, and never wait for a device.
"""

from __future__ import annotations

import contextlib
from operator import index
from typing import Any

import torch
from torch import Tensor

from cula._arguments import (
    Dims,
    activations,
    decays,
    decode_dims,
    like_tokens,
    seed_of_rounding,
    split_count,
    token_dims,
)
from cula_core import arguments
from cula_core.delta_decode import slots
from cula_core.delta_decode.gates import check_softplus
from cula_core.delta_rule.contract import (
    SAFE_LOWER_BOUND,
    check_checkpoints,
    check_cp_context,
    check_has_initial_state,
    check_null_slot,
    check_operand_dtype,
    check_split_choice,
    check_targets,
)
from cula_core.dtypes import dtype_name

MAX_DECODE_TOKENS = 8
requires_grad = arguments.requires_grad
_POOL_STATES = (torch.float32, torch.bfloat16, torch.float16)
_IN_PLACE = "the state is updated in place; use torch.no_grad()"


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float | None,
    disable_recompute: bool,
    return_intermediate_states: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: object,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_intracard_cp: bool | str,
    out: Tensor | None,
    segment_tokens: int | None,
    state_pool: Tensor | None,
    initial_state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    update_state_pool: bool,
    null_slot: int | None,
    has_initial_state: Tensor | None,
    state_checkpoints: Tensor | None,
    checkpoint_every_n_tokens: int | None,
    checkpoint_rows: Tensor | None,
    checkpoint_offsets: Tensor | None,
    requires_grad: bool,
    **flags: bool,
) -> None:
    """The contract of `chunk_kda`; `flags` are the remaining booleans by name."""
    check_split_choice(use_intracard_cp, segment_tokens)
    arguments.booleans(
        update_state_pool=update_state_pool,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        **flags,
    )
    dims = token_dims(q, k, v, out, cu_seqlens, cu_seqlens_cpu, requires_grad)
    heads = tuple(v.shape[:3])
    like_tokens("g", g, q, (*heads, dims.dim_k), "[B, T, HV, K]")
    arguments.last_dim("g", g)
    like_tokens("beta", beta, q, heads, "[B, T, HV]")
    arguments.number("scale", scale)
    _states(
        q,
        v,
        dims,
        state_v_first,
        initial_state=initial_state,
        state_pool=state_pool,
        indices=initial_state_indices,
        updated=update_state_pool and output_state_indices is None,
        null_slot=null_slot,
    )
    check_targets(
        state_pool, initial_state_indices, output_state_indices, null_slot, update_state_pool, q, v, dims.sequences
    )  # fmt: skip
    states = initial_state if state_pool is None else state_pool
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, states, dims.sequences, q)
    check_checkpoints(
        state_checkpoints, checkpoint_every_n_tokens, checkpoint_rows, checkpoint_offsets, q, v, dims.sequences,
        state_v_first, states, state_pool if update_state_pool else None, cu_seqlens, aligned=False,
    )  # fmt: skip
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        other = "use_beta_sigmoid_in_kernel"
        arguments.value_error("allow_neg_eigval", f"{other}=True with it", f"{other}=False")
    check_cp_context(cp_context)
    _gate(q, g, dims, lower_bound, A_log, dt_bias, use_gate_in_kernel, safe_gate)
    if return_intermediate_states and disable_recompute:
        arguments.value_error(
            "return_intermediate_states",
            "disable_recompute=False with it",
            "disable_recompute=True",
        )
    if return_intermediate_states and requires_grad:
        arguments.value_error(
            "return_intermediate_states",
            "no gradients (use torch.no_grad())",
            "an input that requires them",
        )
    if return_intermediate_states and (state_pool is not None or state_checkpoints is not None):
        other = "state_checkpoints" if state_pool is None else "state_pool"
        arguments.value_error("return_intermediate_states", f"False with {other}", True)
    arguments.not_with_gradients("state_checkpoints", state_checkpoints, requires_grad)
    if requires_grad and update_state_pool:
        _no_gradients_into(state_pool)


def kernel_choices(
    use_intracard_cp: bool | str,
    segment_tokens: int | None,
    operand_dtype: torch.dtype | None,
    softplus_beta: float,
    softplus_threshold: float,
) -> None:
    """The part of the contract of `chunk_gated_delta_rule`, beside operands, that choosing an implementation needs."""
    check_split_choice(use_intracard_cp, segment_tokens)
    check_operand_dtype(operand_dtype)
    check_softplus(softplus_beta, softplus_threshold)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    out: Tensor | None,
    requires_grad: bool,
    **common: Any,
) -> None:
    """The contract of `chunk_simple_gla`; `common` as in `_prefill`."""
    arguments.booleans(output_final_state=output_final_state, state_v_first=state_v_first)
    dims = token_dims(q, k, v, out, cu_seqlens, cu_seqlens_cpu, requires_grad)
    if g is not None:
        like_tokens("g", g, q, v.shape[:3], "[B, T, HV]")
        arguments.sign("g", g, -1)
    if g_gamma is not None:
        decays("g_gamma", g_gamma, q, dims.value_heads, -1, "q")
    arguments.number("scale", scale)
    _states(q, v, dims, state_v_first, initial_state=initial_state)
    _prefill(q, v, dims, initial_state, state_v_first, requires_grad, **common)


def lightning_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    out: Tensor | None,
    requires_grad: bool,
    **common: Any,
) -> None:
    """The contract of `lightning_attn_fwd`; `common` as in `_prefill`."""
    arguments.booleans(output_final_state=output_final_state, state_v_first=state_v_first)
    dims = token_dims(q, k, v, out, None, None, requires_grad)
    decays("decay", decay, q, dims.value_heads, 1, "q")
    arguments.number("scale", scale)
    _states(q, v, dims, state_v_first, initial_state=initial_state)
    _prefill(q, v, dims, initial_state, state_v_first, requires_grad, **common)


def lightning_attn_fwd_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None,
    state_pool: Tensor | None,
    initial_state_indices: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    update_state_pool: bool,
    null_slot: int | None,
    has_initial_state: Tensor | None,
    out: Tensor | None,
    requires_grad: bool,
    **common: Any,
) -> None:
    """The contract of `lightning_attn_fwd_varlen`; `common` as in `_prefill`."""
    arguments.booleans(
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        update_state_pool=update_state_pool,
    )
    arguments.tensor("cu_seqlens", cu_seqlens)
    dims = token_dims(q, k, v, out, cu_seqlens, None, requires_grad)
    decays("decay", decay, q, dims.value_heads, 1, "q")
    arguments.number("scale", scale)
    _states(
        q,
        v,
        dims,
        state_v_first,
        state_pool=state_pool,
        indices=initial_state_indices,
        updated=update_state_pool,
        null_slot=null_slot,
    )
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, state_pool, dims.sequences, q)
    if requires_grad and update_state_pool:
        _no_gradients_into(state_pool)
    pool = state_pool if update_state_pool else None
    _prefill(
        q, v, dims, state_pool, state_v_first, requires_grad, pool=pool, cu_seqlens=cu_seqlens, **common
    )  # fmt: skip


def prefill_operands(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The part of the prefill contracts that choosing an implementation needs: K, V and HV // H."""
    arguments.four_dims("q", q, "[B, T, H, K]")
    arguments.four_dims("v", v, "[B, T, HV, V]")
    if q.shape[2] == 0:
        arguments.value_error("q", "at least one head", list(q.shape))
    return index(q.shape[3]), index(v.shape[3]), index(v.shape[2] // q.shape[2])


def in_autocast(device_type: str) -> bool:
    """Whether autocast is on for tensors of a type of device, of which some have none."""
    # Compilers trace the second question, those of before torch 2.13 not the first one.
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def outside_autocast(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Products of what runs in it stay in their precision, where autocast is on around it too."""
    if in_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cast_by_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 tokens in the dtype of autocast, where that is on, as torch's own attention takes them."""
    if not in_autocast(q.device.type):
        return q, k, v
    dtype, single = torch.get_autocast_dtype(q.device.type), torch.float32
    k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype == single else x for x in (k, v))
    return q.to(dtype), k, v


def grouped_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, bool]:
    """The same where heads may be grouped in any way: K, V, HS // HQ, and whether heads of q share one of k or v."""
    dim_k, dim_v, _ = prefill_operands(q, v)
    arguments.four_dims("k", k, "[B, T, HK, K]")
    heads, heads_k, heads_v = index(q.shape[2]), index(k.shape[2]), index(v.shape[2])
    return dim_k, dim_v, max(heads, heads_v) // heads, heads_k != heads or heads_v < heads


def without_ones(x: Tensor | None) -> Tensor | None:
    """Numbers per head or channel, which some callers keep as `[1, 1, H, 1]`: a view without the dimensions of size 1.

    What is no tensor is left to the checks.
    """
    if not isinstance(x, Tensor) or x.dim() == 1 or 1 not in x.shape:
        return x
    return x.reshape([size for size in x.shape if size != 1] or [1])


def graph(use_graph: bool, max_num_seqs: int | None, cu_seqlens: Tensor | None) -> None:
    """What flash-linear-attention asks for where a call is captured into a CUDA graph."""
    arguments.booleans(use_graph=use_graph)
    if max_num_seqs is None:
        return
    arguments.integer("max_num_seqs", max_num_seqs)
    if (
        isinstance(cu_seqlens, Tensor)
        and cu_seqlens.dim() == 1
        and max_num_seqs < cu_seqlens.shape[0] - 1
    ):
        expected = f"at least the {cu_seqlens.shape[0] - 1} sequences of cu_seqlens"
        arguments.value_error("max_num_seqs", expected, max_num_seqs)


def chunk_size(size: int, return_intermediate_states: bool = False) -> None:
    """A length of chunks that flash-linear-attention takes."""
    arguments.integer("chunk_size", size)
    if size not in (16, 32, 64):
        arguments.value_error("chunk_size", "16, 32 or 64", size)
    if return_intermediate_states and size != 64:
        arguments.value_error("chunk_size", "64 with return_intermediate_states", size)


def dtype_of(name: str, x: Tensor | None) -> torch.dtype | None:
    """The dtype of an optional tensor."""
    if x is None:
        return None
    arguments.tensor(name, x)
    return x.dtype


def decode_operands(
    k: Tensor, v: Tensor, state: Tensor, q: Tensor | None = None, matrix: str = "K, V"
) -> None:
    """The part of the decode contracts that choosing an implementation needs; q where there is one."""
    if q is not None:
        arguments.four_dims("q", q, "[B, T, H, K]")
    arguments.four_dims("k", k, "[B, T, H, K]")
    arguments.four_dims("v", v, "[B, T, HV, V]")
    arguments.four_dims("state", state, f"[pool, HV, {matrix}]")


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    *,
    state_indices: Tensor | None,
    scale: float | None,
    state_v_first: bool,
    out: Tensor | None,
    commit: bool,
    rounding_seed: Tensor | int | None,
    null_slot: int | None,
) -> None:
    """The contract of `linear_attention_decode`."""
    arguments.booleans(state_v_first=state_v_first, commit=commit)
    activations(q=q, k=k, v=v)
    _decode(
        k, v, state, decay, state_indices, state_v_first, rounding_seed, null_slot, written=commit
    )
    if q.shape != k.shape:
        arguments.value_error("q", f"the shape of k, {list(k.shape)}", list(q.shape))
    arguments.number("scale", scale)
    if out is not None:
        arguments.tensor("out", out)
        if out.shape != v.shape:
            arguments.value_error("out", f"the shape of v, {list(v.shape)}", list(out.shape))
        arguments.activation("out", out, k, "k")
        arguments.not_with_gradients("out", out, False)
    arguments.no_gradients(_IN_PLACE, q=q, k=k, v=v, state=state, decay=decay)


def linear_attention_commit(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None,
    state_v_first: bool,
    rounding_seed: Tensor | int | None,
    null_slot: int | None,
) -> None:
    """The contract of `linear_attention_commit`."""
    arguments.booleans(state_v_first=state_v_first)
    activations(k=k, v=v)
    _decode(
        k, v, state, decay, state_indices, state_v_first, rounding_seed, null_slot, written=True
    )
    arguments.int32_vector("num_accepted", num_accepted, "B", k.shape[0], k, "k")
    arguments.no_gradients(_IN_PLACE, k=k, v=v, state=state, decay=decay)


def layer(layer_idx: int, num_layers: int) -> None:
    """The position of a layer in a model."""
    for name, value in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        arguments.integer(name, value)
    if num_layers < 1:
        arguments.value_error("num_layers", "at least 1", num_layers)
    if not 0 <= layer_idx < num_layers:
        arguments.value_error("layer_idx", f"0 to {num_layers - 1}", layer_idx)


def _prefill(
    q: Tensor,
    v: Tensor,
    dims: Dims,
    states: Tensor | None,
    state_v_first: bool,
    requires_grad: bool,
    *,
    use_qk_l2norm_in_kernel: bool,
    exact_state: bool,
    state_checkpoints: Tensor | None,
    checkpoint_every_n_tokens: int | None,
    num_splits: int | None,
    segment_tokens: int | None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    pool: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """The keyword arguments that every Lightning prefill function has, and those of rows. pool: one that is updated."""
    arguments.booleans(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, exact_state=exact_state)
    split_count(num_splits)
    other = None if num_splits is None else str(num_splits)
    arguments.segment_tokens(segment_tokens, not_beside=other, of="num_splits")
    check_checkpoints(
        state_checkpoints, checkpoint_every_n_tokens, checkpoint_rows, checkpoint_offsets, q, v, dims.sequences,
        state_v_first, states, pool, cu_seqlens, aligned=False,
    )  # fmt: skip
    arguments.not_with_gradients("state_checkpoints", state_checkpoints, requires_grad)


def _no_gradients_into(state_pool: Tensor | None) -> None:
    if state_pool is not None:
        arguments.value_error(
            "state_pool",
            "no gradients with it, it is updated in place (see update_state_pool)",
            "an input that requires them",
        )


def _states(
    q: Tensor,
    v: Tensor,
    dims: Dims,
    state_v_first: bool,
    *,
    initial_state: Tensor | None = None,
    state_pool: Tensor | None = None,
    indices: Tensor | None = None,
    updated: bool = False,
    null_slot: int | None = None,
) -> None:
    """States wherever they lie: a kernel that needs aligned ones refuses others itself."""
    check_null_slot(null_slot, state_pool)
    arguments.state_or_pool(
        initial_state,
        state_pool,
        indices,
        q,
        v,
        dims.sequences,
        state_v_first,
        updated,
        aligned=False,
        null_slot=null_slot,
    )


def _gate(
    q: Tensor,
    g: Tensor,
    dims: Dims,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    inside: bool,
    safe: bool,
) -> None:
    """The log decay g, or what a gate inside makes one of: A_log, dt_bias and lower_bound.

    inside: use_gate_in_kernel. safe: safe_gate.
    """
    _lower_bound(lower_bound, inside, safe)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        arguments.floating(name, x)
        if not inside:
            expected = "None unless use_gate_in_kernel is True"
            arguments.value_error(name, expected, type(x).__name__)
        arguments.device(name, x, q)
    if not inside:
        arguments.sign("g", g, -1)
    if A_log is not None:
        arguments.vector("A_log", A_log, "HV", dims.value_heads)
    elif inside and lower_bound is None:
        expected = "a tensor with use_gate_in_kernel and no lower_bound"
        arguments.value_error("A_log", expected, None)
    if dt_bias is not None:
        shapes: dict[str, tuple[int, ...]] = {
            "[HV * K]": (dims.value_heads * dims.dim_k,),
            "[HV, K]": (dims.value_heads, dims.dim_k),
        }
        if tuple(dt_bias.shape) not in shapes.values():
            expected = " or ".join(
                f"{letters} = {list(sizes)}" for letters, sizes in shapes.items()
            )
            arguments.value_error("dt_bias", expected, list(dt_bias.shape))
        arguments.last_dim("dt_bias", dt_bias)


def _lower_bound(lower_bound: float | None, inside: bool, safe: bool) -> None:
    arguments.number("lower_bound", lower_bound)
    if lower_bound is None:
        if inside and safe:
            expected = "a float with use_gate_in_kernel and safe_gate"
            arguments.value_error("lower_bound", expected, None)
        return
    if not (inside or safe):
        expected = "None unless use_gate_in_kernel or safe_gate is True"
        arguments.value_error("lower_bound", expected, lower_bound)
    if not lower_bound < 0:
        arguments.value_error("lower_bound", "a number below 0", lower_bound)
    if safe and lower_bound < SAFE_LOWER_BOUND:
        expected = f"a number in [{SAFE_LOWER_BOUND:g}, 0) with safe_gate"
        arguments.value_error("lower_bound", expected, lower_bound)


def _decode(
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
    """What decoding and committing share; `decode_operands` has seen k, v and state."""
    dims = decode_dims(k, v)
    if not 1 <= dims.tokens <= MAX_DECODE_TOKENS:
        arguments.value_error("k", f"1 to {MAX_DECODE_TOKENS} tokens (dimension 1)", dims.tokens)
    allowed = arguments.ACTIVATIONS["cuda"]
    if k.device.type == "cuda" and k.dtype not in allowed:
        arguments.type_error("k", f"{arguments.names(allowed)} on a GPU", dtype_name(k.dtype))
    pools = (*_POOL_STATES, torch.float64) if k.device.type == "cpu" else _POOL_STATES
    arguments.states(
        "state", state, v, dims.dim_k, state_v_first, dtypes=pools, aligned=False, lead_name="k"
    )
    decays("decay", decay, k, dims.value_heads, 1, "k")
    slots.check_null_slot(null_slot)
    if state_indices is None:
        if state.shape[0] < dims.batch:
            expected = f"a pool of at least B = {dims.batch} states when there are no state_indices"
            arguments.value_error("state", expected, state.shape[0])
    else:
        arguments.int32_vector("state_indices", state_indices, "B", dims.batch, k, "k")
        arguments.pool_rows(
            "state_indices", state_indices, "state", state.shape[0], written, null_slot
        )
    if rounding_seed is not None:
        seed_of_rounding(rounding_seed, state)
