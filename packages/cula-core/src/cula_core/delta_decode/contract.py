"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import arguments
from ..dtypes import dtype_name
from ..reference.decode_fused import GatedNorm, ShortConvolution
from ..reference.delta_decode import CURSOR_COLUMNS, MAX_TOKENS, Replay
from ..tensors import as_stored
from .fused import check_convolution, check_norm
from .gates import check_gates, has_channels
from .slots import (
    NO_BACKWARD,
    Limits,
    Sizes,
    check_begins,
    check_contiguous,
    check_dtype,
    check_grid,
    check_head_dims,
    check_indices,
    check_null_slot,
    check_one_slot,
    check_pool,
    check_slot_values,
    check_slots_once,
    check_states,
    kind_of,
)

MAX_RECORDS = 64


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    scale: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    commit: bool,
    replay: Replay | None,
    num_accepted: Tensor | None,
    token_states: Tensor | None,
    token_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    max_tokens: int | None,
    null_slot: int | None,
    convolution: ShortConvolution | None,
    norm: GatedNorm | None,
    out: Tensor | None,
    limits: Limits | None = None,
) -> None:
    """Raises unless the arguments of `delta_rule_decode` fit together, and within the limits of kernels."""
    arguments.four_dims("q", q, "[B, T, H, K]")
    sizes = _activations(k, v, cu_seqlens, max_tokens, limits)
    for name, x, like, like_name in (("q", q, k, "k"), ("out", out, v, "v")):
        if x is None:
            continue
        arguments.tensor(name, x)
        if x.shape != like.shape:
            expected = f"the shape of {like_name}, {list(like.shape)}"
            arguments.value_error(name, expected, list(x.shape))
        arguments.activation(name, x, k, "k")
    arguments.number("scale", scale)
    check_gates(
        sizes, g, beta, A_log, dt_bias, lower_bound, softplus_beta, softplus_threshold, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    arguments.booleans(state_v_first=state_v_first, commit=commit)
    check_states("state", state, v, sizes, state_v_first)
    check_null_slot(null_slot)

    if replay is not None:
        _alone(
            replay, commit, state_indices, output_state_indices, token_states, token_state_indices
        )
        _replay(replay, state, sizes, has_channels(g, sizes))
        check_dtype("replay.k", replay.k, (k.dtype,))
    check_begins(state, state_indices, num_accepted, replay is not None, sizes)
    if output_state_indices is not None:
        check_indices("output_state_indices", output_state_indices, sizes, ("N",), (sizes.rows,))
        if not commit:
            arguments.value_error("output_state_indices", "None unless commit is True", "a tensor")
    if token_states is not None:
        check_states("token_states", token_states, v, sizes, state_v_first)
        check_dtype("token_states", token_states, (state.dtype,))
        if as_stored(token_states)[1] != as_stored(state)[1]:
            strides = f"strides {token_states.stride()}"
            arguments.value_error("token_states", "the layout of state", strides)
        if token_state_indices is None:
            arguments.value_error("token_state_indices", "a tensor with token_states", None)
    if token_state_indices is not None:
        shape = (sizes.rows, sizes.tokens)
        check_indices("token_state_indices", token_state_indices, sizes, ("N", "T"), shape)
    if convolution is not None:
        check_convolution(convolution, k, v, state, sizes)
        elsewhere = (output_state_indices, token_states, token_state_indices)
        if not commit or any(x is not None for x in elsewhere):
            expected = "None unless every state stays in its slot: commit=True and no other slots"
            arguments.value_error("convolution", expected, "a ShortConvolution")
        if isinstance(state_indices, Tensor) and state_indices.dim() == 2:
            expected = "None with [N, slots] state_indices"
            arguments.value_error("convolution", expected, "a ShortConvolution")
    if norm is not None:
        check_norm(norm, v, sizes)
    arguments.no_gradients(
        NO_BACKWARD,
        **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias},
        **{"state": state, "token_states": token_states, "out": out},
    )
    check_slot_values(
        state, state_indices, output_state_indices, num_accepted, token_states, token_state_indices, sizes, commit,
        null_slot,
    )  # fmt: skip


