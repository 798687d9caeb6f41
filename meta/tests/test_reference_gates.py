"""The flags of chunk_kda that turn raw projections into decays and write strengths."""

import pytest
import torch

from cula.reference import chunk_gated_delta_rule, chunk_kda, recurrent_kda


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
