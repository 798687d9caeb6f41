"""The kernels on a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from delta_problems import SLOTS, Case, Inputs, exact, make_inputs, public
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_delta_decode import (
    delta_rule_commit,
    delta_rule_decode,
    delta_rule_flush,
    launch,
    new_replay,
)
from cula_delta_decode.config import DTYPES
from cula_testing.comparing import assert_rounded_once, same
from cula_testing.tensors import column, int32, unsynchronised

pytestmark = pytest.mark.gpu

GATES = (("softplus", False), ("safe", True), ("none", False), ("log", False), ("softplus", True))
HEADS = ((1, 1), (2, 2), (1, 3), (2, 8))
LIVE = [n for n, slot in enumerate(SLOTS) if slot >= 0]
WRITTEN = [slot for slot in SLOTS if slot >= 0]
# All head dimensions, state dtypes and layouts; the other facts take turns.
CASES = [
    Case(
        gate=GATES[i % 5], strength=("logits", "given", "one")[i % 3], doubled=i % 2 == 0,
        tokens=1 + (3 * i + i // 8) % 8, dims=dims, heads=HEADS[(i + i // 4) % 4], state_v_first=v_first,
        dtype=("bfloat16", "float16")[i // 2 % 2], state_dtype=state_dtype,
        gate_dtype=("bfloat16", "float32")[i // 3 % 2], bias=("float32", None)[i // 5 % 2], l2norm=i % 7 != 0,
        packed=i % 4 == 3,
    )
    for i, (dims, state_dtype, v_first) in enumerate(
        itertools.product(itertools.product((64, 128), (64, 128)), DTYPES, (False, True))
    )
]  # fmt: skip


def label(case: Case) -> str:
    order = "VK" if case.state_v_first else "KV"
    dims = "x".join(map(str, case.dims))
    return f"{'-'.join(map(str, case.gate))}-{case.state_dtype}-{dims}-{order}-T{case.tokens}"


def decode(case: Case, x: Inputs, **options) -> Tensor:
    return delta_rule_decode(x.q, x.k, x.v, **public(case, x) | options)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(cuda, case):
    x = make_inputs(case).to(cuda)
    expected, state = exact(case, x)
    before = x.state.clone()
    out = torch.full_like(x.v, math.nan)
    assert decode(case, x, out=out) is out
    if case.packed:
        used = sum(x.lengths)
        out, expected = out[:, :used], expected[:, :used]
    else:
        assert not out[1].any()
    assert_rounded_once(out, expected)
    assert_rounded_once(x.state[WRITTEN], state[WRITTEN])
    unused = [slot for slot in range(len(x.state)) if slot not in WRITTEN]
    assert same(x.state[unused], before[unused])

    x.state.copy_(before)
    drafted = torch.full_like(x.v, math.nan)
    decode(case, x, out=drafted, commit=False)
    assert same(x.state, before)
    assert_rounded_once(drafted[:, : sum(x.lengths)] if case.packed else drafted, expected)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_token_counts(cuda, relative_rmse, tokens, v_first):
    case = Case(gate=("safe", True), tokens=tokens, dims=(128, 128), state_v_first=v_first)
    x = make_inputs(case, seed=tokens).to(cuda)
    expected, state = exact(case, x)
    assert_rounded_once(decode(case, x)[LIVE], expected[LIVE])
    assert relative_rmse(x.state[WRITTEN], state[WRITTEN]) <= 1e-6


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_commit_is_decode_of_the_accepted_tokens(cuda, relative_rmse, tokens, v_first):
    case = Case(tokens=tokens, state_v_first=v_first)
    x = make_inputs(case).to(cuda)
    x.slots = column(x.slots)
    accepted = column(int32(tokens, 1, 0, min(2, tokens)).to(cuda))
    wide = x.state.double()
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    options = {"state_indices": x.slots, **given, **case.options()}
    reference.delta_rule_commit(k, v, g, beta, wide, accepted, **options)
    arguments = public(case, x)
    delta_rule_commit(x.k, x.v, num_accepted=accepted, **arguments)
    assert relative_rmse(x.state, wide) <= 1e-6


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens, records", [(1, 16), (1, None), (4, None), (2, 32)])
@pytest.mark.parametrize("gate", [("softplus", False), ("safe", True)])
def test_replay_is_serial_decoding(cuda, relative_rmse, gate, tokens, records, v_first):
    case = Case(gate=gate, tokens=tokens, dims=(128, 128), state_v_first=v_first)
    generator = torch.Generator().manual_seed(tokens)
    first = make_inputs(case).to(cuda)
    replay = new_replay(
        first.state, case.heads[0], max_tokens=tokens, channels=gate[1], records=records, state_v_first=v_first
    )  # fmt: skip
    wide, previous = first.state.double(), None
    for step in range(12):
        x = replace(make_inputs(case, seed=step).to(cuda), A_log=first.A_log, dt_bias=first.dt_bias)
        accepted = torch.randint(0, tokens + 1, (4,), generator=generator).int().to(cuda)
        if previous is not None:
            commit_exactly(case, previous, wide, accepted)
        expected, _ = exact(case, replace(x, state=wide), next_state=None)
        x = replace(x, state=first.state)
        out = decode(case, x, replay=replay, num_accepted=accepted)
        assert_rounded_once(out[LIVE], expected[LIVE])
        previous = x
    accepted = torch.ones(4, dtype=torch.int32, device=cuda)
    commit_exactly(case, previous, wide, accepted)
    delta_rule_flush(
        first.state, replay, accepted, state_indices=first.slots, state_v_first=v_first
    )
    assert relative_rmse(first.state[WRITTEN], wide[WRITTEN]) <= 2e-6


def commit_exactly(case: Case, x: Inputs, wide: Tensor, accepted: Tensor) -> None:
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    reference.delta_rule_commit(
        k, v, g, beta, wide, accepted, state_indices=x.slots, **given, **case.options()
    )


def test_large_batch(cuda, relative_rmse):
    """Many waves of CTAs."""
    case = Case(gate=("safe", True), dims=(128, 128), heads=(8, 16), indexed=False)
    x = make_inputs(case, rows=257)
    x = replace(x, state=torch.randn(257, 16, 128, 128)).to(cuda)
    expected, state = exact(case, x)
    assert_rounded_once(decode(case, x), expected)
    assert relative_rmse(x.state, state) <= 1e-6


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_activations_may_be_any_view(cuda, tokens, v_first, offset):
    """Slices of one fused projection, aligned or not: the same bits as dense tensors."""
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first, dims=(64, 128))
    x = make_inputs(case).to(cuda)
    twin = replace(x, state=x.state.clone())
    expected = decode(case, twin)
    widths = [t[0, 0].numel() for t in (x.q, x.k, x.v)]
    whole = torch.full(
        (4, tokens, sum(widths) + offset + 3), math.nan, dtype=x.q.dtype, device=cuda
    )
    first, views = offset, {}
    for name, width in zip(("q", "k", "v"), widths):
        own = getattr(x, name)
        views[name] = whole[..., first : first + width].unflatten(2, own.shape[2:]).copy_(own)
        first += width
    table = torch.stack((x.slots, torch.full_like(x.slots, 6)), 1)
    x = replace(x, **views, slots=table[:, 0])
    assert same(decode(case, x), expected) and same(x.state, twin.state)


@pytest.mark.parametrize(
    "tokens, v_first, state_dtype",
    [(1, True, "float32"), (4, True, "bfloat16"), (1, False, "float32")],
)
def test_ten_thousand_runs_are_bit_identical(cuda, tokens, v_first, state_dtype):
    case = Case(
        gate=("safe", True), tokens=tokens, dims=(128, 128), heads=(2, 4), state_v_first=v_first,
        state_dtype=state_dtype,
    )  # fmt: skip
    x = make_inputs(case).to(cuda)
    start = x.state.clone()
    expected = decode(case, x)
    state = x.state.clone()
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(10_000):
        x.state.copy_(start)
        out = decode(case, x)
        wrong += (out.view(torch.int16) != expected.view(torch.int16)).sum()
        wrong += (x.state != state).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_graph_replay_sees_new_inputs_and_indices(cuda, tokens, v_first):
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first)
    x = make_inputs(case).to(cuda)
    out = torch.empty_like(x.v)
    decode(case, replace(x, state=x.state.clone()), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(case, x, out=out)
    for seed, slots in ((1, (0, 1, 2, 3)), (2, (-1, -1, 6, -1)), (3, SLOTS)):
        other = make_inputs(case, seed=seed).to(cuda)
        for name in ("q", "k", "v", "g", "beta", "state"):
            getattr(x, name).copy_(getattr(other, name))
        x.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        twin = replace(x, state=x.state.clone())
        expected = decode(case, twin)
        graph.replay()
        assert same(out, expected) and same(x.state, twin.state)


def test_calls_neither_synchronise_nor_allocate(cuda):
    case = Case(tokens=2)
    x = make_inputs(case).to(cuda)
    out, accepted = torch.empty_like(x.v), torch.ones(4, dtype=torch.int32, device=cuda)
    replay = new_replay(x.state, 1, max_tokens=2)

    def step() -> None:
        decode(case, x, out=out)
        decode(case, x, out=out, commit=False)
        delta_rule_commit(x.k, x.v, num_accepted=accepted, **public(case, x))
        decode(case, x, out=out, replay=replay, num_accepted=accepted)
        delta_rule_flush(x.state, replay, accepted, state_indices=x.slots)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with unsynchronised():
        step()
    assert torch.cuda.max_memory_allocated() == before


def test_one_compile_serves_all_sizes(cuda, relative_rmse):
    launch.kernel_for.cache_clear()
    launch.compile.cache_clear()
    for rows in range(1, 33):
        case = Case(heads=(1 + rows % 3, (1 + rows % 3) * (1 + rows % 2)), indexed=False)
        x = make_inputs(case, rows=rows)
        x = replace(x, state=torch.randn(rows + rows % 5, case.heads[1], 64, 64)).to(cuda)
        expected, state = exact(case, x)
        assert_rounded_once(decode(case, x), expected)
        assert relative_rmse(x.state[:rows], state[:rows]) <= 1e-6
    # One for very few states, one for few.
    assert launch.compile.cache_info().misses == 2


def test_wrong_arguments_are_refused_before_a_launch(cuda):
    case = Case()
    x = make_inputs(case).to(cuda)
    before = x.state.clone()
    for name, value, message in (
        ("state_indices", x.slots.long(), "state_indices"),
        ("beta", x.beta[..., :1], "beta"),
        ("A_log", x.A_log.cpu(), "A_log"),
        ("state", x.state[:, :1], "state"),
        ("out", x.v[:, :, :1], "out"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            decode(case, x, **{name: value})
    assert same(x.state, before)
