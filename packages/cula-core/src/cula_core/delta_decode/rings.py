"""The rings of a short convolution in front of decode: made for a pool of states, and filled behind a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.decode_fused import empty_ring, fill_ring
from .contract import check_new_rings
from .fused import check_fill_convolution_ring


def new_convolution_ring(
    state: Tensor,
    heads: int,
    *,
    max_tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    state_v_first: bool = True,
) -> Tensor:
    """Returns the rings of a `ShortConvolution` for a pool of states: zeros `[pool, L, 2 H K + HV V]`.

    L is the smallest that calls of `max_tokens` tokens can use, a power of two of at least `max_tokens + 3`.

    Args:
        state: the pool, `[pool, HV, V, K]`.
        heads: H, heads of q and k.
        max_tokens: the most tokens that a call will have, 1..8.
        dtype: that of q, k and v.
        state_v_first: layout of the pool; False: `[pool, HV, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        >>> import torch
        >>> from cula_core.delta_decode.rings import new_convolution_ring
        >>> pool = torch.zeros(2, 8, 16, 16)  # [pool, HV, V, K]
        >>> new_convolution_ring(pool, 4, max_tokens=3).shape  # 8 inputs of 2 * 4 * 16 + 8 * 16 channels per slot
        torch.Size([2, 8, 256])
    """
    check_new_rings(state, heads, max_tokens, dtype, state_v_first)
    return empty_ring(state, heads, max_tokens=max_tokens, dtype=dtype, state_v_first=state_v_first)


def fill_convolution_ring(
    ring: Tensor,
    inputs: Tensor,
    positions: Tensor,
    state_indices: Tensor | None = None,
    null_slot: int | None = None,
) -> None:
    """Writes the last inputs of sequences to the rings of their slots, in place: what a prefill leaves to decode.

    The last three are enough. Nothing is read back from a GPU, and a CUDA graph can hold the call.

    Args:
        ring: `[pool, L, C]`, as `new_convolution_ring` makes it.
        inputs: `[B, n, C]` in the dtype of the ring, n = 1..L, any strides: the channels of q, k and v before the
            convolution, at positions `positions - n` to `positions - 1`. Those before position 0 are left out, so a
            sequence of fewer than n tokens has its own at the end.
        positions: `[B]` int32, any stride, of the next token of every sequence: its number of tokens so far.
        state_indices: `[B]` int32, any stride, the slot of every sequence; negative, or equal to `null_slot`: padding,
            nothing is written. None: sequence n has slot n.
        null_slot: a slot that means padding, as negative ones do.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was changed.

    Example:
        >>> import torch
        >>> from cula_core.delta_decode.rings import fill_convolution_ring
        >>> ring = torch.zeros(2, 4, 1)  # four inputs of one channel for each of two slots
        >>> last = torch.tensor([[[7.0], [8.0], [9.0]]])  # at positions 7, 8 and 9
        >>> slots = torch.tensor([1], dtype=torch.int32)
        >>> fill_convolution_ring(ring, last, torch.tensor([10], dtype=torch.int32), slots)
        >>> ring[1, :, 0]  # each at its position modulo 4
        tensor([8., 9., 0., 7.])
    """
    check_fill_convolution_ring(ring, inputs, positions, state_indices, null_slot)
    fill_ring(ring, inputs, positions, state_indices, null_slot)
