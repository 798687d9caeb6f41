"""Operators over the ranks of a real process group, against whole sequences in one process.

The world of three processes that serves all tests of the session runs functions of this module on every rank.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sequences_over_ranks import CHANNELS, HEADS, WIDTH, Inputs, problem, random_batch, whole

from cula.distributed import ContextParallel, operators
from cula.distributed.exchange import folded
from cula.kda import chunk_kda
from cula.lightning import chunk_gated_delta_rule, chunk_lightning_attn, chunk_simple_gla

RANKS = 3
KINDS = ("kda", "gdn", "gla")


# ---- what runs on the ranks ------------------------------------------------------------------------------------------


def call(kind: str, x: Inputs, cp: object, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of a kind on tensors without a batch dimension; scale 1."""
    q, k, v, g = (t[None] for t in (x.q, x.k, x.v, x.g))
    options = {"scale": 1.0, "output_final_state": True, "cp_context": cp, **options}
    if kind == "kda":
        return chunk_kda(q, k, v, g, x.beta[None], **options)
    if kind == "gdn":
        return chunk_gated_delta_rule(q, k, v, g[..., 0], x.beta[None], **options)
    return chunk_simple_gla(q, k, v, g[..., 0], **options)


def random_cases(seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        cu_seqlens, bounds, zigzag = random_batch(rng, RANKS)
        compare(seed, KINDS[seed % 3], cu_seqlens, bounds, "zigzag" if zigzag else "contiguous")


def compare(
    seed: int, kind: str, cu_seqlens: list[int], bounds: list[int] | None, layout: str
) -> None:
    """Forward and backward against the oracle, and both exchanges against each other to the bit."""
    x, states, d_o, d_final = problem(seed, cu_seqlens[-1], len(cu_seqlens) - 1, kind)
    leaves = [t.clone().requires_grad_() for t in (*x, states) if t is not None]
    named = Inputs(*leaves[:4], leaves[4] if x.beta is not None else None)
    o, final = whole(named, leaves[-1], cu_seqlens)
    wanted = torch.autograd.grad(
        (o, final), leaves, (d_o, d_final), allow_unused=True, materialize_grads=True
    )
    found = []
    for exchange in ("gather", "transpose"):
        cp = ContextParallel(
            dist.group.WORLD,
            cu_seqlens=torch.tensor(cu_seqlens),
            bounds=bounds,
            layout=layout,
            exchange=exchange,
        )
        cp.check()
        own = [cp.shard(t, 0).clone().requires_grad_() for t in x if t is not None]
        sequences = [p.sequence for p in cp.pieces]
        # What is no state of a sequence is not read.
        start = torch.stack(
            [states[p.sequence] if p.begins else states[0] * torch.nan for p in cp.pieces]
            or [states[0]]
        )
        start = start[: len(sequences)].requires_grad_()
        local = Inputs(*own[:4], own[4] if x.beta is not None else None)
        got, last = call(kind, local, cp, initial_state=start)
        close(got[0], cp.shard(o.detach(), 0))
        # The gradient behind a piece that does not end its sequence is not read either.
        d_last = torch.stack(
            [d_final[p.sequence] if p.ends else d_final[0] * torch.nan for p in cp.pieces]
            or [d_final[0]]
        )
        grads = torch.autograd.grad(
            (got, last), [*own, start], (cp.shard(d_o, 0)[None], d_last[: len(sequences)])
        )
        for a, b in zip(grads[:-1], wanted, strict=False):
            close(a, cp.shard(b, 0))
        for i, piece in enumerate(cp.pieces):
            if piece.ends:
                close(last[i], final[piece.sequence].detach())
            close(grads[-1][i], wanted[-1][piece.sequence] * float(piece.begins))
        found.append([got.detach(), last.detach(), *grads])
        assert torch.equal(
            cp.unshard(got.detach(), 1)[0, : cu_seqlens[-1]], gathered(got.detach(), cp, o)
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def gathered(got: torch.Tensor, cp: ContextParallel, like: torch.Tensor) -> torch.Tensor:
    """All tokens by object collectives."""
    shards: list[Any] = [None] * RANKS
    dist.all_gather_object(shards, got[0])
    whole = torch.full_like(like.detach(), torch.nan)
    for rank, ranges in enumerate(cp._ranges(cp.bounds)):
        rest = shards[rank]
        for low, high in ranges:
            whole[low:high], rest = rest[: high - low], rest[high - low :]
    return whole


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def dense_batch(layout: str, how: str) -> None:
    """Two rows with grouped heads, gates inside, and states with V first, without any lengths."""
    rng = torch.Generator().manual_seed(3)
    rows, heads, value_heads = 2, 2, 4
    tokens = 18 if layout == "zigzag" else 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=rng, dtype=torch.float64)

    q, k = normal(tokens, heads, WIDTH), normal(tokens, heads, WIDTH)
    v, g, beta = (
        normal(tokens, value_heads, CHANNELS),
        normal(tokens, value_heads, WIDTH),
        normal(tokens, value_heads),
    )
    A_log = torch.linspace(-1, 0.5, value_heads, dtype=torch.float64)
    state, d_o, d_state = (
        normal(value_heads, CHANNELS, WIDTH),
        normal(*v.shape[1:]),
        normal(value_heads, CHANNELS, WIDTH),
    )
    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True, "state_v_first": True,
    }  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, A_log, state)]
    o, final = chunk_kda(*leaves[:5], A_log=leaves[5], initial_state=leaves[6], **options)
    wanted = torch.autograd.grad((o, final), leaves, (d_o, d_state))

    context: Any
    cp = ContextParallel(dist.group.WORLD, layout=layout)
    if how == "context":
        context = cp
    elif how == "group":
        context = dist.group.WORLD
    else:
        context = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    local = [cp.shard(x).clone().requires_grad_() for x in (q, k, v, g, beta)]
    rate = A_log.clone().requires_grad_()
    parts = 2 if layout == "zigzag" else 1
    start = state.repeat_interleave(parts, 0).requires_grad_()
    got, last = chunk_kda(*local, A_log=rate, initial_state=start, cp_context=context, **options)
    close(got, cp.shard(o.detach()))
    d_last = d_state.repeat_interleave(parts, 0)
    grads = torch.autograd.grad((got, last), [*local, rate, start], (cp.shard(d_o), d_last))
    for a, b in zip(grads[:5], wanted, strict=False):
        close(a, cp.shard(b))
    total = grads[5].clone()
    dist.all_reduce(total)
    close(total, wanted[5])
    rank = dist.get_rank()
    begins, ends = (0, 0) if layout == "zigzag" else (0, RANKS - 1)
    if rank == ends:
        close(last[parts - 1 :: parts], final.detach())
    close(grads[6][::parts], wanted[6] * float(rank == begins))
    assert parts == 1 or not grads[6][1::2].any()


