"""Chunks of the backward pass of the gated delta rule in the emulator, against the oracle in fp64."""

from __future__ import annotations

import pytest
import torch

from cula_core.delta_rule.backward.config import FACTORS
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_core.delta_rule.kernels.block import BLOCK
from cula_core.reference import kda_backward as oracle
from cula_core.reference.common import normalized
from cula_lightning_sm90.gated.backward.config import PrepareConfig
from cula_lightning_sm90.gated.backward.launch import unit
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from cula_testing.kda.blocks import unpacked
from cula_testing.tensors import one_thread

SCALE = 0.25
CONFIGS = {
    "dense": PrepareConfig("bfloat16", "float32", "bfloat16", beta_sigmoid=True),
    "packed": PrepareConfig(
        "float16", "bfloat16", "float32", l2norm=False, neg_eigval=True, index_dtype="int64"
    ),
    "bfloat16": PrepareConfig("bfloat16", "float32", "float32", operand="bfloat16"),
}
# Lengths of the sequences; heads of keys and of values.
SHAPES = {
    "dense": ((100, 100), (1, 2)), "packed": ((65, 0, 1, 64), (2, 2)), "bfloat16": ((64,), (1, 1))
}  # fmt: skip
# Relative RMSE. Rounding to fp16 alone costs 2e-4; bf16 operands have an eighth of its precision.
ERRORS = {"float16": 1e-3, "bfloat16": 6e-3}


def decays_of(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns log decays among which some forget everything."""
    return torch.where(torch.rand(shape) < 0.1, -1e4, -0.3 * torch.rand(shape))


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks(emulated, name):
    """Operands, products and inverse of every chunk, factors of tokens and peaks."""
    torch.manual_seed(0)
    config, (lengths, (heads_k, heads)) = CONFIGS[name], SHAPES[name]
    packed = config.index_dtype is not None
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    dtype = getattr(torch, config.dtype)
    q, k = (torch.randn(2, batch, tokens, heads_k, HEAD_DIM) * HEAD_DIM**-0.5).to(dtype)
    do = (1e-5 * torch.randn(batch, tokens, heads, HEAD_DIM)).to(dtype)
    g = decays_of((batch, tokens, heads)).to(getattr(torch, config.gate_dtype))
    beta = torch.randn(batch, tokens, heads)
    beta = (beta if config.beta_sigmoid else beta.sigmoid()).to(getattr(torch, config.beta_dtype))
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    slots = tokens // CHUNK + len(lengths) if packed else batch * -(-tokens // CHUNK)
    cu_seqlens = segments = None
    if packed:
        cu_seqlens = torch.tensor(starts, dtype=getattr(torch, config.index_dtype))
        segments = torch.full((1 + len(lengths), 6), -1, dtype=torch.int32)
    blocks = emulated.empty((slots, heads, BLOCK), getattr(torch, config.operand))
    factors = emulated.empty((slots, heads, FACTORS, CHUNK), torch.float32)
    peaks = torch.zeros(len(lengths), heads, dtype=torch.int32)
    emulated_kernel(emulated, unit(config))(
        q, k, g, beta, cu_seqlens, segments, blocks, do, factors, peaks, SCALE, max(tokens, CHUNK), slots
    )  # fmt: skip

    if packed:
        assert segments[0, 0] == len(lengths)
    for n, length in enumerate(lengths):
        row, start = (0, starts[n]) if packed else (n, 0)
        first = start // CHUNK + n if packed else n * -(-tokens // CHUNK)
        for head in range(heads):
            largest = do[row, start : start + length, head].abs().float()
            assert peaks.view(torch.float32)[n, head] == (largest.max() if length else 0.0)
            for c in range(-(-length // CHUNK)):
                size = min(CHUNK, length - CHUNK * c)
                rows = slice(start + CHUNK * c, start + CHUNK * c + size)
                own = [x[row, rows, head * heads_k // heads].double() for x in (q, k)]
                norms = [(x.square().sum(-1) + 1e-6).rsqrt() for x in own]
                if not config.l2norm:
                    norms = [torch.ones(size) for _ in own]
                strength = beta[row, rows, head].double()
                strength = strength.sigmoid() if config.beta_sigmoid else strength
                r = (strength * (2 if config.neg_eigval else 1)).sqrt()
                qn, kn = (normalized(x) for x in own) if config.l2norm else own
                decay = g[row, rows, head].double()[:, None].expand(-1, HEAD_DIM)
                with one_thread():
                    right = oracle.prepare((SCALE * qn)[None], (r[:, None] * kn)[None], decay[None])
                block = unpacked(blocks[first + c, head])
                found = factors[first + c, head, :, :size]
                assert relative_rmse(found, torch.stack([r, *norms, r])) < 1e-6
                pairs = {
                    "qg": right.qg, "kh": right.kh, "kg": right.kg, "aqk": right.Aqk, "t_prime": right.Q,
                    "decay": right.decay,
                }  # fmt: skip
                for what, exact in pairs.items():
                    part = block[what]
                    if what != "decay":
                        part = (
                            part[:size, : exact.shape[-1]]
                            if exact.shape[-1] == HEAD_DIM
                            else part[:size, :size]
                        )
                    if exact.any():
                        error = relative_rmse(part, exact[0])
                        assert error < ERRORS[config.operand], (
                            f"{what} of slot {first + c}: {error:.1e}"
                        )
                    else:
                        assert not part.any()
                for what in ("qg", "kh", "kg"):
                    assert not block[what][size:].any()
