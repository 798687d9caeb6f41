"""The argument contract: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.dtypes import dtype_name
from cula_core.reference.delta_decode import CURSOR_COLUMNS, Replay
from cula_core.tensors import as_stored

from .config import HEAD_DIMS, MAX_TOKENS
from .slots import (
    STATES,
    Sizes,
    check_begins,
    check_contiguous,
    check_dtype,
    check_head_dims,
    check_indices,
    check_null_slot,
    check_one_slot,
    check_pool,
    check_slot_values,
    check_slots_once,
    check_states,
)

MAX_RECORDS = 64
_MAX_GRID = 65535
_NO_BACKWARD = "decode has no backward; use torch.no_grad()"


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
    out: Tensor | None,
) -> None:
    """Raises unless the arguments of `delta_rule_decode` fit together."""
    arguments.tensor("q", q)
    if q.dim() != 4:
        arguments.value_error("q", "4 dimensions [B, T, H, K]", list(q.shape))
    sizes = _activations(k, v, cu_seqlens, max_tokens)
    for name, x, like, like_name in (("q", q, k, "k"), ("out", out, v, "v")):
        if x is None:
            continue
        arguments.tensor(name, x)
        if x.shape != like.shape:
            expected = f"the shape of {like_name}, {list(like.shape)}"
            arguments.value_error(name, expected, list(x.shape))
        arguments.activation(name, x, k, "k")
    arguments.number("scale", scale)
    _gates(
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
        _replay(replay, state, sizes, _channels(g, sizes))
        check_dtype("replay.k", replay.k, (k.dtype,))
    check_begins(state, state_indices, num_accepted, replay is not None, sizes)
    if output_state_indices is not None:
        check_indices("output_state_indices", output_state_indices, sizes, ("N",), (sizes.rows,))
        if not commit:
            arguments.value_error("output_state_indices", "None unless commit is True", "a tensor")
    if token_states is not None:
        check_states("token_states", token_states, v, sizes, state_v_first)
        check_dtype("token_states", token_states, (state.dtype,))
        if as_stored(token_states)[1]:
            strides = f"strides {token_states.stride()}"
            arguments.value_error("token_states", "the layout of state", strides)
        if token_state_indices is None:
            arguments.value_error("token_state_indices", "a tensor with token_states", None)
    if token_state_indices is not None:
        shape = (sizes.rows, sizes.tokens)
        check_indices("token_state_indices", token_state_indices, sizes, ("N", "T"), shape)
    arguments.no_gradients(
        _NO_BACKWARD,
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
) -> None:
    """Raises unless the arguments of `delta_rule_commit` fit together."""
    sizes = _activations(k, v, cu_seqlens, max_tokens)
    _gates(
        sizes, g, beta, A_log, dt_bias, lower_bound, softplus_beta, softplus_threshold, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    arguments.booleans(state_v_first=state_v_first)
    check_states("state", state, v, sizes, state_v_first)
    check_null_slot(null_slot)
    arguments.int32_vector("num_accepted", num_accepted, "N", sizes.rows, k, "k")
    check_one_slot(state, state_indices, sizes)
    arguments.no_gradients(
        _NO_BACKWARD,
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


def check_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
) -> int:
    """Raises unless the arguments of the recurrence fit together; returns the number of sequences."""
    arguments.attention(q, k, v, out, HEAD_DIMS)
    batch, tokens, heads, dim_k = q.shape
    sequences = batch if cu_seqlens is None else arguments.offsets("cu_seqlens", cu_seqlens, q)
    heads_v, dim_v = v.shape[2:]
    sizes = Sizes(
        q.device.type, sequences, tokens, heads, heads_v, dim_k, dim_v, None, q, "q"
    )  # fmt: skip
    if sequences > _MAX_GRID or heads > _MAX_GRID:
        got = f"{sequences} sequences of {heads} heads"
        arguments.value_error("q", f"at most {_MAX_GRID} sequences and heads", got)
    arguments.number("scale", scale)
    _gates(
        sizes, g, beta, A_log, dt_bias, lower_bound, 1.0, 20.0, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    arguments.booleans(state_v_first=state_v_first, output_final_state=output_final_state)
    if initial_state is not None:
        check_states("initial_state", initial_state, v, sizes, state_v_first)
        if initial_state.shape[0] != sequences:
            expected = f"one state for each of {sequences} sequences"
            arguments.value_error("initial_state", expected, initial_state.shape[0])
    arguments.no_gradients(
        _NO_BACKWARD,
        **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias},
        **{"initial_state": initial_state, "out": out},
    )
    return sequences


def check_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None,
    state_indices: Tensor | None,
    state_v_first: bool,
    null_slot: int | None,
) -> None:
    """Raises unless the arguments of `delta_rule_flush` fit together."""
    sizes = check_pool(state, state_v_first)
    check_null_slot(null_slot)
    _replay(replay, state, sizes)
    if state_indices is not None:
        arguments.tensor("state_indices", state_indices)
        rows = state_indices.shape[0] if state_indices.dim() else 1
        sizes = sizes._replace(rows=rows)
    check_one_slot(state, state_indices, sizes)
    if num_accepted is not None:
        arguments.int32_vector("num_accepted", num_accepted, "N", sizes.rows, state, "state")
    arguments.no_gradients(_NO_BACKWARD, state=state)
    check_slots_once(state, state_indices, null_slot)


def check_new_replay(
    state: Tensor,
    heads: int,
    max_tokens: int,
    channels: bool,
    dtype: torch.dtype,
    records: int | None,
    state_v_first: bool,
) -> None:
    """Raises unless the arguments of `new_replay` fit together."""
    sizes = check_pool(state, state_v_first)
    arguments.booleans(channels=channels)
    arguments.integer("heads", heads)
    if heads < 1 or sizes.heads_v % heads:
        expected = f"a number of heads H that divides HV = {sizes.heads_v}"
        arguments.value_error("heads", expected, heads)
    _max_tokens(max_tokens)
    if dtype not in arguments.ACTIVATIONS[sizes.kind]:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        arguments.type_error("dtype", arguments.names(arguments.ACTIVATIONS[sizes.kind]), got)
    if records is not None:
        arguments.integer("records", records)
        _records("records", records, max_tokens)


# ---- activations -----------------------------------------------------------------------------------------------------


def _activations(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None) -> Sizes:
    """Checks k, v and how their tokens are rows."""
    for name, x in (("k", k), ("v", v)):
        arguments.tensor(name, x)
    kind = arguments.leading("k", k)
    if k.dim() != 4:
        arguments.value_error("k", "4 dimensions [B, T, H, K]", list(k.shape))
    batch, tokens, heads, dim_k = k.shape
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] != tokens:
        expected = f"[B, T, HV, V] with B, T = {batch}, {tokens} as in k"
        arguments.value_error("v", expected, list(v.shape))
    heads_v, dim_v = v.shape[2:]
    check_head_dims(kind, ("k", "K", dim_k), ("v", "V", dim_v))
    arguments.value_heads("v", heads_v, heads)
    arguments.activation("k", k, k, "k")
    arguments.activation("v", v, k, "k")
    rows, lengths = batch, None
    if cu_seqlens is not None:
        longest = MAX_TOKENS
        if max_tokens is not None:
            longest = _max_tokens(max_tokens)
        rows, lengths = _offsets(cu_seqlens, k, longest)
        tokens = longest
    else:
        if max_tokens is not None:
            arguments.value_error("max_tokens", "None without cu_seqlens", max_tokens)
        if not 1 <= tokens <= MAX_TOKENS:
            arguments.value_error("k", f"1 to {MAX_TOKENS} tokens (dimension 1)", tokens)
    if rows > _MAX_GRID or heads > _MAX_GRID:
        got = f"{rows} rows of {heads} heads"
        arguments.value_error("k", f"at most {_MAX_GRID} rows and heads", got)
    return Sizes(kind, rows, tokens, heads, heads_v, dim_k, dim_v, lengths, k)


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


# ---- gates -----------------------------------------------------------------------------------------------------------


def _gates(
    sizes: Sizes,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """Checks what decays and write strengths are made of."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    batch, tokens = sizes.lead.shape[:2]
    heads_v, dim_k = sizes.heads_v, sizes.dim_k
    per_head = (batch, tokens, heads_v)
    if g is not None:
        every = (per_head, (*per_head, dim_k), (batch, tokens, heads_v * dim_k))
        _gate("g", g, "[B, T, HV], [B, T, HV, K] or [B, T, HV * K]", every, sizes)
        if _channels(g, sizes):
            arguments.last_dim("g", g)
        # NaN may be the gate of padding.
        if not use_gate_in_kernel and arguments.is_readable(g) and bool((g > 0).any()):
            expected = "values <= 0 with use_gate_in_kernel=False"
            arguments.value_error("g", expected, g.max().item())
    if beta is not None:
        _gate("beta", beta, "[B, T, HV]", (per_head,), sizes)

    arguments.number("lower_bound", lower_bound)
    if lower_bound is not None:
        if not lower_bound < 0:
            arguments.value_error("lower_bound", "a number below 0", lower_bound)
        if not use_gate_in_kernel:
            expected = "None unless use_gate_in_kernel is True"
            arguments.value_error("lower_bound", expected, lower_bound)
    for name, number in (
        ("softplus_beta", softplus_beta),
        ("softplus_threshold", softplus_threshold),
    ):
        if number is None:
            arguments.type_error(name, "a float", "NoneType")
        arguments.number(name, number)
    if not softplus_beta > 0:
        arguments.value_error("softplus_beta", "a number above 0", softplus_beta)
    _gate_parameters(
        sizes, _channels(g, sizes), g is not None and use_gate_in_kernel, A_log, dt_bias
    )
    if allow_neg_eigval and not (use_beta_sigmoid_in_kernel and beta is not None):
        got = "no beta" if beta is None else "use_beta_sigmoid_in_kernel=False"
        expected = "False unless there are beta and use_beta_sigmoid_in_kernel"
        arguments.value_error("allow_neg_eigval", expected, f"True with {got}")


