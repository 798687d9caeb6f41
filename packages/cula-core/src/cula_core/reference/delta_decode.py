"""Decode of the gated delta rule and of KDA in plain torch: the oracle of the kernels and what serves CPU tensors.

Per row and value head, with the state S [K, V], the log decay d_t (one number, or one per channel of K) and the write
strength b_t of token t:

    S'_t = diag(exp(d_t)) S_(t-1)
    u_t  = b_t (v_t - S'_t^T k_t)          S_t = S'_t + k_t u_t^T          o_t = scale * S_t^T q_t

A row has up to 8 tokens. It begins with the state of a slot of a pool, and afterwards either its state is stored in a
slot, or the state after each of its tokens is, or nothing. With a `Replay` the pool stays behind instead: what a token
adds to the state is recorded, and applied by a later call once it is known whether the token was accepted.

Runs on any device without reading a tensor back to the host. Arguments are taken as checked.
Sources: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import EPSILON, normalized, work_dtype
from .gates import gate_kind, log_decay, strength_kind, write_strength
from .lightning_decode import pool_slots, store_live

MAX_TOKENS = 8
# A cursor packs three numbers of 8 bits: where the records begin, how many are certain, and how many are in question.
_BYTE = 8
# Elements of V that share a cursor.
CURSOR_COLUMNS = 8


class Gates(NamedTuple):
    """What g and beta are.

    in_kernel: g is a raw gate, else the log decay. lower_bound: the safe form of the gate, None: the softplus form.
    beta_sigmoid: beta holds logits. neg_eigval: their sigmoid is doubled.
    """

    in_kernel: bool = True
    lower_bound: float | None = None
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    beta_sigmoid: bool = True
    neg_eigval: bool = False


_RAW = Gates()


def options(
    lower_bound: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> dict[str, Any]:
    """Returns what the functions below call the flags of the public ones."""
    gates = Gates(
        use_gate_in_kernel,
        lower_bound,
        softplus_beta,
        softplus_threshold,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    return {"gates": gates, "l2norm": use_qk_l2norm_in_kernel, "state_v_first": state_v_first}


class Replay(NamedTuple):
    """Records of tokens that the states of a pool do not hold yet: rings of L records per slot.

    k [pool, L, H, K] as it was given, u [pool, L, HV, V] fp32 over the norm of k, decay [pool, L, HV] or
    [pool, L, HV, K] fp32 (the factor exp(d), not its logarithm), cursor [pool, HV, ceil(V / 8)] int32. L is a power of
    two and at least twice the tokens of a call.

    Example:
        >>> import torch
        >>> from cula_core.reference.delta_decode import Replay
        >>> k, u = torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 2, 16)  # four records for each of two slots
        >>> rings = Replay(k, u, torch.zeros(2, 4, 2), torch.zeros(2, 2, 2, dtype=torch.int32))
        >>> rings.u.shape
        torch.Size([2, 4, 2, 16])
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    cursor: Tensor


