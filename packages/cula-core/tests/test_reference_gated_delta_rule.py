"""Rung 1: the oracle of gated delta rule prefill against numbers by hand, matrices written out, and decode's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from cula_core.reference.delta_decode import Gates, delta_rule_decode
from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_testing.gated.cases import HEADS, Case, arguments
from cula_testing.tensors import int32

DOUBLE, DIM = torch.float64, 8
TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = (70, 0, 3, 64)
STARTS = (0, 70, 70, 73, 137)
NAN = float("nan")


def given(
    heads: tuple[int, int, int] = (2, 2, 4), lengths: tuple[int, ...] = LENGTHS, decays: bool = True, **options: Any
) -> dict[str, Any]:  # fmt: skip
    found = arguments(Case(heads, lengths, decays, decays, None), DIM, DOUBLE)
    del found["output_final_state"]
    return found | options


def states(rows: int, heads: int = 4, dim_v: int = DIM) -> Tensor:
    return torch.randn(rows, heads, DIM, dim_v, dtype=DOUBLE)


def assert_near(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None and found.dtype == DOUBLE
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def by_matrices(x: dict[str, Any], head: int, start: int, stop: int, state: Tensor) -> tuple:
    """One head of one sequence, S_t = a_t (I - b_t k k^T) S_(t-1) + b_t k v^T with every matrix written out."""
    count = max(x["q"].shape[2], x["v"].shape[2])
    q, k, v = (x[n][0, :, head // (count // x[n].shape[2])] for n in ("q", "k", "v"))
    ones = torch.ones(q.shape[0], dtype=DOUBLE)
    factor = ones if x["g"] is None else x["g"][0, :, head].exp()
    strength = ones if x["beta"] is None else x["beta"][0, :, head]
    scale = DIM**-0.5 if x["scale"] is None else x["scale"]
    outputs = [v[:0]]
    for t in range(start, stop):
        kept = torch.eye(DIM, dtype=DOUBLE) - strength[t] * torch.outer(k[t], k[t])
        state = factor[t] * kept @ state + strength[t] * torch.outer(k[t], v[t])
        outputs.append(scale * (state.T @ q[t])[None])
    return torch.cat(outputs), state


def test_three_tokens_by_hand() -> None:
    """S: 8 -> 4, + (2 - 4) / 2 = 3. -> 3, + 2 (5 - 6) / 4 = 2.5. -> 0.25, + 1 (4 - 0.25) = 4."""
    q, k, v = (
        torch.tensor(x, dtype=DOUBLE).view(1, 3, 1, 1) for x in ([1, 2, -1], [1, 2, 1], [2, 5, 4])
    )
    g, beta = (torch.tensor(x, dtype=DOUBLE).view(1, 3, 1) for x in ([0.5, 1, 0.1], [0.5, 0.25, 1]))
    found = gated_delta_rule(q, k, v, g.log(), beta, 1.0, torch.full((1, 1, 1, 1), 8.0))
    assert_near(found.out.flatten(), torch.tensor([3, 5, -4], dtype=DOUBLE))
    assert_near(found.states.flatten(), torch.tensor([4], dtype=DOUBLE))
    assert found.pool is None and found.checkpoints is None
    # Without decays and strengths what was written last is read back.
    found = gated_delta_rule(q, k / k, v, scale=1.0)
    assert_near(found.out, q * v)


@pytest.mark.parametrize("heads", [*HEADS[:3], (3, 1, 1), (2, 1, 4), (1, 4, 4), (4, 2, 1)])
@pytest.mark.parametrize("decays", [True, False])
def test_it_is_the_product_of_its_matrices(heads: tuple[int, int, int], decays: bool) -> None:
    lengths = (5, 0, 1, 3)
    x = given(heads, lengths, decays)
    count = max(heads)
    initial = states(len(lengths), count)
    found = gated_delta_rule(**x, initial_state=initial)
    assert found.out.shape == (1, 9, count, DIM)
    bounds = x["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        for head in range(count):
            o, final = by_matrices(x, head, start, stop, initial[n, head])
            assert_near(found.out[0, start:stop, head], o)
            assert_near(found.states[n, head], final)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_it_is_decode_token_by_token(raw: bool, v_first: bool) -> None:
    """Decode's reference has gates, strengths, norms, slots and padding of its own."""
    x = given(lengths=(6,))
    del x["cu_seqlens"]
    x |= {name: x[name].reshape(3, 2, *x[name].shape[2:]) for name in TOKENS}
    x["k"] = 3 * x["k"]
    rate = (
        {"A_log": torch.randn(4, dtype=DOUBLE), "dt_bias": torch.randn(4, dtype=DOUBLE)}
        if raw
        else {}
    )
    pool = states(5)
    slots, ends = int32(4, -1, 2), int32(0, 1, -1)
    gates = Gates(
        in_kernel=raw, softplus_beta=2.0, softplus_threshold=1.0, beta_sigmoid=raw, neg_eigval=raw
    )
    found = gated_delta_rule(
        **x, state_pool=pool, state_indices=slots, output_state_indices=ends, use_gate_in_kernel=raw,
        use_beta_sigmoid_in_kernel=raw, allow_neg_eigval=raw, use_qk_l2norm_in_kernel=True, state_v_first=v_first,
        softplus_beta=2.0, softplus_threshold=1.0, **rate,
    )  # fmt: skip
    expected, begin = pool.clone(), slots
    for t in range(2):
        tokens = {name: x[name][:, t : t + 1] for name in TOKENS}
        o = delta_rule_decode(
            **tokens, state=expected if t else pool, next_state=expected, state_indices=begin,
            output_state_indices=int32(0, -1, 3), gates=gates, state_v_first=v_first, **rate,
        )  # fmt: skip
        assert_near(found.out[:, t : t + 1], o)
        begin = int32(0, -1, 3)
    assert_near(found.states[0], expected[0])
    assert_near(found.states[2], expected[3])
    # The last one's state has no slot to go to.
    assert_near(found.pool, torch.cat((expected[:1], pool[1:])))
    assert not found.out[1].any() and not found.states[1].any()