def check_commit(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    num_accepted: Tensor,
    state_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    max_tokens: int | None,
    null_slot: int | None,
    limits: Limits | None = None,
) -> None:
    """Raises unless the arguments of `delta_rule_commit` fit together, and within the limits of kernels."""
    sizes = _activations(k, v, cu_seqlens, max_tokens, limits)
    check_gates(
        sizes, g, beta, A_log, dt_bias, lower_bound, softplus_beta, softplus_threshold, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    arguments.booleans(state_v_first=state_v_first)
    check_states("state", state, v, sizes, state_v_first)
    check_null_slot(null_slot)
    arguments.int32_vector("num_accepted", num_accepted, "N", sizes.rows, k, "k")
    check_one_slot(state, state_indices, sizes)
    arguments.no_gradients(
        NO_BACKWARD,
        **{
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "state": state,
        },
    )
    check_slots_once(state, state_indices, null_slot)


def check_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None,
    state_indices: Tensor | None,
    state_v_first: bool,
    null_slot: int | None,
    limits: Limits | None = None,
) -> None:
    """Raises unless the arguments of `delta_rule_flush` fit together, and within the limits of kernels."""
    sizes = check_pool(state, state_v_first, limits)
    check_null_slot(null_slot)
    _replay(replay, state, sizes)
    if state_indices is not None:
        arguments.tensor("state_indices", state_indices)
        rows = state_indices.shape[0] if state_indices.dim() else 1
        sizes = sizes._replace(rows=rows)
    check_one_slot(state, state_indices, sizes)
    if num_accepted is not None:
        arguments.int32_vector("num_accepted", num_accepted, "N", sizes.rows, state, "state")
    arguments.no_gradients(NO_BACKWARD, state=state)
    check_slots_once(state, state_indices, null_slot)


def check_new_replay(
    state: Tensor,
    heads: int,
    max_tokens: int,
    channels: bool,
    dtype: torch.dtype,
    records: int | None,
    state_v_first: bool,
    limits: Limits | None = None,
) -> None:
    """Raises unless the arguments of `new_replay` fit together, and within the limits of kernels."""
    check_new_rings(state, heads, max_tokens, dtype, state_v_first, limits)
    arguments.booleans(channels=channels)
    if records is not None:
        arguments.integer("records", records)
        _records("records", records, max_tokens)


def check_new_rings(
    state: Tensor,
    heads: int,
    max_tokens: int,
    dtype: torch.dtype,
    state_v_first: bool,
    limits: Limits | None = None,
) -> None:
    """Raises unless there can be rings of something for the tokens of a pool of states."""
    sizes = check_pool(state, state_v_first, limits)
    arguments.integer("heads", heads)
    if heads < 1 or sizes.heads_v % heads:
        expected = f"a number of heads H that divides HV = {sizes.heads_v}"
        arguments.value_error("heads", expected, heads)
    _max_tokens(max_tokens)
    if dtype not in arguments.ACTIVATIONS[sizes.kind]:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        arguments.type_error("dtype", arguments.names(arguments.ACTIVATIONS[sizes.kind]), got)


# ---- activations -----------------------------------------------------------------------------------------------------


def _activations(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None, limits: Limits | None
) -> Sizes:
    """Checks k, v and how their tokens are rows."""
    for name, x in (("k", k), ("v", v)):
        arguments.tensor(name, x)
    kind = kind_of("k", k, limits)
    check_dtype("k", k, arguments.ACTIVATIONS[kind])
    arguments.four_dims("k", k, "[B, T, H, K]")
    batch, tokens, heads, dim_k = k.shape
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] != tokens:
        expected = f"[B, T, HV, V] with B, T = {batch}, {tokens} as in k"
        arguments.value_error("v", expected, list(v.shape))
    heads_v, dim_v = v.shape[2:]
    check_head_dims(kind, limits, ("k", "K", dim_k), ("v", "V", dim_v))
    arguments.value_heads("v", heads_v, heads)
    arguments.activation("k", k, k, "k")
    arguments.activation("v", v, k, "k")
    rows, lengths = batch, None
    tokens = row_tokens(k, cu_seqlens, max_tokens)
    if cu_seqlens is not None:
        rows, lengths = _offsets(cu_seqlens, k, tokens)
    check_grid("k", rows, heads, "rows", limits)
    return Sizes(kind, rows, tokens, heads, heads_v, dim_k, dim_v, lengths, k, limits=limits)


def row_tokens(k: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None) -> int:
    """Returns the most tokens of a row of a decode, once it is known that there may be so many."""
    if max_tokens is not None:
        if cu_seqlens is None:
            arguments.value_error("max_tokens", "None without cu_seqlens", max_tokens)
        return _max_tokens(max_tokens)
    if cu_seqlens is not None:
        return MAX_TOKENS
    if not 1 <= k.shape[1] <= MAX_TOKENS:
        arguments.value_error("k", f"1 to {MAX_TOKENS} tokens (dimension 1)", k.shape[1])
    return k.shape[1]


def _max_tokens(x: int) -> int:
    arguments.integer("max_tokens", x)
    if not 1 <= x <= MAX_TOKENS:
        arguments.value_error("max_tokens", f"1 to {MAX_TOKENS}", x)
    return x


