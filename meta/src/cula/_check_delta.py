"""The argument contracts of `cula.delta`, for what serves without checking its arguments itself.

They run before anything is launched or written, and never wait for a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula._arguments import activations, decode_dims, four_dims, like_tokens, not_with_gradients
from cula_core import arguments
from cula_core.dtypes import dtype_name
from cula_core.reference.delta_decode import CURSOR_COLUMNS, MAX_TOKENS, Replay

MAX_RECORDS = 64
_IN_PLACE = "the state is updated in place; use torch.no_grad()"
_POOL_STATES = (torch.float32, torch.bfloat16, torch.float16)


class _Call(NamedTuple):
    """Sizes of a call. rows: B, or the number of packed rows. tokens: the most of a row. values: v, or one like it.

    offsets: cu_seqlens.
    """

    rows: int
    tokens: int
    heads: int
    dim_k: int
    values: Tensor
    state_v_first: bool
    offsets: Tensor | None = None

    @property
    def heads_v(self) -> int:
        return self.values.shape[2]


def operands(k: Tensor, v: Tensor, state: Tensor, q: Tensor | None = None) -> None:
    """The part of the contracts that choosing an implementation needs; q where there is one."""
    if q is not None:
        four_dims("q", q, "[B, T, H, K]")
    four_dims("k", k, "[B, T, H, K]")
    four_dims("v", v, "[B, T, HV, V]")
    four_dims("state", state, "[pool, HV, V, K]")


def pool(state: Tensor, replay: Replay) -> None:
    """The same of `delta_rule_flush`."""
    four_dims("state", state, "[pool, HV, V, K]")
    if not isinstance(replay, Replay):
        arguments.type_error("replay", "what new_replay made", type(replay).__name__)
    for name, x in replay._asdict().items():
        arguments.tensor(f"replay.{name}", x)
    for name, letters in (("k", "[pool, L, H, K]"), ("u", "[pool, L, HV, V]")):
        four_dims(f"replay.{name}", getattr(replay, name), letters)


def row_tokens(k: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None) -> int:
    """The most tokens of a row, once it is known that there may be so many."""
    if max_tokens is not None:
        arguments.integer("max_tokens", max_tokens)
        if cu_seqlens is None:
            arguments.value_error("max_tokens", "None without cu_seqlens", max_tokens)
        if not 1 <= max_tokens <= MAX_TOKENS:
            arguments.value_error("max_tokens", f"1 to {MAX_TOKENS}", max_tokens)
        return max_tokens
    if cu_seqlens is not None:
        return MAX_TOKENS
    if not 1 <= k.shape[1] <= MAX_TOKENS:
        arguments.value_error("k", f"1 to {MAX_TOKENS} tokens (dimension 1)", k.shape[1])
    return k.shape[1]


def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    scale: float | None,
    commit: bool,
    replay: Replay | None,
    num_accepted: Tensor | None,
    token_states: Tensor | None,
    token_state_indices: Tensor | None,
    null_slot: int | None,
    out: Tensor | None,
    **shared: Any,
) -> None:
    """The contract of `delta_rule_decode`; `shared` as in `_call`."""
    arguments.booleans(commit=commit)
    activations(q=q, k=k, v=v)
    call = _call(k, v, g, beta, state, null_slot=null_slot, **shared)
    if q.shape != k.shape:
        arguments.value_error("q", f"the shape of k, {list(k.shape)}", list(q.shape))
    arguments.number("scale", scale)
    if out is not None:
        arguments.tensor("out", out)
        if out.shape != v.shape:
            arguments.value_error("out", f"the shape of v, {list(v.shape)}", list(out.shape))
        arguments.activation("out", out, k, "k")
        not_with_gradients("out", out, False)

    if replay is not None:
        if not commit:
            arguments.value_error("commit", "True beside a replay", commit)
        channels = g is not None and tuple(g.shape) != tuple(v.shape[:3])
        _replay(replay, state, call, channels=channels, dtype=k.dtype)
        others = {
            "output_state_indices": output_state_indices,
            "token_states": token_states,
            "token_state_indices": token_state_indices,
        }
        for name, x in others.items():
            if x is not None:
                arguments.value_error(name, "None beside a replay", type(x).__name__)
    table = isinstance(state_indices, Tensor) and state_indices.dim() == 2
    if replay is not None and state_indices is not None and table:
        expected = "[B], beside a replay"
        arguments.value_error("state_indices", expected, list(state_indices.shape))
    if num_accepted is not None:
        arguments.int32_vector("num_accepted", num_accepted, "B", call.rows, v, "v")
        if replay is None and not table:
            expected = "None without a replay or [B, slots] state_indices"
            arguments.value_error("num_accepted", expected, "a tensor")
    elif table:
        arguments.value_error("num_accepted", "[B] beside [B, slots] state_indices", None)

    in_place = commit and output_state_indices is None
    chosen = num_accepted if table else None
    begins = _slots(state_indices, state, call, null_slot, updated=in_place, chosen=chosen)
    if output_state_indices is not None:
        name = "output_state_indices"
        if not commit:
            arguments.value_error(name, "None with commit=False", "a tensor")
        _indices(name, output_state_indices, {"[B]": (call.rows,)}, v)
        _stored(name, output_state_indices, begins, "state", state, null_slot)
    _token_states(token_states, token_state_indices, state, call, begins, null_slot)
    arguments.no_gradients(_IN_PLACE, q=q, k=k, v=v, g=g, beta=beta, state=state)


def delta_rule_commit(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None,
    null_slot: int | None,
    **shared: Any,
) -> None:
    """The contract of `delta_rule_commit`; `shared` as in `_call`."""
    activations(k=k, v=v)
    call = _call(k, v, g, beta, state, null_slot=null_slot, **shared)
    arguments.int32_vector("num_accepted", num_accepted, "B", call.rows, v, "v")
    _slots(state_indices, state, call, null_slot, updated=True)
    arguments.no_gradients(_IN_PLACE, k=k, v=v, g=g, beta=beta, state=state)


def delta_rule_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None,
    *,
    state_indices: Tensor | None,
    state_v_first: bool,
    null_slot: int | None,
) -> None:
    """The contract of `delta_rule_flush`."""
    arguments.booleans(state_v_first=state_v_first)
    _null_slot(null_slot)
    _, _, heads, dim_k = replay.k.shape
    if state_indices is not None:
        arguments.tensor("state_indices", state_indices)
        if state_indices.dim() != 1:
            arguments.value_error("state_indices", "[B]", list(state_indices.shape))
    arguments.value_heads("replay.u", replay.u.shape[2], heads)
    rows = len(state) if state_indices is None else len(state_indices)
    call = _Call(rows, 1, heads, dim_k, replay.u, state_v_first)
    _pool("state", state, call)
    _replay(replay, state, call, channels=replay.decay.dim() == 4, dtype=replay.k.dtype)
    if num_accepted is not None:
        arguments.int32_vector("num_accepted", num_accepted, "B", rows, state, "state")
    _slots(state_indices, state, call, null_slot, updated=True)
    arguments.no_gradients(_IN_PLACE, state=state)


def new_replay(
    state: Tensor,
    heads: int,
    *,
    max_tokens: int,
    channels: bool,
    dtype: torch.dtype,
    records: int | None,
    state_v_first: bool,
) -> None:
    """The contract of `new_replay`."""
    four_dims("state", state, "[pool, HV, V, K]")
    arguments.booleans(channels=channels, state_v_first=state_v_first)
    arguments.integer("heads", heads)
    arguments.integer("max_tokens", max_tokens)
    arguments.value_heads("state", state.shape[1], heads)
    if not 1 <= max_tokens <= MAX_TOKENS:
        arguments.value_error("max_tokens", f"1 to {MAX_TOKENS}", max_tokens)
    if dtype not in arguments.FLOATING:
        arguments.type_error("dtype", arguments.names(arguments.FLOATING), dtype)
    if records is not None:
        arguments.integer("records", records)
        if not 2 * max_tokens <= records <= MAX_RECORDS or records & (records - 1):
            expected = f"a power of two from {2 * max_tokens} to {MAX_RECORDS}"
            arguments.value_error("records", expected, records)


def _call(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
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
) -> _Call:
    """What decoding and committing share; `operands` and `row_tokens` were called."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    _null_slot(null_slot)
    dims = decode_dims(k, v)
    allowed = arguments.ACTIVATIONS["cuda"]
    if k.device.type == "cuda" and k.dtype not in allowed:
        arguments.type_error("k", f"{arguments.names(allowed)} on a GPU", dtype_name(k.dtype))
    tokens = row_tokens(k, cu_seqlens, max_tokens)
    rows = dims.batch if cu_seqlens is None else _offsets(cu_seqlens, k, tokens)
    call = _Call(rows, tokens, dims.heads, dims.dim_k, v, state_v_first, cu_seqlens)
    _pool("state", state, call)
    _gate(g, call, A_log, dt_bias, lower_bound, use_gate_in_kernel)
    for name, x in (("softplus_beta", softplus_beta), ("softplus_threshold", softplus_threshold)):
        if x is None:
            arguments.type_error(name, "a float", "NoneType")
        arguments.number(name, x)
    if softplus_beta <= 0:
        arguments.value_error("softplus_beta", "a number above 0", softplus_beta)
    if beta is not None:
        like_tokens("beta", beta, k, tuple(v.shape[:3]), "[B, T, HV]")
    if allow_neg_eigval and (beta is None or not use_beta_sigmoid_in_kernel):
        got = "no beta" if beta is None else "use_beta_sigmoid_in_kernel=False"
        expected = "False unless there is a beta and use_beta_sigmoid_in_kernel"
        arguments.value_error("allow_neg_eigval", expected, f"True with {got}")
    return call


