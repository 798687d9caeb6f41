"""Gradients of log decays, from sums that the passes of dq and dk leave for every token.

The decay of token t lies between what is written before t and what is read at t or later. In a chunk with the state S
in front of it and E, the gradient of the state behind it, there are four kinds of such pairs:

    a token i >= t and S     a_i, the part of q_i . dq_i that comes from S
    a token j < t and E      b_j, the part of k_j . dk_j that comes from E
    tokens j < t <= i        sum over i >= t of r_i - c_i, the other parts of q_i . dq_i and k_i . dk_i
    S and E                  the same for every t of a chunk; from chunk to chunk it grows by its b and the next one's a

r and c are sums of the same rounded products over rows and columns, so that their difference is exact to fp32 however
small it is. The last kind is summed up, so that the rounding of a and b adds up from chunk to chunk. But it is known
where a sequence begins and ends, after every `EVERY` tokens of it, where the passes leave S and the gradient of S, and
in every chunk that forgets all that lies before it, where it is zero. What a sum has gathered too much from one such
place to the next is taken off in proportion to the squares of a and b on the way, from which it comes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import CHUNK, EVERY, FLOOR, FORGOTTEN, V_TILE, WARPS


class Sums(NamedTuple):
    """What gradients of decays are made from.

    of_q, of_k: `Call.dots` of dq with q and of dk with k. states, d_states: what `new_states` returns, written; both or
    none. started, ended [N, HV]: sums of initial and of final states times their gradients, None for zero. g
    [B, T, HV], head_decay [HV]: the log decay of a token is g + sign * head_decay. scale: states times their gradients
    times it are what they are to products of tokens.
    """

    of_q: Tensor
    of_k: Tensor
    states: Tensor | None
    d_states: Tensor | None
    started: Tensor | None
    ended: Tensor | None
    g: Tensor | None
    head_decay: Tensor | None
    sign: int
    cu_seqlens: Tensor | None
    scale: float


# Gradients of g and of head_decay, where they are.
Found = tuple[Tensor | None, Tensor | None]


def new_dots(x: Tensor, v: Tensor, dtype: torch.dtype, padded: bool) -> Tensor:
    """Returns memory for `Call.dots` of the gradient of x [B, T, H, K]. padded: some sequences may be padding, for
    which nothing is written; then it is zero."""
    batch, tokens, _, dim = x.shape
    new = x.new_zeros if padded else x.new_empty
    return new(batch, v.shape[2], WARPS * -(-dim // V_TILE), 2, tokens, dtype=dtype)


def new_states(
    q: Tensor, v: Tensor, dtype: torch.dtype, v_first: bool, padded: bool
) -> Tensor | None:
    """Returns memory for `Call.checkpoints`, [B, T // EVERY, HV, K, V] or V, K; None where no sequence is so long.

    Packed sequences take it whatever their lengths, which the host does not know: 64 KiB per head and `EVERY` tokens.
    padded: some sequences may be padding and write nothing; then it is zero.
    """
    batch, tokens, _, dim_k = q.shape
    if tokens <= EVERY:
        return None
    matrix = (v.shape[3], dim_k) if v_first else (dim_k, v.shape[3])
    new = q.new_zeros if padded else q.new_empty
    return new(batch, tokens // EVERY, v.shape[2], *matrix, dtype=dtype)


def on_cpu(sums: Sums) -> Found:
    """Returns the gradients in fp64, by functions of torch; zero for tokens behind the last sequence."""
    (a, whole_q), (b, whole_k) = (
        x.sum(2, dtype=torch.float64).unbind(2) for x in (sums.of_q, sums.of_k)
    )
    tokens, cu_seqlens = a.shape[2], sums.cu_seqlens
    t = torch.arange(tokens, device=a.device)
    start, end = torch.zeros_like(t), torch.full_like(t, tokens)
    ends = [None if x is None else x[:, :, None] for x in (sums.started, sums.ended)]
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:], t.to(cu_seqlens.dtype), right=True)
        sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
        start, end = cu_seqlens[sequence].long(), cu_seqlens[sequence + 1].long()
        ends = [None if x is None else x[sequence].T for x in (sums.started, sums.ended)]
    opened, closed = (a.new_zeros(()) if x is None else x for x in ends)
    first = start + (t - start) // CHUNK * CHUNK
    last = torch.minimum(first + CHUNK, end)
    rates = a.new_zeros(a.shape)
    if sums.g is not None:
        rates = rates + sums.g.transpose(1, 2)
    if sums.head_decay is not None:
        rates = rates + sums.sign * sums.head_decay[:, None]

    def before(x: Tensor) -> Tensor:
        """Sums of what lies before a token, [B, HV, T + 1]."""
        return torch.nn.functional.pad(x.cumsum(2), (1, 0))

    inside, rates = before(whole_q - whole_k + b), before(rates.clamp(min=FLOOR))
    doubt_a, doubt_b, a, b = (before(x) for x in (a.square(), b.square(), a, b))
    within = inside[..., last] - inside[..., t] + b[..., t] - b[..., first]
    # Of S and E, up to what was known where it was known last, and how much of it is rounded.
    passing, doubt = b[..., first] - a[..., last], doubt_b[..., first] + doubt_a[..., last]
    forgets = rates[..., last] - rates[..., first] < FORGOTTEN
    # The stretch between two known ones that a token lies in.
    begin, stop = start, end
    if sums.states is not None and sums.d_states is not None:
        known = sums.scale * (sums.states * sums.d_states).sum((3, 4), dtype=torch.float64)
        begin = start + (t - start) // EVERY * EVERY
        stop = torch.minimum(begin + EVERY, end)
        row = start // EVERY + (begin - start) // EVERY

        def of_row(row: Tensor) -> Tensor:
            return known.transpose(1, 2)[..., row.clamp(0, known.shape[1] - 1)]

        opened = torch.where(begin == start, opened, of_row(row - 1))
        closed = torch.where(stop == end, closed, of_row(row))
    begins = (t == first) & (forgets | (first == begin))
    too_much = torch.where(forgets, passing, b[..., first] - a[..., first] - opened)
    rounded = torch.where(forgets, doubt, doubt_b[..., first] + doubt_a[..., first])
    since = torch.where(begins, t, -1).cummax(2).values
    following = torch.where(begins, t, tokens).flip(2).cummin(2).values.flip(2)
    following = torch.nn.functional.pad(following[..., 1:], (0, 1), value=tokens)
    at_end = following >= stop
    following = torch.where(at_end, t, following)
    early, late = too_much.gather(2, since), too_much.gather(2, following)
    late = torch.where(at_end, b[..., stop] - a[..., stop] - closed, late)
    least, most = rounded.gather(2, since), rounded.gather(2, following)
    most = torch.where(at_end, doubt_b[..., stop] + doubt_a[..., stop], most)
    share = torch.where(most > least, (doubt - least) / (most - least), 0.0)
    found = within + passing - torch.lerp(early, late, share)
    dg = found.masked_fill(t >= end, 0.0).transpose(1, 2)
    of_heads = None if sums.head_decay is None else sums.sign * dg.sum((0, 1))
    return None if sums.g is None else dg, of_heads