def _offsets(x: Tensor, k: Tensor, longest: int) -> tuple[int, list[int] | None]:
    """Checks cu_seqlens; returns the number of rows, and how many tokens each has where that can be read."""
    name, (batch, tokens) = "cu_seqlens", k.shape[:2]
    arguments.tensor(name, x)
    check_dtype(name, x, (torch.int32,))
    if x.dim() != 1 or x.shape[0] < 1:
        arguments.value_error(name, "[N + 1]", list(x.shape))
    arguments.contiguous_elements(name, x)
    arguments.device(name, x, k, "k")
    if batch != 1:
        arguments.value_error(name, "None unless B = 1", f"a tensor with B = {batch}")
    rows = x.shape[0] - 1
    if not (arguments.is_readable(x) and arguments.is_readable(k)):
        return rows, None
    values = x.tolist()
    lengths = [b - a for a, b in zip(values[:-1], values[1:])]
    if values[0] != 0 or values[-1] > tokens or min(lengths, default=0) < 0:
        expected = f"offsets that rise from 0 to at most T = {tokens}"
        arguments.value_error(name, expected, values)
    if max(lengths, default=0) > longest:
        arguments.value_error(name, f"rows of at most {longest} tokens", max(lengths))
    return rows, lengths


# ---- replay ----------------------------------------------------------------------------------------------------------


def _alone(
    replay: Replay,
    commit: bool,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    token_states: Tensor | None,
    token_state_indices: Tensor | None,
) -> None:
    """Refuses other ways to store states beside a replay, and several slots per row."""
    check_rings(replay)
    if not commit:
        arguments.value_error("commit", "True with replay", False)
    for name, x in (
        ("output_state_indices", output_state_indices),
        ("token_states", token_states),
        ("token_state_indices", token_state_indices),
    ):
        if x is not None:
            arguments.value_error(name, "None with replay", type(x).__name__)
    if isinstance(state_indices, Tensor) and state_indices.dim() == 2:
        arguments.value_error("state_indices", "[N] with replay", list(state_indices.shape))


def _replay(replay: Replay, state: Tensor, sizes: Sizes, channels: bool | None = None) -> None:
    """Checks the rings of records for a pool. channels: whether decays are per channel; None: the rings say so."""
    check_rings(replay)
    heads_v, dim_k, dim_v = sizes.heads_v, sizes.dim_k, sizes.dim_v
    pool, kind = state.shape[0], sizes.kind
    records, heads = replay.k.shape[1:3]
    _records("replay.k", records, max(sizes.tokens, 1))
    if sizes.heads:
        heads = sizes.heads
    elif heads == 0 or heads_v % heads:
        expected = f"a number of heads H that divides HV = {heads_v}"
        arguments.value_error("replay.k", expected, heads)
    if channels is None:
        channels = replay.decay.dim() == 4
    per_head = "HV, K" if channels else "HV"
    factors = (heads_v, dim_k) if channels else (heads_v,)
    groups = -(-dim_v // CURSOR_COLUMNS)
    check_dtype("replay.k", replay.k, arguments.ACTIVATIONS[kind])
    wide = (torch.float64 if replay.k.dtype == torch.float64 else torch.float32,)
    for name, x, letters, shape, dtypes in (
        ("k", replay.k, "L, H, K", (records, heads, dim_k), (replay.k.dtype,)),
        ("u", replay.u, "L, HV, V", (records, heads_v, dim_v), wide),
        ("decay", replay.decay, f"L, {per_head}", (records, *factors), wide),
        ("cursor", replay.cursor, f"HV, V / {CURSOR_COLUMNS}", (heads_v, groups), (torch.int32,)),
    ):
        name, shape = f"replay.{name}", (pool, *shape)
        check_dtype(name, x, dtypes)
        if x.shape != shape:
            arguments.value_error(name, f"[pool, {letters}] = {list(shape)}", list(x.shape))
        arguments.device(name, x, sizes.lead, sizes.lead_name)
        check_contiguous(name, x)


def check_rings(replay: Replay) -> None:
    """Refuses anything but rings of records, the first two of which tell their sizes."""
    if not isinstance(replay, Replay):
        arguments.type_error("replay", "a Replay, which new_replay returns", type(replay).__name__)
    for name, x in zip(Replay._fields, replay):
        arguments.tensor(f"replay.{name}", x)
    for name, x, letters in (("k", replay.k, "H, K"), ("u", replay.u, "HV, V")):
        if x.dim() != 4:
            arguments.value_error(f"replay.{name}", f"[pool, L, {letters}]", list(x.shape))


def _records(name: str, records: int, tokens: int) -> None:
    """Checks how many records a ring holds, for calls of so many tokens."""
    if not 2 * tokens <= records <= MAX_RECORDS or records & (records - 1):
        expected = f"a power of two from {2 * tokens} to {MAX_RECORDS} records"
        arguments.value_error(name, expected, records)