def _gate(
    g: Tensor | None,
    call: _Call,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    inside: bool,
) -> None:
    """g of any of its shapes, and what a raw one is beside. inside: use_gate_in_kernel."""
    arguments.number("lower_bound", lower_bound)
    if lower_bound is not None:
        if not lower_bound < 0:
            arguments.value_error("lower_bound", "a number below 0", lower_bound)
        if not inside:
            expected = "None unless use_gate_in_kernel is True"
            arguments.value_error("lower_bound", expected, lower_bound)
    channels = False
    if g is not None:
        heads = tuple(call.values.shape[:3])
        arguments.floating("g", g)
        shapes: dict[str, tuple[int, ...]] = {
            "[B, T, HV]": heads,
            "[B, T, HV, K]": (*heads, call.dim_k),
            "[B, T, HV * K]": (*heads[:2], call.heads_v * call.dim_k),
        }
        _one_of("g", g, shapes)
        arguments.device("g", g, call.values, "v")
        channels = tuple(g.shape) != heads
        if channels:
            arguments.last_dim("g", g)
        if not inside:
            arguments.sign("g", g, -1)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        arguments.floating(name, x)
        if g is None or not inside:
            expected = "None unless there is a g and use_gate_in_kernel is True"
            arguments.value_error(name, expected, type(x).__name__)
        arguments.device(name, x, call.values, "v")
    if A_log is not None:
        arguments.vector("A_log", A_log, "HV", call.heads_v)
    if dt_bias is not None:
        shapes = {"[HV]": (call.heads_v,)}
        if channels:
            shapes = {
                "[HV * K]": (call.heads_v * call.dim_k,),
                "[HV, K]": (call.heads_v, call.dim_k),
            }
        _one_of("dt_bias", dt_bias, shapes)
        arguments.last_dim("dt_bias", dt_bias)


