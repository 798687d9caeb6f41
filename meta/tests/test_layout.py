"""Which maps travel between ranks: all ranks played by a loop, against whole sequences."""

from __future__ import annotations

import random

import pytest
import torch
from sequences_over_ranks import CHANNELS, HEADS, WIDTH, problem, random_batch, recurrence, whole

from cula.distributed.exchange import Wire
from cula.distributed.layout import (
    Layout,
    balanced_bounds,
    dense,
    equal_bounds,
    packed,
    ranges_of,
)

BATCHES = 40


def random_layout(seed: int) -> tuple[int, list[int], Layout]:
    rng = random.Random(seed)
    ranks = rng.randint(1, 8)
    cu_seqlens, bounds, zigzag = random_batch(rng, ranks)
    bounds = equal_bounds(cu_seqlens[-1], ranks, zigzag) if bounds is None else bounds
    return ranks, cu_seqlens, packed(cu_seqlens, ranges_of(bounds, ranks, zigzag))


def test_every_token_and_every_sequence_has_one_place():
    for seed in range(500):
        _, cu_seqlens, layout = random_layout(seed)
        pieces = [p for own in layout.pieces for p in own]
        assert sorted(t for p in pieces for t in range(p.start, p.stop)) == list(
            range(cu_seqlens[-1])
        )
        for n, (begin, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
            own = [p for p in pieces if p.sequence == n]
            assert [p.start for p in own if p.begins] == [begin]
            assert [p.stop for p in own if p.ends] == [end]
            assert all(begin <= p.start <= p.stop <= end for p in own)
            assert len(own) == 1 or begin < end


def test_local_tokens_lie_in_the_order_of_the_batch_within_a_range():
    for seed in range(200):
        _, _, layout = random_layout(seed)
        for own in layout.pieces:
            jumps = sum(a.stop > b.start for a, b in zip(own, own[1:], strict=False))
            assert jumps == 0  # a rank's ranges rise, zigzag too


@pytest.mark.parametrize(
    ("cu_seqlens", "bounds", "zigzag", "slots"),
    [
        ([0, 8], [0, 4, 8], False, 1),
        ([0, 4, 8], [0, 4, 8], False, 0),
        ([0, 8], [0, 2, 4, 6, 8], True, 2),
        ([0, 8], [0, 0, 8], False, 0),
    ],
)
def test_slots_are_as_many_as_the_busiest_rank_needs(cu_seqlens, bounds, zigzag, slots):
    layout = packed(cu_seqlens, ranges_of(bounds, 2, zigzag))
    assert layout.forward(0).slots == slots
    assert layout.backward(0).slots == slots


def test_matrices_travel_only_where_a_piece_lies_inside_a_sequence():
    assert not dense(2, 3, zigzag=False).needs_matrices
    assert dense(2, 1, zigzag=True).needs_matrices
    assert dense(3, 1, zigzag=False).needs_matrices
    assert not packed([0, 3, 9], [[(0, 2)], [(2, 5)], [(5, 9)]]).needs_matrices


def test_a_dense_batch_is_so_many_sequences_cut_alike():
    layout = dense(3, 2, zigzag=False)
    assert [[(p.sequence, p.begins, p.ends) for p in own] for own in layout.pieces] == [
        [(0, True, False), (1, True, False)],
        [(0, False, False), (1, False, False)],
        [(0, False, True), (1, False, True)],
    ]
    assert layout.forward(2).chains[2] == (((0, 0), (2, 2)), ((1, 1), (3, 3)))
    assert layout.backward(0).chains[0] == (((4, -1), (2, 2)), ((5, -1), (3, 3)))


def _from_identity(x):
    start = torch.eye(WIDTH, dtype=torch.float64).expand(HEADS, -1, -1)
    return recurrence(x._replace(v=torch.zeros_like(x.k)), start)[1]


@pytest.mark.parametrize("kind", ["kda", "gdn", "gla"])
def test_forward_and_backward_of_all_ranks_in_a_loop(kind):
    for seed in range(BATCHES):
        ranks, cu_seqlens, layout = random_layout(seed)
        x, states, d_o, d_final = problem(seed, cu_seqlens[-1], len(cu_seqlens) - 1, kind)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g, states)]
        o, final = whole(x, states, cu_seqlens)
        wanted = torch.autograd.grad(
            (o, final), leaves, (d_o, d_final), allow_unused=True, materialize_grads=True
        )
        states = states.detach()

        with torch.no_grad():
            slots = layout.forward(0).slots
            vectors = torch.zeros(ranks * slots, HEADS, WIDTH, CHANNELS, dtype=torch.float64)
            matrices = torch.zeros(ranks * slots, HEADS, WIDTH, WIDTH, dtype=torch.float64)
            for rank, own in enumerate(layout.pieces):
                for slot, i in enumerate(layout.forward(rank).sends):
                    piece = own[i]
                    start = states[piece.sequence] if piece.begins else torch.zeros_like(states[0])
                    part = x.part(piece.start, piece.stop)
                    vectors[rank * slots + slot] = recurrence(part, start)[1]
                    matrices[rank * slots + slot] = _from_identity(part)

        starts, gradients = {}, {}
        for rank, own in enumerate(layout.pieces):
            route = layout.forward(rank)
            got = Wire(None, rank, ranks, False).receive(route, HEADS, vectors, matrices, False)
            starts |= {(rank, i): states[p.sequence] for i, p in enumerate(own)}
            starts |= {(rank, i): state for i, state in zip(route.takes, got, strict=True)}
            for i, piece in enumerate(own):
                part = x.part(piece.start, piece.stop)
                start = starts[rank, i].detach().requires_grad_()
                local, behind = recurrence(part, start)
                assert torch.allclose(local, o[piece.start : piece.stop], rtol=0, atol=1e-11)
                if piece.ends:
                    assert torch.allclose(behind, final[piece.sequence], rtol=0, atol=1e-11)
                gradients[rank, i] = (part, start, local, behind)

        slots = layout.backward(0).slots
        maps = torch.zeros(ranks * slots, HEADS, WIDTH, CHANNELS, dtype=torch.float64)
        for rank, own in enumerate(layout.pieces):
            for slot, i in enumerate(layout.backward(rank).sends):
                _, start, local, behind = gradients[rank, i]
                own_final = d_final[own[i].sequence] * float(own[i].ends)
                d_local = d_o[own[i].start : own[i].stop]
                maps[rank * slots + slot] = torch.autograd.grad(
                    (local, behind), start, (d_local, own_final), retain_graph=True
                )[0]
        total = [torch.zeros_like(t) for t in leaves]
        for rank, own in enumerate(layout.pieces):
            route = layout.backward(rank)
            got = Wire(None, rank, ranks, False).receive(route, HEADS, maps, matrices, True)
            behind_of = dict(zip(route.takes, got, strict=True))
            for i, piece in enumerate(own):
                _, start, local, behind = gradients[rank, i]
                d_behind = behind_of.get(i, d_final[piece.sequence])
                found = torch.autograd.grad(
                    (local, behind), [*leaves[:4], start], (d_o[piece.start : piece.stop], d_behind),
                    retain_graph=True, allow_unused=True, materialize_grads=True,
                )  # fmt: skip
                for sum_, grad in zip(total, found[:4], strict=False):
                    sum_ += grad
                if piece.begins:
                    total[4][piece.sequence] += found[4]
        for got, want in zip(total, wanted, strict=True):
            assert torch.allclose(got, want, rtol=0, atol=1e-11), seed


def test_balanced_bounds_rise_and_give_the_second_rank_more():
    for tokens in (0, 1, 63, 64, 1000, 131072):
        for ranks in range(1, 9):
            for heads in (1, 16, 47, 48, 64, 256):
                bounds = balanced_bounds(tokens, ranks, heads)
                assert len(bounds) == ranks + 1 and bounds == sorted(bounds)
                assert bounds[0] == 0 and bounds[-1] == tokens
                assert all(b % 64 == 0 or b == tokens for b in bounds)
                if tokens == 131072:
                    longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
                    assert (longest > tokens // ranks + 64) == (ranks == 2 and heads >= 48)
    for wrong in ((-1, 2, 4), (64, 0, 4), (64, 2, 0)):
        with pytest.raises(ValueError, match="expected at least"):
            balanced_bounds(*wrong)
