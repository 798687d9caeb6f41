"""Calls of the public functions of all kernel packages, with every kind of argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cula_cp_sm90
import cula_delta_decode
import cula_lightning_decode
import cula_lightning_sm90
import liteattention_sm89
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_core.reference.delta_decode import Replay

T, H, HV, D = 256, 2, 4, 128
Make = Callable[[torch.device], dict[str, Any]]
SAMPLES: dict[str, tuple[Callable[..., Any], Make]] = {}


def sample(function: Callable[..., Any], label: str, **capability: Any) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        SAMPLES[f"{function.__name__}-{label}"] = (function, make)
        return make

    return keep


def normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def prefill(device: torch.device, batch: int = 1, **more: Any) -> dict[str, Any]:
    q, k = (normal(device, batch, T, H, D) for _ in range(2))
    return {"q": q, "k": k / 8, "v": normal(device, batch, T, HV, D), **more}


def rates(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(*shape, device=device)


def rows(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def states(device: torch.device, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(device, count, HV, D, D, dtype=dtype)


@sample(cula_lightning_sm90.lightning_attn_fwd, "states")
def _(device):
    return prefill(
        device, 2, decay=rates(device, HV), initial_state=states(device, 2), output_final_state=True
    )


@sample(cula_lightning_sm90.lightning_attn_fwd, "copies")
def _(device):
    """Views that TMA cannot read, and states that lie transposed."""
    given = prefill(device, decay=rates(device, HV), output_final_state=True, state_v_first=True)
    fused = normal(device, 1, T, H, D + 1)
    return {**given, "k": fused[..., 1:] / 8, "initial_state": states(device, 1).transpose(2, 3)}


@sample(cula_lightning_sm90.lightning_attn_fwd_varlen, "pool")
def _(device):
    return prefill(
        device, decay=rates(device, HV), cu_seqlens=rows(device, 0, 100, T),
        state_pool=states(device, 5), initial_state_indices=rows(device, 3, -1),
    )  # fmt: skip


@sample(cula_lightning_sm90.lightning_attn_fwd_varlen, "engine")
def _(device):
    """16-bit states, padding by value, a fresh sequence, and a checkpoint in the pool."""
    return prefill(
        device, decay=rates(device, HV), cu_seqlens=rows(device, 0, 100, 150, T), null_slot=0,
        state_pool=states(device, 5).bfloat16(), initial_state_indices=rows(device, 3, 0, 2),
        has_initial_state=torch.tensor([True, True, False], device=device),
        checkpoint_offsets=rows(device, 64, 0, 0).long(), checkpoint_rows=rows(device, 4, -1, -1),
    )  # fmt: skip


@sample(cula_lightning_sm90.chunk_lightning_attn, "layer")
def _(device):
    return prefill(device, layer_idx=3, num_layers=12, use_qk_l2norm_in_kernel=True)


@sample(cula_lightning_sm90.chunk_simple_gla, "checkpoints")
def _(device):
    buffer = torch.zeros(1, T // 64, HV, D, D, device=device)
    return prefill(
        device, g=-rates(device, 1, T, HV), state_checkpoints=buffer, checkpoint_every_n_tokens=64,
        num_splits=2,
    )  # fmt: skip


@sample(cula_lightning_sm90.chunk_gated_delta_rule, "plain")
def _(device):
    return prefill(device, g=-rates(device, 1, T, HV), beta=rates(device, 1, T, HV), scale=0.1)


@sample(cula_lightning_sm90.chunk_gated_delta_rule, "engine")
def _(device):
    """As an engine calls it: raw gates, a pool, padding by value, fresh sequences, checkpoints."""
    return prefill(
        device, g=normal(device, 1, T, HV), beta=normal(device, 1, T, HV), use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, A_log=rates(device, HV),
        dt_bias=torch.nn.Parameter(rates(device, HV)), cu_seqlens=rows(device, 0, 100, T),
        state_pool=states(device, 5), state_indices=rows(device, 3, 1), output_state_indices=rows(device, 2, 0),
        null_slot=0, has_initial_state=torch.tensor([True, False], device=device), state_v_first=True,
        state_checkpoints=torch.zeros(1, T // 128, HV, D, D, device=device), checkpoint_every_n_tokens=128,
    )  # fmt: skip


@sample(cula_lightning_sm90.chunk_gated_delta_rule, "cut")
def _(device):
    tokens = 2048
    return {
        "q": normal(device, 1, tokens, 1, D), "k": normal(device, 1, tokens, 1, D),
        "v": normal(device, 1, tokens, 1, D), "use_intracard_cp": True, "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def kda(device: torch.device, **more: Any) -> dict[str, Any]:
    g, beta = -rates(device, 1, T, HV, D), rates(device, 1, T, HV)
    return prefill(device, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **more)


@sample(cula_cp_sm90.chunk_kda, "plain")
def _(device):
    return kda(device)


@sample(cula_cp_sm90.chunk_kda, "pool")
def _(device):
    return kda(
        device, cu_seqlens=rows(device, 0, 100, T), state_pool=states(device, 5),
        initial_state_indices=rows(device, 3, -1), dt_bias=rates(device, HV * D), A_log=rates(device, HV),
        use_gate_in_kernel=True, out=normal(device, 1, T, HV, D),
    )  # fmt: skip


@sample(cula_cp_sm90.chunk_kda, "engine")
def _(device):
    return kda(
        device, cu_seqlens=rows(device, 0, 100, T), state_pool=states(device, 5),
        initial_state_indices=rows(device, 3, 1), output_state_indices=rows(device, 2, 0), null_slot=0,
        has_initial_state=torch.tensor([True, False], device=device), state_v_first=True,
        checkpoint_offsets=rows(device, 64, 128).long(), checkpoint_rows=rows(device, 4, -1),
    )  # fmt: skip


@sample(cula_cp_sm90.chunk_kda, "before chunks")
def _(device):
    return kda(
        device, cu_seqlens=rows(device, 0, 100, T), initial_state=states(device, 2), output_final_state=True,
        has_initial_state=torch.tensor([True, False], device=device), return_intermediate_states=True,
    )  # fmt: skip


@sample(cula_cp_sm90.chunk_kda, "pieces")
def _(device):
    """In a workspace that holds a chunk, with all that a backward pass reads."""
    room = cula_cp_sm90.kda_workspace_bytes(1, 64, HV)
    workspace = torch.zeros(room, dtype=torch.uint8, device=device)
    given = kda(device, workspace=workspace, return_intra=True, disable_recompute=True)
    return {**given, "initial_state": states(device, 1), "output_final_state": True}


def decode(device: torch.device, tokens: int = 1, **more: Any) -> dict[str, Any]:
    q, k = (normal(device, 3, tokens, H, D) for _ in range(2))
    return {
        "q": q, "k": k / 8, "v": normal(device, 3, tokens, HV, D), "state": states(device, 6),
        "state_indices": rows(device, 5, -1, 0), **more,
    }  # fmt: skip


@sample(cula_lightning_decode.linear_attention_decode, "plain")
def _(device):
    return decode(device, decay=rates(device, HV))


@sample(cula_lightning_decode.linear_attention_decode, "seed")
def _(device):
    pool = states(device, 6, torch.bfloat16)
    return {**decode(device, decay=rates(device, HV), rounding_seed=7), "state": pool}


@sample(cula_lightning_decode.linear_attention_commit, "plain")
def _(device):
    given = decode(device, 3, decay=rates(device, HV), num_accepted=rows(device, 2, 1, 0))
    return {name: x for name, x in given.items() if name != "q"}


def delta(device: torch.device, tokens: int = 1, **more: Any) -> dict[str, Any]:
    gates = {name: normal(device, 3, tokens, HV) for name in ("g", "beta")}
    given = decode(device, tokens, **gates, A_log=rates(device, HV), dt_bias=rates(device, HV))
    return {**given, **more}


@sample(cula_delta_decode.delta_rule_decode, "plain")
def _(device):
    return delta(device)


@sample(cula_delta_decode.delta_rule_decode, "fused")
def _(device):
    channels = (2 * H + HV) * D
    convolution = ShortConvolution(
        normal(device, 6, 4, channels), rows(device, 5, 6, 7), normal(device, channels, 4)
    )
    norm = GatedNorm(normal(device, 3, 1, HV, D), torch.ones(D, device=device))
    return delta(device, convolution=convolution, norm=norm, null_slot=0)


def rings(device: torch.device) -> Replay:
    return cula_delta_decode.new_replay(states(device, 6), H, max_tokens=2)


@sample(cula_delta_decode.delta_rule_decode, "replay")
def _(device):
    return delta(device, 2, replay=rings(device), num_accepted=rows(device, 0, 0, 0))


@sample(cula_delta_decode.delta_rule_commit, "plain")
def _(device):
    given = delta(device, 3, num_accepted=rows(device, 2, 1, 0))
    return {name: x for name, x in given.items() if name != "q"}


@sample(cula_delta_decode.delta_rule_flush, "plain")
def _(device):
    return {"state": states(device, 6), "replay": rings(device)}


@sample(cula_delta_decode.fused_recurrent_kda, "states")
def _(device):
    q, k = (normal(device, 3, 2, HV, D) for _ in range(2))
    return {
        "q": q, "k": k, "v": normal(device, 3, 2, HV, D), "g": -rates(device, 3, 2, HV, D),
        "beta": rates(device, 3, 2, HV), "initial_state": states(device, 3).transpose(2, 3),
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


@sample(cula_delta_decode.fused_recurrent_gated_delta_rule, "packed")
def _(device):
    q, k = (normal(device, 1, 9, HV, D) for _ in range(2))
    return {
        "q": q, "k": k, "v": normal(device, 1, 9, HV, D), "cu_seqlens": rows(device, 0, 2, 9).long(),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def attention(device: torch.device, **more: Any) -> dict[str, Any]:
    q, k, v = (normal(device, 1, T, heads, D) for heads in (HV, H, H))
    return {"q": q, "k": k, "v": v, **more}


@sample(liteattention_sm89.lite_attention, "dense")
def _(device):
    return attention(device, threshold=None, causal=True)


@sample(liteattention_sm89.lite_attention, "lists")
def _(device):
    every = torch.ones(1, HV, 2, 4, dtype=torch.bool, device=device)
    direction = rows(device, -1)
    return attention(device, read_mask=every, must_do=every[:, :1], direction=direction)


@sample(liteattention_sm89.lite_attention, "packed")
def _(device):
    starts = rows(device, 0, 100, T)
    return attention(
        device, cu_seqlens_q=starts, cu_seqlens_k=starts.clone(), max_seqlen_q=156, max_seqlen_k=156,
        use_int8=True, scale=-0.1, out=normal(device, 1, T, HV, D),
    )  # fmt: skip


def tensors(x: Any) -> list[Tensor]:
    """Returns the tensors of arguments, tuples included."""
    if isinstance(x, Tensor):
        return [x]
    return [y for item in x for y in tensors(item)] if isinstance(x, tuple) else []


def outcome(call: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that a call returns, and those that it may have written to."""
    result = call(**given)
    return tensors((*(result if isinstance(result, tuple) else (result,)), *given.values()))
