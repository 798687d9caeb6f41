"""The backward kernel on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math

import pytest
import torch

from cula_core.compiled.artifacts import Unit
from cula_emulator import mutation
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from liteattention_sm89 import masks, reference
from liteattention_sm90.config import BackwardConfig

CASES = [
    # rows, keys, heads, kv heads, dim, causal, listed, block_n, dtype
    (130, 200, 1, 1, 128, False, None, 64, "bfloat16"),
    (200, 130, 2, 1, 64, True, None, 64, "float16"),
    (200, 130, 1, 1, 128, True, None, 64, "bfloat16"),
    (130, 200, 1, 1, 64, False, None, 64, "bfloat16"),
    (130, 200, 2, 1, 128, False, None, 64, "bfloat16"),
    (70, 200, 1, 1, 96, True, 0.6, 64, "bfloat16"),
    (300, 300, 2, 2, 128, False, 0.5, 64, "bfloat16"),
    (260, 400, 2, 1, 80, False, 0.6, 128, "float16"),
    (129, 2200, 1, 1, 64, False, 0.1, 64, "bfloat16"),
    (1, 65, 1, 1, 64, False, 1.0, 64, "bfloat16"),
]


@pytest.fixture
def gradients(emulated):
    def run(q, k, v, out, lse, dout, mask, *, causal, block_n, **changes):
        batch, rows, heads, dim = q.shape
        padded = -(-rows // 64) * 64
        lse2 = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e)).float()
        lse2 = torch.nn.functional.pad(lse2, (0, padded - rows), value=math.inf).contiguous()
        delta = (out.float() * dout.float()).sum(-1).transpose(1, 2)
        delta = torch.nn.functional.pad(delta, (0, padded - rows)).contiguous()
        dk, dv = emulated.empty(k.shape, k.dtype), emulated.empty(v.shape, v.dtype)
        config = BackwardConfig(str(q.dtype).split(".")[1], dim, causal, mask is not None, block_n)
        acc = torch.zeros(batch, rows, heads, config.width)
        across = None
        if mask is not None:
            across = masks.transpose(mask, -(-rows // 128), -(-k.shape[1] // block_n))
        scale = dim**-0.5
        run.kernel = emulated_kernel(emulated, Unit("liteattention_sm90.build", config, "sm_90a"))
        run.kernel(
            q, k, v, dout, lse2, delta, across, acc, dk, dv, scale, scale * math.log2(math.e), **changes
        )  # fmt: skip
        return (acc[..., :dim] * scale), dk, dv

    return run


def problem(case):
    rows, keys, heads, heads_k, dim, causal, listed, block_n, dtype = case
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    q, dout = normal(1, rows, heads, dim), normal(1, rows, heads, dim)
    k, v = normal(1, keys, heads_k, dim), normal(1, keys, heads_k, dim)
    mask = None
    if listed is not None:
        shape = 1, heads, -(-rows // 128), -(-keys // block_n)
        mask = masks.pack(torch.rand(shape, generator=generator) < listed)
    doubles = [x.double() for x in (q, k, v)]
    out, lse, _ = reference.lite_attention(
        *doubles,
        mask,
        threshold=-math.inf,
        direction=1,
        scale=dim**-0.5,
        causal=causal,
        must_do=None,
        block_m=128,
        block_n=block_n,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=rows,
        max_seqlen_k=keys,
        use_int8=False,
    )
    want = reference.masked_gradients(
        *doubles, dout.double(), mask, out=out, lse=lse, dlse=None, scale=dim**-0.5, causal=causal, block_m=128,
        block_n=block_n, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=rows, max_seqlen_k=keys,
    )  # fmt: skip
    return (q, k, v, out.to(q.dtype), lse, dout, mask), {"causal": causal, "block_n": block_n}, want


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(gradients, case):
    given, options, want = problem(case)
    for name, a, b in zip("qkv", gradients(*given, **options), want):
        if b.any():
            assert relative_rmse(a, b) <= 5e-3, name
        else:
            assert not a.any()


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("dim", [64, 128])
def test_every_wait_matters(gradients, dim):
    given, options, _ = problem((200, 230, 2, 1, dim, False, 0.7, 64, "bfloat16"))
    want = gradients(*given, **options)

    def check(changes):
        for a, b in zip(gradients(*given, **options, **vars(changes)), want):
            assert torch.equal(a, b), "another result"

    report = mutation.run(check, gradients.kernel, schedules=mutation.SCHEDULES[:3])
    # The emulator keeps shared memory longer than its CTA, so that nobody need wait for what leaves it last.
    unnoticed = sorted(m.text for m in report.unnoticed)
    last = "cp.async.bulk.wait_group 0"
    assert unnoticed == ["cp.async.bulk.commit_group", last, last], str(report)
