"""Tensors as vLLM 0.33 builds them, and the recurrences token by token in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

H, HV, K, V = 2, 4, 16, 8
BLOCKS = 9


class Pool(NamedTuple):
    """States `[blocks, HV, V, K]` in pages that hold something else too; block 0 holds NaN."""

    states: Tensor
    pages: Tensor
    before: Tensor

    def before_of(self, block: int) -> Tensor:
        """A state as it was."""
        return self.before[block, : self.states[0].numel()].view_as(self.states[0])

    def fresh(self) -> Tensor:
        """The pool as it was, in other memory."""
        size = self.states[0].numel()
        return self.before.clone()[:, :size].unflatten(1, self.states.shape[1:])

    def others_are_untouched(self, *touched: int) -> bool:
        """Whether no byte of the pages has changed but the states of these blocks."""
        now, size = self.pages.clone(), self.states[0].numel()
        for block in touched:
            now[block, :size] = self.before[block, :size]
        return torch.equal(now.view(torch.uint8), self.before.view(torch.uint8))


def pool(dtype: torch.dtype, heads: int = HV, rows: int = V, columns: int = K) -> Pool:
    size = heads * rows * columns
    pages = torch.randn(BLOCKS, size + 24).to(dtype)
    pages[0] = float("nan")
    return Pool(pages[:, :size].unflatten(1, (heads, rows, columns)), pages, pages.clone())


def packed(rows: int, heads: int, heads_v: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """q, k and v behind the convolution, `[rows, 2 H K + HV V]`, as columns of wider rows; norms from 1e-3 to 1e3."""
    x = torch.randn(rows, 2 * heads * K + heads_v * V + 40)
    x[:, : 2 * heads * K] *= torch.logspace(-3, 3, rows)[:, None]
    return x.to(dtype)[:, :-40]


def columns(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Two operands `[rows, width]` that lie in the same rows."""
    return torch.randn(rows, 2 * width + 3).bfloat16()[:, : 2 * width].split(width, 1)  # type: ignore[return-value]


def table(slots: list[int] | list[list[int]]) -> Tensor:
    """A view of the block table: its first column, or its first columns."""
    x = torch.tensor(slots, dtype=torch.int32)
    wide = torch.full((len(slots), 7), BLOCKS - 1, dtype=torch.int32)
    wide[:, : x.shape[1] if x.dim() == 2 else 1] = x if x.dim() == 2 else x[:, None]
    return wide[:, : x.shape[1]] if x.dim() == 2 else wide[:, 0]


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def split(mixed: Tensor, heads: int, heads_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[1, rows, H, K]` and v `[1, rows, HV, V]`, views of packed rows."""
    q, k, v = mixed.split((heads * K, heads * K, heads_v * V), 1)
    return q.view(1, -1, heads, K), k.view(1, -1, heads, K), v.view(1, -1, heads_v, V)


def gate(
    x: Tensor, A_log: Tensor, bias: Tensor, lower_bound: float | None = None, beta: float = 1.0, threshold: float = 20.0
) -> Tensor:  # fmt: skip
    """Log decays of raw gates `[L, HV]` or `[L, HV, K]`."""
    x, rate = x.double() + bias.double().view(x.shape[1:]), A_log.double().exp()
    rate = rate if x.dim() == 2 else rate[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * softplus(x, beta, threshold)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor, norm: bool = True,
    scale: float = K**-0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs `[L, HV, V]`, and the states `[L, HV, V, K]` after every token, of one sequence."""
    q, k, v, state = (x.double() for x in (q, k, v, state))
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    decay = decay.double() if decay.dim() == 3 else decay.double()[..., None]
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * decay[t].exp()[:, None, :]
        error = v[t] - (state * k[t][:, None]).sum(-1)
        state = state + (strength[t].double()[:, None] * error)[..., None] * k[t][:, None]
        outputs.append((state * q[t][:, None]).sum(-1) * scale)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def lightning(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs `[L, H * D]` and the last state `[H, K, V]` of one sequence."""
    q, k, v, state = (x.double() for x in (q, k, v, state))
    outputs = []
    for t in range(q.shape[0]):
        state = state * (-slope.double()).exp()[:, None, None] + k[t][..., None] * v[t][:, None]
        outputs.append((q[t][..., None] * state).sum(1).flatten())
    return torch.stack(outputs), state


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within what the dtype of `found` rounds off, relative to the root mean square."""
    assert found.shape == expected.shape and bool(found.isfinite().all())
    error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < {torch.bfloat16: 4e-3, torch.float32: 2e-5}[found.dtype]
