"""Arguments as callers of other libraries have them: shapes of A_log and dt_bias, and what FLA plans with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cula import delta, kda, lightning

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
CU = torch.tensor([0, 2, 5, 5, 5])


def inputs(function: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    channels = (K,) if function.__name__ not in GATED_DELTA_RULE else ()
    q, k = torch.randn(2, B, T, H, K)
    v, g, beta = torch.randn(B, T, HV, V), torch.randn(B, T, HV, *channels), torch.rand(B, T, HV)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "use_gate_in_kernel": True}
    if function in DECODE:
        given["state"] = torch.randn(B, HV, V, K)
    if function is delta.delta_rule_commit:
        del given["q"]
        given["num_accepted"] = torch.tensor([5, 3], dtype=torch.int32)
    return given | {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV, *channels)}


GATED_DELTA_RULE = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
DECODE = (delta.delta_rule_decode, delta.delta_rule_commit)
FUNCTIONS = (
    kda.chunk_kda,
    kda.fused_recurrent_kda,
    lightning.chunk_gated_delta_rule,
    lightning.fused_recurrent_gated_delta_rule,
    *DECODE,
)


def results(function: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    """Outputs, or the states that a function without outputs leaves."""
    given = given | {"state": given["state"].clone()} if "state" in given else given
    found = function(**given)
    return [
        x for x in (*(found if isinstance(found, tuple) else (found,)), given.get("state")) if x is not None
    ]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_numbers_per_head_may_have_more_dimensions_of_size_1(function: Callable[..., Any]) -> None:
    given = inputs(function)
    expected = results(function, given)
    bias = given["dt_bias"]
    for A_log in (given["A_log"].view(1, 1, HV, 1), given["A_log"][:, None]):
        for dt_bias in (bias.view(1, 1, *bias.shape), bias.reshape(1, -1), bias.reshape(-1, 1)):
            found = results(function, given | {"A_log": A_log, "dt_bias": dt_bias})
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    for name, wrong in (("A_log", given["A_log"].view(2, 2)), ("A_log", torch.zeros(1, 1, H, 1)),
                        ("dt_bias", torch.zeros(1, 1, HV + 1, K))):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            results(function, given | {name: wrong})


def test_numbers_of_one_head_may_have_any_number_of_dimensions() -> None:
    given = inputs(kda.chunk_kda)
    one = {"q": given["q"][:, :, :1], "k": given["k"][:, :, :1], "use_gate_in_kernel": True}
    one |= {name: given[name][:, :, :1] for name in ("v", "g", "beta")}
    A_log, dt_bias = given["A_log"][:1], given["dt_bias"][0]
    expected = kda.chunk_kda(**one, A_log=A_log, dt_bias=dt_bias)[0]
    found = kda.chunk_kda(**one, A_log=A_log.view(1, 1, 1, 1), dt_bias=dt_bias.view(1, 1, 1, K))[0]
    assert torch.equal(found, expected)


def test_gradients_have_the_shape_that_was_given() -> None:
    given = inputs(kda.chunk_kda)
    A_log = given["A_log"].view(1, 1, HV, 1).requires_grad_()
    kda.chunk_kda(**given | {"A_log": A_log})[0].sum().backward()
    assert A_log.grad is not None and A_log.grad.shape == (1, 1, HV, 1) and A_log.grad.all()


def test_arguments_of_the_schedule_change_nothing() -> None:
    given = inputs(kda.chunk_kda)
    packed = {n: x[:1] if n in ("q", "k", "v", "g", "beta") else x for n, x in given.items()}
    options = {"cu_seqlens": CU, "output_final_state": True}
    expected = kda.chunk_kda(**packed, **options)
    for more in (
        {"use_graph": True},
        {"use_graph": True, "max_num_seqs": 4},
        {"max_num_seqs": 9},
        {"chunk_size": 32},
    ):
        found = kda.chunk_kda(**packed, **options, **more)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    given = inputs(lightning.chunk_gated_delta_rule)
    expected = lightning.chunk_gated_delta_rule(**given)[0]
    for size in (16, 32, 64):
        assert torch.equal(lightning.chunk_gated_delta_rule(**given, chunk_size=size)[0], expected)


def test_intermediate_states_of_other_chunks_are_refused() -> None:
    given = inputs(kda.chunk_kda)
    assert len(kda.chunk_kda(**given, return_intermediate_states=True, chunk_size=64)) == 3
    with pytest.raises(
        ValueError, match="^chunk_size: expected 64 with return_intermediate_states, got 32$"
    ):
        kda.chunk_kda(**given, return_intermediate_states=True, chunk_size=32)