def _one_of(name: str, x: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    if tuple(x.shape) not in shapes.values():
        expected = " or ".join(f"{letters} = {list(sizes)}" for letters, sizes in shapes.items())
        arguments.value_error(name, expected, list(x.shape))


def _offsets(cu_seqlens: Tensor, k: Tensor, longest: int) -> int:
    """Checks cu_seqlens [N + 1], whose rows need not cover all tokens, and returns N."""
    name = "cu_seqlens"
    arguments.tensor(name, cu_seqlens)
    if cu_seqlens.dtype != torch.int32:
        arguments.type_error(name, "int32", dtype_name(cu_seqlens.dtype))
    rows = arguments.offsets_vector(name, cu_seqlens, k)
    if arguments.is_readable(cu_seqlens):
        values = cu_seqlens.tolist()
        lengths = [b - a for a, b in zip(values[:-1], values[1:])]
        if values[0] != 0 or values[-1] > k.shape[1] or min(lengths, default=0) < 0:
            expected = f"offsets that rise from 0 to at most T = {k.shape[1]}"
            arguments.value_error(name, expected, values)
        if max(lengths, default=0) > longest:
            arguments.value_error(name, f"rows of at most {longest} tokens", max(lengths))
    return rows


def _pool(name: str, state: Tensor, call: _Call) -> None:
    """A pool of dense matrices, which may lie transposed."""
    on_cpu = call.values.device.type == "cpu"
    arguments.states(
        name,
        state,
        call.values,
        call.dim_k,
        call.state_v_first,
        dtypes=(*_POOL_STATES, torch.float64) if on_cpu else _POOL_STATES,
        aligned=False,
        lead_name="v",
    )


def _null_slot(null_slot: int | None) -> None:
    if null_slot is None:
        return
    arguments.integer("null_slot", null_slot)
    if isinstance(null_slot, int) and not -(1 << 31) <= null_slot < 1 << 31:
        arguments.value_error("null_slot", "a 32-bit integer", null_slot)


def _indices(name: str, x: Tensor, shapes: dict[str, tuple[int, ...]], lead: Tensor) -> None:
    """int32 numbers of any strides."""
    arguments.tensor(name, x)
    if x.dtype != torch.int32:
        arguments.type_error(name, "int32", dtype_name(x.dtype))
    _one_of(name, x, shapes)
    arguments.device(name, x, lead, "v")


def _slots(
    indices: Tensor | None,
    state: Tensor,
    call: _Call,
    null_slot: int | None,
    *,
    updated: bool,
    chosen: Tensor | None = None,
) -> Tensor | None:
    """Checks where rows begin; returns the slots, -1 for padding, where they can be read.

    updated: states are stored there. chosen: indices are [B, slots], and a row begins at number chosen - 1 of its own.
    """
    name = "state_indices"
    if indices is None:
        if len(state) < call.rows:
            expected = f"a pool of at least B = {call.rows} states when there are no {name}"
            arguments.value_error("state", expected, len(state))
        if not arguments.is_readable(call.values):
            return None
        indices = torch.arange(call.rows, dtype=torch.int32)
    arguments.tensor(name, indices)
    shapes: dict[str, tuple[int, ...]] = {"[B]": (call.rows,)}
    if chosen is not None:
        shapes = {"[B, slots] with slots >= 1": (call.rows, max(indices.shape[1], 1))}
    _indices(name, indices, shapes, call.values)
    if not all(x is None or arguments.is_readable(x) for x in (indices, chosen)):
        return None
    if chosen is not None:
        last = (chosen.long() - 1).clamp(0, indices.shape[1] - 1)
        indices = indices.gather(1, last[:, None])[:, 0]
    begins = _live(indices, null_slot)
    arguments.pool_rows(name, begins, "state", len(state), updated)
    return begins


def _live(indices: Tensor, null_slot: int | None) -> Tensor:
    """The slots, -1 for padding."""
    return indices.clamp(min=-1) if null_slot is None else indices.where(indices != null_slot, -1)


def _stored(
    name: str,
    indices: Tensor,
    begins: Tensor | None,
    pool_name: str,
    pool: Tensor,
    null_slot: int | None,
) -> None:
    """Refuses slots beyond a pool, and one that two store, or one row stores and another of `begins` begins at."""
    if begins is None or not arguments.is_readable(indices):
        return
    own = _live(indices.reshape(len(begins), -1), null_slot)
    own = torch.where(begins[:, None] < 0, -1, own)
    arguments.pool_rows(name, own, pool_name, len(pool))
    if pool_name != "state":
        return
    readers: dict[int, int] = {}
    for row, slot in enumerate(begins.tolist()):
        readers[slot] = -1 if slot in readers else row
    for row, slots in enumerate(own.tolist()):
        for slot in slots:
            if slot >= 0 and readers.get(slot, row) != row:
                got = f"{slot} in row {row}"
                arguments.value_error(name, "slots at which no other row begins", got)


def _token_states(
    states: Tensor | None,
    indices: Tensor | None,
    state: Tensor,
    call: _Call,
    begins: Tensor | None,
    null_slot: int | None,
) -> None:
    """Where the state after every token goes: nowhere, to slots of the pool, or to a pool of their own."""
    if indices is None:
        if states is not None:
            arguments.value_error("token_state_indices", "a tensor beside token_states", None)
        return
    pool, pool_name = (state, "state") if states is None else (states, "token_states")
    if states is not None:
        _pool("token_states", states, call)
        if states.dtype != state.dtype:
            expected = f"the dtype of state, {dtype_name(state.dtype)}"
            arguments.type_error("token_states", expected, dtype_name(states.dtype))
    name = "token_state_indices"
    _indices(name, indices, {"[B, T]": (call.rows, call.tokens)}, call.values)
    if call.offsets is not None and all(map(arguments.is_readable, (indices, call.offsets))):
        there = torch.arange(call.tokens) < call.offsets.diff()[:, None]
        indices = torch.where(there, indices, -1)
    _stored(name, indices, begins, pool_name, pool, null_slot)


def _replay(
    replay: Replay, state: Tensor, call: _Call, *, channels: bool, dtype: torch.dtype
) -> None:
    """Rings that fit the pool and the call."""
    pool(state, replay)
    slots, length, (heads_v, dim_v) = len(state), replay.k.shape[1], call.values.shape[2:]
    least = 2 * call.tokens
    if not least <= length <= MAX_RECORDS or length & (length - 1):
        expected = f"rings of a power of two from {least} to {MAX_RECORDS} records"
        arguments.value_error("replay", expected, length)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = (heads_v, call.dim_k) if channels else (heads_v,)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "k": ((slots, length, call.heads, call.dim_k), dtype),
        "u": ((slots, length, heads_v, dim_v), wide),
        "decay": ((slots, length, *factors), wide),
        "cursor": ((slots, heads_v, -(-dim_v // CURSOR_COLUMNS)), torch.int32),
    }
    for field, (shape, expected_dtype) in shapes.items():
        name, x = f"replay.{field}", getattr(replay, field)
        if tuple(x.shape) != shape:
            arguments.value_error(name, f"the shape {list(shape)}", list(x.shape))
        if x.dtype != expected_dtype:
            arguments.type_error(name, dtype_name(expected_dtype), dtype_name(x.dtype))
        arguments.device(name, x, call.values, "v")
        if not x.is_contiguous():
            arguments.value_error(name, "a contiguous tensor", f"strides {x.stride()}")
