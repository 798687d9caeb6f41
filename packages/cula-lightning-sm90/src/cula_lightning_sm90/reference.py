"""Lightning attention and simple GLA in plain torch: the oracle of the kernel, and what serves CPU tensors.

Per sequence and value head, with the log decay d_t of token t and the state S [K, V]:

    S_t = exp(d_t) S_(t-1) + k_t v_t^T          o_t = scale * S_t^T q_t

`recurrent_prefill` is that, token by token in fp64. `chunked_prefill` takes 64 tokens at a time. With
D_ij = d_(j+1) + ... + d_i, and S the state before the chunk's tokens 0 .. L-1:

    o_i = scale * (exp(d_0 + ... + d_i) S^T q_i + sum_(j <= i) exp(D_ij) (q_i . k_j) v_j)
    S  <- exp(d_0 + ... + d_(L-1)) S + sum_j exp(D_(L-1)j) k_j v_j^T

Every exponent is a sum of its own terms, never a difference of two large sums, so that any decay is exact to rounding.
A last chunk of L < 64 tokens advances the state by L tokens. Arguments are taken as checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cula_core.reference.common import normalized, work_dtype
from cula_core.tensors import live_rows

_CHUNK = 64


class _Kept(NamedTuple):
    """States on the way that are kept in `buffer` `[rows, HV, K, V]`, or V, K.

    first: the row of each sequence's first one, negative: none is kept. Kept is the state after `every` so many tokens,
    or with offsets one of each sequence, after so many.
    """

    buffer: Tensor
    first: list[int]
    every: int
    offsets: list[int] | None

    def row(self, sequence: int, done: int) -> int:
        """Returns the row for the state after `done` tokens, negative if it is not kept."""
        first = self.first[sequence]
        if self.offsets is not None:
            return first if done == self.offsets[sequence] else -1
        return first + done // self.every - 1 if first >= 0 and done % self.every == 0 else -1


class _Sequence(NamedTuple):
    """Tokens [start, stop) of a row of the batch; `state` is its row of the initial states, negative for padding."""

    row: int
    start: int
    stop: int
    state: int


def recurrent_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    head_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    decay_sign: int = -1,
    state_v_first: bool = False,
    l2norm: bool = False,
    checkpoint_every: int = 0,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, one token after another, in fp64 whatever the dtypes of the arguments.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. The log decay of a token is decay_sign * head_decay [HV] + g [B, T, HV];
    what is None does not count. initial_state: [rows, HV, K, V] ([rows, HV, V, K] with `state_v_first`) or None.
    state_indices: row of initial_state per sequence, negative for padding. cu_seqlens: [N + 1], packs B = 1.
    checkpoints: [B, T // checkpoint_every, HV, K, V] (or V, K), written where a sequence owns a row. With
    checkpoint_rows [N] it is [rows, HV, K, V], which name the sequences' first rows, negative: none. With
    checkpoint_offsets [N], multiples of 64, the state after so many tokens goes to row n, or that of checkpoint_rows.
    Returns the outputs [B, T, HV, V] and the final states [N, HV, K, V] (or V, K), both zero for padding.
    """
    _, tokens, heads, dim_k = q.shape
    heads_v, dim_v = v.shape[2:]
    sequences = _sequences(q, state_indices, cu_seqlens)
    queries, keys = (normalized(x.double()) if l2norm else x.double() for x in (q, k))
    if scale is None:
        scale = dim_k**-0.5
    outputs = v.new_zeros(v.shape, dtype=torch.float64)
    finals = v.new_zeros(len(sequences), heads_v, dim_k, dim_v, dtype=torch.float64)
    head = torch.arange(heads_v, device=q.device) // (heads_v // heads)
    kept = _kept(checkpoints, checkpoint_every, checkpoint_rows, checkpoint_offsets, q, sequences)
    for n, (row, start, stop, slot) in enumerate(sequences):
        if slot < 0:
            continue
        state = finals[n]
        if initial_state is not None:
            given = initial_state[slot].double()
            state = given.transpose(1, 2) if state_v_first else given
        for t in range(start, stop):
            log_decay = torch.zeros(heads_v, dtype=torch.float64, device=q.device)
            if head_decay is not None:
                log_decay = log_decay + decay_sign * head_decay.double()
            if g is not None:
                log_decay = log_decay + g[row, t].double()
            update = torch.einsum("hk,hv->hkv", keys[row, t, head], v[row, t].double())
            state = log_decay.exp()[:, None, None] * state + update
            outputs[row, t] = scale * torch.einsum("hk,hkv->hv", queries[row, t, head], state)
            if kept is not None and (place := kept.row(n, t + 1 - start)) >= 0:
                kept.buffer[place] = state.transpose(1, 2) if state_v_first else state
        finals[n] = state
    return outputs, finals.transpose(2, 3) if state_v_first else finals


