"""The argument contracts of the public functions, one function each.

They run before anything is launched or written, and never wait for a device.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

import torch
from torch import Tensor

from cula import _arguments as arguments
from cula._arguments import Dims

MAX_DECODE_TOKENS = 8
_DECODE_CUDA = (torch.bfloat16, torch.float16)
_POOL_STATES = (torch.float32, torch.bfloat16, torch.float16)
_SAFE_LOWER_BOUND = -5.0
_LOG_DECAY = "it is the natural log of a decay"


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
    requires_grad: bool,
    **flags: bool,
) -> Dims:
    """The contract of `chunk_kda`; `flags` are the remaining booleans by name."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        **flags,
    )
    dims = arguments.token_dims(q, k, v, cu_seqlens, cu_seqlens_cpu)
    _gate(g, q, (*v.shape[:3], dims.dim_k), "[B, T, HV, K]", use_gate_in_kernel)
    _delta_rule(
        q, v, beta, dims, scale, initial_state, state_v_first, out, requires_grad,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_context,
    )  # fmt: skip
    _gate_parameters(
        q, dims, use_gate_in_kernel, A_log, dt_bias, dims.dim_k, needs_rate=lower_bound is None
    )
    _lower_bound(lower_bound, safe_gate, use_gate_in_kernel)
    if not (isinstance(use_intracard_cp, bool) or use_intracard_cp == "auto"):
        arguments.value_error("use_intracard_cp", "'auto', True or False", repr(use_intracard_cp))
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
    return dims


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    requires_grad: bool,
    **flags: bool,
) -> Dims:
    """The contract of `fused_recurrent_kda`; `flags` are the remaining booleans by name."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        **flags,
    )
    dims = arguments.token_dims(q, k, v, cu_seqlens, None)
    _gate(g, q, (*v.shape[:3], dims.dim_k), "[B, T, HV, K]", use_gate_in_kernel)
    _delta_rule(
        q, v, beta, dims, scale, initial_state, state_v_first, out, requires_grad,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, None,
    )  # fmt: skip
    _gate_parameters(
        q, dims, use_gate_in_kernel, A_log, dt_bias, dims.dim_k, needs_rate=lower_bound is None
    )
    _lower_bound(lower_bound, None, use_gate_in_kernel)
    return dims


def chunk_gated_delta_rule(
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
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor | None,
    requires_grad: bool,
    **flags: bool,
) -> Dims:
    """The contract of `chunk_gated_delta_rule`; `flags` are the remaining booleans by name."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        **flags,
    )
    dims = arguments.token_dims(q, k, v, cu_seqlens, cu_seqlens_cpu)
    _gate(g, q, v.shape[:3], "[B, T, HV]", use_gate_in_kernel)
    _delta_rule(
        q, v, beta, dims, scale, initial_state, state_v_first, out, requires_grad,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_context,
    )  # fmt: skip
    _gate_parameters(q, dims, use_gate_in_kernel, A_log, dt_bias, 1, needs_rate=True)
    if chunk_indices is not None:
        arguments.tensor("chunk_indices", chunk_indices)
        if cu_seqlens is None:
            arguments.value_error("chunk_indices", "None without cu_seqlens", "a tensor")
        if chunk_indices.dtype not in (torch.int32, torch.int64):
            arguments.type_error(
                "chunk_indices", "int32 or int64", arguments.dtype_name(chunk_indices.dtype)
            )
        if chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2:
            arguments.value_error("chunk_indices", "shape [chunks, 2]", list(chunk_indices.shape))
        arguments.same_device("chunk_indices", chunk_indices, q)
    return dims


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
    requires_grad: bool,
    **common: Any,
) -> None:
    """The contract of `chunk_simple_gla`; `common` as in `_prefill`."""
    arguments.booleans(output_final_state=output_final_state, state_v_first=state_v_first)
    dims = arguments.token_dims(q, k, v, cu_seqlens, cu_seqlens_cpu)
    if g is not None:
        arguments.like_tokens("g", g, q, v.shape[:3], "[B, T, HV]", any_strides=True)
        arguments.sign("g", g, -1, _LOG_DECAY)
    if g_gamma is not None:
        arguments.per_head("g_gamma", g_gamma, q, dims.value_heads)
        arguments.sign(
            "g_gamma", g_gamma, -1, "it is the log of a decay; Lightning's decay is -g_gamma"
        )
    arguments.scale_factor(scale)
    arguments.initial_states(initial_state, q, dims, state_v_first)
    _prefill(q, v, dims, state_v_first, requires_grad, **common)


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
    requires_grad: bool,
    **common: Any,
) -> None:
    """The contract of `lightning_attn_fwd`; `common` as in `_prefill`."""
    arguments.booleans(output_final_state=output_final_state, state_v_first=state_v_first)
    dims = arguments.token_dims(q, k, v, None, None)
    arguments.decay_rates(decay, q, dims.value_heads)
    arguments.scale_factor(scale)
    arguments.initial_states(initial_state, q, dims, state_v_first)
    _prefill(q, v, dims, state_v_first, requires_grad, **common)


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
    dims = arguments.token_dims(q, k, v, cu_seqlens, None)
    arguments.decay_rates(decay, q, dims.value_heads)
    arguments.scale_factor(scale)
    if state_pool is None:
        if initial_state_indices is not None:
            arguments.value_error("initial_state_indices", "None without a state_pool", "a tensor")
    else:
        arguments.state_stack(
            "state_pool", state_pool, q, dims, state_v_first, "pool", arguments.state_dtypes(q)
        )
        arguments.pool_rows(
            "initial_state_indices",
            initial_state_indices,
            q,
            dims.sequences,
            "N",
            "state_pool",
            state_pool,
            written=update_state_pool,
        )
        if requires_grad and update_state_pool:
            arguments.value_error(
                "state_pool",
                "no gradients with it, it is updated in place (see update_state_pool)",
                "an input that requires them",
            )
    _prefill(q, v, dims, state_v_first, requires_grad, **common)


