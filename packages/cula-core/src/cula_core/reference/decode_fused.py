"""What models have around a decode step, in plain torch: the short convolution before it, the gated RMSNorm behind it.

    y_t = silu(bias + sum over j < 4 of weight[:, j] * x_(t - 3 + j))           per channel of q, k and v
    out = o / sqrt(mean(o^2) + eps) * weight * silu(gate)                       per head, the mean over V

Runs on any device without reading a tensor back to the host. Arguments are taken as checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from .delta_decode import row_slots, row_tokens
from .lightning_decode import store_live

CONVOLUTION_WIDTH = 4
NORM_ACTIVATIONS = {"silu": silu, "sigmoid": torch.sigmoid}


class ShortConvolution(NamedTuple):
    """A causal convolution of width 4 over q, k and v, with SiLU behind it.

    inputs [pool, L, C]: rings of earlier inputs, the one at position p of a sequence at p mod L; C = 2 H K + HV V
    channels, those of q, of k and of v. positions [B] int32: of the first token of each row; what lies before position
    0 counts as zero, so a ring needs no clearing for a new sequence. weight [C, 4], the last column for the token
    itself; bias [C] or None.

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
    kept = torch.where((before >= 0)[..., None], ring[slots[:, None], before % length], 0)
    work = torch.promote_types(given.dtype, torch.float32)
    line = torch.cat((kept.to(given.dtype), given[index]), 1).to(work)
    total = sum(line[:, j : j + tokens] * weight[:, j].to(work) for j in range(CONVOLUTION_WIDTH))
    if convolution.bias is not None:
        total = total + convolution.bias.to(work)
    result = given.new_zeros(len(given) + 1, given.shape[1])
    # The last row takes what is computed for tokens past the end of a row.
    result[torch.where(live, index, len(given))] = silu(total).to(given.dtype)
    at = (positions + torch.arange(tokens, device=q.device)) % length
    for t in range(tokens):
        store_live(ring.flatten(0, 1), given[index[:, t]], slots * length + at[:, t], live[:, t])
    split = result[:-1].split([x[0, 0].numel() for x in parts], 1)
    q, k, v = (y.reshape(x.shape) for x, y in zip(parts, split))
    return q, k, v


def normalize(o: Tensor, norm: GatedNorm) -> Tensor:
    """Returns the normalized and gated output, in the working precision of `o`."""
    work = torch.promote_types(o.dtype, torch.float32)
    o = o.to(work)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps)
    return o * norm.weight.to(work) * NORM_ACTIVATIONS[norm.activation](norm.gate.to(work))