def chunked_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    head_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    decay_sign: int = -1,
    state_v_first: bool = False,
    l2norm: bool = False,
    checkpoint_every: int = 0,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    reverse: bool = False,
    dot_with: Tensor | None = None,
    dots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent_prefill` by chunks of 64 tokens, in fp64 if an argument is fp64 and in fp32 otherwise.

    Arguments and results are the same. A dense batch runs its sequences together, a packed one each for itself.
    reverse, dot_with, dots [B, HV, 2, T]: see `Call`.
    """
    batch, tokens, _, dim_k = q.shape
    heads_v, dim_v = v.shape[2:]
    work = work_dtype(q, v, g, initial_state)
    sequences = _sequences(q, state_indices, cu_seqlens)
    if scale is None:
        scale = dim_k**-0.5
    outputs = v.new_zeros(v.shape, dtype=work)
    finals = v.new_zeros(len(sequences), heads_v, dim_k, dim_v, dtype=work)
    live = [n for n, sequence in enumerate(sequences) if sequence.state >= 0]
    if initial_state is not None and live:
        given = initial_state[[sequences[n].state for n in live]].to(work)
        finals[live] = given.transpose(2, 3) if state_v_first else given
    log_decay = v.new_zeros(batch, tokens, heads_v, dtype=work)
    if head_decay is not None:
        log_decay += decay_sign * head_decay.to(work)
    if g is not None:
        log_decay += g.to(work)
    kept = _kept(checkpoints, checkpoint_every, checkpoint_rows, checkpoint_offsets, q, sequences)
    # Sequences of a dense batch have the same bounds, so their chunks are one batched product.
    groups = [live] if cu_seqlens is None else [[n] for n in live]
    for members in groups:
        if not members:
            continue
        rows = [sequences[n].row for n in members]
        _, start, stop, _ = sequences[members[0]]
        state = finals[members]
        pieces = [slice(i, min(i + _CHUNK, stop)) for i in range(start, stop, _CHUNK)]
        for piece in reversed(pieces) if reverse else pieces:
            q_c, k_c, v_c = (x[rows, piece].to(work) for x in (q, k, v))
            if l2norm:
                q_c, k_c = normalized(q_c), normalized(k_c)
            given, own, state = _chunk(q_c, k_c, v_c, log_decay[rows, piece], state, scale, reverse)
            outputs[rows, piece] = given + own
            if dots is not None and dot_with is not None:
                x = (
                    dot_with[rows, piece]
                    .to(work)
                    .repeat_interleave(heads_v // dot_with.shape[2], 2)
                )
                for i, o in enumerate((given, given + own)):
                    dots[rows, :, i, piece] = (x * o).sum(-1).transpose(1, 2)
            if kept is None:
                continue
            done = (piece.start if reverse else piece.stop) - start
            for n, own in zip(members, state):
                if done > 0 and (place := kept.row(n, done)) >= 0:
                    kept.buffer[place] = own.mT if state_v_first else own
        finals[members] = state
    return outputs, finals.transpose(2, 3) if state_v_first else finals


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    head_decay: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    final_state: Tensor | None,
    checkpoints: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    decay_sign: int = -1,
    state_v_first: bool = False,
    l2norm: bool = False,
    checkpoint_every: int = 0,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    reverse: bool = False,
    dot_with: Tensor | None = None,
    dots: Tensor | None = None,
) -> None:
    """`chunked_prefill` into `out` and `final_state`: the contract of the kernel's launcher, on the CPU.

    final_state: None, another tensor [N, HV, ..] for row n of the final states, or `initial_state` itself, whose rows
    are then replaced where they were read. Rows that are negative or null_slot are padding. has_initial_state [N]:
    False where a sequence begins from zero.
    """
    pool = initial_state
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = slots = torch.arange(sequences, device=q.device)
    live = rows >= 0
    if state_indices is not None:
        slots, live = state_indices.long(), live_rows(state_indices, null_slot)
        state_indices = torch.where(live, slots, -1)
    if has_initial_state is not None and pool is not None:
        read = live & has_initial_state
        initial_state = pool.new_zeros(sequences, *pool.shape[1:])
        initial_state[read] = pool[slots[read]]
        state_indices = torch.where(live, rows, -1)
    v = v.repeat_interleave(out.shape[2] // v.shape[2], 2)
    outputs, finals = chunked_prefill(
        q, k, v, g, head_decay, initial_state, state_indices, checkpoints, cu_seqlens, scale=scale,
        decay_sign=decay_sign, state_v_first=state_v_first, l2norm=l2norm,
        checkpoint_every=checkpoint_every, checkpoint_rows=checkpoint_rows, checkpoint_offsets=checkpoint_offsets,
        reverse=reverse, dot_with=dot_with, dots=None if dots is None else dots.zero_()[:, :, 0],
    )  # fmt: skip
    out.copy_(outputs)
    if final_state is None:
        return
    if final_state is not pool:
        final_state.copy_(finals)
    else:
        final_state[slots[live]] = finals[live].to(final_state.dtype)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, L, HV, V] of L tokens, from the state and from each other, and the state [B, HV, K, V] after them.

    reverse: the state is that behind them, and returned is the one in front.
    """
    length, group = q.shape[1], v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (q, k))
    v, log_decay = v.transpose(1, 2), log_decay.transpose(1, 2)
    # between[i, j] = d_(j+1) + ... + d_i: down column j, only what comes after token j is added up.
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    terms = torch.where(causal.tril(-1), log_decay[..., None], 0)
    between = terms.cumsum(2).masked_fill(~causal, -torch.inf)
    since_start = log_decay.cumsum(2).exp()[..., None]
    until_end = between[:, :, -1].exp()[..., None]
    total = since_start[:, :, -1:]
    if reverse:
        between, since_start, until_end = between.mT, until_end, since_start
    scores = (q @ k.transpose(2, 3)) * between.exp()
    given, own = scale * since_start * (q @ state), scale * (scores @ v)
    state = total * state + (until_end * k).transpose(2, 3) @ v
    return given.transpose(1, 2), own.transpose(1, 2), state


def _kept(
    buffer: Tensor | None,
    every: int,
    rows: Tensor | None,
    offsets: Tensor | None,
    q: Tensor,
    sequences: list[_Sequence],
) -> _Kept | None:
    if buffer is None:
        return None
    first = list(range(len(sequences)))
    if rows is not None:
        first = rows.tolist()
    elif offsets is None:
        first = [row * (q.shape[1] // every) + start // every for row, start, _, _ in sequences]
    buffer = buffer.flatten(0, 1) if buffer.dim() == 5 else buffer
    return _Kept(buffer, first, every, None if offsets is None else offsets.tolist())


def _sequences(
    q: Tensor, state_indices: Tensor | None, cu_seqlens: Tensor | None
) -> list[_Sequence]:
    if cu_seqlens is None:
        places = [(row, 0, q.shape[1]) for row in range(q.shape[0])]
    else:
        bounds = cu_seqlens.tolist()
        places = [(0, start, stop) for start, stop in zip(bounds[:-1], bounds[1:])]
    slots = range(len(places)) if state_indices is None else state_indices.tolist()
    return [_Sequence(*place, slot) for place, slot in zip(places, slots)]
