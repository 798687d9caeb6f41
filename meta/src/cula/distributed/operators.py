"""An operator over the slices of all ranks, composed of calls of the same operator on one rank.

A rank walks its travelling pieces once to learn what state they end with (A), and those that lie inside a sequence once
more from the identity with v = 0 (M). The maps are exchanged and folded into the states in front of the local pieces,
and the call itself starts from those. A rank whose pieces all begin their sequences learns A from the call itself, and
kernels that can begin a call before its starting states are known share their work between the walks.

Backwards, the gradients in front of the pieces (B) travel the other way; M^T is the forward's, and nothing is
differentiated through M. Kernels that can begin a backward find B without the other gradients; else a rank that both
sends and receives computes all of them twice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cula import _check
from cula._facts import COMMON_FACTS, FACTS
from cula._registry import beside, resolve
from cula.distributed.context import Plan, plan_of
from cula.distributed.exchange import Wire, by_heads, folded
from cula.distributed.layout import Chain
from cula_core import arguments
from cula_core.delta_rule.call import Slice

_Tensors = dict[str, Tensor | None]
_Map = tuple[
    Tensor, Tensor | None
]  # A [H, K, V] and, of a piece that lies inside a sequence, M [H, K, K] or [H, 1, 1]
# Options of a public function that mean nothing to a call that is begun before its starting states are known.
_OF_WHOLE_CALLS = frozenset(("impl", "cp_context", "disable_recompute", "update_state_pool"))
_served: set[tuple[Any, ...]] = set()


def across_ranks(
    op: Callable[..., Any],
    check: Callable[..., None],
    cp_context: object,
    tokens: _Tensors,
    shared: _Tensors,
    options: dict[str, Any],
    choices: dict[str, Any],
    refused: dict[str, object],
    one_decay: bool = False,
    begin: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`op` with a `cp_context`.

    Args:
        op: a public function, which is called without one.
        check: its contract, which is asked before anything is sent.
        tokens: arguments `[B, T, ..]` of this rank, q and v among them.
        shared: tensors that all ranks have alike, such as A_log.
        options: arguments of `op` and of `check`, initial_state, output_final_state, state_v_first, cu_seqlens and
            cu_seqlens_cpu among them.
        choices: arguments of `op` alone, such as impl.
        refused: arguments of `check` that have to be None or False beside a context.
        one_decay: M is one number per head, from g and g_gamma, either of which may be None.
        begin: the function by which kernel packages begin a call of `op` whose starting states are not known yet; with
            `_backward` behind it the one by which they begin its backward.
    """
    for name, value in refused.items():
        if value is not None and value is not False:
            arguments.value_error(name, "None or False beside cp_context", type(value).__name__)
    given = {name: x for name, x in (tokens | shared).items() if x is not None}
    _refuse_dtensors(given | {"initial_state": options["initial_state"]})
    for name in ("q", "k", "v"):
        arguments.four_dims(name, given[name], "[B, T, heads, dim]")
    if given["q"].dtype is torch.float32:
        narrow = _check.cast_by_autocast(given["q"], given["k"], given["v"])
        given |= zip(("q", "k", "v"), narrow, strict=True)
    q, v = given["q"], given["v"]
    for name, x in tokens.items():
        if isinstance(x, Tensor) and x.shape[:2] != q.shape[:2]:
            arguments.value_error(
                name, f"[B, T] = {list(q.shape[:2])} first, as in q", list(x.shape)
            )
    plan = plan_of(cp_context, q.shape[0], q.shape[1], options.pop("cu_seqlens"))
    options.pop("cu_seqlens_cpu")
    packed = {
        name: x.flatten(0, 1)[None] if name in tokens and isinstance(x, Tensor) else x
        for name, x in given.items()
    }
    offsets = _offsets(plan.cuts, q.device)
    requires_grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad
        for x in (*given.values(), options["initial_state"])
    )
    absent = {name: None for name in tokens | shared if name not in given}
    check(
        **packed, **absent, **options, **refused, cu_seqlens=offsets, cu_seqlens_cpu=None,
        requires_grad=requires_grad,
    )  # fmt: skip

    if {**options, **choices}.get("use_intracard_cp") is True:
        arguments.value_error("use_intracard_cp", "'auto' or False beside cp_context", True)
    initial, v_first = options.pop("initial_state"), options.pop("state_v_first")
    wanted = options.pop("output_final_state")
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    heads = max(q.shape[2], v.shape[2])
    if initial is None:
        start = v.new_zeros(len(plan.cuts) - 1, heads, q.shape[3], v.shape[3], dtype=dtype)
    else:
        start = (initial.mT if v_first else initial).to(dtype)
    _refuse_unserved(op, packed, frozenset(tokens), start, options | choices)
    options |= choices
    half = back = fold = None
    if begin is not None and not torch.compiler.is_compiling():
        kernels = _served_by(op, packed, options, requires_grad=False)
        fold = None if one_decay else beside(kernels, "fold_slices")
        if packed["q"].shape[1] > 0:
            half = beside(kernels, begin)
            if requires_grad:
                kernels = _served_by(op, packed, options, requires_grad=True)
                back = beside(kernels, f"{begin}_backward")
    walk = _Walk(op, plan, tuple(packed), frozenset(tokens), options, one_decay, half, back, fold)
    o, final = _Across.apply(walk, start, *packed.values())
    o = o.reshape(*q.shape[:2], *o.shape[2:])  # whose gradient, unlike that of an index, is no copy
    if not wanted:
        return o, None
    final = (final.mT if v_first else final).contiguous()
    return o, final if initial is None else final.to(initial.dtype)


