"""Who holds which tokens: the objects that operators take as `cp_context`, and what one call makes of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from cula._ranks import enter, leave
from cula.distributed import convolution
from cula.distributed.exchange import all_gather, start_all_gather
from cula.distributed.layout import (
    Halo,
    Layout,
    Piece,
    Range,
    Route,
    dense,
    dense_at,
    equal_bounds,
    packed,
    ranges_of,
)
from cula_core import arguments

_VERSION = 1
_EXCHANGES = ("auto", "gather", "transpose")


@dataclass(frozen=True)
class Plan:
    """One call on one rank. cuts: the local pieces, as offsets into the rows of the batch laid end to end.

    differs: a bool on some device, whether ranks have different layouts; None where there is nothing to compare.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cuts: tuple[int, ...]
    forward: Route
    backward: Route
    matrices: bool
    exchange: str
    differs: Tensor | None = None

    def checked(self, x: Tensor) -> Tensor:
        """NaN where ranks have different layouts."""
        if self.differs is None:
            return x
        return x.masked_fill(self.differs.to(x.device), torch.nan)


class ContextParallel:
    """Slices of one batch, as the ranks of a group hold them. Every rank constructs it, with the same arguments.

    Construction starts one small all-gather, by which calls find out, without waiting on the host, whether the ranks
    agree: where they do not, states and outputs are NaN. Communication itself needs layouts that send messages of the
    same size; `check` tells beforehand.

    Args:
        group_or_mesh: a ProcessGroup, or a DeviceMesh of one dimension.
        cu_seqlens: `[N + 1]` int32 or int64, global: the offsets of the packed sequences of the whole batch, whose
            local tensors have B = 1. None: a dense batch, every row of which is one sequence.
        cu_seqlens_cpu: the same on the CPU. Without it, offsets on a device are read once, here.
        bounds: part p holds tokens `bounds[p] .. bounds[p + 1] - 1`: R + 1 numbers for the R ranks, 2 R + 1 with
            zigzag. Parts may be empty. None: the split of `torch.chunk`, with zigzag 2 R parts as equal as they can be.
            A dense batch needs none: contiguous slices have whatever lengths their tensors have.
        layout: "contiguous": rank r holds part r. "zigzag": parts r and 2 R - 1 - r, as causal softmax attention
            wants them.
        exchange: "gather": one all-gather of states. "transpose": two all-to-alls, by heads; fewer bytes with many
            ranks. "auto": by size.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from cula.distributed import ContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 3, 8]))
        >>> cp.shard(torch.arange(8)[None]), [piece.ends for piece in cp.pieces]
        (tensor([[0, 1, 2, 3, 4, 5, 6, 7]]), [True, True])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        bounds: Sequence[int] | None = None,
        layout: str = "contiguous",
        exchange: str = "auto",
    ) -> None:
        group = group_of("group_or_mesh", group_or_mesh)
        if layout not in ("contiguous", "zigzag"):
            arguments.value_error("layout", "'contiguous' or 'zigzag'", repr(layout))
        if exchange not in _EXCHANGES:
            arguments.value_error("exchange", "'auto', 'gather' or 'transpose'", repr(exchange))
        self.group, self.exchange, self.zigzag = group, exchange, layout == "zigzag"
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.cu_seqlens = _global_offsets(cu_seqlens, cu_seqlens_cpu)
        self.bounds = None if bounds is None else self._checked_bounds(bounds)
        self._layout: Layout | None = None
        self._routes: tuple[Route, Route] | None = None
        if self.cu_seqlens is not None:
            if self.bounds is None:
                self.bounds = tuple(equal_bounds(self.cu_seqlens[-1], self.ranks, self.zigzag))
            self._layout = packed(self.cu_seqlens, self._ranges(self.bounds))
            self._routes = self._layout.forward(self.rank), self._layout.backward(self.rank)
        self._halos: dict[tuple[int, int], Halo] = {}
        self._digests: Tensor | None = None
        self._differs: Tensor | None = None
        if self.ranks > 1:
            facts = (_VERSION, self.ranks, layout, exchange, self.cu_seqlens, self.bounds)
            digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
            self._digest = int.from_bytes(digest, "little", signed=True)
            own = torch.tensor([self._digest], device=_device_of(group_or_mesh, group))
            self._digests = start_all_gather(own, group)

    def __enter__(self) -> ContextParallel:
        """`with cp:` calls that have a `cp_context` and name none take this one; `cp_context=False` takes none.

        It holds in this thread. What was called in it keeps it for its backward, but a forward that is computed again
        in the backward, as by activation checkpoints, happens in a thread of autograd: enter it there as well.
        """
        enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        leave()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What a call sees as its sequences: the parts of packed sequences on this rank, in the order of its tokens.

        A row of `initial_state` is read where the piece `begins` its sequence, and a final state is that of the
        sequence where the piece `ends` it.
        """
        if self._layout is None:
            raise ValueError("pieces: expected a context with cu_seqlens, got one without")
        return self._layout.pieces[self.rank]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that has all tokens of the batch; a view where that is one run of them."""
        arguments.tensor("x", x)
        bounds = self._bounds_for(x.shape[dim])
        parts = [x.narrow(dim, low, high - low) for low, high in self._ranges(bounds)[self.rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens of the batch, on every rank, from local tensors. Without gradients; synchronises with the host."""
        arguments.tensor("x", x)
        if torch.is_grad_enabled() and x.requires_grad:
            arguments.value_error(
                "x", "no gradients (use torch.no_grad())", "a tensor that requires them"
            )
        rows = x.movedim(dim, 0)
        count = torch.tensor([len(rows)], device=x.device)
        counts = all_gather(count, self.group).tolist()
        most = max(counts)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        got = all_gather(padded, self.group)
        whole = rows.new_empty(sum(counts), *rows.shape[1:])
        bounds: Sequence[int] | None = self.bounds
        if bounds is None and self.zigzag:
            bounds = equal_bounds(sum(counts), self.ranks, True)
        elif bounds is None:
            bounds = [0, *accumulate(counts)]
        if bounds[-1] != sum(counts):
            arguments.value_error("x", f"{bounds[-1]} tokens on all ranks together", sum(counts))
        for rank, ranges in enumerate(self._ranges(bounds)):
            at = rank * most
            for low, high in ranges:
                whole[low:high] = got[at : at + high - low]
                at += high - low
        return whole.movedim(0, dim)

    def halo(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The tokens in front of every local piece, for what looks back a little, such as a short convolution.

        The slices of several ranks are looked through where they are short. Every rank calls it, and goes on with the
        x that it returns: the gradient of the tokens that were lent comes back through it.

        Args:
            x: `[B, T, ..]`, this rank's tokens. Tensors with the same tokens are best joined into one.
            size: how many tokens; of a convolution its width less one.

        Returns: `(x, halo)`, halo `[pieces, size, ..]` in the dtype of x, zero before the begin of a sequence.

        Raises:
            TypeError, ValueError: an argument does not fit, or the context of a dense batch has no bounds.
        """
        arguments.tensor("x", x)
        size = index(size)
        if size < 0 or x.dim() < 2:
            arguments.value_error("x, size", "[B, T, ..] and 0 or more", f"{list(x.shape)}, {size}")
        if not x.is_floating_point():
            arguments.type_error("x", "a floating dtype", x.dtype)
        return self._halo(x, size)[:2]

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """The causal convolution of every channel along its sequence, over the slices of all ranks.

        Args:
            x: `[B, T, D]`, this rank's tokens.
            weight: `[D, width]`; the last column is the token's own. bias: `[D]`.
            activation: None, or "silu", which is also called "swish".

        Returns: `[B, T, D]`. Gradients of weight and bias are this rank's part.

        Raises:
            TypeError, ValueError: an argument does not fit, or the context of a dense batch has no bounds.
        """
        convolution.check(x, weight, bias, activation)
        x, front, cuts = self._halo(x, weight.shape[1] - 1)
        y = convolution.convolve(x.flatten(0, 1), front, cuts, weight, bias, activation)
        return y.unflatten(0, x.shape[:2])

    def _halo(self, x: Tensor, size: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        rows, tokens = x.shape[:2]
        if self.bounds is None:
            raise ValueError("x: expected a context with cu_seqlens or bounds, got one without")
        plan = self.plan(rows, tokens, "x")
        halo = self._halos.get((rows, size))
        if halo is None:
            layout = self._layout or dense_at(rows, self._ranges(self.bounds))
            halo = self._halos[rows, size] = layout.halo(self.rank, size)
        flat, front = convolution.TokensInFront.apply(x.flatten(0, 1), halo, plan)
        return flat.unflatten(0, (rows, tokens)), front, plan.cuts

    def check(self) -> None:
        """Waits until all ranks have told their layout.

        Raises:
            ValueError: ranks have another one; the message names them.
        """
        if self._digests is None:
            return
        others = collectives.wait_tensor(self._digests).tolist()
        wrong = [rank for rank, digest in enumerate(others) if digest != self._digest]
        if wrong:
            raise ValueError(
                f"cp_context: expected one layout on all ranks, got another than that of rank {self.rank} on "
                f"{', '.join(f'rank {rank}' for rank in wrong)}"
            )

    def plan(self, rows: int, tokens: int, name: str = "q") -> Plan:
        """What a call with local tensors `[rows, tokens, ..]` does on this rank; name: what errors call them."""
        if self._layout is not None and self._routes is not None:
            if rows != 1:
                arguments.value_error(
                    name, "B = 1 with packed sequences in cp_context", f"B = {rows}"
                )
            layout, cuts = self._layout, _cuts(p.stop - p.start for p in self.pieces)
            if cuts[-1] != tokens:
                arguments.value_error(name, f"T = {cuts[-1]} as cp_context says", f"T = {tokens}")
            forward, backward = self._routes
        else:
            layout, forward, backward = _dense_routes(self.ranks, self.rank, rows, self.zigzag)
            cuts = _cuts(self._part_lengths(tokens, name) * rows)
        return Plan(
            self.group, self.rank, self.ranks, cuts, forward, backward, layout.needs_matrices, self.exchange,
            self.differs,
        )  # fmt: skip

    @property
    def differs(self) -> Tensor | None:
        """Whether ranks have different layouts, as a bool on the device of the group; None for a single rank."""
        if self._differs is None and self._digests is not None:
            self._differs = (collectives.wait_tensor(self._digests) != self._digest).any()
        return self._differs

    def _part_lengths(self, tokens: int, name: str) -> list[int]:
        """Of the local parts of every row of a dense batch."""
        if self.bounds is not None:
            lengths = [high - low for low, high in self._ranges(self.bounds)[self.rank]]
            if sum(lengths) != tokens:
                arguments.value_error(
                    name, f"T = {sum(lengths)} as cp_context says", f"T = {tokens}"
                )
            return lengths
        if self.zigzag and tokens % 2:
            arguments.value_error(name, "an even T (zigzag without bounds)", f"T = {tokens}")
        return [tokens // 2] * 2 if self.zigzag else [tokens]

    def _ranges(self, bounds: Sequence[int]) -> list[list[Range]]:
        return ranges_of(bounds, self.ranks, self.zigzag)

    def _bounds_for(self, tokens: int) -> Sequence[int]:
        if self.bounds is None:
            if self.zigzag and tokens % (2 * self.ranks):
                arguments.value_error(
                    "x", f"tokens in {2 * self.ranks} equal parts (zigzag without bounds)", tokens
                )
            return equal_bounds(tokens, self.ranks, self.zigzag)
        if self.bounds[-1] != tokens:
            arguments.value_error("x", f"{self.bounds[-1]} tokens as cp_context says", tokens)
        return self.bounds

    def _checked_bounds(self, bounds: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple(index(b) for b in bounds)
        except TypeError:
            arguments.type_error("bounds", "a sequence of integers", type(bounds).__name__)
        count = self.ranks * (2 if self.zigzag else 1) + 1
        end = None if self.cu_seqlens is None else self.cu_seqlens[-1]
        rises = all(a <= b for a, b in zip(found, found[1:]))
        if len(found) != count or found[0] != 0 or not rises or end not in (None, found[-1]):
            to = "" if end is None else f" to {end}"
            arguments.value_error("bounds", f"{count} numbers that rise from 0{to}", list(found))
        return found


def plan_of(cp_context: object, rows: int, tokens: int, cu_seqlens: object) -> Plan:
    """The plan of a call with local tensors `[rows, tokens, ..]`, from whatever was given as `cp_context`."""
    if all(
        hasattr(cp_context, name)
        for name in ("group", "pre_num_ranks", "post_num_ranks", "cu_seqlens_cpu")
    ):
        return _plan_of_fla(cp_context, rows, tokens, cu_seqlens)
    if cu_seqlens is not None:
        arguments.value_error(
            "cu_seqlens", "None with cp_context, which has it", type(cu_seqlens).__name__
        )
    if isinstance(cp_context, ContextParallel):
        return cp_context.plan(rows, tokens)
    group = group_of("cp_context", cp_context)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout, forward, backward = _dense_routes(ranks, rank, rows, False)
    return Plan(
        group, rank, ranks, _cuts([tokens] * rows), forward, backward, layout.needs_matrices, "auto"
    )


def _plan_of_fla(context: Any, rows: int, tokens: int, cu_seqlens: object) -> Plan:
    """flash-linear-attention's object describes one rank: its sequences, and over how many ranks before and behind it
    the first and the last of them extend."""
    if cu_seqlens is not None and cu_seqlens is not context.cu_seqlens:
        arguments.value_error(
            "cu_seqlens", "None, or that of cp_context", type(cu_seqlens).__name__
        )
    if getattr(context, "pre_num_ranks_dev", None) is not None:
        raise NotImplementedError(
            "cp_context: expected counts of ranks on the host, got some on a device"
        )
    zigzag = getattr(context, "layout", "contiguous") == "zigzag"
    group = dist.group.WORLD if context.group is None else context.group
    group = group_of("cp_context", group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arguments.tensor("cp_context.cu_seqlens_cpu", context.cu_seqlens_cpu)
    cuts = tuple(context.cu_seqlens_cpu.tolist())
    if rows != 1 or len(cuts) < 2 or cuts[-1] != tokens:
        arguments.value_error(
            "q", f"B, T = 1, {cuts[-1]} as cp_context says", f"B, T = {rows}, {tokens}"
        )
    # Every part of the batch has one slot; those of a rank are neighbours.
    parts = 2 * ranks if zigzag else ranks
    own: tuple[int, ...]
    firsts: tuple[int, ...]
    if zigzag:
        before, behind = context.pre_num_ranks_by_part, context.post_num_ranks_by_part
        own, firsts = (rank, parts - 1 - rank), (0, index(context.front_num_seqs))
        slots = [2 * min(p, parts - 1 - p) + (p >= ranks) for p in range(parts)]
    else:
        before, behind = (context.pre_num_ranks,), (context.post_num_ranks,)
        own, firsts, slots = (rank,), (0,), list(range(parts))
    lasts = (*(first - 1 for first in firsts[1:]), len(cuts) - 2)
    before, behind = tuple(map(index, before)), tuple(map(index, behind))
    for p, pre, post in zip(own, before, behind, strict=True):
        if not 0 <= pre <= p or not 0 <= post < parts - p:
            arguments.value_error(
                "cp_context", f"parts beside part {p} of {parts}", f"{pre}, {post}"
            )

    def route(sends: Sequence[int], gives: Sequence[int], takes: Sequence[int], step: int) -> Route:
        """gives, takes: how far the sequences that leave and enter each own part extend. step: the way they go."""
        count = max((i + 1 for i, n in enumerate(gives) if n), default=0)
        entries = firsts if step > 0 else lasts
        chains = tuple(
            tuple((slots[p - step * n], slots[p - step * n]) for n in range(reach, 0, -1))
            for p, reach in zip(own, takes, strict=True)
            if reach
        )
        return Route(
            len(own),
            tuple(sends[:count]),  # in its place, though a front that nobody needs goes with a back
            tuple(piece for piece, reach in zip(entries, takes, strict=True) if reach),
            {rank: chains},
        )

    return Plan(
        group,
        rank,
        ranks,
        cuts,
        route(lasts, behind, before, 1),
        route(firsts, before, behind, -1),
        matrices=parts > 2,
        exchange="gather",  # nobody knows the chains of other ranks
    )


@functools.lru_cache(maxsize=64)
def _dense_routes(ranks: int, rank: int, rows: int, zigzag: bool) -> tuple[Layout, Route, Route]:
    layout = dense(ranks, rows, zigzag)
    return layout, layout.forward(rank), layout.backward(rank)


def _cuts(lengths: Any) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def group_of(name: str, given: object) -> dist.ProcessGroup:
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            arguments.value_error(name, "a DeviceMesh of one dimension", f"one of {given.ndim}")
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        kinds = "a ProcessGroup or a DeviceMesh"
        if name == "cp_context":
            kinds = f"a ContextParallel, {kinds}, or the context of flash-linear-attention"
        arguments.type_error(name, kinds, type(given).__name__)
    if dist.get_rank(given) < 0:
        arguments.value_error(name, "a group that this process is in", "another")
    return given


def _device_of(group_or_mesh: object, group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of a group's collectives lie."""
    if isinstance(group_or_mesh, DeviceMesh):
        kind = group_or_mesh.device_type
    else:
        kind = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _global_offsets(cu_seqlens: Tensor | None, copy: Tensor | None) -> tuple[int, ...] | None:
    given = cu_seqlens if copy is None else copy
    if given is None:
        return None
    name = "cu_seqlens" if copy is None else "cu_seqlens_cpu"
    arguments.tensor(name, given)
    if given.dtype not in arguments.OFFSETS:
        arguments.type_error(name, "int32 or int64", given.dtype)
    if copy is not None and copy.device.type != "cpu":
        arguments.value_error(name, "a tensor on the CPU", copy.device)
    if given.dim() != 1 or len(given) < 2:
        arguments.value_error(name, "[N + 1] with N >= 1", list(given.shape))
    found = tuple(given.tolist())
    if found[0] != 0 or any(a > b for a, b in zip(found, found[1:])):
        arguments.value_error(name, "offsets that rise from 0", list(found[:16]))
    return found
