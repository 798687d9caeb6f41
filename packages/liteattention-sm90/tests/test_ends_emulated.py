"""The kernels before and after the backward on the CPU, beside torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from liteattention_sm90 import launch
from liteattention_sm90.config import ConvertConfig, SumsConfig

CASES = [
    # batch, rows, heads, dim, dtype, views
    (1, 64, 1, 8, "bfloat16", False),
    (2, 1, 3, 40, "float16", True),
    (1, 200, 2, 40, "bfloat16", False),
    (3, 130, 1, 64, "float16", False),
    (2, 63, 3, 96, "bfloat16", True),
    (1, 129, 2, 128, "bfloat16", True),
    (2, 257, 5, 128, "float16", False),
]


def normal(shape: tuple[int, ...], dtype: str, views: bool = False, seed: int = 0) -> Tensor:
    """Random numbers [B, S, H, D]; with views in the middle of a larger tensor of NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    if not views:
        return values
    batch, rows, heads, dim = shape
    whole = torch.full((batch, rows + 3, heads + 1, dim + 8), math.nan, dtype=values.dtype)
    return whole[:, 2 : 2 + rows, :heads, :dim].copy_(values)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(emulated, case, with_dlse):
    batch, rows, heads, dim, dtype, views = case
    out, dout = (normal((batch, rows, heads, dim), dtype, views, seed) for seed in range(2))
    lse, dlse = normal((2, batch, heads, rows), "float32")
    blind = torch.arange(rows) % 7 == 3
    lse[..., blind], dlse[..., blind], out[:, blind] = -math.inf, math.nan, math.nan
    if views:
        lse, dlse = (torch.stack((x, x), 2)[:, :, 1] for x in (lse, dlse))
    config = SumsConfig(dtype, dim, with_dlse)
    padded = -(-rows // 64) * 64
    lse_log2, delta = (emulated.empty((batch, heads, padded), torch.float32) for _ in range(2))
    acc = emulated.empty((batch, rows, heads, config.width), torch.float32)
    kernel = emulated_kernel(emulated, launch.unit(config))
    kernel(out, dout, lse, dlse if with_dlse else None, lse_log2, delta, acc, None, None)

    assert torch.equal(acc, torch.zeros_like(acc))
    nothing = torch.cat((blind, torch.ones(padded - rows, dtype=torch.bool)))
    assert (lse_log2[..., nothing] == math.inf).all() and not delta[..., nothing].any()
    want = (out.double() * dout.double()).sum(-1).mT
    if with_dlse:
        want = want - dlse
    found = [x[..., :rows][..., ~blind] for x in (delta, lse_log2)]
    torch.testing.assert_close(found[0], want[..., ~blind].float())
    torch.testing.assert_close(found[1], lse[..., ~blind] * math.log2(math.e))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convert(emulated, case):
    batch, rows, heads, dim, dtype, views = case
    config = ConvertConfig(dtype, dim)
    acc = normal((batch, rows, heads, config.width), "float32", views)
    acc[..., dim:] = math.nan
    shape, stride = (batch, rows, heads, dim), None
    if views:
        stride = ((rows + 2) * (heads * dim + 16), heads * dim + 16, dim, 1)
    dq = emulated.empty(shape, getattr(torch, dtype), stride=stride)
    emulated_kernel(emulated, launch.unit(config))(acc, dq, 0.3, None, None)
    want = acc[..., :dim] * torch.tensor(0.3, dtype=torch.float32)
    assert torch.equal(dq, want.to(dq.dtype))


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("config", [
    SumsConfig("bfloat16", 128, True), ConvertConfig("bfloat16", 128),
])  # fmt: skip
def test_nobody_waits(emulated, config):
    kernel = emulated_kernel(emulated, launch.unit(config))
    assert not mutation.synchronisation(kernel.kernel.ptx)