@dataclass(frozen=True)
class _Walk:
    """Local calls of `op`. names: of the tensors that come in a row; per_token: those of them that are `[1, T, ..]`."""

    op: Callable[..., Any]
    plan: Plan
    names: tuple[str, ...]
    per_token: frozenset[str]
    options: dict[str, Any]
    one_decay: bool
    begin: Callable[..., Any] | None
    begin_backward: Callable[..., Any] | None
    fold: Callable[..., Sequence[Tensor]] | None

    def __call__(
        self, tensors: Sequence[Tensor], start: Tensor, which: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final states of some of the local pieces, from the states `start`."""
        named = dict(zip(self.names, tensors, strict=True))
        runs = [(self.plan.cuts[i], self.plan.cuts[i + 1]) for i in which]
        cuts = (0, *accumulate(stop - begin for begin, stop in runs))
        if cuts[-1] != named["q"].shape[1]:
            named |= {name: _rows(named[name], runs) for name in self.per_token & named.keys()}
        if cuts[-1] == 0:
            v = named["v"]
            return v.new_empty(1, 0, start.shape[1], v.shape[3]), start.clone()
        if len(which) > 1:
            copy = torch.tensor(cuts, dtype=torch.int32)
            named |= {"cu_seqlens": _offsets(cuts, start.device), "cu_seqlens_cpu": copy}
        o, final = self.op(**named, **self.options, initial_state=start, output_final_state=True)
        return o, final

    def begun(self, tensors: Sequence[Tensor], initial: Tensor) -> Any:
        """The call by kernels, as far as it goes without the starting states; None if none can begin so."""
        if self.begin is None:
            return None
        plan, sends, takes = self.plan, self.plan.forward.sends, self.plan.forward.takes
        slices = tuple(
            Slice(plan.cuts[i], plan.cuts[i + 1], comes_on=i in takes, goes_on=i in sends)
            for i in self.every
        )
        return self._by(self.begin, tensors, initial, slices=slices)

    def _by(
        self, begin: Callable[..., Any], tensors: Sequence[Tensor], states: Tensor, **more: Any
    ) -> Any:
        """What a function of kernels begins over the local pieces."""
        return begin(
            **dict(zip(self.names, tensors, strict=True)),
            cu_seqlens=_offsets(self.plan.cuts, states.device),
            initial_state=states,
            **more,
            **{name: x for name, x in self.options.items() if name not in _OF_WHOLE_CALLS},
        )

    def backward(
        self, tensors: Sequence[Tensor], starts: Tensor, needs: Sequence[bool], d_o: Tensor
    ) -> _ByKernels | _ByGraph:
        """The way back from the gradients of outputs and final states. needs: which tensors require gradients."""
        if self.begin_backward is None:
            return _ByGraph(*self.with_graph(tensors, starts, needs), d_o)
        tensors = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        begun = self._by(self.begin_backward, tensors, starts, do=d_o)
        wanted = [name for name, need in zip(self.names, needs, strict=True) if need]
        return _ByKernels(begun, ["initial_state", *wanted])

    def maps(self, tensors: Sequence[Tensor], initial: Tensor) -> list[_Map]:
        """What the pieces that travel do to a state."""
        route = self.plan.forward
        if not route.sends:
            return []
        fresh = torch.stack(
            [torch.zeros_like(initial[i]) if i in route.takes else initial[i] for i in route.sends]
        )
        ends = self(tensors, fresh, route.sends)[1]
        return self.with_matrices(ends.unbind(), tensors, initial)

    def with_matrices(
        self, ends: Sequence[Tensor], tensors: Sequence[Tensor], initial: Tensor
    ) -> list[_Map]:
        """The same from what the pieces that travel add to a state."""
        route = self.plan.forward
        inside = tuple(i for i in route.sends if i in route.takes) if self.plan.matrices else ()
        matrices = (
            dict(zip(inside, self.matrices(tensors, inside, initial), strict=True))
            if inside
            else {}
        )
        return [(end, matrices.get(i)) for i, end in zip(route.sends, ends, strict=True)]

    def starts(
        self, initial: Tensor, own: Sequence[_Map]
    ) -> tuple[Tensor, Wire | None, Tensor | None]:
        """The states in front of the local pieces; how they travelled, and the matrices that came with them."""
        plan, route = self.plan, self.plan.forward
        starts = initial.clone()
        if route.slots == 0:
            return self.plan.checked(starts), None, None
        _, heads, dim_k, dim_v = initial.shape
        columns = (1 if self.one_decay else dim_k) if plan.matrices else 0
        # A^T above M^T, as kernels write and read them.
        maps = initial.new_zeros(route.slots, heads, dim_v + columns, dim_k).mT
        for slot, (end, matrix) in enumerate(own):
            maps[slot, ..., :dim_v] = end
            if matrix is not None:
                maps[slot, ..., dim_v:] = matrix
        wire = self._wire(maps)
        vectors, matrices = wire.collect(maps.mT).mT.split([dim_v, columns], -1)
        states = wire.receive(route, heads, vectors, matrices, False, self.folded)
        for piece, state in zip(route.takes, states, strict=True):
            starts[piece] = state
        return self.plan.checked(starts), wire, matrices

    def folded(
        self, vectors: Tensor, matrices: Tensor | None, chains: Sequence[Chain], transposed: bool
    ) -> Sequence[Tensor]:
        """`exchange.folded`, by the kernels that serve the call where they can."""
        if self.fold is None or matrices is None or all(len(chain) < 2 for chain in chains):
            return folded(vectors, matrices, chains, transposed)
        return self.fold(vectors, matrices, chains, transposed)

    @property
    def every(self) -> tuple[int, ...]:
        """All local pieces."""
        return tuple(range(len(self.plan.cuts) - 1))

    def with_graph(
        self, tensors: Sequence[Tensor], starts: Tensor, needs: Sequence[bool]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Leaves for the starts and the tensors, those of which that `needs` says require gradients; and the results.

        The graph between them belongs to nobody else: hooks on saved tensors, as of activation checkpoints, skip it.
        """
        leaves = [
            x.detach().requires_grad_(need)
            for x, need in zip((starts, *tensors), (True, *needs), strict=True)
        ]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        ):
            return leaves, self(leaves[1:], leaves[0], self.every)

    def matrices(self, tensors: Sequence[Tensor], which: tuple[int, ...], like: Tensor) -> Tensor:
        """M `[pieces, H, K, K]` of some of the local pieces, or one number per head `[pieces, H, 1, 1]`."""
        heads, dim_k, dtype = like.shape[1], like.shape[2], like.dtype
        named = dict(zip(self.names, tensors, strict=True))
        if self.one_decay:
            sums = []
            for piece in which:
                begin, stop = self.plan.cuts[piece : piece + 2]
                if "g" in named:
                    total = named["g"][0, begin:stop].sum(0, dtype=dtype)
                else:
                    total = like.new_zeros(heads)
                if "g_gamma" in named:
                    total = total.add(named["g_gamma"].to(dtype), alpha=stop - begin)
                sums.append(total)
            return torch.stack(sums).exp()[..., None, None]
        identity = torch.eye(dim_k, dtype=dtype, device=like.device).repeat(len(which), heads, 1, 1)
        nothing = named["v"].new_zeros(*named["v"].shape[:3], dim_k)
        without = tuple(nothing if name == "v" else x for name, x in named.items())
        return self(without, identity, which)[1]

    def _wire(self, maps: Tensor) -> Wire:
        plan = self.plan
        bytes_in = maps.numel() * maps.element_size() * (plan.ranks - 1)
        return Wire(
            plan.group, plan.rank, plan.ranks, by_heads(plan.exchange, plan.ranks, bytes_in)
        )