def two_ranks_send_no_matrices() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    group = groups[rank // 2]
    x, states, _, _ = problem(5, 11, 1, "kda")
    o, final = whole(x, states, [0, 11])
    calls = []
    cp = ContextParallel(group, bounds=[0, 4, 11] if rank < 2 else [0, 11])
    local = Inputs(*(cp.shard(t, 0) for t in x))
    from cula.distributed import operators

    plain = operators._Walk.matrices
    operators._Walk.matrices = lambda *a: calls.append(a) or plain(*a)
    got, last = call("kda", local, cp, initial_state=states)
    operators._Walk.matrices = plain
    close(got[0], cp.shard(o, 0))
    if rank:
        close(last, final)
    assert not calls
    assert cp.plan(1, len(local.q)).matrices is False


def part_by_fla(cu_seqlens: list[int], part: int, size: int) -> tuple[list[int], int, int]:
    """What flash-linear-attention says of one part of the batch: lengths, and parts before and behind."""
    low, high = part * size, (part + 1) * size
    inside = [
        (a, b) for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False) if a < high and b > low
    ]
    lengths = [min(b, high) - max(a, low) for a, b in inside]
    return lengths, part - inside[0][0] // size, (inside[-1][1] - 1) // size - part


def with_the_context_of_fla(cu_seqlens: list[int], layout: str) -> None:
    rank, total = dist.get_rank(), cu_seqlens[-1]
    parts = (rank, 2 * RANKS - 1 - rank) if layout == "zigzag" else (rank,)
    size = total // (RANKS * len(parts))
    lengths, before, behind = zip(*(part_by_fla(cu_seqlens, p, size) for p in parts), strict=True)
    local = torch.tensor([0, *accumulate(sum(lengths, []))], dtype=torch.int32)
    context = SimpleNamespace(
        group=dist.group.WORLD, cu_seqlens=local, cu_seqlens_cpu=local, layout=layout, pre_num_ranks=None,
        post_num_ranks=None, pre_num_ranks_dev=None,
    )  # fmt: skip
    if layout == "zigzag":
        context.front_num_seqs = len(lengths[0])
        context.pre_num_ranks_by_part, context.post_num_ranks_by_part = before, behind
    else:
        (context.pre_num_ranks,), (context.post_num_ranks,) = before, behind

    def own(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[p * size : (p + 1) * size] for p in parts])

    x, _, d_o, _ = problem(7, total, len(cu_seqlens) - 1, "gdn")
    leaves = [t.clone().requires_grad_() for t in x]
    zeros = torch.zeros(len(cu_seqlens) - 1, HEADS, WIDTH, CHANNELS, dtype=torch.float64)
    o, _ = whole(Inputs(*leaves), zeros, cu_seqlens)
    wanted = torch.autograd.grad(o, leaves, d_o)
    mine = [own(t).requires_grad_() for t in x]
    got, _ = call("gdn", Inputs(*mine), context, cu_seqlens=local)
    close(got[0], own(o.detach()))
    for a, b in zip(torch.autograd.grad(got, mine, own(d_o)[None]), wanted, strict=True):
        close(a, own(b))
    with pytest.raises(ValueError, match="^cu_seqlens: expected None, or that of cp_context"):
        call("gdn", Inputs(*mine), context, cu_seqlens=local.clone())
    context.pre_num_ranks_dev = local
    with pytest.raises(NotImplementedError, match="on the host"):
        call("gdn", Inputs(*mine), context)


