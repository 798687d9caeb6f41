"""The gated delta rule beyond FLA's contract: grouped queries, no gates, pools, states on the way, and who serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cula.lightning import chunk_gated_delta_rule
from cula_core.reference.gated_delta_rule import gated_delta_rule

HQ, HK, HV, HS, K, V = 4, 1, 2, 4, 8, 6
LENGTHS = (70, 0, 3, 130)
STARTS = (0, 70, 70, 73, 203)
CU = torch.tensor(STARTS, dtype=torch.int32)
TOKENS = ("q", "k", "v", "g", "beta")
DOUBLE, NAN = torch.float64, float("nan")


pytestmark = pytest.mark.usefixtures("undecided")


def inputs(batch: int = 1, tokens: int = STARTS[-1]) -> dict[str, Any]:
    new = {"dtype": DOUBLE}
    return {
        "q": torch.randn(batch, tokens, HQ, K, **new),
        "k": torch.nn.functional.normalize(torch.randn(batch, tokens, HK, K, **new), dim=-1),
        "v": torch.randn(batch, tokens, HV, V, **new),
        "g": -torch.rand(batch, tokens, HS, **new),
        "beta": torch.rand(batch, tokens, HS, **new),
    }


def states(rows: int, v_first: bool = False) -> Tensor:
    return torch.randn(rows, HS, *((V, K) if v_first else (K, V)), dtype=DOUBLE)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def part(x: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: x[name][:, start:stop] for name in TOKENS}


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("kept", ["every", "in rows", "once", "once in rows", "in the pool"])
def test_pools_checkpoints_and_fresh_sequences(v_first: bool, kept: str) -> None:
    """Everything at once on a dense batch and on packed sequences; what the oracle leaves alone stays as it was."""
    for packed in (True, False):
        x = inputs() | {"cu_seqlens": CU} if packed else inputs(4, 130)
        pool = states(7, v_first)
        pool[1] = NAN
        batch, tokens = x["q"].shape[:2]
        buffer = torch.full((batch, tokens // 64, *pool.shape[1:]), NAN, dtype=DOUBLE)
        options = {
            "state_indices": int32(1, 6, 0, 2), "output_state_indices": int32(1, 4, 3, -7), "null_slot": 0,
            "has_initial_state": torch.tensor([False, True, True, True]), "state_v_first": v_first,
            "state_checkpoints": buffer, "checkpoint_every_n_tokens": 64, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip
        if kept != "every":
            buffer = torch.full((9, *pool.shape[1:]), NAN, dtype=DOUBLE)
            options |= {"state_checkpoints": buffer}
        if kept.endswith("rows"):
            options["checkpoint_rows"] = int32(-1, 5, 2, 0)
        if kept.startswith("once"):
            options |= {
                "checkpoint_every_n_tokens": None,
                "checkpoint_offsets": torch.tensor([64, 64, 64, 128]),
            }
        if kept == "in the pool":
            options |= {
                "checkpoint_every_n_tokens": None,
                "checkpoint_offsets": torch.tensor([64, 64, 64, 128]),
            }
            options |= {"checkpoint_rows": int32(5, 5, -1, 2), "state_checkpoints": None}
            options["checkpoint_offsets"][1] = 0
        expected = gated_delta_rule(**x, **options, state_pool=pool)
        o, final = chunk_gated_delta_rule(**x, **options, state_pool=pool)
        assert final is pool
        assert_near((o, pool), (expected.out, expected.pool))
        if kept != "in the pool":
            assert_near(buffer, expected.checkpoints)
            assert buffer.isfinite().any()
        # Of the dense batch the third row is padding, which writes none.
        assert pool[1].isfinite().all() and (
            kept != "every" or buffer.isnan().any() == (not packed)
        )
        assert not (o[0, 70:73] if packed else o[2]).any()


def test_a_pool_that_is_only_read() -> None:
    x, pool = inputs(), states(4).requires_grad_()
    before = pool.detach().clone()
    x["v"].requires_grad_()
    options = {"cu_seqlens": CU, "state_indices": int32(3, 1, -1, 3), "update_state_pool": False}
    o, final = chunk_gated_delta_rule(**x, **options, state_pool=pool, output_final_state=True)
    expected = gated_delta_rule(**x, **options, state_pool=pool)
    assert_near((o, final), expected[:2])
    assert not final[2].any() and chunk_gated_delta_rule(**x, **options, state_pool=pool)[1] is None
    (o.sum() + final.sum()).backward()
    assert pool.equal(before) and pool.grad[[1, 3]].any() and not pool.grad[[0, 2]].any()
    assert x["v"].grad.any()


@pytest.mark.parametrize("cut", [1, 64, 70])
def test_two_calls_are_one(cut: int) -> None:
    x = part(inputs(), 73, 203)
    o, final = chunk_gated_delta_rule(**x, output_final_state=True)
    first, pool = chunk_gated_delta_rule(
        **part(x, 0, cut), state_pool=torch.zeros(2, HS, K, V, dtype=DOUBLE)
    )
    second, pool = chunk_gated_delta_rule(**part(x, cut, 130), state_pool=pool)
    assert_near((torch.cat((first, second), 1), pool[:1]), (o, final))
    assert not pool[1].any()


def test_sequences_do_not_see_each_other() -> None:
    """Each alone gives what it gives among neighbours that hold NaN; an empty one passes its state through."""
    x, initial = inputs(), states(4)
    for n in range(4):
        poisoned = {name: torch.full_like(x[name], NAN) for name in TOKENS} | {
            "g": torch.full_like(x["g"], -1e4)
        }
        here = slice(STARTS[n], STARTS[n + 1])
        for name in TOKENS:
            poisoned[name][:, here] = x[name][:, here]
        o, final = chunk_gated_delta_rule(
            **poisoned, initial_state=initial, output_final_state=True, cu_seqlens=CU
        )
        alone = chunk_gated_delta_rule(
            **part(x, here.start, here.stop),
            initial_state=initial[n : n + 1],
            output_final_state=True,
        )
        assert_near((o[:, here], final[n : n + 1]), alone)
        if not LENGTHS[n]:
            assert final[n].equal(initial[n])


def test_states_that_are_not_there() -> None:
    """has_initial_state counts for initial states too, and takes no more from them than zero."""
    x, initial = inputs(), states(4)
    fresh = torch.tensor([True, False, True, False])
    zeroed = torch.where(fresh[:, None, None, None], initial, 0)
    options = {"cu_seqlens": CU, "output_final_state": True}
    expected = chunk_gated_delta_rule(**x, **options, initial_state=zeroed)
    initial[~fresh] = NAN
    assert_near(
        chunk_gated_delta_rule(**x, **options, initial_state=initial, has_initial_state=fresh),
        expected,
    )
    read = {"state_pool": initial, "has_initial_state": fresh, "update_state_pool": False}
    assert_near(chunk_gated_delta_rule(**x, **options, **read), expected)


def test_gates_that_are_not_there() -> None:
    x = inputs()
    zero, one = torch.zeros_like(x["g"]), torch.ones_like(x["g"])
    q, k, v, g, beta = (x[name] for name in TOKENS)
    for given, same in (((g, None), (g, one)), ((None, beta), (zero, beta)), ((), (zero, one))):
        o, final = chunk_gated_delta_rule(q, k, v, *given, output_final_state=True)
        assert_near((o, final), chunk_gated_delta_rule(q, k, v, *same, output_final_state=True))


def test_softplus_has_numbers() -> None:
    x = inputs()
    raw = x | {
        "g": 40 * x["g"] + 20,
        "A_log": torch.randn(HS, dtype=DOUBLE),
        "dt_bias": torch.randn(HS, dtype=DOUBLE),
    }
    for numbers in ({}, {"softplus_beta": 0.5, "softplus_threshold": 3.0}):
        decay = torch.nn.functional.softplus(
            raw["g"] + raw["dt_bias"], *(numbers.values() or (1.0, 20.0))
        )
        o, _ = chunk_gated_delta_rule(**raw, use_gate_in_kernel=True, **numbers)
        expected, _ = chunk_gated_delta_rule(**x | {"g": -raw["A_log"].exp() * decay})
        assert_near(o, expected)


def test_gradients_of_grouped_heads_are_those_of_repeated_ones() -> None:
    x = {name: tensor[:, :20].requires_grad_() for name, tensor in inputs(tokens=20).items()}
    o, final = chunk_gated_delta_rule(**x, output_final_state=True)
    own = torch.autograd.grad((o * o).sum() + final.sum(), [*x.values()])
    repeated = x | {
        name: x[name].repeat_interleave(HS // x[name].shape[2], 2) for name in ("q", "k", "v")
    }
    o, final = chunk_gated_delta_rule(**repeated, output_final_state=True)
    assert_near(own, torch.autograd.grad((o * o).sum() + final.sum(), [*x.values()]))


def test_nothing_waits_for_a_device() -> None:
    """On meta tensors, which have no contents, everything that looks at contents would raise."""
    arguments = inputs() | {
        "cu_seqlens": CU, "state_pool": states(5), "state_indices": int32(0, 1, 2, 3), "null_slot": 0,
        "output_state_indices": int32(0, 1, 4, 3), "has_initial_state": torch.ones(4, dtype=torch.bool),
        "state_checkpoints": torch.empty(1, 3, HS, K, V, dtype=DOUBLE), "checkpoint_every_n_tokens": 64,
    }  # fmt: skip
    moved = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    o, pool = chunk_gated_delta_rule(**moved)
    assert o.device.type == "meta" and pool is moved["state_pool"]


@pytest.mark.parametrize("options", [{"use_intracard_cp": True}, {"impl": "fla"}])
def test_what_nothing_here_serves_is_refused_by_name(options: dict[str, Any]) -> None:
    reason = "does not split sequences|needs a CUDA device"
    with pytest.raises(RuntimeError, match=reason):
        chunk_gated_delta_rule(**inputs(tokens=3), **options)
