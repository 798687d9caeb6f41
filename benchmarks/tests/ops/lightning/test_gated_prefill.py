"""The benchmark of the gated delta rule: its settings, grouped heads, and what its check refuses; on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.checks import worst_head
from benchmarks.ops.lightning import delta, gated_prefill
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.delta import setting
from benchmarks.ops.sequences import query_heads
from benchmarks.tests.ops.common import assert_fits_the_h200, token_by_token

ALL = gated_prefill.settings(False)
SMALL = [
    setting(100, heads=4, heads_q=2),
    setting(70, batch=2, heads=4),
    setting(150, heads=4, sequences=3, lengths="skewed", heads_q=1, slow=True),
]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(lightning, "DIM", 16)
    monkeypatch.setattr(lightning, "ORACLE_CHUNK", 32)


def naive(problem, x):
    """The delta rule token by token in fp64, every value head with its head of q and k."""
    y, group = x.gated, problem.params["H"] // query_heads(problem)

    def step(b, t, h, start, s):
        q, k = (z[b, t, h // group].double() for z in (y.q, y.k))
        s = s * math.exp(float(y.gate[b, t, h]))
        s = s + float(x.beta[b, t, h]) * torch.outer(k, y.v[b, t, h].double() - s.T @ k)
        return s, (q @ s) * k.shape[0] ** -0.5

    return token_by_token(problem, y, step)


@pytest.mark.parametrize("problem", SMALL, ids=lambda p: p.name)
def test_the_oracle_is_the_recurrence(small, problem):
    x = delta.make_inputs(problem, "cpu", 1)
    output, state = delta.delta_oracle(problem, x.gated, x.beta, [0, 1, 3])
    o, final = naive(problem, x)
    assert worst_head(o[:, :, [0, 1, 3]], output, 2) < 3e-3  # o is rounded to 16 bits
    assert worst_head(final[:, [0, 1, 3]], state, 1) < 1e-6


@pytest.mark.parametrize("problem", SMALL, ids=lambda p: p.name)
def test_ours_passes_the_check(small, problem):
    """On the CPU the function computes in fp64; what is left is the rounding of the output."""
    errors = gated_prefill.check(gated_prefill.CULA, problem, "cpu")
    assert errors["output"] < 3e-3 and errors["state"] < 1e-6
    o, state = gated_prefill.CULA.bind(problem, delta.make_inputs(problem, "cpu", 0))()
    assert o.isfinite().all() and state.isfinite().all()


def test_the_check_refuses_another_result(small, monkeypatch):
    right = gated_prefill._result

    def wrong(problem, x):
        o, state = right(problem, x)
        return o, state.mT

    monkeypatch.setattr(gated_prefill, "_result", wrong)
    with pytest.raises(CheckFailed, match="relative RMSE of the state"):
        gated_prefill.check(gated_prefill.CULA, SMALL[0], "cpu")


def test_settings_have_names_of_their_own():
    names = [s.name for s in ALL]
    assert len(set(names)) == len(names) == 14 and "B1-T8192-H32-Q16" in names
    assert {s.name for s in gated_prefill.settings(True)} < set(names)


@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.name)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    assert_fits_the_h200(delta.read(problem), 4 * gated_prefill.CULA.moved(problem))
