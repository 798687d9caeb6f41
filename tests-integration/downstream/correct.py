"""A user's program that calls every distribution correctly: mypy --strict has nothing to say about it."""

from __future__ import annotations

import torch
from torch import Tensor

import cula
import cula_cp_sm90
import cula_delta_decode
import cula_emulator
import cula_kda_sm100
import cula_lightning_decode
import cula_lightning_sm90
import liteattention_sm89
import liteattention_sm90
from cula.delta import delta_rule_decode, delta_rule_flush, new_replay
from cula.kda import chunk_kda
from cula.lightning import linear_attention_decode
from cula_core.dtypes import dtype_name
from cula_testing.comparing import relative_rmse


def explanation(q: Tensor) -> str:
    return str(cula.explain("chunk_kda", dtype=q.dtype))


def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    out = chunk_kda(q, k, v, g, beta, scale=0.5, output_final_state=True)[0]
    hopper: Tensor = cula_cp_sm90.chunk_kda(q, k, v, g, beta)[0]
    blackwell: Tensor = cula_kda_sm100.chunk_kda(q, k, v, g, beta, scale=0.5)[0]
    error: float = relative_rmse(hopper, blackwell)
    return out, out * error


def lightning(q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor) -> Tensor:
    rows = torch.arange(4, dtype=torch.int32)
    out = linear_attention_decode(q, k, v, state, decay, state_indices=rows, impl="reference")
    out += cula_lightning_decode.linear_attention_decode(q, k, v, state, decay, scale=None)
    return out + cula_lightning_sm90.lightning_attn_fwd(q, k, v, decay, scale=1.0)[0]


def delta(q: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    replay = new_replay(state, 4, max_tokens=2)
    out = delta_rule_decode(q, q, v, a, b, state, replay=replay, impl="reference")
    delta_rule_flush(state, replay)
    return out + cula_delta_decode.delta_rule_decode(q, q, v, a, b, state, scale=None)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = liteattention_sm89.LiteAttention(threshold=-8.0)
        self.hopper = liteattention_sm90.LiteAttention(threshold=-8.0)

    def name(self, x: Tensor) -> str:
        return dtype_name(x.dtype)


options = cula_emulator.Options(async_mode="lazy", seed=1, time_limit=None)