def fewer_heads_than_ranks_and_low_precision() -> None:
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 40, 1, 8, generator=rng) for _ in range(3))
    whole_o, whole_state = chunk_lightning_attn(q, k, v, 1, 4, output_final_state=True)
    results = []
    for exchange in ("gather", "transpose"):
        cp = ContextParallel(dist.group.WORLD, bounds=[0, 7, 30, 40], exchange=exchange)
        local = [cp.shard(x) for x in (q, k, v)]
        o, state = chunk_lightning_attn(*local, 1, 4, output_final_state=True, cp_context=cp)
        assert state.dtype == torch.float32
        close(o, cp.shard(whole_o), 1e-4)
        if dist.get_rank() == RANKS - 1:
            close(state, whole_state, 1e-4)
        half, last = chunk_lightning_attn(
            *(x.bfloat16() for x in local), 1, 4, output_final_state=True, cp_context=cp,
            initial_state=torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16),
        )  # fmt: skip
        assert half.dtype == last.dtype == torch.bfloat16
        close(half.float(), cp.shard(whole_o), 0.5)
        results.append((o, state))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def a_rank_with_another_layout() -> None:
    rank = dist.get_rank()
    cu_seqlens = [0, 5, 9] if rank != 1 else [0, 4, 9]
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor(cu_seqlens), bounds=[0, 3, 6, 9])
    x, _, _, _ = problem(2, 9, 2, "kda")
    o, _ = call("kda", Inputs(*(cp.shard(t, 0) for t in x)), cp)
    assert o.isnan().all()
    assert cp.halo(cp.shard(x.q, 0)[None], 1)[1].isnan().all()
    named = "rank 1$" if rank != 1 else "rank 0, rank 2$"
    with pytest.raises(
        ValueError, match=f"^cp_context: expected one layout on all ranks.* on {named}"
    ):
        cp.check()


def nothing_of_the_inputs_is_written() -> None:
    """Strided views of larger tensors stay as they are, padding included, and so does the initial state."""
    x, states, _, _ = problem(9, 12, 1, "kda")
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 12]), layout="zigzag")
    storage = [torch.full((t.shape[0] + 3, *t.shape[1:]), 7.0, dtype=torch.float64) for t in x]
    for room, t in zip(storage, x, strict=True):
        room[:4] = cp.shard(t, 0)
    start = torch.stack([states[0], states[0]])
    before = [t.clone() for t in (*storage, start)]
    o, last = call("kda", Inputs(*(room[:4] for room in storage)), cp, initial_state=start)
    o.zero_()
    last.zero_()
    assert all(torch.equal(a, b) for a, b in zip((*storage, start), before, strict=True))