def test_raw_gates_are_softplus() -> None:
    x = given()
    rate, bias = torch.randn(4, dtype=DOUBLE), torch.randn(4, dtype=DOUBLE)
    decay = -rate.exp() * softplus(30 * x["g"] + bias, 0.5, 3.0)
    raw = {"g": 30 * x["g"], "A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True}
    found = gated_delta_rule(**x | raw, softplus_beta=0.5, softplus_threshold=3.0)
    assert_near(found.out, gated_delta_rule(**x | {"g": decay}).out)


@pytest.mark.parametrize("v_first", [False, True])
def test_checkpoints_are_states_after_shorter_calls(v_first: bool) -> None:
    x = given(lengths=(200, 0, 64, 63))
    initial = states(4)
    buffer = torch.full((1, 327 // 64, 4, DIM, DIM), NAN, dtype=DOUBLE)
    options = {"state_v_first": v_first, "initial_state": initial}
    found = gated_delta_rule(**x, **options, state_checkpoints=buffer, checkpoint_every_n_tokens=64)
    assert_near(found.out, gated_delta_rule(**x, **options).out)
    # Three of the first sequence, one of the third, which begins at token 200; the last row has none.
    for row, start, stop, n in ((0, 0, 64, 0), (1, 0, 128, 0), (2, 0, 192, 0), (3, 200, 264, 2)):
        part = {name: x[name][:, start:stop] for name in TOKENS}
        alone = gated_delta_rule(**part, initial_state=initial[n : n + 1], state_v_first=v_first)
        assert_near(found.checkpoints[0, row], alone.states[0])
    assert found.checkpoints[0, 4].isnan().all() and buffer.isnan().all()


def test_checkpoints_of_a_dense_batch() -> None:
    x = given(lengths=(260,))
    del x["cu_seqlens"]
    x |= {name: x[name].reshape(2, 130, *x[name].shape[2:]) for name in TOKENS}
    pool, buffer = states(2), torch.full((2, 2, 4, DIM, DIM), NAN, dtype=DOUBLE)
    options = {"state_checkpoints": buffer, "checkpoint_every_n_tokens": 64, "state_pool": pool}
    found = gated_delta_rule(**x, **options, state_indices=int32(1, -1))
    part = {name: x[name][:1, :128] for name in TOKENS}
    assert_near(found.checkpoints[0, 1], gated_delta_rule(**part, initial_state=pool[1:]).states[0])
    assert found.checkpoints[1].isnan().all() and found.checkpoints[0].isfinite().all()


def test_a_pool_changes_where_states_are_stored() -> None:
    """A fresh sequence does not read its row, one without tokens copies its state, and null_slot is padding."""
    x = given()
    pool = states(6)
    pool[3] = NAN
    before = pool.clone()
    options = {
        "state_indices": int32(3, 5, 0, 2),
        "output_state_indices": int32(3, 4, 1, 2),
        "null_slot": 0,
    }
    fresh = torch.tensor([False, True, True, True])
    found = gated_delta_rule(**x, state_pool=pool, has_initial_state=fresh, **options)
    assert pool[:3].equal(before[:3]) and pool[3].isnan().all() and pool[4:].equal(before[4:])
    initial = torch.stack((torch.zeros_like(pool[0]), pool[5], torch.zeros_like(pool[0]), pool[2]))
    alone = gated_delta_rule(**x, initial_state=initial)
    for n in (0, 1, 3):
        part = slice(STARTS[n], STARTS[n + 1])
        assert_near(found.out[:, part], alone.out[:, part])
        assert_near(found.states[n], alone.states[n])
    assert not found.out[:, 70:73].any() and not found.states[2].any()
    assert_near(
        found.pool,
        torch.stack((before[0], before[1], alone.states[3], alone.states[0], before[5], before[5])),
    )
    read = {**options, "output_state_indices": None, "update_state_pool": False}
    read_only = gated_delta_rule(**x, state_pool=pool, has_initial_state=fresh, **read)
    assert_near(read_only.states, found.states)
    assert read_only.pool.nan_to_num().equal(before.nan_to_num())


def test_arguments_are_rounded_by_nobody() -> None:
    """16-bit inputs give fp64 results, those of the same numbers in fp64."""
    x = given()
    half = {n: x[n].bfloat16() for n in TOKENS}
    exact = gated_delta_rule(**x | {n: y.double() for n, y in half.items()})
    found = gated_delta_rule(**x | half)
    assert found.out.dtype == found.states.dtype == DOUBLE
    assert found.out.equal(exact.out) and found.states.equal(exact.states)