def empty_replay(
    state: Tensor,
    heads: int,
    *,
    max_tokens: int = 1,
    channels: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    records: int | None = None,
    state_v_first: bool = True,
) -> Replay:
    """Returns rings without records for a pool of states.

    heads, dtype: of q and k. max_tokens: the most tokens of a call. channels: whether g has a gate per channel of K.
    records: L, None: the smallest that calls of `max_tokens` tokens can use.
    """
    pool, heads_v, rows, columns = state.shape
    dim_v, dim_k = (rows, columns) if state_v_first else (columns, rows)
    if records is None:
        records = 1 << (2 * max_tokens - 1).bit_length()
    device = state.device
    factors = (heads_v, dim_k) if channels else (heads_v,)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Replay(
        torch.zeros(pool, records, heads, dim_k, dtype=dtype, device=device),
        torch.zeros(pool, records, heads_v, dim_v, dtype=wide, device=device),
        torch.zeros(pool, records, *factors, dtype=wide, device=device),
        torch.zeros(pool, heads_v, -(-dim_v // CURSOR_COLUMNS), dtype=torch.int32, device=device),
    )


def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    *,
    next_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gates: Gates = _RAW,
    l2norm: bool = True,
    state_v_first: bool = True,
    replay: Replay | None = None,
    num_accepted: Tensor | None = None,
    token_states: Tensor | None = None,
    token_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Runs the tokens of every row through its state, one after another, and returns the outputs [B, T, HV, V].

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV] or [B, T, HV, K], None: no decay. beta: [B, T, HV], None: 1.
    A_log: [HV], dt_bias: as many as g has per token, None: 0. With cu_seqlens [N + 1], B is 1 and T holds N rows of up
    to `max_tokens` tokens (None: MAX_TOKENS); tokens of no row have output zero.

    state: [pool, HV, V, K], or K, V without `state_v_first`, where rows begin; None: at zero. next_state: where the
    states after the last tokens go, which may be `state`; None: nowhere. state_indices: slot of each row, [N] int32;
    or [N, T], and then `num_accepted[n] - 1` says which of a row's. output_state_indices: slot in next_state, None:
    that of state_indices. Slots < 0 and `null_slot` are padding: where a row begins at one, its output is zero and
    nothing of it is stored; where it would be stored in one, it is not. token_states: [rows, HV, V, K] with
    token_state_indices [N, T], where the state after each token goes.

    replay: the records that `state` lacks. `num_accepted` [N] of a row's tokens of the call before are certain, None:
    all. The state is stored, without this call's tokens, when these records and those of this call are more than half
    of the ring.
    """
    index, live = row_tokens(v, cu_seqlens, max_tokens)
    (rows, tokens), (heads_v, dim_v), dim_k = live.shape, v.shape[2:], q.shape[3]
    group = heads_v // q.shape[2]
    scale = dim_k**-0.5 if scale is None else scale
    work = work_dtype(q, v, state)

    chosen = chosen_slots(state_indices, num_accepted if replay is None else None)
    slots, begins = row_slots(chosen, null_slot, rows, v if state is None else state)
    live = live & begins[:, None]
    current = _read(state, slots, state_v_first, (rows, heads_v, dim_k, dim_v), work)
    first = slots
    if replay is not None and state is not None:
        cursor = _cursor(replay, slots, num_accepted)
        current = _apply(replay, slots, cursor, current, group)
        added = live.sum(1)
        full = cursor.certain + added > replay.u.shape[1] // 2
        _store(state, current, slots, begins & full & (cursor.certain > 0), state_v_first)
        first = cursor.begin + cursor.certain
        begin, count = torch.where(full, first, cursor.begin), torch.where(full, 0, cursor.certain)
        _set_cursor(replay, slots, begins, _Cursor(begin, count, added))

    v_all = v.to(work).flatten(0, 1)
    decays = _decays(g, A_log, dt_bias, gates, v_all, dim_k)
    strengths = _strengths(beta, gates, v_all)
    k_given = k.flatten(0, 1)
    q_all, k_all = q.to(work).flatten(0, 1), k_given.to(work)
    norms = torch.ones_like(k_all[..., :1])
    if l2norm:
        norms = (k_all.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        q_all, k_all = normalized(q_all), k_all / norms
    # The last row takes what is computed for tokens past the end of a row.
    outputs = v_all.new_zeros(len(v_all) + 1, heads_v, dim_v)
    for t in range(tokens):
        at, now = index[:, t], live[:, t]
        q_t, k_t = (x[at].repeat_interleave(group, 1)[..., None] for x in (q_all, k_all))
        faded = current * decays[at][..., None]
        u = strengths[at][..., None] * (v_all[at] - (k_t * faded).sum(2))
        current = torch.where(now[:, None, None, None], faded + k_t * u[:, :, None], current)
        outputs[torch.where(now, at, len(v_all))] = scale * (q_t * current).sum(2)
        if token_states is not None and token_state_indices is not None:
            targets, kept = row_slots(token_state_indices[:, t], null_slot, rows, token_states)
            _store(token_states, current, targets, kept & now, state_v_first)
        if replay is not None:
            u = u / norms[at].repeat_interleave(group, 1)
            _record(replay, slots, first + t, now, (k_given[at], u, decays[at]))
    if next_state is not None:
        wanted = chosen if output_state_indices is None else output_state_indices
        targets, kept = row_slots(wanted, null_slot, rows, next_state)
        _store(next_state, current, targets, kept & begins, state_v_first)
    result = outputs[:-1].view(v.shape)
    return result.to(v.dtype) if out is None else out.copy_(result)


def delta_rule_commit(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gates: Gates = _RAW,
    l2norm: bool = True,
    state_v_first: bool = True,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
) -> None:
    """Advances the state of row n by its first `num_accepted[n]` tokens (int32 [N]), in place.

    More than a row has are all that it has, and negative numbers none. The other arguments are those of
    `delta_rule_decode`.
    """
    index, present = row_tokens(v, cu_seqlens, max_tokens)
    rows, tokens = index.shape
    slots, live = row_slots(state_indices, null_slot, rows, state)
    # Of every row the state after one token is kept, that after the last accepted one.
    accepted = torch.minimum(num_accepted, present.sum(1))
    kept = torch.arange(tokens, device=v.device) == accepted[:, None] - 1
    delta_rule_decode(
        k, k, v, g, beta, state, state_indices=state_indices, A_log=A_log, dt_bias=dt_bias, gates=gates,
        l2norm=l2norm, state_v_first=state_v_first, cu_seqlens=cu_seqlens, max_tokens=max_tokens,
        null_slot=null_slot, token_states=state,
        token_state_indices=torch.where(kept & live[:, None], slots[:, None], -1),
    )  # fmt: skip


def delta_rule_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    null_slot: int | None = None,
    state_v_first: bool = True,
    rows: int | None = None,
) -> None:
    """Applies the certain records to the states, in place, and empties the rings.

    num_accepted: int32 [N], how many of the last call's tokens are certain, None: all. state_indices: int32 [N], None:
    the first `rows` slots (None: all of the pool).
    """
    if rows is None:
        rows = len(state) if state_indices is None else len(state_indices)
    heads_v, group = state.shape[1], state.shape[1] // replay.k.shape[2]
    dim_k, dim_v = replay.k.shape[3], replay.u.shape[3]
    slots, live = row_slots(state_indices, null_slot, rows, state)
    cursor = _cursor(replay, slots, num_accepted)
    shape = (rows, heads_v, dim_k, dim_v)
    work = work_dtype(state)
    current = _apply(replay, slots, cursor, _read(state, slots, state_v_first, shape, work), group)
    _store(state, current, slots, live & (cursor.certain > 0), state_v_first)
    empty = torch.zeros_like(cursor.certain)
    _set_cursor(replay, slots, live, _Cursor(cursor.begin + cursor.certain, empty, empty))


# ---- rows and slots --------------------------------------------------------------------------------------------------


def row_tokens(
    v: Tensor, cu_seqlens: Tensor | None, max_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Where the tokens of every row lie among all tokens, [N, T], and which of them there are."""
    batch, tokens = v.shape[:2]
    if cu_seqlens is None:
        index = torch.arange(batch * tokens, device=v.device).view(batch, tokens)
        return index, torch.ones_like(index, dtype=torch.bool)
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    longest = min(MAX_TOKENS if max_tokens is None else max_tokens, tokens)
    index = start[:, None] + torch.arange(longest, device=v.device)
    live = index < end[:, None]
    return index.clamp(max=tokens - 1), live


def chosen_slots(state_indices: Tensor | None, num_accepted: Tensor | None) -> Tensor | None:
    """The slot where each row begins: of several the one of the last accepted token."""
    if state_indices is None or num_accepted is None or state_indices.dim() == 1:
        return state_indices
    last = (num_accepted.long() - 1).clamp(0, state_indices.shape[1] - 1)
    return state_indices.gather(1, last[:, None])[:, 0]


def row_slots(
    indices: Tensor | None, null_slot: int | None, rows: int, pool: Tensor
) -> tuple[Tensor, Tensor]:
    """The slot of each row, 0 for padding, and which rows are none."""
    return pool_slots(indices, rows, pool, null_slot)


def _read(
    state: Tensor | None,
    slots: Tensor,
    state_v_first: bool,
    shape: tuple[int, ...],
    work: torch.dtype,
) -> Tensor:
    """The states [N, HV, K, V] in the working precision; zeros where there are none."""
    if state is None or len(state) == 0:
        return torch.zeros(shape, dtype=work, device=slots.device)
    current = state[slots].to(work)
    return current.transpose(2, 3) if state_v_first else current


def _store(pool: Tensor, current: Tensor, slots: Tensor, live: Tensor, state_v_first: bool) -> None:
    """Stores the states [N, HV, K, V] of the live rows; the slots of the others may be anything."""
    slots = torch.where(live, slots, 0)
    store_live(pool, current.transpose(2, 3) if state_v_first else current, slots, live)


# ---- gates -----------------------------------------------------------------------------------------------------------


def _decays(
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gates: Gates,
    like: Tensor,
    dim_k: int,
) -> Tensor:
    """What a state is multiplied by at every token: [B * T, HV, K] or [B * T, HV, 1]. like: [B * T, HV, V]."""
    heads = like.shape[1]
    kind = gate_kind(g is not None, gates.in_kernel, gates.lower_bound is not None)
    if g is None:
        return torch.ones_like(like[..., :1])
    g = g.to(like.dtype).flatten(0, 1)
    scalar = g.dim() == 2 and g.shape[1] == heads
    g = g.reshape(len(g), heads, 1 if scalar else dim_k)
    if kind == "log":
        return g.exp()
    softplus = (gates.softplus_beta, gates.softplus_threshold)
    return log_decay(g, A_log, dt_bias, gates.lower_bound, softplus).exp()


def _strengths(beta: Tensor | None, gates: Gates, like: Tensor) -> Tensor:
    """The write strengths [B * T, HV]."""
    kind = strength_kind(beta is not None, gates.beta_sigmoid)
    if beta is None:
        return torch.ones_like(like[..., 0])
    beta = beta.to(like.dtype).flatten(0, 1)
    return write_strength(beta, gates.neg_eigval) if kind == "logits" else beta


# ---- records ---------------------------------------------------------------------------------------------------------


class _Cursor(NamedTuple):
    """Of every row [N]: the first record of the ring, how many are certain, how many in question."""

    begin: Tensor
    certain: Tensor
    pending: Tensor


def _cursor(replay: Replay, slots: Tensor, num_accepted: Tensor | None) -> _Cursor:
    """What the rings of the slots hold once the accepted ones of the records in question are certain."""
    if len(replay.cursor) == 0:
        none = torch.zeros_like(slots)
        return _Cursor(none, none, none)
    word = replay.cursor[slots, 0, 0].long()
    begin, count, pending = (word >> shift & (1 << _BYTE) - 1 for shift in (0, _BYTE, 2 * _BYTE))
    accepted = (
        pending if num_accepted is None else torch.minimum(num_accepted.clamp(min=0), pending)
    )
    return _Cursor(begin, count + accepted, torch.zeros_like(count))


def _set_cursor(replay: Replay, slots: Tensor, live: Tensor, cursor: _Cursor) -> None:
    begin = cursor.begin % replay.u.shape[1]
    word = begin | cursor.certain << _BYTE | cursor.pending << 2 * _BYTE
    store_live(replay.cursor, word[:, None, None].expand(-1, *replay.cursor.shape[1:]), slots, live)


def _apply(replay: Replay, slots: Tensor, cursor: _Cursor, current: Tensor, group: int) -> Tensor:
    """Adds the certain records to states [N, HV, K, V]."""
    length = replay.u.shape[1]
    if len(replay.u) == 0:
        return current
    for j in range(length):
        at = (cursor.begin + j) % length
        k, u, decay = (x[slots, at].to(current.dtype) for x in replay[:3])
        k = k.repeat_interleave(group, 1)
        decay = decay[..., None] if decay.dim() == 3 else decay[..., None, None]
        advanced = decay * current + k[..., None] * u[:, :, None]
        current = torch.where((j < cursor.certain)[:, None, None, None], advanced, current)
    return current


def _record(
    replay: Replay, slots: Tensor, at: Tensor, live: Tensor, values: tuple[Tensor, ...]
) -> None:
    """Writes k, u and decay of one token of every row to record `at` of the rings."""
    length = replay.u.shape[1]
    for ring, value in zip(replay[:3], values):
        value = value.expand(-1, -1, ring.shape[3]) if ring.dim() == 4 else value[..., 0]
        store_live(ring.flatten(0, 1), value, slots * length + at % length, live)