def _outside_autocast(function: Callable[..., Any]) -> Any:
    """A way of `_Across` where autocast, which would round maps and folded states, is off."""

    @functools.wraps(function)
    def exact(ctx: Any, first: Any, second: Tensor, *more: Tensor) -> Any:
        with _check.outside_autocast(second.device.type):
            return function(ctx, first, second, *more)

    return exact


class _Across(torch.autograd.Function):
    """`(o [1, T, H, V], final [pieces, H, K, V])`; every rank takes part in both exchanges, whatever it holds."""

    @staticmethod
    @_outside_autocast
    def forward(ctx: Any, walk: _Walk, initial: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.walk, ctx.needs = walk, ctx.needs_input_grad[1:]
        route, learns = walk.plan.forward, any(ctx.needs)

        def call(starts: Tensor) -> tuple[Tensor, Tensor]:
            if not learns:
                return walk(tensors, starts, walk.every)
            # As with gradients, so that what cannot have them refuses now. The graph is made again when it is needed.
            o, final = walk.with_graph(tensors, starts, ctx.needs[1:])[1]
            return o.detach(), final.detach()

        begun = walk.begun(tensors, initial)
        done: tuple[Tensor, Tensor] | None = None
        if begun is not None:
            held = dict(zip(sorted(route.sends), begun.maps, strict=True))
            own = [held[piece] for piece in route.sends]
            if walk.one_decay:  # which kernels leave to all tokens' sum
                own = walk.with_matrices([end for end, _ in own], tensors, initial)
        elif route.sends and not route.takes:
            done = call(walk.plan.checked(initial))
            own = [(done[1][piece], None) for piece in route.sends]
        else:
            own = walk.maps(tensors, initial)
        starts, ctx.wire, matrices = walk.starts(initial, own)
        if begun is not None:
            done = begun.finish(starts)
        if learns:
            ctx.save_for_backward(starts, matrices, *tensors)
        return call(starts) if done is None else done

    @staticmethod
    @_outside_autocast
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        starts, matrices, *tensors = ctx.saved_tensors
        route, wire = ctx.walk.plan.backward, ctx.wire
        way = ctx.walk.backward(tensors, starts, ctx.needs[1:], d_o)
        d_final = d_final.clone()
        for piece in route.takes:  # only the state behind the sequence has a gradient of its own
            d_final[piece] = 0
        if wire is not None:
            _, heads, dim_k, dim_v = starts.shape
            maps = starts.new_zeros(route.slots, heads, dim_v, dim_k).mT
            if route.sends:
                front = way.front(d_final)
                for slot, piece in enumerate(route.sends):
                    maps[slot] = front[piece]
            else:
                way.prepare()
            found = wire.collect(maps.mT).mT
            behind = wire.receive(route, heads, found, matrices, True, ctx.walk.folded)
            for piece, d in zip(route.takes, behind, strict=True):
                d_final[piece] = d
        grads = way.finish(d_final, bool(route.takes))
        d_initial = grads[0].clone()
        for piece in ctx.walk.plan.forward.takes:
            d_initial[piece] = 0
        rest = iter(grads[1:])
        return (
            None,
            d_initial if ctx.needs[0] else None,
            *(next(rest) if need else None for need in ctx.needs[1:]),
        )


class _ByGraph:
    """Gradients through the graph of a call, of the states in front and of tensors, in this order. front: of the states
    alone, where the gradients of final states are those; prepare: what can be done in place of it. finish: all;
    changed: whether they are others since then."""

    def __init__(self, inputs: list[Tensor], results: tuple[Tensor, Tensor], d_o: Tensor) -> None:
        self._wanted = [x for x in inputs if x.requires_grad]
        self._results, self._d_o = results, d_o
        self._found: tuple[Tensor, ...] = ()

    def front(self, d_final: Tensor) -> Tensor:
        return self.finish(d_final, True)[0]

    def prepare(self) -> None:
        """Nothing: the graph is there."""

    def finish(self, d_final: Tensor, changed: bool) -> tuple[Tensor, ...]:
        if changed or not self._found:
            pairs = zip(self._results, (self._d_o, d_final), strict=True)
            found = [(y, d) for y, d in pairs if y.requires_grad]
            self._found = torch.autograd.grad(
                [y for y, _ in found], self._wanted, [d for _, d in found], retain_graph=True, allow_unused=True,
                materialize_grads=True,
            )  # fmt: skip
        return self._found


class _ByKernels:
    """The same by kernels that begin a backward. wanted: the tensors that require gradients, by name."""

    def __init__(self, begun: Any, wanted: list[str]) -> None:
        self._begun, self._wanted = begun, wanted
        self.front, self.prepare = begun.front, begun.prepare

    def finish(self, d_final: Tensor, changed: bool) -> tuple[Tensor, ...]:
        found = dict(zip(self._begun.gives, self._begun.finish(d_final), strict=True))
        return tuple(found[name] for name in self._wanted)


def _served_by(
    op: Callable[..., Any],
    named: dict[str, Tensor],
    options: dict[str, Any],
    requires_grad: bool,
) -> Callable[..., Any]:
    """What serves `op` on one rank, with gradients or without."""
    q = named["q"]
    dim_k, dim_v, group, grouped = _check.grouped_operands(q, named["k"], named["v"])
    softplus = tuple(options.get(name) for name in ("softplus_beta", "softplus_threshold"))
    decay = named.get("g_gamma")
    known = options | {
        "dtype": q.dtype, "head_dim_k": dim_k, "head_dim_v": dim_v, "requires_grad": requires_grad,
        "state_dtype": torch.float32, "gate_dtype": _check.dtype_of("g", named.get("g")),
        "beta_dtype": _check.dtype_of("beta", named.get("beta")), "varlen": True, "group": group,
        "initial_state": True, "output_final_state": True, "state_v_first": False, "grouped_queries": grouped,
        "softplus": softplus != (1.0, 20.0), "lower_bound": options.get("lower_bound") is not None,
        "head_decay": decay is not None, "decay_requires_grad": requires_grad and _check.requires_grad(decay),
    }  # fmt: skip
    facts = (known.get(name, False) for name in (*COMMON_FACTS, *FACTS[op.__name__]))
    return resolve(op.__name__, options["impl"], q.device, *facts)


def _refuse_unserved(
    op: Callable[..., Any],
    named: dict[str, Tensor],
    per_token: frozenset[str],
    start: Tensor,
    options: dict[str, Any],
) -> None:
    """Raises what a call would raise for lack of an implementation: on every rank, before any of them waits.

    A rank whose pieces do not travel would call `op` behind the exchange only. A call of one token tells, once.
    """
    learns = torch.is_grad_enabled()
    kinds = tuple((n, x.dtype, x.device, x.shape[2:], x.requires_grad) for n, x in named.items())
    key = (op, kinds, start.shape[1:], learns, tuple(options.items()))
    if key in _served:
        return
    one = {
        name: x.new_zeros(1, 1, *x.shape[2:]).requires_grad_(x.requires_grad)
        if name in per_token
        else x
        for name, x in named.items()
    }
    first = start.new_zeros(1, *start.shape[1:])
    op(**one, **options, initial_state=first, output_final_state=True)
    _served.add(key)


def _rows(x: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Runs of tokens of `[1, T, ..]`, those that touch as one; a view where that is all."""
    joined = [list(runs[0])] if runs else [[0, 0]]
    for begin, stop in runs[1:]:
        if begin == joined[-1][1]:
            joined[-1][1] = stop
        else:
            joined.append([begin, stop])
    parts = [x[:, begin:stop] for begin, stop in joined]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept serves training too
def _offsets(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(cuts, dtype=torch.int32, device=device)


def _refuse_dtensors(tensors: _Tensors) -> None:
    module = sys.modules.get("torch.distributed.tensor")
    for name, x in tensors.items():
        if module is not None and isinstance(x, module.DTensor):
            raise TypeError(
                f"{name}: expected a local tensor, got a DTensor; torch.distributed.tensor.experimental.local_map "
                "calls a function with the local tensors of DTensors"
            )
