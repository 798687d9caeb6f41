"""Gradients of log decays, from sums that the passes of dq and dk leave for every token.

The decay of token t lies between what is written before t and what is read at t or later. In a chunk with the state S
in front of it and E, the gradient of the state behind it, there are four kinds of such pairs:

    a token i >= t and S     a_i, the part of q_i . dq_i that comes from S
    a token j < t and E      b_j, the part of k_j . dk_j that comes from E
    tokens j < t <= i        sum over i >= t of r_i - c_i, the other parts of q_i . dq_i and k_i . dk_i
    S and E                  the same for every t of a chunk; from chunk to chunk it grows by its b and the next one's a

r and c are sums of the same rounded products over rows and columns, so that their difference is exact to fp32 however
small it is. The last kind is summed up, so that the rounding of a and b adds up from chunk to chunk. It begins again at
every chunk that forgets all that lies before it, which so cannot have the rounding of what it forgot, and after every
`EVERY` tokens of a sequence, where the passes leave S and the gradient of S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import CHUNK, V_TILE, WARPS

# Tokens of a sequence between two states that a pass leaves, a multiple of CHUNK. A state of 128 x 128 takes 64 KiB in
# fp32, which is as much as 256 tokens of q, so that the states of both passes take half as much memory as q and k.
EVERY = 512
# A log decay over a chunk behind which nothing of what lies before it is left in fp32.
_FORGOTTEN = -16.0
# Below any log decay that the kernel tells from it.
_FLOOR = -104.0


def new_dots(x: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for `Call.dots` of the gradient of x [B, T, H, K]; zero where padding is left out."""
    batch, tokens, _, dim = x.shape
    return x.new_zeros(batch, v.shape[2], WARPS * -(-dim // V_TILE), 2, tokens, dtype=dtype)


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


def log_decays(g: Tensor | None, head_decay: Tensor | None, sign: int, v: Tensor) -> Tensor:
    """Returns the log decay of every token, [B, HV, T] in fp64."""
    found = v.new_zeros(v.shape[:3], dtype=torch.float64)
    if g is not None:
        found = found + g
    if head_decay is not None:
        found = found + sign * head_decay
    return found.clamp(min=_FLOOR).transpose(1, 2)


def of_log_decays(
    of_q: Tensor, of_k: Tensor, decays: Tensor, started: Tensor | None, cu_seqlens: Tensor | None,
    known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the gradients [B, T, HV] of log decays, in fp64; zero for tokens behind the last sequence.

    of_q, of_k: `Call.dots` of dq with q and of dk with k. decays: as `log_decays` returns them. started [N, HV]: the
    sums of initial states times their gradients, None for zero. cu_seqlens [N + 1] of packed sequences. known [B, T //
    EVERY, HV]: the same of the states that `new_states` has room for, None if there are none.
    """
    (a, whole_q), (b, whole_k) = (x.sum(2, dtype=torch.float64).unbind(2) for x in (of_q, of_k))
    tokens = a.shape[2]
    t = torch.arange(tokens, device=a.device)
    start, end, opened = torch.zeros_like(t), torch.full_like(t, tokens), a.new_zeros(())
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:], t.to(cu_seqlens.dtype), right=True)
        sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
        start, end = cu_seqlens[sequence].long(), cu_seqlens[sequence + 1].long()
        if started is not None:
            opened = started[sequence].T
    elif started is not None:
        opened = started[:, :, None]
    first = start + (t - start) // CHUNK * CHUNK
    last = torch.minimum(first + CHUNK, end)

    def before(x: Tensor) -> Tensor:
        """Sums of what lies before a token, [B, HV, T + 1]."""
        return torch.nn.functional.pad(x.cumsum(2), (1, 0))

    a, b, inside, decays = (before(x) for x in (a, b, whole_q - whole_k + b, decays))
    within = inside[..., last] - inside[..., t] + b[..., t] - b[..., first]
    # Of S and E, up to what a chunk has too much that forgets, or in front of which the state's sum is known.
    passing = b[..., first] - a[..., last]
    forgets = decays[..., last] - decays[..., first] < _FORGOTTEN
    certain = t == start
    if known is not None:
        number = (t - start) // EVERY
        row = (start // EVERY + number - 1).clamp(0, known.shape[1] - 1)
        opened = torch.where(certain, opened, known.transpose(1, 2)[..., row])
        certain = t == start + number * EVERY
    begins = (t == first) & (forgets | certain)
    too_much = torch.where(forgets, passing, b[..., first] - a[..., first] - opened)
    since = torch.where(begins, t, -1).cummax(2).values
    found = within + passing - too_much.gather(2, since)
    return found.masked_fill(t >= end, 0.0).transpose(1, 2)
