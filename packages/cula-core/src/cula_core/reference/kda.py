"""KDA in plain torch, token by token: the oracle of the kernels, and what serves CPU tensors.

Per sequence and value head, with the state S [K, V], the log decay d_t [K] and the write strength b_t of token t:

    S'_t = diag(exp(d_t)) S_(t-1)
    S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T          o_t = scale * S_t^T q_t

`gate` says what g is, and `neg_eigval` doubles a strength that is computed here:

    "log"       d = g                                                   b = beta
    "softplus"  d = -exp(A_log) * softplus(g + dt_bias)                 b = sigmoid(beta) with `beta_sigmoid`
    "safe"      d = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))

All sequences take a step together as long as they last. Arguments are taken as checked.
Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import live_rows
from .common import normalized, work_dtype
from .gates import log_decay, write_strength

_CHUNK = 64


class _Sequence(NamedTuple):
    """`length` tokens from `start` on, rows of the batch one after another; `state`: row of the initial states."""

    start: int
    length: int
    state: int


def recurrent_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    gate: str = "log",
    lower_bound: float = 0.0,
    l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
    checkpoints: Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence in `dtype`; None: in fp64 if q is fp64 and in fp32 otherwise.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV]. A_log: [HV], None: 0. dt_bias: [HV * K] or
    [HV, K], None: 0. initial_state: [rows, HV, K, V] ([rows, HV, V, K] with `state_v_first`) or None. state_indices:
    row of initial_state per sequence, negative for padding. cu_seqlens: [N + 1], packs B = 1. checkpoints:
    [B, T // n, HV, K, V] (or V, K) with n = checkpoint_every, written with the states after every n tokens of a
    sequence; where it begins at token a, from row a // n on. With checkpoint_rows [N] it is [rows, HV, K, V], and they
    are written from these rows on, none where they are negative. With checkpoint_offsets [N], multiples of 64, the
    state after so many tokens is written to row n, or that of checkpoint_rows.
    Returns the outputs [B, T, HV, V] and the final states [N, HV, K, V] (or V, K), unrounded, both zero for padding.
    """
    work = dtype or work_dtype(q)
    dim_k, (heads_v, dim_v) = q.shape[3], v.shape[2:]
    group = heads_v // q.shape[2]
    if scale is None:
        scale = dim_k**-0.5
    # Contiguous, so that sums take one order whatever the strides of the arguments.
    q, k, v, g, beta = (x.to(work).contiguous() for x in (q, k, v, g, beta))
    decays = _log_decay(g, A_log, dt_bias, gate, lower_bound).exp()
    if beta_sigmoid:
        beta = write_strength(beta, neg_eigval)
    if l2norm:
        q, k = normalized(q), normalized(k)
    tokens = [x.flatten(0, 1) for x in (q, k, v, decays, beta)]
    outputs = torch.zeros_like(tokens[2])

    sequences = _sequences(q, state_indices, cu_seqlens)
    finals = v.new_zeros(len(sequences), heads_v, dim_k, dim_v)
    # The longest first, so that those which still run are the first ones.
    live = [n for n, sequence in enumerate(sequences) if sequence.state >= 0]
    live.sort(key=lambda n: -sequences[n].length)
    starts = torch.tensor([sequences[n].start for n in live], device=q.device)
    states = finals[live]
    if initial_state is not None and live:
        states = initial_state[[sequences[n].state for n in live]].to(work)
        states = (states.transpose(2, 3) if state_v_first else states).contiguous()
    running = len(live)
    offsets = None if checkpoint_offsets is None else checkpoint_offsets.tolist()
    first = _first_rows(q, sequences, checkpoint_rows, checkpoint_every)
    for t in range(sequences[live[0]].length if live else 0):
        while sequences[live[running - 1]].length <= t:
            running -= 1
        rows, state = starts[:running] + t, states[:running]
        q_t, k_t, v_t, decay, strength = (x[rows] for x in tokens)
        q_t, k_t = (x.repeat_interleave(group, 1)[..., None] for x in (q_t, k_t))
        state *= decay[..., None]
        error = v_t - (k_t * state).sum(2)
        state += k_t * (strength[..., None] * error)[:, :, None]
        outputs[rows] = scale * (q_t * state).sum(2)
        if checkpoints is None or (t + 1) % (checkpoint_every or _CHUNK):
            continue
        due = [i for i in range(running) if first[live[i]] >= 0]
        number = 0
        if offsets is None:
            number = (t + 1) // checkpoint_every - 1
        else:
            due = [i for i in due if offsets[live[i]] == t + 1]
        kept = state[due].transpose(2, 3) if state_v_first else state[due]
        rows_kept = [first[live[i]] + number for i in due]
        places = checkpoints.flatten(0, 1) if checkpoints.dim() == 5 else checkpoints
        places[rows_kept] = kept.to(checkpoints.dtype)
    finals[live] = states
    return outputs.view(v.shape), finals.transpose(2, 3) if state_v_first else finals


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    output_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_every: int = 0,
    scale: float,
    gate: str,
    lower_bound: float,
    l2norm: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    state_v_first: bool,
    intra: tuple[Tensor, ...] | None = None,
) -> None:
    """`recurrent_prefill` into `out` and `final_state`: the contract of the kernels' launcher, on the CPU.

    final_state: None, another tensor [N, HV, ..] for row n of the final states, or `initial_state` itself, whose rows
    are then replaced where they were read, or where output_state_indices [N] says; rows that are negative or null_slot
    are padding. has_initial_state [N]: False where a sequence begins from zero. intra: the first of the
    `Intermediates`, or all of them.
    """
    if intra is not None:
        found = intermediates(
            q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale=scale, gate=gate, lower_bound=lower_bound,
            l2norm=l2norm, beta_sigmoid=beta_sigmoid, neg_eigval=neg_eigval,
        )  # fmt: skip
        for own, exact in zip(intra, found):
            own.copy_(exact)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = slots = torch.arange(sequences, device=q.device)
    live = rows >= 0
    if state_indices is not None:
        slots, live = state_indices.long(), live_rows(state_indices, null_slot)
    begin = None
    if initial_state is not None:
        read = live if has_initial_state is None else live & has_initial_state
        begin = initial_state.new_zeros(sequences, *initial_state.shape[1:])
        begin[read] = initial_state[slots[read]]
    outputs, finals = recurrent_prefill(
        q, k, v, g, beta, A_log, dt_bias, begin, torch.where(live, rows, -1), cu_seqlens, scale=scale,
        gate=gate, lower_bound=lower_bound, l2norm=l2norm, beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval, state_v_first=state_v_first, checkpoints=checkpoints,
        checkpoint_rows=checkpoint_rows, checkpoint_offsets=checkpoint_offsets, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    out.copy_(outputs)
    if final_state is None:
        return
    if final_state is not initial_state:
        final_state.copy_(finals)
        return
    if output_state_indices is not None:
        slots, live = output_state_indices.long(), live & live_rows(output_state_indices, null_slot)
    final_state[slots[live]] = finals[live].to(final_state.dtype)


class Intermediates(NamedTuple):
    """What a backward pass takes of the chunks of 64 tokens that every sequence begins anew.

    With D the sum of log decays in a chunk, L its last token, b the write strength and scale that of the outputs,

        Aqk_ij = scale sum_c q_ic k_jc exp(D_ic - D_jc), j <= i
        Akk_ij = b_i sum_c k_ic k_jc exp(D_ic - D_jc), j < i
        w      = (I + Akk)^-1 (b exp(D) k)      u = (I + Akk)^-1 (b v)
        qg     = exp(D) q                       kg = exp(D_L - D) k

    Aqk [B, T, HV, 64] has token t of a chunk in row t and zeros elsewhere, Akk likewise (I + Akk)^-1. w, qg, kg
    [B, T, HV, K] and u [B, T, HV, V] have a row for every token.
    """

    Aqk: Tensor
    Akk: Tensor
    w: Tensor
    u: Tensor
    qg: Tensor
    kg: Tensor


def intermediates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    gate: str,
    lower_bound: float,
    l2norm: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
) -> Intermediates:
    """Arguments are those of `recurrent_prefill`, which also says in which dtype this computes."""
    work = work_dtype(q)
    q, k, v, g, beta = (x.to(work) for x in (q, k, v, g, beta))
    decays = _log_decay(g, A_log, dt_bias, gate, lower_bound)
    if beta_sigmoid:
        beta = write_strength(beta, neg_eigval)
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (x.repeat_interleave(decays.shape[2] // q.shape[2], 2) for x in (q, k))
    aqk, akk = (decays.new_zeros(*decays.shape[:3], _CHUNK) for _ in range(2))
    found = Intermediates(aqk, akk, *(torch.zeros_like(x) for x in (k, v, q, k)))
    tokens = [x.flatten(0, 1) for x in (q, k, v, decays, beta)]
    written = [x.flatten(0, 1) for x in found]
    for start, length, _ in _sequences(g, None, cu_seqlens):
        for first in range(start, start + length, _CHUNK):
            rows = slice(first, min(first + _CHUNK, start + length))
            size = rows.stop - rows.start
            aqk, akk, w, u, qg, kg = (x[rows] for x in written)
            q_c, k_c, v_c, sums, strength = (x[rows] for x in tokens)
            sums = sums.cumsum(0)
            seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[..., None, None]
            apart = (sums[:, None] - sums).where(seen, -torch.inf).exp()
            aqk[..., :size] = scale * torch.einsum("ihc,jhc,ijhc->ihj", q_c, k_c, apart)
            below = torch.einsum("ih,ihc,jhc,ijhc->hij", strength, k_c, k_c, apart).tril(-1)
            ones = torch.eye(size, dtype=work, device=q.device)
            inverse = torch.linalg.solve_triangular(
                ones + below, ones, upper=False, unitriangular=True
            )
            akk[..., :size] = inverse.transpose(0, 1)
            weight = sums.exp()
            w[:] = torch.einsum("hij,jh,jhc->ihc", inverse, strength, weight * k_c)
            u[:] = torch.einsum("hij,jh,jhc->ihc", inverse, strength, v_c)
            qg[:] = weight * q_c
            kg[:] = (sums[-1] - sums).exp() * k_c
    return found


def _log_decay(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, gate: str, lower_bound: float
) -> Tensor:
    if gate == "log":
        return g
    return log_decay(g, A_log, dt_bias, lower_bound if gate == "safe" else None)


def _sequences(
    q: Tensor, state_indices: Tensor | None, cu_seqlens: Tensor | None
) -> list[_Sequence]:
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        places = [(row * tokens, tokens) for row in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        places = [(start, stop - start) for start, stop in zip(bounds[:-1], bounds[1:])]
    slots = range(len(places)) if state_indices is None else state_indices.tolist()
    return [_Sequence(*place, slot) for place, slot in zip(places, slots)]


def _first_rows(
    q: Tensor, sequences: list[_Sequence], rows: Tensor | None, every: int
) -> list[int]:
    """The row of the first state on the way of every sequence."""
    if rows is not None:
        return rows.tolist()
    if not every:
        return list(range(len(sequences)))
    tokens = q.shape[1]
    return [
        start // tokens * (tokens // every) + start % tokens // every if tokens else 0
        for start, _, _ in sequences
    ]