def refusals() -> None:
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 4, 9]))
    x, _, _, _ = problem(2, 9, 2, "gdn")
    local = Inputs(*(cp.shard(t, 0) for t in x))

    def refuses(
        error: type[Exception],
        message: str,
        context: object = cp,
        inputs: Inputs = local,
        **options: Any,
    ):
        with pytest.raises(error, match=message):
            call("gdn", inputs, context, **options)

    refuses(TypeError, "^cp_context: expected a ContextParallel, a ProcessGroup", 3)
    refuses(
        ValueError, "^cu_seqlens: expected None with cp_context", cu_seqlens=torch.tensor([0, 3])
    )
    refuses(ValueError, "^q: expected T = 3 as cp_context says, got T = 2", inputs=local.part(0, 2))
    refuses(ValueError, "^out: expected None", out=local.v[None])
    refuses(
        ValueError, "^state_pool: expected None", state_pool=torch.zeros(2, HEADS, WIDTH, CHANNELS)
    )
    refuses(
        ValueError,
        "^has_initial_state: expected None",
        has_initial_state=torch.ones(1, dtype=torch.bool),
    )
    refuses(ValueError, "^checkpoint_every_n_tokens: expected None", checkpoint_every_n_tokens=64)
    refuses(
        ValueError,
        "^initial_state: ",
        initial_state=torch.zeros(7, HEADS, WIDTH, CHANNELS).double(),
    )
    refuses(ValueError, "^beta: expected", inputs=local._replace(beta=local.beta[:2]))
    # What is refused for lack of a kernel is refused on the last rank too, which sends nothing.
    refuses(RuntimeError, "^impl='fla' cannot serve", impl="fla")
    refuses(ValueError, "^use_intracard_cp: expected 'auto' or False beside", use_intracard_cp=True)
    with pytest.raises(ValueError, match="^return_intermediate_states: expected None or False"):
        k = torch.zeros(1, 3, HEADS, WIDTH)
        chunk_kda(k, k, k, k, k[..., 0], return_intermediate_states=True, cp_context=cp)
    for name, value in (
        ("state_pool", k),
        ("checkpoint_every_n_tokens", 64),
        ("has_initial_state", k),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected None or False beside cp_context"):
            chunk_kda(k, k, k, k, k[..., 0], **{name: value}, cp_context=cp)
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    refuses(
        TypeError,
        "^q: expected a local tensor, got a DTensor; .*local_map",
        inputs=local._replace(q=DTensor.from_local(local.q, mesh, [Shard(0)])),
    )
    plane = dist.device_mesh.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("a", "b"))
    refuses(ValueError, "^cp_context: expected a DeviceMesh of one dimension", plane)
    for options, message in (
        ({"cu_seqlens": torch.tensor([0, 5, 4])}, "cu_seqlens: expected offsets that rise from 0"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens: expected int32 or int64"),
        ({"bounds": [0, 5, 9]}, "bounds: expected 4 numbers that rise from 0"),
        ({"bounds": [0, 5, 4, 9]}, "bounds: expected 4 numbers"),
        (
            {"bounds": [0, 1, 2, 3], "cu_seqlens": torch.tensor([0, 4])},
            "bounds: .* from 0 to 4, got",
        ),
        ({"layout": "ring"}, "layout: expected 'contiguous' or 'zigzag'"),
        ({"exchange": "ring"}, "exchange: expected"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ContextParallel(dist.group.WORLD, **options)
    zigzag = ContextParallel(dist.group.WORLD, layout="zigzag")
    with pytest.raises(ValueError, match="^x: expected tokens in 6 equal parts"):
        zigzag.shard(torch.zeros(1, 8))
    with pytest.raises(ValueError, match="^x: expected no gradients"):
        zigzag.unshard(torch.zeros(1, 2, requires_grad=True))
    with pytest.raises(ValueError, match="^x: expected 9 tokens"):
        cp.shard(torch.zeros(1, 8))
    with pytest.raises(ValueError, match="^q: expected an even T"):
        call("gdn", local, zigzag)


class Halves:
    """What kernels give that begin a call before the states in front are known, by calls of the reference. Those of
    simple GLA leave M, the decay of all tokens, to who exchanges the maps."""

    def __init__(self, function: Any, begun: list[Any], **given: Any) -> None:
        begun.append(self)
        self.function = function
        self.slices = given.pop("slices")
        self.starts, self.given = given.pop("initial_state"), given
        assert given["cu_seqlens"].tolist() == [
            *(x.start for x in self.slices),
            given["q"].shape[1],
        ]
        self.maps = [self.map_of(n) for n, part in enumerate(self.slices) if part.goes_on]

    def call(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.function(**self.given | changes, output_final_state=True, cp_context=False)

    def map_of(self, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        part, start = self.slices[n], self.starts[n : n + 1]
        x = {
            name: self.given[name][:, part.start : part.stop]
            for name in ("q", "k", "v", "g", "beta")
            if name in self.given
        }
        alone = x | {"cu_seqlens": None}
        if not part.comes_on:
            return self.call(**alone, initial_state=start)[1][0], None
        added = self.call(**alone, initial_state=torch.zeros_like(start))[1][0]
        if self.function is chunk_simple_gla:
            return added, None
        identity = torch.eye(WIDTH, dtype=start.dtype).expand(1, HEADS, -1, -1)
        alone["v"] = torch.zeros_like(x["k"])
        return added, self.call(**alone, initial_state=identity)[1][0]

    def finish(self, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.call(initial_state=starts)


class TwoSteps:
    """What kernels give that begin a backward before the gradients behind are known, by calls of the reference."""

    def __init__(self, function: Any, begun: list[Any], **given: Any) -> None:
        begun.append(self)
        names = ("q", "k", "v", "initial_state", "g", "beta")
        self.function, self.gives = function, tuple(name for name in names if name in given)
        self.do, self.given, self.fronts = given.pop("do"), given, 0
        self.prepared = False

    def pulled(self, dht: torch.Tensor, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        given = {
            name: x.detach().requires_grad_() if name in names else x
            for name, x in self.given.items()
        }
        with torch.enable_grad():
            results = self.function(**given, output_final_state=True, cp_context=False)
        return torch.autograd.grad(results, [given[name] for name in names], (self.do, dht))

    def front(self, dht: torch.Tensor) -> torch.Tensor:
        self.fronts += 1
        return self.pulled(dht, ("initial_state",))[0]

    def prepare(self) -> None:
        self.prepared = True

    def finish(self, dht: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return self.pulled(dht, self.gives)


def stand_in(function: Any, begun: list[Any], steps: list[Any], folds: list[Any]) -> Any:
    """For `beside`: functions by which calls and their backwards are begun, and maps are folded."""

    def fold(
        vectors: torch.Tensor, matrices: torch.Tensor, chains: list[Any], back: bool
    ) -> list[torch.Tensor]:
        # As kernels read them: A^T and M^T, row behind row.
        assert vectors.stride()[-2:] == matrices.stride()[-2:] == (1, WIDTH)
        folds.append(chains)
        return folded(vectors, matrices, chains, back)

    def found(_: Any, name: str) -> Any:
        if name == "fold_slices":
            return fold
        kind, made = (TwoSteps, steps) if name.endswith("_backward") else (Halves, begun)
        return functools.partial(kind, function, made)

    return found


def in_two_halves(kind: str, cu_seqlens: list[int], bounds: list[int] | None, layout: str) -> None:
    """A call by kernels that can begin it is the same as one that is composed of whole calls."""
    x, states, _, _ = problem(11, cu_seqlens[-1], len(cu_seqlens) - 1, kind)
    function = {"kda": chunk_kda, "gla": chunk_simple_gla}[kind]
    cp = ContextParallel(
        dist.group.WORLD, cu_seqlens=torch.tensor(cu_seqlens), bounds=bounds, layout=layout
    )
    local = Inputs(*(None if t is None else cp.shard(t, 0) for t in x))
    start = torch.stack([states[p.sequence] * (1 if p.begins else torch.nan) for p in cp.pieces])
    begun: list[Halves] = []
    folds: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        expected = call(kind, local, cp, initial_state=start)
        patch.setattr(operators, "beside", stand_in(function, begun, [], folds))
        found = call(kind, local, cp, initial_state=start)
    assert len(begun) == 1
    # One decay per head, and states that one slice alone adds to, need no kernel.
    chains = cp.plan(1, local.q.shape[0]).forward.chains[dist.get_rank()]
    needed = kind == "kda" and any(len(chain) > 1 for chain in chains)
    assert folds == [chains] * needed
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    o, final = whole(x, states, cu_seqlens)
    close(found[0][0], cp.shard(o, 0))
    for i, piece in enumerate(cp.pieces):
        if piece.ends:
            close(found[1][i], final[piece.sequence])
    # With gradients, of some inputs or of all.
    _, _, d_o, d_final = problem(12, cu_seqlens[-1], len(cu_seqlens) - 1, kind)
    behind = torch.stack(
        [d_final[p.sequence] * (1 if p.ends else torch.nan) for p in cp.pieces] or [d_final[0]]
    )[: len(cp.pieces)]
    for wanting in ("qkvgbs", "vs", "g"):
        grads, steps, begun = [], [], []
        for kernels in (False, True):
            leaves = [None if t is None else t.detach().clone() for t in (*local, start)]
            for name, leaf in zip("qkvgbs", leaves, strict=True):
                if leaf is not None:
                    leaf.requires_grad_(name in wanting)
            with pytest.MonkeyPatch.context() as patch:
                if kernels:
                    patch.setattr(operators, "beside", stand_in(function, begun, steps, []))
                o, last = call(kind, Inputs(*leaves[:5]), cp, initial_state=leaves[5])
            needing = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            grads.append(torch.autograd.grad((o, last), needing, (cp.shard(d_o, 0)[None], behind)))
        assert len(begun) == len(steps) == 1
        assert steps[0].fronts == any(not piece.begins for piece in cp.pieces)
        assert not (steps[0].prepared and steps[0].fronts)
        for a, b in zip(*grads, strict=True):
            close(a, b)


def checkpointed() -> None:
    """Recomputed forwards, with their exchange, give the same gradients."""
    x, _, d_o, _ = problem(4, 12, 1, "kda")
    cp = ContextParallel(dist.group.WORLD, bounds=[0, 5, 5, 12])
    found = []
    for again in (False, True):
        own = [cp.shard(t, 0).clone().requires_grad_() for t in x]

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            return call("kda", Inputs(*tensors), cp)[0]

        o = (
            torch.utils.checkpoint.checkpoint(layer, *own, use_reentrant=False)
            if again
            else layer(*own)
        )
        found.append(torch.autograd.grad(o, own, cp.shard(d_o, 0)[None]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def in_autocast(kind: str) -> None:
    """Maps travel and are folded in float32: a call has the bits of one with bfloat16 activations, without autocast."""
    x, states, d_o, _ = problem(6, 48, 1, kind)
    single = [None if t is None else t.float() for t in x]
    for exchange in ("gather", "transpose"):
        cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 48]), exchange=exchange)
        own = [None if t is None else cp.shard(t, 0) for t in single]
        found = []
        for cast in (True, False):
            given = Inputs(*(None if t is None else t.clone() for t in own))
            if not cast:
                given = given._replace(**{n: getattr(given, n).bfloat16() for n in ("q", "k", "v")})
            leaves = [t.requires_grad_() for t in given if t is not None]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                o, last = call(kind, given, cp, initial_state=states.float())
                assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
            grads = torch.autograd.grad(o, leaves, cp.shard(d_o, 0)[None].bfloat16())
            found.append([o, last, *(d.float() for d in grads)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_random_batches_with_both_exchanges(world):
    world(random_cases, list(range(6)))


@pytest.mark.parametrize(
    ("kind", "cu_seqlens", "bounds", "layout"),
    [
        ("gdn", [0, 12], [0, 4, 4, 12], "contiguous"),
        ("gla", [0, 12], [0, 3, 8, 12], "contiguous"),
        ("kda", [0, 2, 2, 10, 12], None, "zigzag"),
    ],
)
def test_empty_slices_empty_sequences_and_zigzag(world, kind, cu_seqlens, bounds, layout):
    world(compare, 11, kind, cu_seqlens, bounds, layout)


@pytest.mark.parametrize(
    ("layout", "how"), [("contiguous", "group"), ("contiguous", "mesh"), ("zigzag", "context")]
)
def test_dense_batch_without_lengths(world, layout, how):
    world(dense_batch, layout, how)


def test_two_ranks_send_no_matrices(world):
    world(two_ranks_send_no_matrices)


@pytest.mark.parametrize(
    ("cu_seqlens", "layout"),
    [
        ([0, 12], "contiguous"),
        ([0, 3, 5, 11, 12], "contiguous"),
        ([0, 12], "zigzag"),
        ([0, 3, 5, 11, 12], "zigzag"),  # a front that sends only because its back does
        ([0, 4, 8, 12], "zigzag"),
    ],
)
def test_context_of_flash_linear_attention(world, cu_seqlens, layout):
    world(with_the_context_of_fla, cu_seqlens, layout)


def test_fewer_heads_than_ranks_and_low_precision(world):
    world(fewer_heads_than_ranks_and_low_precision)


def test_a_rank_with_another_layout_is_seen(world):
    world(a_rank_with_another_layout)


def test_nothing_of_the_inputs_is_written(world):
    world(nothing_of_the_inputs_is_written)


def test_arguments_that_do_not_fit_are_refused(world):
    world(refusals)


@pytest.mark.parametrize("kind", ["kda", "gla"])
@pytest.mark.parametrize(
    ("cu_seqlens", "bounds", "layout"),
    [
        ([0, 16], None, "contiguous"),
        ([0, 3, 3, 14, 16], [0, 5, 9, 16], "contiguous"),
        ([0, 20, 24], None, "zigzag"),
    ],
)
def test_a_call_in_two_halves(world, kind, cu_seqlens, bounds, layout):
    world(in_two_halves, kind, cu_seqlens, bounds, layout)


def test_activation_checkpoints(world):
    world(checkpointed)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(world, kind):
    world(in_autocast, kind)


def test_offsets_made_in_inference_serve_training_too():
    with torch.inference_mode():
        offsets = operators._offsets((0, 3, 8), torch.device("cpu"))
    assert not offsets.is_inference() and offsets.tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "kind, heads, more",
    [
        ("kda", (2, 2, 4), {"safe_gate": True, "lower_bound": -5.0, "use_gate_in_kernel": True}),
        ("kda", (2, 2, 2), {"use_qk_l2norm_in_kernel": True}),
        ("gdn", (4, 2, 2), {"softplus_beta": 2.0, "use_gate_in_kernel": True}),
        ("gdn", (2, 2, 4), {"operand_dtype": torch.bfloat16, "segment_tokens": 1024, "g": None}),
        ("gla", (2, 2, 4), {"g_gamma": torch.zeros(4, requires_grad=True), "exact_state": True}),
        ("gla", (2, 2, 2), {"num_splits": 2, "use_qk_l2norm_in_kernel": True}),
    ],
)
def test_begun_calls_are_served_by_what_serves_calls(monkeypatch, kind, heads, more):
    """Both ask for an implementation by the same facts."""
    op, module = {
        "kda": (chunk_kda, sys.modules["cula.kda"]),
        "gdn": (chunk_gated_delta_rule, sys.modules["cula._gated_delta_rule"]),
        "gla": (chunk_simple_gla, sys.modules["cula.lightning"]),
    }[kind]
    q, k, v = (torch.randn(1, 8, n, 16, requires_grad=True) for n in heads)
    most = max(heads)
    gates = torch.randn(1, 8, most, 16) if kind == "kda" else torch.randn(1, 8, most)
    x = {
        "q": q,
        "k": k,
        "v": v,
        "g": gates,
        "beta": torch.rand(1, 8, most),
        "A_log": torch.zeros(most),
    }
    if kind == "gla":
        x = {"q": q, "k": k, "v": v, "g": gates, "g_gamma": None}
    x |= {name: value for name, value in more.items() if name in x}
    more = {name: value for name, value in more.items() if name not in x}
    asked = []

    def resolve(*facts: object) -> object:
        asked.append(facts)
        raise LookupError

    monkeypatch.setattr(module, "resolve", resolve)
    monkeypatch.setattr(operators, "resolve", resolve)
    defaults = {
        name: p.default
        for name, p in inspect.signature(op).parameters.items()
        if name not in (*x, "dt_bias", "initial_state", "output_final_state", "cu_seqlens", "out", "state_pool",
                        "has_initial_state", "state_v_first", "return_intermediate_states")
    }  # fmt: skip
    named = {name: t for name, t in x.items() if t is not None}
    states = {"initial_state": torch.zeros(2, most, 16, 16), "output_final_state": True}
    cu_seqlens = torch.tensor([0, 3, 8])
    with pytest.raises(LookupError):
        op(**x, **more, **states, cu_seqlens=cu_seqlens)
    with pytest.raises(LookupError):
        operators._served_by(op, named, defaults | more | {"impl": "auto"}, True)
    assert asked[0] == asked[1]
