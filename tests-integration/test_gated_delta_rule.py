"""Prefill of the gated delta rule through `cula`, chunk by chunk, against the token-by-token oracle of `cula_core`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cula.lightning import chunk_gated_delta_rule
from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_testing import refusals
from cula_testing.gated.cases import CHOICES, HEADS, LENGTHS, Case, arguments, cases
from cula_testing.gated.contract import WRONG, WRONG_WITH_GRADIENTS, good_arguments
from cula_testing.tensors import one_thread

DIM = 16


def call(case: Case) -> tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]:
    """The arguments of a case in fp64, and what they should give."""
    given = arguments(case, DIM, torch.float64)
    with one_thread():
        expected = gated_delta_rule(**{n: x for n, x in given.items() if n != "output_final_state"})
    return given, expected[:2]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_chunks_are_the_recurrence(case: Case) -> None:
    given, expected = call(case)
    found = chunk_gated_delta_rule(**given, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_all_choices_meet_each_of_the_heads() -> None:
    table = cases()
    assert {case[:2] for case in table} == {(heads, x) for heads in HEADS for x in LENGTHS}
    met = {(case.heads, case[2:]) for case in table}
    assert met == {(heads, choice) for heads in HEADS for choice in CHOICES}


def test_16_bits_lose_what_their_rounding_does() -> None:
    case = Case((6, 2, 2), (31, 0, 91), True, True, None)
    given = arguments(case, DIM)
    found, states = chunk_gated_delta_rule(**given, impl="reference")
    expected = gated_delta_rule(**{n: x for n, x in given.items() if n != "output_final_state"})
    assert found.dtype == torch.bfloat16 and states.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.out, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(states.double(), expected.states, rtol=1e-4, atol=1e-5)


# Kernels refuse every cp_context, which the public function takes apart; meta's tests have a wrong one.
WRONG_HERE = [*(x for x in WRONG if x.argument != "cp_context"), *WRONG_WITH_GRADIENTS]


@pytest.mark.parametrize("wrong, mode", refusals.cases(WRONG_HERE, "cpu"))
def test_wrong_arguments_are_refused(wrong: refusals.Wrong, mode: str) -> None:
    refusals.assert_refused(chunk_gated_delta_rule, wrong, good_arguments(mode, dim=DIM))


@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_good_arguments_are_accepted(mode: str) -> None:
    given = good_arguments(mode, dim=DIM)
    o, states = chunk_gated_delta_rule(**given)
    assert o is given["out"] and not (o == 9).any()
    assert states is given.get("state_pool", states) and states.isfinite().all()


def test_every_argument_has_a_wrong_value() -> None:
    """Those that other functions have too are in the table of meta's tests."""
    known = {"scale", "cu_seqlens", "cu_seqlens_cpu", "initial_state", "chunk_size", "impl"}
    taken = {*inspect.signature(chunk_gated_delta_rule).parameters}
    assert taken - known <= {wrong.argument for wrong in [*WRONG, *WRONG_WITH_GRADIENTS]} <= taken
