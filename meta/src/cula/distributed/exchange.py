"""Maps between ranks, by nothing but all-gather and all-to-all, and their fold in the order of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from cula.distributed.layout import Chain, Route

Fold = Callable[[Tensor, Tensor | None, Sequence[Chain], bool], Sequence[Tensor]]
# (output, input, group=): torch 2.13 has renamed it.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
exchange_into = dist.all_to_all_single
# Up to so many bytes into a rank one all-gather is expected to be faster than two all-to-alls.
GATHERED_BYTES = 10_000_000


def by_heads(exchange: str, ranks: int, bytes_in: int) -> bool:
    """Whether maps go by heads, for an `exchange` of `ContextParallel`; bytes_in: that an all-gather would bring."""
    if exchange == "auto":
        return ranks > 2 and bytes_in > GATHERED_BYTES
    return exchange == "transpose"


def folded(
    vectors: Tensor, matrices: Tensor | None, chains: Sequence[Chain], transposed: bool
) -> list[Tensor]:
    """`M S + A` along every chain, or `M^T S + A`. Chains with a common begin share it."""
    done: dict[Chain, Tensor] = {}
    for chain in chains:
        for length in range(1, len(chain) + 1):
            part = chain[:length]
            if part in done:
                continue
            vector, matrix = part[-1]
            state = vectors[vector]
            if length > 1:
                assert matrices is not None
                m, before = matrices[matrix], done[chain[: length - 1]]
                # One operation, because a small one takes the host longer than the GPU.
                if m.shape[-1] == 1:  # one decay per head
                    state = torch.addcmul(state, m, before)
                else:
                    state = torch.baddbmm(state, m.mT if transposed else m, before)
            done[part] = state
    return [done[chain] for chain in chains]


@dataclass(frozen=True)
class Wire:
    """A group, and how maps travel in it: whole to every rank, or by heads to the rank that folds those heads."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    by_heads: bool

    def collect(self, maps: Tensor) -> Tensor:
        """`[slots, H, ..]` of this rank -> `[ranks * slots, H, ..]`, of the own heads alone where it goes by heads."""
        if not self.by_heads:
            return all_gather(maps, self.group)
        split = shares(maps.shape[1], self.ranks)
        own = split[self.rank]
        rows = all_to_all(maps.movedim(1, 0), [own] * self.ranks, split, self.group)
        return rows.unflatten(0, (self.ranks, own)).movedim(2, 1).flatten(0, 1)

    def receive(
        self,
        route: Route,
        heads: int,
        vectors: Tensor,
        matrices: Tensor | None,
        transposed: bool,
        fold: Fold = folded,
    ) -> Sequence[Tensor]:
        """The folded state `[H, K, V]` of every piece in `route.takes`, from what `collect` returned."""
        if not self.by_heads:
            return fold(vectors, matrices, route.chains[self.rank], transposed)
        most = max(map(len, route.chains.values()))
        split = shares(heads, self.ranks)
        own = split[self.rank]
        every = [route.chains[rank] for rank in range(self.ranks)]
        states = iter(fold(vectors, matrices, [chain for of in every for chain in of], transposed))
        # As many for every rank: in place of those that it does not take are zeros.
        spare = vectors.new_zeros(own, *vectors.shape[2:])
        rows = [next(states) if i < len(of) else spare for of in every for i in range(most)]
        sent = torch.stack(rows).unflatten(0, (self.ranks, most)).movedim(2, 1)
        got = all_to_all(sent.flatten(0, 1), split, [own] * self.ranks, self.group)
        return got.unbind(1)[: len(route.takes)]


def shares(heads: int, ranks: int) -> list[int]:
    """How many heads every rank folds."""
    return [heads * (r + 1) // ranks - heads * r // ranks for r in range(ranks)]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, one rank behind the other; every rank has as many. Streams wait for it, not the host.

    Functional collectives, whose result knows that it has to be waited for, would take the host much longer.
    """
    found = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    gather_into(found, x.contiguous(), group=group)
    return found


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same without waiting: the result is for `wait_tensor`."""
    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    return gather(x.contiguous(), 0, group)


def all_to_all(x: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup) -> Tensor:
    """`gives[r]` rows go to rank r, one rank behind the other, and `takes[r]` come from it."""
    found = x.new_empty(sum(takes), *x.shape[1:])
    exchange_into(found, x.contiguous(), takes, gives, group=group)
    return found


def start_all_to_all(
    x: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup
) -> Tensor:
    """The same without waiting: the result is for `wait_tensor`."""
    return collectives.all_to_all_single(x.contiguous(), takes, gives, group)


def moved(x: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup) -> Tensor:
    """`all_to_all`, whose gradient travels back."""
    return _Moved.apply(x, takes, gives, group)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, takes: list[int], gives: list[int], group: Any) -> Tensor:
        ctx.way = gives, takes, group
        return all_to_all(x, takes, gives, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(d, *ctx.way), None, None, None
