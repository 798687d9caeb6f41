"""Chunk forms equal the token-by-token oracles in fp64, for any split, packing, head grouping and state layout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cula.reference import (
    _chunks,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_simple_gla,
    fused_recurrent_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_simple_gla,
)

TOL = dict(rtol=1e-10, atol=1e-10)
CHUNK, K, V = 64, 4, 3
examples = settings(max_examples=25, deadline=None)
lengths = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128]), st.integers(0, 90)), min_size=1, max_size=4
)
seeds = st.integers(0, 2**31)
heads = st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)])


@dataclass(frozen=True)
class Op:
    chunk: Callable
    recurrent: Callable
    gate_dims: tuple = ()
    delta: bool = True


OPS = {
    "simple_gla": Op(chunk_simple_gla, recurrent_simple_gla, delta=False),
    "gated_delta_rule": Op(chunk_gated_delta_rule, recurrent_gated_delta_rule),
    "kda": Op(chunk_kda, recurrent_kda, gate_dims=(K,)),
    "kda_decode": Op(fused_recurrent_kda, recurrent_kda, gate_dims=(K,)),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@dataclass
class Problem:
    """Tokens `[B, T, ...]` and states `[N, HV, K, V]` from a seed: unit keys, beta up to 2, decays of many orders."""

    op: Op
    seed: int
    batch: int
    tokens: int
    sequences: int
    heads: tuple
    tensors: dict = field(init=False)
    initial: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def draw(kind, *shape):
            return kind(*shape, generator=generator, dtype=torch.float64)

        h, hv = self.heads
        shape = (self.batch, self.tokens)
        k = draw(torch.randn, *shape, h, K)
        strength = draw(torch.rand, *shape, hv, *self.op.gate_dims)
        self.tensors = dict(
            q=draw(torch.randn, *shape, h, K),
            k=k / k.norm(dim=-1, keepdim=True),
            v=draw(torch.randn, *shape, hv, V),
            g=-(10 ** (6 * strength - 4)),
        )
        if self.op.delta:
            self.tensors["beta"] = 2 * draw(torch.rand, *shape, hv)
        self.initial = draw(torch.randn, self.sequences, hv, K, V)

    def part(self, start, end):
        return {name: x[:, start:end] for name, x in self.tensors.items()}


def check(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, **TOL)


@every_op
@given(
    seed=seeds,
    tokens=st.integers(0, 150),
    batch=st.integers(1, 2),
    heads=heads,
    v_first=st.booleans(),
    state=st.booleans(),
)
@examples
def test_chunk_equals_recurrent(op, seed, tokens, batch, heads, v_first, state):
    problem = Problem(op, seed, batch, tokens, batch, heads)
    initial = problem.initial if state else None
    o, final = op.recurrent(**problem.tensors, initial_state=initial, output_final_state=True)
    if v_first:
        final, initial = final.mT, None if initial is None else initial.mT.contiguous()
    actual = op.chunk(
        **problem.tensors, initial_state=initial, output_final_state=True, state_v_first=v_first
    )
    check(actual, (o, final))
    assert actual[1].is_contiguous()


@every_op
@given(seed=seeds, pieces=lengths, heads=heads)
@examples
def test_any_split_with_the_state_carried_gives_the_whole(op, seed, pieces, heads):
    problem = Problem(op, seed, 2, sum(pieces), 2, heads)
    whole = op.chunk(**problem.tensors, initial_state=problem.initial, output_final_state=True)
    state, outputs, start = problem.initial, [], 0
    for length in pieces:
        part = problem.part(start, start + length)
        o, state = op.chunk(**part, initial_state=state, output_final_state=True)
        outputs.append(o)
        start += length
    check((torch.cat(outputs, 1), state), whole)


@every_op
@given(
    seed=seeds,
    packed=lengths,
    heads=heads,
    dtype=st.sampled_from([torch.int32, torch.int64]),
    state=st.booleans(),
)
@examples
def test_packed_equals_one_by_one(op, seed, packed, heads, dtype, state):
    problem = Problem(op, seed, 1, sum(packed), len(packed), heads)
    cu_seqlens = torch.tensor([0, *packed]).cumsum(0).to(dtype)
    initial = problem.initial if state else None
    actual = op.chunk(
        **problem.tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu_seqlens
    )
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        part = problem.part(start, end)
        own = initial[n : n + 1] if state else None
        o, final = op.recurrent(**part, initial_state=own, output_final_state=True)
        outputs.append(o)
        states.append(final)
    check(actual, (torch.cat(outputs, 1), torch.cat(states)))
    oracle = op.recurrent(
        **problem.tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu_seqlens
    )
    check(oracle, (torch.cat(outputs, 1), torch.cat(states)))


@every_op
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127])
def test_final_state_of_a_partial_chunk_has_decayed_by_its_own_length(op, tokens):
    """The state after T tokens must not depend on how far T is from a multiple of the chunk."""
    problem = Problem(op, 7, 1, tokens, 1, (1, 1))
    problem.tensors["g"].fill_(-0.1)
    problem.tensors["k"].zero_()
    _, final = op.chunk(**problem.tensors, initial_state=problem.initial, output_final_state=True)
    torch.testing.assert_close(final, problem.initial * math.exp(-0.1 * tokens), **TOL)


@every_op
def test_tokens_behind_the_last_sequence_are_zero_and_reach_no_state(op):
    problem = Problem(op, 3, 1, 150, 2, (2, 4))
    inside = {name: x[:, :90] for name, x in problem.tensors.items()}
    for name in ("q", "k", "v"):
        problem.tensors[name][:, 90:] = torch.nan
    cu_seqlens = torch.tensor([0, 70, 90])
    inputs = dict(initial_state=problem.initial, output_final_state=True, cu_seqlens=cu_seqlens)
    o, final = op.chunk(**problem.tensors, **inputs)
    check((o[:, :90], final), op.recurrent(**inside, **inputs))
    assert torch.equal(o[:, 90:], torch.zeros_like(o[:, 90:]))


@every_op
def test_no_sequence_reaches_its_neighbour(op):
    problem = Problem(op, 4, 1, 200, 3, (1, 2))
    cu_seqlens = torch.tensor([0, 65, 66, 200])
    clean, states = op.chunk(**problem.tensors, cu_seqlens=cu_seqlens, output_final_state=True)
    for name in ("q", "k", "v"):
        problem.tensors[name][:, 65] = torch.nan
    o, final = op.chunk(**problem.tensors, cu_seqlens=cu_seqlens, output_final_state=True)
    assert torch.equal(o[:, :65], clean[:, :65]) and torch.equal(o[:, 66:], clean[:, 66:])
    assert torch.equal(final[[0, 2]], states[[0, 2]])


@every_op
def test_nothing_at_all(op):
    problem = Problem(op, 5, 1, 0, 2, (1, 2))
    for cu_seqlens, initial in (
        (torch.tensor([0, 0, 0]), problem.initial),
        (torch.tensor([0]), problem.initial[:0]),
    ):
        inputs = dict(initial_state=initial, output_final_state=True, cu_seqlens=cu_seqlens)
        check(op.chunk(**problem.tensors, **inputs), op.recurrent(**problem.tensors, **inputs))
    o, final = op.chunk(**Problem(op, 5, 0, 9, 0, (1, 2)).tensors, output_final_state=True)
    assert o.shape == (0, 9, 2, V) and final.shape == (0, 2, K, V)


@every_op
def test_strided_views_out_and_untouched_arguments(op):
    problem = Problem(op, 6, 2, 70, 2, (2, 2))
    expected, _ = op.chunk(**problem.tensors, initial_state=problem.initial)
    views = {
        name: torch.stack([x, torch.full_like(x, torch.nan)], dim=1)[:, 0]
        for name, x in problem.tensors.items()
    }
    before, initial = {name: x.clone() for name, x in views.items()}, problem.initial.clone()
    out = torch.full_like(expected, torch.nan)
    o, final = op.chunk(**views, initial_state=problem.initial, out=out)
    assert o is out and final is None and expected.is_contiguous()
    check((out,), (expected,))
    assert all(torch.equal(views[name], before[name]) for name in views)
    assert torch.equal(problem.initial, initial)


@every_op
def test_final_state_is_never_an_alias_of_the_initial_state(op):
    problem = Problem(op, 8, 1, 0, 1, (1, 1))
    for inputs in ({}, {"cu_seqlens": torch.tensor([0, 0])}):
        _, final = op.chunk(
            **problem.tensors, initial_state=problem.initial, output_final_state=True, **inputs
        )
        assert torch.equal(final, problem.initial)
        assert final.data_ptr() != problem.initial.data_ptr()


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_are_rounded_once(op, dtype):
    problem = Problem(op, 9, 1, 150, 2, (1, 2))
    initial = problem.initial.to(dtype)
    inputs = problem.tensors | dict(cu_seqlens=torch.tensor([0, 20, 150]), output_final_state=True)
    o, final = op.chunk(**inputs, initial_state=initial)
    expected, exact = op.chunk(**inputs, initial_state=initial.double())
    assert torch.equal(o, expected)
    assert final.dtype == dtype and torch.equal(final, exact.to(dtype))


@every_op
def test_long_inputs_are_worked_off_in_groups_of_chunks(op, monkeypatch):
    problem = Problem(op, 10, 1, 400, 3, (1, 2))
    inputs = dict(
        initial_state=problem.initial,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, 150, 151, 400]),
    )
    whole = op.chunk(**problem.tensors, **inputs)
    monkeypatch.setattr(_chunks, "_GROUP_ELEMENTS", 2 * 2 * CHUNK * (K + V))
    assert [
        len(range(*g.indices(9)))
        for g in _chunks.dense_chunks(9 * CHUNK, "cpu").groups(2 * CHUNK * (K + V))
    ] == [2, 2, 2, 2, 1]
    check(op.chunk(**problem.tensors, **inputs), whole)


@given(seed=seeds, tokens=st.integers(0, 200), v_first=st.booleans())
@examples
def test_intermediate_states_are_the_states_before_each_chunk(seed, tokens, v_first):
    problem = Problem(OPS["kda"], seed, 2, tokens, 2, (1, 2))
    initial = problem.initial.mT.contiguous() if v_first else problem.initial
    _, _, h = chunk_kda(
        **problem.tensors,
        initial_state=initial,
        return_intermediate_states=True,
        state_v_first=v_first,
    )
    starts = range(0, tokens, CHUNK)
    assert h.shape == (2, len(starts), 2, *((V, K) if v_first else (K, V)))
    for i, start in enumerate(starts):
        _, state = recurrent_kda(
            **problem.part(0, start), initial_state=problem.initial, output_final_state=True
        )
        torch.testing.assert_close(h[:, i], state.mT if v_first else state, **TOL)


def test_intermediate_states_of_packed_sequences():
    packed = [70, 0, 1, 129]
    problem = Problem(OPS["kda"], 9, 1, sum(packed), len(packed), (1, 2))
    cu_seqlens = torch.tensor([0, *packed]).cumsum(0)
    inputs = dict(
        initial_state=problem.initial, return_intermediate_states=True, cu_seqlens=cu_seqlens
    )
    bound = chunk_kda(**problem.tensors, **inputs)[2]
    exact = chunk_kda(**problem.tensors, **inputs, cu_seqlens_cpu=cu_seqlens)[2]
    expected = []
    for n, length in enumerate(packed):
        for local in range(0, length, CHUNK):
            start = int(cu_seqlens[n])
            part = problem.part(start, start + local)
            expected.append(
                recurrent_kda(
                    **part, initial_state=problem.initial[n : n + 1], output_final_state=True
                )[1]
            )
    assert exact.shape[1] == len(expected) == 6
    torch.testing.assert_close(exact, torch.stack(expected, 1), **TOL)
    assert bound.shape[1] == 4 + (200 - 4) // CHUNK
    assert torch.equal(bound[:, :6], exact) and torch.equal(
        bound[:, 6:], torch.zeros_like(bound[:, 6:])
    )
