"""Arguments that `cula.compat` refuses: they are named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_inputs import CU, HV, ROWS, H, K, Raw, T, V, lightning_inputs, rand
from torch import Tensor

from cula.compat import flash_kda, flashinfer, kda, lightning


def decode_arguments() -> dict[str, Any]:
    x = Raw(3)
    return {
        "A_log": x.A_log, "dt_bias": x.dt_bias, "q": x.q[None], "k": x.k[None], "v": x.v[None], "a": x.g, "b": x.beta,
        "initial_state_source": rand(7, HV, V, K), "initial_state_indices": ROWS,
        "out": torch.zeros(1, 3, HV, V).double(),
    }  # fmt: skip


def lightning_decode_arguments() -> dict[str, Any]:
    q, k, v = rand(3, 3, H, K)
    return {
        "q": q, "k": k, "v": v, "s": rand(7, H, K, K), "out": torch.zeros_like(q), "softmax_scale": 1.0,
        **dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_s", "stride_o"), 0), "s_offsets": ROWS,
        "decay_scales": torch.rand(H).double(), **dict.fromkeys(("HEAD_DIM", "K_SPLIT_DIM", "V_SPLIT_DIM"), K),
    }  # fmt: skip


def flash_kda_arguments() -> dict[str, Any]:
    x = Raw(6)
    given = {name: getattr(x, name)[None] for name in ("q", "k", "v", "g", "beta")}
    return given | {
        "scale": 1.0, "out": torch.zeros(1, 6, HV, V).double(), "A_log": x.A_log, "dt_bias": x.dt_bias,
        "lower_bound": -5.0, "final_state": torch.zeros(1, HV, V, K).double(),
    }  # fmt: skip


def flashinfer_arguments() -> dict[str, Any]:
    return {
        "q": rand(6, H, K), "k": rand(6, H, K), "v": rand(6, HV, V), "g": torch.rand(6, HV), "beta": torch.rand(6, HV),
        "cu_seqlens": torch.tensor([0, 6]), "output_final_state": True, "output": torch.zeros(6, HV, V).double(),
        "output_state": torch.zeros(1, HV, V, K).double(),
    }  # fmt: skip


def lightning_arguments() -> dict[str, Any]:
    q, k, v, decay = lightning_inputs()
    return {"Q": q[None], "K": k[None], "V": v[None], "decay": decay, "cu_seqlens": CU}


DECODE = (kda.kda_decode, decode_arguments)
LIGHTNING_DECODE = (lightning.linear_attention_decode, lightning_decode_arguments)
LIGHTNING_VARLEN = (lightning.lightning_attn_fwd_varlen, lightning_arguments)
FLASH_KDA = (flash_kda.fwd, flash_kda_arguments)
FLASHINFER = (flashinfer.chunk_gated_delta_rule, flashinfer_arguments)
Called = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
WRONG = [
    (DECODE, {"q": [1.0]}, TypeError, "q: expected a torch.Tensor"),
    (DECODE, {"k": rand(3, H, K)}, ValueError, "k: expected "),
    (DECODE, {"v": rand(3, 2, HV, V)}, ValueError, "v: expected one token per row"),
    (DECODE, {"a": rand(3, HV)}, ValueError, r"a: expected the numbers of \[3, 1, 4, 8\]"),
    (DECODE, {"b": rand(3, H)}, ValueError, "b: expected the numbers of"),
    (DECODE, {"out": [0.0]}, TypeError, "out: expected a torch.Tensor"),
    (DECODE, {"out": rand(3, 1, HV, V)}, ValueError, "out: expected the shape of v"),
    (DECODE, {"state_layout": "kk"}, ValueError, "state_layout: expected 'vk' or 'kv'"),
    (DECODE, {"state_layout": "kv"}, ValueError, "initial_state_source: expected "),
    (DECODE, {"cu_seqlens": CU}, ValueError, r"cu_seqlens: expected \[N \+ 1\] = \[4\]"),
    (DECODE, {"initial_state_indices": [0]}, TypeError, "initial_state_indices: expected "),
    (DECODE, {"initial_state_indices": ROWS.double()}, TypeError, "state_indices: expected "),
    (LIGHTNING_DECODE, {"s": 1}, TypeError, "s: expected a torch.Tensor"),
    (LIGHTNING_DECODE, {"HEAD_DIM": 16}, NotImplementedError, "K_SPLIT_DIM"),
    (LIGHTNING_DECODE, {"q": rand(3, H, 4)}, ValueError, "q: expected "),
    (LIGHTNING_DECODE, {"q": rand(3, 2, H, K)}, ValueError, "q: expected one"),
    (LIGHTNING_DECODE, {"s": rand(5, K, K)}, ValueError, "state: expected "),
    (LIGHTNING_DECODE, {"s_offsets": [0]}, TypeError, "s_offsets: expected"),
    (LIGHTNING_VARLEN, {"chunk_size": 48}, ValueError, "chunk_size: expected 16"),
    (LIGHTNING_VARLEN, {"V": rand(T, HV, V)}, ValueError, "V: expected "),
    (LIGHTNING_VARLEN, {"cu_seqlens": [0]}, TypeError, "cu_seqlens: expected "),
    (FLASH_KDA, {"final_state": [0]}, TypeError, "final_state: expected a torch.Tensor"),
    (FLASH_KDA, {"final_state": rand(1, HV, K, V)}, ValueError, "final_state: expected "),
    (FLASH_KDA, {"lower_bound": -6.0}, ValueError, "lower_bound: expected "),
    (FLASH_KDA, {"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens: expected "),
    (FLASHINFER, {"cu_seqlens": None}, TypeError, "cu_seqlens: expected "),
    (FLASHINFER, {"q": rand(1, 6, H, K)}, ValueError, r"q: expected \[T, HQ"),
    (FLASHINFER, {"g": -torch.rand(6, HV)}, ValueError, "g: expected factors"),
    (FLASHINFER, {"beta": 1.0}, TypeError, "beta: expected a torch.Tensor"),
    (FLASHINFER, {"output_state": rand(1, HV, K, V)}, ValueError, "output_state"),
    (FLASHINFER, {"checkpoint_every_n_tokens": 64}, ValueError, ""),
]  # fmt: skip


@pytest.mark.parametrize(("called", "changes", "error", "message"), WRONG)
def test_wrong_arguments_are_named_and_change_nothing(
    called: Called, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    function, good = called
    function(**good())
    given = good() | changes
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    with pytest.raises(error, match=f"^{message}"):
        function(**given)
    assert all(torch.equal(given[name], x) for name, x in before.items())
