"""FLA's own kernels behind `impl="fla"` against the reference, on a GPU: the adapter's mapping is right for real."""

from __future__ import annotations

import pytest
import torch

import cula.kda
import cula.lightning

pytestmark = pytest.mark.gpu

H, HV, K, V = 2, 4, 64, 128
LENGTHS = (70, 0, 1, 129)
BOUND = 1e-2  # two bf16 results, each allowed 5e-3


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU")
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())


def randn(device, *shape):
    return torch.randn(shape, device=device)


def activations(device, batch, tokens, heads=HV):
    q, k = (
        torch.nn.functional.normalize(randn(device, batch, tokens, heads, K), dim=-1).bfloat16()
        for _ in range(2)
    )
    return q, k, randn(device, batch, tokens, HV, V).bfloat16()


def assert_near(got, want):
    assert got.shape == want.shape and torch.isfinite(got).all()
    difference = (got.double() - want.double()).norm() / want.double().norm()
    assert difference <= BOUND, f"relative RMSE {difference:.2e}"


def both(function, *args, **kwargs):
    """The results of FLA and of the reference."""
    return (function(*args, **kwargs, impl=impl) for impl in ("fla", "reference"))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_lightning_prefill(cuda, state_v_first):
    q, k, v = activations(cuda, 2, 130)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    h0 = randn(cuda, 2, HV, *((V, K) if state_v_first else (K, V)))
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.lightning_attn_fwd,
        q,
        k,
        v,
        decay,
        initial_state=h0,
        output_final_state=True,
        state_v_first=state_v_first,
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_lightning_prefill_on_a_pool(cuda):
    total = sum(LENGTHS)
    q, k, v = activations(cuda, 1, total)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    offsets = torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).to(torch.int32)
    rows = torch.tensor([4, 2, 0, 1], device=cuda, dtype=torch.int32)
    pools = [randn(cuda, 6, HV, K, V)]
    pools.append(pools[0].clone())
    outputs = [
        cula.lightning.lightning_attn_fwd_varlen(
            q, k, v, decay, offsets, state_pool=pool, initial_state_indices=rows, impl=impl
        )[0]
        for impl, pool in zip(("fla", "reference"), pools)
    ]
    assert_near(*outputs)
    assert_near(*pools)


def test_simple_gla(cuda):
    q, k, v = activations(cuda, 2, 100)
    g = torch.nn.functional.logsigmoid(randn(cuda, 2, 100, HV))
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.chunk_simple_gla, q, k, v, g, output_final_state=True
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_gated_delta_rule(cuda):
    q, k, v = activations(cuda, 2, 100)
    g = torch.nn.functional.logsigmoid(randn(cuda, 2, 100, HV))
    beta = torch.rand(2, 100, HV, device=cuda).bfloat16()
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.chunk_gated_delta_rule, q, k, v, g, beta, output_final_state=True
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_kda(cuda):
    q, k, v = activations(cuda, 1, 200)
    raw = randn(cuda, 1, 200, HV, K).bfloat16()
    beta = torch.rand(1, 200, HV, device=cuda).bfloat16()
    offsets = torch.tensor([0, 70, 71, 200], device=cuda, dtype=torch.int32)
    (o, ht), (o_want, ht_want) = both(
        cula.kda.chunk_kda,
        q,
        k,
        v,
        raw,
        beta,
        output_final_state=True,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        cu_seqlens=offsets,
        A_log=torch.zeros(HV, device=cuda),
        dt_bias=torch.zeros(HV * K, device=cuda),
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_decode(cuda):
    q, k, v = activations(cuda, 3, 1, heads=H)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    rows = torch.tensor([2, -1, 0], device=cuda, dtype=torch.int32)
    pools = [randn(cuda, 4, HV, K, V)]
    pools.append(pools[0].clone())
    outputs = [
        cula.lightning.linear_attention_decode(q, k, v, pool, decay, state_indices=rows, impl=impl)
        for impl, pool in zip(("fla", "reference"), pools)
    ]
    assert_near(*outputs)
    assert_near(*pools)
    assert not outputs[0][1].any()
