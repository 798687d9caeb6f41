"""What models have around a decode step, in plain torch: the short convolution before it, the gated RMSNorm behind it.

    y_t = silu(bias + sum over j < 4 of weight[:, j] * x_(t - 3 + j))           per channel of q, k and v
    out = o / sqrt(mean(o^2) + eps) * weight * silu(gate)                       per head, the mean over V

Runs on any device without reading a tensor back to the host. Arguments are taken as checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from .delta_decode import Replay, chosen_slots, delta_rule_decode, row_slots, row_tokens
from .lightning_decode import store_live

CONVOLUTION_WIDTH = 4
NORM_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}


class ShortConvolution(NamedTuple):
    """A causal convolution of width 4 over q, k and v, with SiLU behind it.

    inputs [pool, L, C]: rings of earlier inputs, the one at position p of a sequence at p mod L; C = 2 H K + HV V
    channels, those of q, of k and of v. positions [B] int32: of the first token of each row; what lies before position
    0 counts as zero, so a ring needs no clearing for a new sequence. L is a power of two of at least T + 3;
    `new_convolution_ring` makes the smallest rings, and `fill_convolution_ring` writes what a prefill leaves. weight
    [C, 4], the last column for the token itself; bias [C] or None.

    Example:
        >>> import torch
        >>> from cula_core.reference.decode_fused import ShortConvolution
        >>> ring = torch.zeros(2, 8, 96)  # eight inputs of 96 channels for each of two slots
        >>> positions = torch.tensor([5, 0], dtype=torch.int32)
        >>> ShortConvolution(ring, positions, torch.randn(96, 4)).bias is None
        True
    """

    inputs: Tensor
    positions: Tensor
    weight: Tensor
    bias: Tensor | None = None


class GatedNorm(NamedTuple):
    """RMSNorm of the output over V, times `weight` [V], times an activation of `gate` [B, T, HV, V].

    activation: "silu" or "sigmoid".

    Example:
        >>> import torch
        >>> from cula_core.reference.decode_fused import GatedNorm
        >>> norm = GatedNorm(torch.randn(2, 1, 8, 16), torch.ones(16))
        >>> norm.eps, norm.activation
        (1e-05, 'silu')
    """

    gate: Tensor
    weight: Tensor
    eps: float = 1e-5
    activation: str = "silu"


def fused_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    commit: bool = True,
    replay: Replay | None = None,
    token_states: Tensor | None = None,
    token_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
    convolution: ShortConvolution | None = None,
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Convolves, decodes and normalizes, as the public `delta_rule_decode` does, and returns the outputs [B, T, HV, V].

    commit: whether the states after the last tokens go back to their slots, where there is no replay. Without
    token_states, token_state_indices are slots of `state`. options: the others of `reference.delta_decode`.
    """
    rows: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "max_tokens": max_tokens,
        "null_slot": null_slot,
    }
    if convolution is not None:
        q, k, v = convolve(q, k, v, convolution, state_indices=state_indices, **rows)
    if token_states is None and token_state_indices is not None:
        token_states = state
    # A norm sees the output before it is rounded.
    exact = v if norm is None else v.to(torch.promote_types(v.dtype, torch.float32))
    result = delta_rule_decode(
        q, k, exact, g, beta, state, next_state=state if commit and replay is None else None,
        state_indices=state_indices, replay=replay, token_states=token_states,
        token_state_indices=token_state_indices, out=out if norm is None else None, **rows, **options,
    )  # fmt: skip
    if norm is None:
        return result
    # The gate of a row that is padding may be anything, and its output is zero.
    begins = chosen_slots(state_indices, options.get("num_accepted"))
    live = _live_tokens(v, state, begins, **rows)
    result = torch.where(live[..., None, None], normalize(result, norm), 0)
    return result.to(v.dtype) if out is None else out.copy_(result)


def convolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    convolution: ShortConvolution,
    *,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v behind the convolution, in their dtype, and keeps the inputs in the rings of the rows' slots.

    The arguments but `convolution` are those of `delta_rule_decode`.
    """
    parts = (q, k, v)
    ring, weight = convolution.inputs, convolution.weight
    index, live = row_tokens(v, cu_seqlens, max_tokens)
    rows, tokens = live.shape
    slots, begins = row_slots(state_indices, null_slot, rows, ring)
    live = live & begins[:, None]
    given = torch.cat([x.flatten(2).flatten(0, 1) for x in parts], 1)
    positions = convolution.positions.long()[:, None]
    before = positions + torch.arange(1 - CONVOLUTION_WIDTH, 0, device=q.device)
    length = ring.shape[1]
    kept = given.new_zeros(rows, CONVOLUTION_WIDTH - 1, given.shape[1])
    if len(ring):
        kept = torch.where((before >= 0)[..., None], ring[slots[:, None], before % length], kept)
    work = torch.promote_types(given.dtype, torch.float32)
    line = torch.cat((kept, given[index]), 1).to(work)
    total = line[:, :tokens] * weight[:, 0].to(work)
    for j in range(1, CONVOLUTION_WIDTH):
        total = total + line[:, j : j + tokens] * weight[:, j].to(work)
    if convolution.bias is not None:
        total = total + convolution.bias.to(work)
    result = given.new_zeros(len(given) + 1, given.shape[1])
    # The last row takes what is computed for tokens past the end of a row.
    result[torch.where(live, index, len(given))] = silu(total).to(given.dtype)
    _keep(ring, given[index], slots, positions + torch.arange(tokens, device=q.device), live)
    split = result[:-1].split([x.shape[2] * x.shape[3] for x in parts], 1)
    q, k, v = (y.reshape(x.shape) for x, y in zip(parts, split))
    return q, k, v


def normalize(o: Tensor, norm: GatedNorm) -> Tensor:
    """Returns the normalized and gated output, in the working precision of `o`."""
    work = torch.promote_types(o.dtype, torch.float32)
    o = o.to(work)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps)
    return o * norm.weight.to(work) * NORM_ACTIVATIONS[norm.activation](norm.gate.to(work))


# ---- rings -----------------------------------------------------------------------------------------------------------


def least_length(max_tokens: int) -> int:
    """Returns the fewest inputs that a ring holds: a power of two, for a call and what its tokens look back at."""
    return 1 << (max_tokens + CONVOLUTION_WIDTH - 2).bit_length()


def empty_ring(
    state: Tensor, heads: int, *, max_tokens: int, dtype: torch.dtype, state_v_first: bool
) -> Tensor:
    """Returns the smallest rings of zeros for a pool of states, [pool, L, 2 H K + HV V]."""
    pool, heads_v, rows, columns = state.shape
    dim_k = columns if state_v_first else rows
    channels = 2 * heads * dim_k + heads_v * rows * columns // dim_k
    return torch.zeros(pool, least_length(max_tokens), channels, dtype=dtype, device=state.device)


def fill_ring(
    ring: Tensor,
    inputs: Tensor,
    positions: Tensor,
    state_indices: Tensor | None,
    null_slot: int | None,
) -> None:
    """Writes the inputs [B, n, C] of the n positions before `positions` [B]; those before position 0 are left out."""
    rows, tokens = inputs.shape[:2]
    slots, live = row_slots(state_indices, null_slot, rows, ring)
    at = positions.long()[:, None] + torch.arange(-tokens, 0, device=ring.device)
    _keep(ring, inputs, slots, at, live[:, None] & (at >= 0))


def _keep(ring: Tensor, inputs: Tensor, slots: Tensor, at: Tensor, live: Tensor) -> None:
    """Writes the live ones of the inputs [N, T, C] at positions [N, T] to the rings of the slots [N]."""
    length = ring.shape[1]
    columns = slots[:, None] * length + at % length
    store_live(ring.flatten(0, 1), inputs.flatten(0, 1), columns.flatten(), live.flatten())


def _live_tokens(
    v: Tensor,
    state: Tensor,
    slots: Tensor | None,
    *,
    cu_seqlens: Tensor | None,
    max_tokens: int | None,
    null_slot: int | None,
) -> Tensor:
    """Which tokens [B, T] belong to a row that is no padding."""
    index, live = row_tokens(v, cu_seqlens, max_tokens)
    live = live & row_slots(slots, null_slot, len(live), state)[1][:, None]
    count = v.shape[0] * v.shape[1]
    # The last entry takes what lies past the end of a row.
    found = torch.zeros(count + 1, dtype=torch.bool, device=v.device)
    found[torch.where(live, index, count)] = True
    return found[:-1].view(v.shape[:2])
