"""What a dispatcher is told about this package."""

from __future__ import annotations

import pytest

import cula_delta_decode
from cula_delta_decode import _spec
from cula_testing.specs import assert_answer, assert_says_what_to_install


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({}, None),
        ({"dtype": "torch.bfloat16", "head_dim_k": 64, "head_dim_v": 128, "tokens": 8}, None),
        ({"state_dtype": "torch.float16", "gate_dtype": "torch.float32", "group": 4}, None),
        ({"key_gate_dtype": "torch.bfloat16", "beta_dtype": "torch.float16"}, None),
        ({"requires_grad": True}, "no backward"),
        ({"dtype": "torch.float32"}, "activations must be bfloat16 or float16, not torch.float32"),
        ({"state_dtype": "torch.float64"}, "the state must be float32, bfloat16, float16"),
        ({"head_dim_v": 256}, "V must be one of (64, 128), not 256"),
        ({"tokens": 9}, "1 to 8 tokens per call, not 9"),
        ({"gate_dtype": "torch.float64"}, "g must be float32, bfloat16, float16, not torch.float64"),
        ({"key_gate_dtype": "torch.float64"}, "gk must be float32, bfloat16, float16, not"),
        ({"beta_dtype": "torch.float64"}, "beta must be float32, bfloat16, float16, not"),
        ({"value_gate_dtype": "torch.float32"}, "takes no gates over V (gv)"),
        ({"gate_dtype": "torch.float32", "key_gate_dtype": "torch.float32"}, "takes g or gk, not both"),
    ],
)  # fmt: skip
def test_the_spec_gives_reasons(problem, reason):
    assert_answer(_spec.supports, problem, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_the_spec_says_what_to_install(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, _spec.supports, missing, "cula-delta-decode")


def test_the_spec_describes_this_package():
    assert _spec.NAME == "cula-delta-decode"
    assert _spec.OP == ("delta.decode", "kda.decode", "lightning.gated_delta_decode")
    assert {"sm80", "sm89", "sm90", "sm100", "sm120"} <= set(_spec.ARCHS)
    for name in cula_delta_decode.__all__:
        assert _spec.load(name) is getattr(cula_delta_decode, name)
    with pytest.raises(AttributeError):
        _spec.load("delta_rule_prefill")
