"""Short convolutions over the slices of all ranks: the tokens in front of every local piece, and what needs them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cula.distributed.exchange import all_to_all
from cula.distributed.layout import Halo
from cula_core import arguments

if TYPE_CHECKING:
    from cula.distributed.context import Plan

_ACTIVATIONS = (None, "silu", "swish")


class TokensInFront(torch.autograd.Function):
    """`(x [T, ..], halo [pieces, size, ..])` of local tokens x; zero before the begin of a sequence.

    x is among the results so that its gradient passes through here on every rank: where nothing reads the halo,
    autograd would leave the exchange out, and the other ranks would wait for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, plan: Plan) -> Any:
        ctx.halo, ctx.group = halo, plan.group
        got = all_to_all(x[_indices(halo.rows, x.device)], halo.takes, halo.gives, plan.group)
        front = x.new_zeros(halo.pieces * halo.size, *x.shape[1:])
        front[_indices(halo.places, x.device)] = got
        return x.view_as(x), plan.checked(front).unflatten(0, (halo.pieces, halo.size))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_x: Tensor, d_front: Tensor) -> tuple[Tensor | None, ...]:
        halo = ctx.halo
        lent = d_front.flatten(0, 1)[_indices(halo.places, d_x.device)]
        got = all_to_all(lent, halo.gives, halo.takes, ctx.group)
        # A token may have been lent several times; index_put adds in a fixed order, index_add would not.
        rows = _indices(halo.rows, d_x.device)
        return d_x.index_put((rows,), got, accumulate=True), None, None


def convolve(
    x: Tensor,
    front: Tensor,
    cuts: tuple[int, ...],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """`[T, D]` from x `[T, D]` and front `[pieces, width - 1, D]`; cuts: the pieces as offsets into x."""
    if len(x):
        order, rows = _padded(cuts, front.shape[1], x.device)
        padded = torch.cat((front.flatten(0, 1), x))[order]
        y = torch.nn.functional.conv1d(padded.mT[None], weight[:, None], bias, groups=len(weight))
        y = y[0].mT[rows].contiguous()
    else:  # gradients of weight and bias are zero then, not absent
        y = x * weight.sum(1) if bias is None else x * weight.sum(1) + bias
    return y if activation is None else torch.nn.functional.silu(y)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """The arguments of `ContextParallel.causal_conv1d`."""
    given = [("x", x, 3), ("weight", weight, 2)]
    if bias is not None:
        given.append(("bias", bias, 1))
    for name, tensor, dims in given:
        arguments.tensor(name, tensor)
        if tensor.dim() != dims or tensor.shape[0 if dims < 3 else 2] != x.shape[-1]:
            shape = ("[D]", "[D, width]", "[B, T, D]")[dims - 1]
            arguments.value_error(name, f"{shape} with D as in x", list(tensor.shape))
    if weight.shape[1] < 1:
        arguments.value_error("weight", "a width of at least 1", list(weight.shape))
    if activation not in _ACTIVATIONS:
        arguments.value_error("activation", "None, 'silu' or 'swish'", repr(activation))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept serves training too
def _indices(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _padded(cuts: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of `[front, x]` with each piece behind its own front, and where the outputs of x begin to be summed."""
    lengths = torch.tensor(cuts).diff()
    tokens = torch.arange(cuts[-1])
    rows = tokens + size * torch.repeat_interleave(lengths)
    order = torch.empty(cuts[-1] + size * len(lengths), dtype=torch.long)
    order[rows + size] = tokens + size * len(lengths)
    fronts = torch.arange(size * len(lengths)).reshape(len(lengths), size)
    order[fronts + torch.tensor(cuts[:-1])[:, None]] = fronts
    return order.to(device), rows.to(device)