def _gate(
    name: str, x: Tensor, letters: str, shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> None:
    """Checks g or beta."""
    arguments.tensor(name, x)
    if all(x.shape != shape for shape in shapes):
        expected = f"{letters} = {' or '.join(str(list(shape)) for shape in shapes)}"
        arguments.value_error(name, expected, list(x.shape))
    check_dtype(name, x, STATES[sizes.kind])
    arguments.device(name, x, sizes.lead, sizes.lead_name)


def _gate_parameters(
    sizes: Sizes, channels: bool, used: bool, A_log: Tensor | None, dt_bias: Tensor | None
) -> None:
    """Checks A_log and dt_bias. used: there is a gate that they are part of."""
    heads_v, dim_k = sizes.heads_v, sizes.dim_k
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        arguments.floating(name, x)
        if not used:
            arguments.value_error(
                name, "None unless there are g and use_gate_in_kernel", "a tensor"
            )
        arguments.device(name, x, sizes.lead, sizes.lead_name)
    if A_log is not None:
        arguments.vector("A_log", A_log, "HV", heads_v)
    if dt_bias is not None and not channels:
        arguments.vector("dt_bias", dt_bias, "HV", heads_v)
    elif dt_bias is not None:
        if dt_bias.shape != (heads_v * dim_k,) and dt_bias.shape != (heads_v, dim_k):
            expected = f"[HV * K] = [{heads_v * dim_k}] or [HV, K] = [{heads_v}, {dim_k}]"
            arguments.value_error("dt_bias", expected, list(dt_bias.shape))
        check_contiguous("dt_bias", dt_bias)


def _channels(g: Tensor | None, sizes: Sizes) -> bool:
    """Whether g has a gate for every channel of K."""
    return g is not None and (g.dim() == 4 or g.shape[2] != sizes.heads_v)


# ---- replay ----------------------------------------------------------------------------------------------------------


def _alone(
    replay: object,
    commit: bool,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    token_states: Tensor | None,
    token_state_indices: Tensor | None,
) -> None:
    """Refuses other ways to store states beside a replay, and several slots per row."""
    if not isinstance(replay, Replay):
        arguments.type_error(
            "replay", "a Replay, which new_replay returns, or None", type(replay).__name__
        )
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
    if not isinstance(replay, Replay):
        arguments.type_error("replay", "a Replay, which new_replay returns", type(replay).__name__)
    for name, x in zip(Replay._fields, replay):
        arguments.tensor(f"replay.{name}", x)
    heads_v, dim_k, dim_v = sizes.heads_v, sizes.dim_k, sizes.dim_v
    pool, kind = state.shape[0], sizes.kind
    if replay.k.dim() != 4:
        arguments.value_error("replay.k", "[pool, L, H, K]", list(replay.k.shape))
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


def _records(name: str, records: int, tokens: int) -> None:
    """Checks how many records a ring holds, for calls of so many tokens."""
    if not 2 * tokens <= records <= MAX_RECORDS or records & (records - 1):
        expected = f"a power of two from {2 * tokens} to {MAX_RECORDS} records"
        arguments.value_error(name, expected, records)