def prefill_operands(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The part of the Lightning prefill contracts that choosing an implementation needs: K, V and HV // H."""
    for name, x in (("q", q), ("v", v)):
        arguments.tensor(name, x)
        if x.dim() != 4:
            arguments.value_error(name, "4 dimensions", list(x.shape))
    if q.shape[2] == 0:
        arguments.value_error("q", "at least one head", list(q.shape))
    return index(q.shape[3]), index(v.shape[3]), index(v.shape[2] // q.shape[2])


def dtype_of(name: str, x: Tensor | None) -> torch.dtype | None:
    """The dtype of an optional tensor."""
    if x is None:
        return None
    arguments.tensor(name, x)
    return x.dtype


def decode_operands(**tensors: Tensor) -> None:
    """The part of the decode contracts that choosing an implementation needs: tensors of four dimensions."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            arguments.type_error(name, "a torch.Tensor", type(x).__name__)
        if x.dim() != 4:
            arguments.value_error(name, "4 dimensions", list(x.shape))


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
) -> None:
    """The contract of `linear_attention_decode`."""
    arguments.booleans(state_v_first=state_v_first, commit=commit)
    arguments.tensor("q", q)
    arguments.activations(q=q, k=k, v=v)
    _decode(k, v, state, decay, state_indices, state_v_first, rounding_seed, written=commit)
    if q.shape != k.shape:
        arguments.value_error("q", f"the shape of k, {list(k.shape)}", list(q.shape))
    arguments.scale_factor(scale)
    if out is not None:
        arguments.output(out, v, False)
    arguments.no_gradients(q=q, k=k, v=v, state=state, decay=decay)


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
) -> None:
    """The contract of `linear_attention_commit`."""
    arguments.booleans(state_v_first=state_v_first)
    arguments.activations(k=k, v=v)
    _decode(k, v, state, decay, state_indices, state_v_first, rounding_seed, written=True)
    arguments.int32_vector("num_accepted", num_accepted, k, k.shape[0], "B")
    arguments.no_gradients(k=k, v=v, state=state, decay=decay)


def layer(layer_idx: int, num_layers: int) -> None:
    """The position of a layer in a model."""
    for name, value in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(value, bool) or not isinstance(value, int):
            arguments.type_error(name, "an int", type(value).__name__)
    if num_layers < 1:
        arguments.value_error("num_layers", "an int >= 1", num_layers)
    if not 0 <= layer_idx < num_layers:
        arguments.value_error(
            "layer_idx", f"an int in [0, num_layers) = [0, {num_layers})", layer_idx
        )


def requires_grad(*tensors: Any) -> bool:
    """Whether autograd wants a derivative of any of the tensors. Other objects are left to the checks."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )


def _prefill(
    q: Tensor,
    v: Tensor,
    dims: Dims,
    state_v_first: bool,
    requires_grad: bool,
    *,
    use_qk_l2norm_in_kernel: bool,
    exact_state: bool,
    state_checkpoints: Tensor | None,
    checkpoint_every_n_tokens: int | None,
    num_splits: int | None,
    out: Tensor | None,
) -> None:
    """The keyword arguments that every Lightning prefill function has."""
    arguments.booleans(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, exact_state=exact_state)
    arguments.split_count(num_splits)
    arguments.state_checkpoints(
        state_checkpoints, checkpoint_every_n_tokens, q, dims, state_v_first, requires_grad
    )
    arguments.output(out, v, requires_grad)


def _gate(
    g: Tensor, q: Tensor, shape: tuple[int, ...], symbols: str, use_gate_in_kernel: bool
) -> None:
    """The log decay, or what a gate inside makes one of."""
    arguments.like_tokens("g", g, q, shape, symbols)
    if not use_gate_in_kernel:
        arguments.sign("g", g, -1, _LOG_DECAY)


def _delta_rule(
    q: Tensor,
    v: Tensor,
    beta: Tensor,
    dims: Dims,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    out: Tensor | None,
    requires_grad: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    cp_context: object,
) -> None:
    """What KDA and the gated delta rule share beyond q, k and v."""
    arguments.like_tokens("beta", beta, q, v.shape[:3], "[B, T, HV]")
    arguments.scale_factor(scale)
    arguments.initial_states(initial_state, q, dims, state_v_first)
    arguments.output(out, v, requires_grad)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        arguments.value_error(
            "allow_neg_eigval",
            "use_beta_sigmoid_in_kernel=True with it",
            "use_beta_sigmoid_in_kernel=False",
        )
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context: expected None, got "
            f"{type(cp_context).__name__}; sequences are not split over several GPUs, only within one "
            "(use_intracard_cp of chunk_kda)"
        )


def _gate_parameters(
    q: Tensor,
    dims: Dims,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    channels: int,
    *,
    needs_rate: bool,
) -> None:
    """A_log `[HV]` and dt_bias `[HV * channels]`, which belong to a gate that is computed inside."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not use_gate_in_kernel:
            arguments.value_error(name, "None unless use_gate_in_kernel=True", "a tensor")
    if use_gate_in_kernel and A_log is None and needs_rate:
        arguments.value_error("A_log", "a tensor because use_gate_in_kernel=True", None)
    if A_log is not None:
        arguments.per_head("A_log", A_log, q, dims.value_heads)
    if dt_bias is not None:
        arguments.floating("dt_bias", dt_bias)
        shapes = [(dims.value_heads * channels,)] + [(dims.value_heads, channels)] * (channels > 1)
        if tuple(dt_bias.shape) not in shapes:
            arguments.value_error(
                "dt_bias",
                " or ".join(f"shape {list(shape)}" for shape in shapes),
                list(dt_bias.shape),
            )
        arguments.same_device("dt_bias", dt_bias, q)
        arguments.last_dim("dt_bias", dt_bias)


def _lower_bound(
    lower_bound: float | None, safe_gate: bool | None, use_gate_in_kernel: bool
) -> None:
    """safe_gate is None where there is no such argument."""
    if lower_bound is None:
        if safe_gate and use_gate_in_kernel:
            arguments.value_error(
                "lower_bound", "a float because safe_gate and use_gate_in_kernel are True", None
            )
        return
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, int | float):
        arguments.type_error("lower_bound", "a float or None", type(lower_bound).__name__)
    if not (safe_gate or use_gate_in_kernel):
        flags = "use_gate_in_kernel" if safe_gate is None else "safe_gate or use_gate_in_kernel"
        arguments.value_error("lower_bound", f"None unless {flags} is True", lower_bound)
    if safe_gate and not _SAFE_LOWER_BOUND <= lower_bound < 0:
        arguments.value_error(
            "lower_bound",
            f"a float in [{_SAFE_LOWER_BOUND:g}, 0) because safe_gate is True",
            lower_bound,
        )
    if not -math.inf < lower_bound < 0:
        arguments.value_error("lower_bound", "a finite float < 0", lower_bound)


def _decode(
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
    """What decoding and committing share; `decode_operands` has seen k, v and state."""
    if v.shape[:2] != k.shape[:2]:
        arguments.value_error(
            "v", f"shape [B, T, HV, V] with B, T = {list(k.shape[:2])} as in k", list(v.shape)
        )
    dims = arguments.head_dims("k", k, v)
    if not 1 <= dims.tokens <= MAX_DECODE_TOKENS:
        arguments.value_error("k", f"1 to {MAX_DECODE_TOKENS} tokens T", dims.tokens)
    if k.device.type == "cuda" and k.dtype not in _DECODE_CUDA:
        arguments.type_error(
            "k", "bfloat16 or float16 on a CUDA device", arguments.dtype_name(k.dtype)
        )
    allowed = (*_POOL_STATES, torch.float64) if k.device.type == "cpu" else _POOL_STATES
    arguments.state_stack("state", state, k, dims, state_v_first, "pool", allowed)
    arguments.decay_rates(decay, k, dims.value_heads)
    arguments.pool_rows(
        "state_indices", state_indices, k, dims.batch, "B", "state", state, written=written
    )
    if rounding_seed is not None:
        arguments.seed_of_rounding(rounding_seed, state)
