"""MiniMax's attention by kernels of cula, with a stand-in for the module of transformers: a loop over tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fla_stand_in import put_modules
from torch import Tensor, nn

from cula import _registry
from cula.integrations import fla_plugin, transformers

B, H, D, WIDE = 2, 4, 8, 24
PLACE = "transformers.models.minimax.modeling_minimax"

pytestmark = pytest.mark.usefixtures("undecided")


class Attention(nn.Module):
    """What transformers' class has that the replacement reads, and its own results."""

    calls = 0

    def __init__(self, layer_idx: int = 1) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.num_attention_heads = layer_idx, D, H
        self.act_fn = nn.SiLU()
        self.norm = nn.RMSNorm(H * D)
        self.qkv_proj = nn.Linear(WIDE, 3 * H * D, bias=False)
        self.out_proj = nn.Linear(H * D, WIDE, bias=False)
        self.output_gate = nn.Linear(WIDE, H * D, bias=False)
        self.register_buffer("slope_rate", torch.linspace(0.02, 0.6, H)[:, None, None])

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        type(self).calls += 1
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = qkv * attention_mask[..., None]
        q, k, v = qkv.unflatten(-1, (H, 3 * D)).split(D, -1)
        state = past_key_values and past_key_values.get_linear_cache(self.layer_idx)
        state = q.new_zeros(len(q), H, D, D) if state is None else state
        outputs = []
        for t in range(q.shape[1]):
            state = torch.exp(-self.slope_rate) * state + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ state).flatten(1))
        o = self.norm(torch.stack(outputs, 1)) * torch.sigmoid(self.output_gate(hidden_states))
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, state)
        return self.out_proj(o), state


class Cache:
    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def get_linear_cache(self, layer: int) -> Tensor | None:
        return self.states.get(layer)

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.states[layer] = state


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Attention]]:
    """transformers with MiniMax alone, and no FLA."""
    theirs = type("MiniMaxLightningAttention", (Attention,), {"forward": Attention.forward})
    put_modules(monkeypatch, {PLACE: {"MiniMaxLightningAttention": theirs}})
    monkeypatch.setattr(transformers, "importable", lambda name: name == "transformers")
    monkeypatch.setattr(fla_plugin, "importable", lambda name: False)
    _registry.log_once.cache_clear()
    yield theirs
    transformers.unregister()


def inputs(tokens: int) -> Tensor:
    return torch.randn(B, tokens, WIDE, dtype=torch.float64)


def ran(layer: Any, parts: list[Tensor], mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """The outputs of calls that follow each other, and the state at the end."""
    cache = Cache()
    with torch.no_grad():
        outputs = [layer(x, None, mask if n == 0 else None, cache)[0] for n, x in enumerate(parts)]
    return outputs, cache.states[layer.layer_idx]


@pytest.mark.parametrize("padded", [False, True])
def test_prefill_continued_and_decoded(stand_in: type[Attention], padded: bool) -> None:
    layer = stand_in().double()  # from before register
    parts = [inputs(n) for n in (70, 9, 1, 4, 1)]
    mask = None
    if padded:
        mask = torch.ones(B, 70, dtype=torch.bool)
        mask[1, :20] = False
    expected = ran(layer, parts, mask)
    assert stand_in.calls == 5
    transformers.register("reference")
    assert transformers.registered()
    found = ran(layer, parts, mask)
    assert stand_in.calls == 5
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    transformers.unregister()
    assert not transformers.registered()
    ran(layer, parts, mask)
    assert stand_in.calls == 10


def test_without_a_cache_no_state_is_made(stand_in: type[Attention]) -> None:
    layer, x = stand_in().double(), inputs(5)
    expected = layer(x, None, None)[0]
    transformers.register("reference")
    o, state = layer(x, None, None, cache_position=None)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    assert state is None


def test_gradients(stand_in: type[Attention]) -> None:
    layer, x = stand_in().double(), inputs(40)
    weights = list(layer.parameters())
    expected = torch.autograd.grad(layer(x, None, None)[0].square().sum(), weights)
    transformers.register("reference")
    found = torch.autograd.grad(layer(x, None, None)[0].square().sum(), weights)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_states_of_a_half_precision_model_are_float32(stand_in: type[Attention]) -> None:
    layer, parts = stand_in().bfloat16(), [inputs(n).bfloat16() for n in (20, 1, 1)]
    transformers.register("reference")
    outputs, state = ran(layer, parts)
    assert state.dtype == torch.float32 and {o.dtype for o in outputs} == {torch.bfloat16}
    # From a cache that the model began without cula.
    transformers.unregister()
    cache = Cache()
    with torch.no_grad():
        layer(parts[0], None, None, cache)
        assert cache.states[1].dtype == torch.bfloat16
        transformers.register("reference")
        layer(parts[1], None, None, cache)
    assert cache.states[1].dtype == torch.bfloat16 and cache.states[1].isfinite().all()


def test_what_no_kernel_serves_is_left_to_transformers(
    stand_in: type[Attention], caplog: pytest.LogCaptureFixture
) -> None:
    layer, parts = stand_in().double(), [inputs(n) for n in (20, 1)]
    expected = ran(layer, parts)
    transformers.register()
    with caplog.at_level(logging.INFO, "cula"):
        found = ran(layer, parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (
        stand_in.calls == 4 and "MiniMaxLightningAttention is left to transformers: " in caplog.text
    )


def test_another_forward_stays(
    stand_in: type[Attention], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, hidden_states: Tensor, masks: Any) -> None: ...

    monkeypatch.setattr(stand_in, "forward", forward)
    with caplog.at_level(logging.WARNING, "cula"):
        transformers.register("reference")
    assert (
        stand_in.forward is forward
        and "has other parameters than in transformers 5.17" in caplog.text
    )


def test_register_twice_changes_what_serves(
    stand_in: type[Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.register()
    ours = stand_in.forward
    transformers.register("reference")
    assert stand_in.forward is ours
    layer, x = stand_in().double(), inputs(3)
    layer(x, None, None)
    assert stand_in.calls == 0
    with pytest.raises(ImportError, match="^transformers is not installed"):
        monkeypatch.setattr(transformers, "importable", lambda name: False)
        transformers.register()
