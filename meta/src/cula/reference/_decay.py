"""Products of chunk rows under a cumulative decay, never exponentiating a positive number or subtracting two sums.

For rows i >= j of a chunk the chunk forms need `sum_c a_ic b_jc exp(g_{j+1,c} + ... + g_{i,c})`. Factoring the exponent
as `G_i - G_j` overflows or cancels for strong decays. Here the chunk is halved again and again: for j in the left and i
in the right half of a block, the exponent is (sum from j to the middle) + (sum from the middle to i), and both are
plain sums of non-positive terms. So a decay of -1000, or of -inf, costs no accuracy anywhere else in the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class DecaySums(NamedTuple):
    """Sums of the log decay g over a chunk of C rows; the last dimension is g's."""

    since_start: Tensor  # [..., C, K] sum over rows 0..i
    until_end: Tensor  # [..., C, K] sum over rows i+1..C-1
    total: Tensor  # [..., 1, K]


def decayed_products(
    rows: tuple[Tensor, ...], cols: Tensor, g: Tensor
) -> tuple[tuple[Tensor, ...], DecaySums]:
    """For each `a` of `rows`: `[..., C, C]` lower-triangular matrix of products with `cols`, diagonal included.

    rows, cols `[..., C, K]`; g `[..., C, K]`, or `[..., C, 1]` when all channels decay alike; C is a power of two.
    """
    if g.shape[-1] == 1 and cols.shape[-1] > 1:
        ones = torch.ones_like(g)
        (decay,), sums = decayed_products((ones,), ones, g)
        return tuple(a @ cols.transpose(-1, -2) * decay for a in rows), sums

    count, size = len(rows), cols.shape[-2]
    a = torch.stack(torch.broadcast_tensors(*rows), dim=-2)  # [..., C, count, K]
    since, until = (
        g.unsqueeze(-2),
        torch.zeros_like(g).unsqueeze(-2),
    )  # [..., blocks, rows of a block, K]
    products = (a * cols.unsqueeze(-2)).sum(-1)[
        ..., None
    ]  # [..., blocks, rows of a block * count, rows of a block]
    half = 1
    while half < size:
        since_left, since_right = since[..., 0::2, :, :], since[..., 1::2, :, :]
        until_left, until_right = until[..., 0::2, :, :], until[..., 1::2, :, :]
        right = a.unflatten(-3, (-1, 2, half))[..., 1, :, :, :] * since_right.unsqueeze(-2).exp()
        left = cols.unflatten(-2, (-1, 2, half))[..., 0, :, :] * until_left.exp()
        across = right.flatten(-3, -2) @ left.transpose(-1, -2)
        upper = F.pad(products[..., 0::2, :, :], (0, half))
        lower = torch.cat([across, products[..., 1::2, :, :]], dim=-1)
        products = torch.cat([upper, lower], dim=-2)
        since, until = (
            torch.cat([since_left, since_left[..., -1:, :] + since_right], dim=-2),
            torch.cat([until_left + since_right[..., -1:, :], until_right], dim=-2),
        )
        half *= 2
    products = products.squeeze(-3).unflatten(-2, (size, count))
    since = since.squeeze(-3)
    return products.unbind(-2), DecaySums(since, until.squeeze(-3), since[..., -1:, :])
