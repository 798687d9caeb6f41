"""Gate activations and the norm of keys against the same formulas in Python floats."""

import math

import pytest
import torch

from cula_core.reference.common import normalized, work_dtype
from cula_core.reference.gates import log_decay, write_strength


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_softplus_gate():
    x, A_log, bias = randn(2, 3, 2, 4), randn(2, seed=1), randn(8, seed=2)
    g = log_decay(x, A_log, bias)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        head, channel = index[2:]
        argument = x[tuple(index)].item() + bias[4 * head + channel].item()
        expected = -math.exp(A_log[head].item()) * math.log1p(math.exp(argument))
        assert g[tuple(index)].item() == pytest.approx(expected, rel=1e-13)


def test_safe_gate_is_another_function_and_stays_inside_its_bound():
    x, A_log, bias = randn(2, 3, 2, 4) * 3, randn(2, seed=1), randn(2, 4, seed=2)
    g = log_decay(x, A_log, bias, lower_bound=-5.0)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        head, channel = index[2:]
        argument = math.exp(A_log[head].item()) * (
            x[tuple(index)].item() + bias[head, channel].item()
        )
        assert g[tuple(index)].item() == pytest.approx(-5.0 * sigmoid(argument), rel=1e-13)
    assert (g > -5).all() and (g < 0).all()
    assert (log_decay(x, A_log, bias) - g).abs().max() > 0.1


def test_gate_without_A_log_has_rate_one():
    x, bias = randn(1, 5, 2, 4), randn(8, seed=2)
    zero = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(log_decay(x, None, bias, -3.0), log_decay(x, zero, bias, -3.0))
    assert torch.equal(log_decay(x, None, bias), log_decay(x, zero, bias))


@pytest.mark.parametrize("x", [-800.0, -30.0, 0.0, 19.0, 21.0, 40.0, 800.0])
def test_softplus_has_no_seam_and_no_overflow(x):
    g = log_decay(torch.full((1, 1), x, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    expected = x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
    assert -g.item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("beta, threshold", [(1.0, 20.0), (2.0, 3.0), (0.25, 8.0)])
def test_softplus_may_bend_elsewhere_and_end_in_a_line(beta, threshold):
    for x in (-30.0, 0.0, 1.0, 1.6, 31.9, 32.1):
        g = log_decay(torch.full((1, 1), x, dtype=torch.float64), None, softplus=(beta, threshold))
        expected = x if beta * x > threshold else math.log1p(math.exp(beta * x)) / beta
        assert -g.item() == pytest.approx(expected, rel=1e-14)


def test_gate_per_head():
    x, A_log, bias = randn(1, 3, 2, 1), randn(2, seed=1), randn(2, seed=2)
    expected = -A_log.exp() * torch.log1p((x[..., 0] + bias).exp())
    assert torch.allclose(log_decay(x, A_log, bias)[..., 0], expected, rtol=1e-13)


def test_write_strength():
    logits = randn(4, 3)
    for a, b, twice in zip(
        logits.flatten(),
        write_strength(logits).flatten(),
        write_strength(logits, allow_neg_eigval=True).flatten(),
        strict=True,
    ):
        assert b.item() == pytest.approx(sigmoid(a.item()), rel=1e-14)
        assert twice.item() == 2 * b.item()


def test_norm_has_its_epsilon_inside_the_root():
    x = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [30.0, 40.0]], dtype=torch.float64)
    expected = [
        [3e-3 / math.sqrt(26e-6), 4e-3 / math.sqrt(26e-6)],
        [0.0, 0.0],
        [30 / math.sqrt(2500 + 1e-6), 40 / math.sqrt(2500 + 1e-6)],
    ]
    assert torch.allclose(
        normalized(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_sums_are_as_wide_as_the_widest_input():
    half, double = torch.zeros(1).half(), torch.zeros(1).double()
    assert work_dtype(half, None) == torch.float32
    assert work_dtype(half, None, double) == torch.float64
