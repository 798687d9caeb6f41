"""The functions with flash-linear-attention's names, on a CPU: the recurrence, its states, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cula_core.reference.kda import recurrent_prefill
from cula_delta_decode import fused_recurrent_gated_delta_rule, fused_recurrent_kda

HEADS, VALUE_HEADS, K, V = 2, 4, 16, 24


def activations(batch: int, tokens: int, channels: bool, dtype=torch.float64) -> dict[str, Tensor]:
    """q, k, v, g and beta by name: decays and write strengths as they are."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    gates = (VALUE_HEADS, K) if channels else (VALUE_HEADS,)
    return {
        "q": normal(batch, tokens, HEADS, K),
        "k": normal(batch, tokens, HEADS, K),
        "v": normal(batch, tokens, VALUE_HEADS, V),
        "g": -normal(batch, tokens, *gates).abs(),
        "beta": normal(batch, tokens, VALUE_HEADS).sigmoid(),
    }


def states(rows: int, v_first: bool) -> Tensor:
    matrix = (V, K) if v_first else (K, V)
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, VALUE_HEADS, *matrix, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 8, 19])
@pytest.mark.parametrize("begins", [False, True])
def test_kda_is_the_recurrence(tokens, begins, v_first):
    x = activations(2, tokens, True)
    initial = states(2, v_first) if begins else None
    before = None if initial is None else initial.clone()
    expected, final = recurrent_prefill(
        *x.values(), initial_state=initial, l2norm=True, state_v_first=v_first
    )
    o, state = fused_recurrent_kda(
        **x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=v_first
    )  # fmt: skip
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)
    assert initial is None or torch.equal(initial, before)


@pytest.mark.parametrize("how", ["g", "gk", "none"])
def test_the_gated_delta_rule_is_the_recurrence(how):
    x = activations(1, 11, how == "gk")
    offsets = torch.tensor([0, 4, 4, 11])
    g = x.pop("g")
    wide = (
        torch.zeros_like(x["v"][..., :1]) if how == "none" else g if how == "gk" else g[..., None]
    )
    expected, final = recurrent_prefill(
        x["q"], x["k"], x["v"], wide.expand(*x["v"].shape[:3], K), x["beta"], cu_seqlens=offsets
    )
    given = {} if how == "none" else {how: g}
    o, state = fused_recurrent_gated_delta_rule(
        **x, **given, output_final_state=True, cu_seqlens=offsets
    )
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)


def test_transposed_states_come_back_in_the_shape_that_was_asked_for():
    x = activations(2, 3, True)
    initial = states(2, True)
    expected = fused_recurrent_kda(
        **x, initial_state=initial, output_final_state=True, state_v_first=True
    )
    o, state = fused_recurrent_kda(
        **x, initial_state=initial.transpose(2, 3), output_final_state=True
    )
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1].transpose(2, 3))


def test_outputs_alone():
    x = activations(2, 3, True)
    out = torch.empty_like(x["v"])
    o, state = fused_recurrent_kda(**x, out=out)
    assert o is out and state is None
    assert torch.equal(o, fused_recurrent_kda(**x)[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gv": torch.zeros(1)}, "gv: expected None"),
        ({"gk": torch.zeros(1)}, "gk: expected None beside g"),
        ({"g": torch.ones(2, 3, VALUE_HEADS, dtype=torch.float64)}, "g: expected values <= 0"),
        ({"beta": torch.zeros(2, 3, 1)}, r"beta: expected \[B, T, HV\]"),
        ({"initial_state": torch.zeros(1, VALUE_HEADS, K, V)}, "initial_state: expected one state"),
        ({"initial_state": torch.zeros(2, VALUE_HEADS, V, K)}, "initial_state: expected"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: expected None unless B = 1"),
        ({"scale": "1"}, "scale: expected a float"),
        ({"output_final_state": 1}, "output_final_state: expected a bool"),
        ({"A_log": torch.zeros(VALUE_HEADS)}, "A_log: expected None unless"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval: expected False unless"),
        ({"out": torch.zeros(2, 3, 1, V)}, "out: expected the shape of v"),
        ({"k": torch.zeros(2, 3, 1, K, dtype=torch.float64)}, "k: expected the shape of q"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    x = activations(2, 3, False)
    with pytest.raises((TypeError, ValueError), match=message):
        fused_recurrent_gated_delta_rule(**x | changes)


def test_gradients_are_refused():
    x = activations(2, 3, True)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="v: expected no gradient"):
        fused_recurrent_kda(**x)
