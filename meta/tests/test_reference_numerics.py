"""Extreme decays, low precision, gradients and torch.compile of the chunk forms."""

import pytest
import torch

from cula.reference import (
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_simple_gla,
    lightning_attn_fwd_varlen,
    lite_attention,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_simple_gla,
)
from cula.reference._decay import decayed_products

TOL = dict(rtol=1e-10, atol=1e-10)
OPS = {
    "simple_gla": (chunk_simple_gla, recurrent_simple_gla),
    "gated_delta_rule": (chunk_gated_delta_rule, recurrent_gated_delta_rule),
    "kda": (chunk_kda, recurrent_kda),
}
every_op = pytest.mark.parametrize("name", OPS)


def problem(name, tokens, heads=2, dim=8, dtype=torch.float64, seed=0):
    """Dense tokens and one state per batch row: unit keys, beta in (0, 1), decays around exp(-1/2)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(kind, *shape):
        return kind(1, tokens, heads, *shape, generator=generator, dtype=torch.float64)

    k = draw(torch.randn, dim)
    gate = draw(torch.rand, dim) if name == "kda" else draw(torch.rand)
    x = dict(
        q=draw(torch.randn, dim),
        k=k / k.norm(dim=-1, keepdim=True),
        v=draw(torch.randn, dim),
        g=-gate,
    )
    if name != "simple_gla":
        x["beta"] = draw(torch.rand)
    initial = torch.randn(1, heads, dim, dim, generator=generator, dtype=torch.float64)
    return {key: y.to(dtype) for key, y in x.items()}, initial


def rms(x):
    return x.square().mean().sqrt().item()


@every_op
@pytest.mark.parametrize(
    "pattern",
    [
        [-1000.0],
        [0.0],
        [-1000.0, 0.0],
        [0.0] * 37 + [-1000.0],
        [-1e-9, -80.0, -1e4],
        [-torch.inf, -0.1, -0.1, -0.1],
    ],
    ids=["masked", "none", "alternating", "once a chunk", "mixed", "infinite"],
)
def test_extreme_decays_are_exact(name, pattern):
    chunk, recurrent = OPS[name]
    x, initial = problem(name, 200)
    g = torch.tensor(pattern, dtype=torch.float64).repeat(200)[:200].view(1, 200, 1)
    x["g"].copy_(g[..., None].expand_as(x["g"]) if name == "kda" else g.expand_as(x["g"]))
    inputs = dict(initial_state=initial, output_final_state=True)
    for a, b in zip(chunk(**x, **inputs), recurrent(**x, **inputs), strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_extreme_decays_of_single_channels_are_exact():
    x, initial = problem("kda", 200)
    hit = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1)) < 0.2
    x["g"].masked_fill_(hit, -1000.0)
    inputs = dict(initial_state=initial, output_final_state=True)
    for a, b in zip(chunk_kda(**x, **inputs), recurrent_kda(**x, **inputs), strict=True):
        torch.testing.assert_close(a, b, **TOL)


@every_op
@pytest.mark.parametrize(
    "pattern",
    [[-0.5], [-0.3] * 20 + [-1000.0], [0.0, -1000.0, -0.01]],
    ids=["mild", "masked", "mixed"],
)
def test_fp32_loses_no_more_than_rounding(name, pattern):
    """Relative RMSE <= 1e-6: 17 units of roundoff (2^-24), for sums of 64 to 128 products in a chain of five stages.

    Strong decays must not spend that budget: no exponent is formed as a difference of large sums.
    """
    chunk, recurrent = OPS[name]
    x, initial = problem(name, 300, dim=64, dtype=torch.float32)
    g = torch.tensor(pattern).repeat(300)[:300].view(1, 300, 1)
    x["g"].copy_(g[..., None].expand_as(x["g"]) if name == "kda" else g.expand_as(x["g"]))
    actual = chunk(**x, initial_state=initial.float(), output_final_state=True)
    wide = {key: y.double() for key, y in x.items()}
    expected = recurrent(**wide, initial_state=initial.float().double(), output_final_state=True)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert rms(a.double() - b) <= 1e-6 * rms(b)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_rounds_only_the_output(name, dtype):
    """Arithmetic is fp32: an output is off by its own half ulp plus what fp32 loses, the state by the latter alone."""
    roundoff = torch.finfo(dtype).eps / 2
    chunk, recurrent = OPS[name]
    x, initial = problem(name, 150, dim=32, dtype=dtype)
    o, final = chunk(**x, initial_state=initial.float(), output_final_state=True)
    wide = {key: y.double() for key, y in x.items()}
    expected, state = recurrent(
        **wide, initial_state=initial.float().double(), output_final_state=True
    )
    assert o.dtype == dtype and final.dtype == torch.float32
    fp32_loss = 1e-6 * rms(expected)
    assert (
        (o.double() - expected).abs() <= roundoff * expected.abs() * (1 + roundoff) + 10 * fp32_loss
    ).all()
    assert rms(final.double() - state) <= 1e-6 * rms(state)


def test_decayed_products_against_their_definition():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 16, 5, generator=generator, dtype=torch.float64)
    for channels in (5, 1):
        g = -torch.rand(3, 16, channels, generator=generator, dtype=torch.float64) * 4
        (products,), sums = decayed_products((a,), b, g)
        for i in range(16):
            torch.testing.assert_close(sums.since_start[:, i], g[:, : i + 1].sum(1), **TOL)
            torch.testing.assert_close(sums.until_end[:, i], g[:, i + 1 :].sum(1), **TOL)
            for j in range(16):
                expected = (a[:, i] * b[:, j] * g[:, j + 1 : i + 1].sum(1).exp()).sum(-1)
                torch.testing.assert_close(
                    products[:, i, j], expected if j <= i else torch.zeros_like(expected), **TOL
                )
        torch.testing.assert_close(sums.total[:, 0], g.sum(1), **TOL)


@every_op
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients(name, packed):
    """Against finite differences, for every floating input with the initial state, across a chunk border."""
    chunk, _ = OPS[name]
    x, _ = problem(name, 67, heads=1, dim=2)
    names = list(x)
    sequences = 3 if packed else 1
    state = torch.randn(
        sequences, 1, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    extra = {"cu_seqlens": torch.tensor([0, 1, 1, 67])} if packed else {}

    def fn(*values):
        inputs = dict(zip(names, values[:-1], strict=True))
        return chunk(**inputs, **extra, initial_state=values[-1], output_final_state=True)

    values = [y.requires_grad_() for y in (*x.values(), state)]
    assert torch.autograd.gradcheck(fn, values, fast_mode=True)


@every_op
def test_gradients_equal_those_of_the_recurrence(name):
    chunk, recurrent = OPS[name]
    x, initial = problem(name, 130)
    weight = torch.randn(
        initial.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    gradients = []
    for fn in (chunk, recurrent):
        leaves = [y.clone().requires_grad_() for y in (*x.values(), initial)]
        o, final = fn(
            **dict(zip(x, leaves, strict=False)), initial_state=leaves[-1], output_final_state=True
        )
        gradients.append(torch.autograd.grad(o.square().sum() + (final * weight).sum(), leaves))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_through_the_gates():
    generator = torch.Generator().manual_seed(3)
    q, k, v, x = (
        torch.randn(1, 5, 1, 2, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(4)
    )
    logits = torch.randn(1, 5, 1, generator=generator, dtype=torch.float64).requires_grad_()
    A_log = torch.zeros(1, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(2, dtype=torch.float64).requires_grad_()
    for lower_bound in (None, -5.0):

        def fn(q, k, v, x, logits, A_log, bias, lower_bound=lower_bound):
            flags = dict(
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
            )
            return chunk_kda(
                q, k, v, x, logits, lower_bound=lower_bound, A_log=A_log, dt_bias=bias, **flags
            )[0]

        assert torch.autograd.gradcheck(fn, (q, k, v, x, logits, A_log, bias))


@every_op
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compiles_as_one_graph(name, packed):
    chunk, _ = OPS[name]
    x, initial = problem(name, 130)
    extra = {"cu_seqlens": torch.tensor([0, 129, 129, 130])} if packed else {}
    extra["initial_state"] = initial.repeat(3, 1, 1, 1) if packed else initial
    compiled = torch.compile(chunk, fullgraph=True, backend="eager")
    for a, b in zip(
        compiled(**x, **extra, output_final_state=True),
        chunk(**x, **extra, output_final_state=True),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_state_pool_and_skip_list_compile_as_one_graph():
    x, initial = problem("simple_gla", 130)
    pool = initial.repeat(4, 1, 1, 1)
    inputs = (
        x["q"],
        x["k"],
        x["v"],
        torch.tensor([0.1, 0.2]).double(),
        torch.tensor([0, 100, 130]),
    )
    slots = torch.tensor([2, -1], dtype=torch.int32)
    compiled = torch.compile(lightning_attn_fwd_varlen, fullgraph=True, backend="eager")
    pools = pool.clone(), pool.clone()
    o = compiled(*inputs, state_pool=pools[0], initial_state_indices=slots)[0]
    assert torch.equal(
        o, lightning_attn_fwd_varlen(*inputs, state_pool=pools[1], initial_state_indices=slots)[0]
    )
    assert torch.equal(*pools)
    attention = torch.compile(lite_attention, fullgraph=True, backend="eager")
    for a, b in zip(
        attention(x["q"], x["k"], x["v"]), lite_attention(x["q"], x["k"], x["v"]), strict=True
    ):
        assert torch.equal(a, b)
