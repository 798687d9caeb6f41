"""Gate activations against the same formulas in Python floats, and the flags of chunk_kda that apply them."""

import math

import pytest
import torch

from cula.reference import chunk_gated_delta_rule, chunk_kda, recurrent_kda
from cula.reference.gates import l2norm, log_decay, write_strength


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


def test_safe_gate_without_A_log_has_rate_one():
    x, bias = randn(1, 5, 2, 4), randn(8, seed=2)
    zero = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(log_decay(x, None, bias, -3.0), log_decay(x, zero, bias, -3.0))
    with pytest.raises(
        ValueError, match="A_log: expected a tensor because lower_bound is None, got None"
    ):
        log_decay(x, None, bias)


@pytest.mark.parametrize("x", [-800.0, -30.0, 0.0, 19.0, 21.0, 40.0, 800.0])
def test_softplus_has_no_seam_and_no_overflow(x):
    g = log_decay(torch.full((1, 1), x, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    expected = x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
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


def test_l2norm_has_its_epsilon_inside_the_root():
    x = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [30.0, 40.0]], dtype=torch.float64)
    expected = [
        [3e-3 / math.sqrt(26e-6), 4e-3 / math.sqrt(26e-6)],
        [0.0, 0.0],
        [30 / math.sqrt(2500 + 1e-6), 40 / math.sqrt(2500 + 1e-6)],
    ]
    assert torch.allclose(
        l2norm(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_flags_of_chunk_kda_equal_activation_by_hand(lower_bound, allow_neg_eigval):
    q, k, x = randn(2, 70, 2, 4), randn(2, 70, 2, 4, seed=1), randn(2, 70, 4, 4, seed=2)
    v, logits = randn(2, 70, 4, 3, seed=3), randn(2, 70, 4, seed=4)
    A_log, bias = randn(4, seed=5), randn(16, seed=6)
    o, final = chunk_kda(
        q,
        k,
        v,
        x,
        logits,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=lower_bound is not None,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=bias,
    )
    shifted = x + bias.view(4, 4)
    rate = A_log.exp()[:, None]
    g = (
        -rate * torch.log1p(shifted.exp())
        if lower_bound is None
        else lower_bound / (1 + (-rate * shifted).exp())
    )
    beta = (2 if allow_neg_eigval else 1) / (1 + (-logits).exp())
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    expected, state = recurrent_kda(q, k, v, g, beta, output_final_state=True)
    assert torch.allclose(o, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(final, state, rtol=1e-10, atol=1e-10)


def test_the_form_follows_lower_bound_and_not_safe_gate():
    q, k, x = randn(1, 5, 1, 4), randn(1, 5, 1, 4, seed=1), randn(1, 5, 1, 4, seed=2)
    v, beta, A_log = (
        randn(1, 5, 1, 3, seed=3),
        torch.full((1, 5, 1), 0.5).double(),
        randn(1, seed=5),
    )
    gate = dict(use_gate_in_kernel=True, A_log=A_log)
    safe, _ = chunk_kda(q, k, v, x, beta, lower_bound=-5.0, **gate)
    softplus, _ = chunk_kda(q, k, v, x, beta, safe_gate=True, **gate)
    assert torch.equal(
        safe, chunk_kda(q, k, v, x, beta, safe_gate=True, lower_bound=-5.0, **gate)[0]
    )
    assert torch.equal(softplus, chunk_kda(q, k, v, x, beta, **gate)[0])
    assert (safe - softplus).abs().max() > 1e-3


def test_gate_in_kernel_of_the_gated_delta_rule():
    q, k, x = randn(1, 70, 2, 4), randn(1, 70, 2, 4, seed=1) / 4, randn(1, 70, 4, seed=2)
    v, logits, A_log, bias = (
        randn(1, 70, 4, 3, seed=3),
        randn(1, 70, 4, seed=4),
        randn(4, seed=5),
        randn(4, seed=6),
    )
    flags = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    o, _ = chunk_gated_delta_rule(
        q, k, v, x, logits, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, **flags
    )
    g = -A_log.exp() * torch.log1p((x + bias).exp())
    expected, _ = recurrent_kda(
        q, k, v, g[..., None].expand(1, 70, 4, 4), 2 * torch.sigmoid(logits)
    )
    assert torch.allclose(o, expected, rtol=1e-10, atol=1e-10)


def test_context_parallelism_is_refused_by_name():
    q, beta = randn(1, 3, 1, 2), torch.ones(1, 3, 1).double()
    for op, g in ((chunk_kda, q), (chunk_gated_delta_rule, beta)):
        with pytest.raises(NotImplementedError, match="cp_context"):
            op(q, q, q, g, beta, cp_context=object())
