"""torch.compile(fullgraph=True) sees through the public functions: no graph break, same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cula import _discovery, _registry, kda, lightning
from cula._implementations import Implementation

H, HV, K = 2, 4, 16
torch.library.define(
    "cula_test::decode", "(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor decay) -> Tensor"
)


@torch.library.impl("cula_test::decode", "CPU")
def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    return lightning.linear_attention_decode(q, k, v, state, decay, impl="reference")


@torch.library.register_fake("cula_test::decode")
def _decode_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(v)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    _registry.refresh()
    yield
    torch._dynamo.reset()
    _registry.refresh()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tokens(batch: int, count: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, count, H, K),
        torch.randn(batch, count, H, K),
        torch.randn(batch, count, HV, K),
    )


def decode_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    return lightning.linear_attention_decode(q, k, v, state, decay) + 1


@pytest.mark.parametrize("through_an_op", [False, True])
def test_decode(monkeypatch: pytest.MonkeyPatch, through_an_op: bool) -> None:
    """The reference is traced; a kernel behind an operator that mutates the state becomes one node."""
    if through_an_op:

        def run(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            state: torch.Tensor,
            decay: torch.Tensor,
            **o: Any,
        ) -> torch.Tensor:
            return torch.ops.cula_test.decode.default(q, k, v, state, decay)

        made_up = Implementation(
            "made-up", ("lightning.decode",), ("cpu",), 10, lambda **p: None, lambda f: run
        )
        discovered = _discovery.discover()
        monkeypatch.setattr(_registry, "implementations", lambda op: (made_up, *discovered[0]))
    step = compiled(decode_step)
    decay = torch.rand(HV)
    for batch in (2, 3, 5):
        q, k, v = tokens(batch, 2)
        state = torch.randn(6, HV, K, K)
        expected_state, state = state.clone(), state
        found = step(q, k, v, state, decay)
        expected = (
            lightning.linear_attention_decode(q, k, v, expected_state, decay, impl="reference") + 1
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(state, expected_state)


def prefill(q, k, v, g, beta, decay, cu) -> tuple[torch.Tensor, ...]:
    o, state = kda.chunk_kda(q, k, v, g, beta, output_final_state=True, cu_seqlens=cu)
    o, state = kda.fused_recurrent_kda(
        q, k, o, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu
    )
    delta, _ = lightning.chunk_gated_delta_rule(q, k, o, -beta, beta)
    return o, state, delta, *lightning.lightning_attn_fwd_varlen(q, k, v, decay, cu)


def test_prefill() -> None:
    q, k, v = tokens(1, 9)
    k = k / 4
    rest = (
        -torch.rand(1, 9, HV, K),
        torch.rand(1, 9, HV),
        torch.rand(HV),
        torch.tensor([0, 3, 3, 9]),
    )
    torch.testing.assert_close(compiled(prefill)(q, k, v, *rest), prefill(q, k, v, *rest))
