"""KDA through `cula` with states as engines keep them, in pools and on the way, against the token-by-token oracle."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import cula_cp_sm90
from cula.kda import chunk_kda
from cula_testing import refusals
from cula_testing.kda.contract import WRONG, good_arguments
from cula_testing.kda.states import CASES, written
from cula_testing.tensors import one_thread

# What of the table of wrong arguments is about states; meta's tests have a table of the others.
OF_STATES = {
    "state_pool", "initial_state_indices", "output_state_indices", "update_state_pool", "null_slot",
    "has_initial_state", "state_checkpoints", "checkpoint_every_n_tokens", "checkpoint_rows", "checkpoint_offsets",
}  # fmt: skip


def good(mode: str) -> dict[str, Any]:
    given = good_arguments(mode, "cpu")
    del given["workspace"]
    return given


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_recurrence(name: str) -> None:
    found, expected = (CASES[name].given("cpu", torch.float64) for _ in range(2))
    with one_thread():
        ours = written(found, chunk_kda(**found, impl="reference"))
        theirs = written(expected, cula_cp_sm90.chunk_kda(**expected))
    for key, exact in theirs.items():
        torch.testing.assert_close(ours[key], exact, rtol=1e-9, atol=1e-9, equal_nan=True)
    if "state_pool" in found:
        assert ours["states"] is found["state_pool"]


# The reference has gradients, which the kernels refuse.
ABOUT_STATES = [x for x in WRONG if x.argument in OF_STATES and "gradient" not in x.says]


@pytest.mark.parametrize("wrong, mode", refusals.cases(ABOUT_STATES, "cpu"))
def test_wrong_states_are_refused(wrong: refusals.Wrong, mode: str) -> None:
    refusals.assert_refused(chunk_kda, wrong, good(mode))


def test_every_argument_of_states_has_a_wrong_value() -> None:
    assert OF_STATES <= {wrong.argument for wrong in ABOUT_STATES}
    assert OF_STATES <= {*inspect.signature(chunk_kda).parameters}


@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_good_arguments_are_accepted(mode: str) -> None:
    given = good(mode)
    o, states = chunk_kda(**given)
    assert o is given["out"] and not (o == 9).any()
    assert states is given.get("state_pool", states) and states.isfinite().all()


def test_states_before_chunks_are_not_beside_an_engine_s() -> None:
    given = good("packed") | {"return_intermediate_states": True}
    with pytest.raises(
        ValueError, match="^return_intermediate_states: expected False with state_pool"
    ):
        chunk_kda(**given)
    given = good("dense") | {"return_intermediate_states": True, "checkpoint_every_n_tokens": 64}
    given["state_checkpoints"] = given["initial_state"].new_zeros(2, 0, 2, 128, 128)
    with pytest.raises(ValueError, match="False with state_checkpoints, got True"):
        chunk_kda(**given)


def test_gradients_reach_a_pool_that_is_only_read() -> None:
    given = good("packed") | {"out": None, "initial_state_indices": torch.tensor([3, -1, 3]).int()}
    pool = given["state_pool"].double().requires_grad_()
    given |= {name: given[name].double() for name in ("q", "k", "v", "g")} | {"state_pool": pool}
    with pytest.raises(ValueError, match="^state_pool: expected no gradients with it"):
        chunk_kda(**given | {"initial_state_indices": None})
    given["update_state_pool"] = False
    o, states = chunk_kda(**given)
    assert not states[1].any()
    (o.sum() + states.sum()).backward()
    assert pool.grad[3].any() and not pool.grad[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("name", ["state_checkpoints", "state_pool"])
def test_what_is_written_in_place_excludes_gradients(name: str) -> None:
    given = good("dense") | {"out": None}
    given["v"] = given["v"].requires_grad_()
    if name == "state_pool":
        given["state_pool"] = given.pop("initial_state")
    else:
        memory = given["initial_state"].new_zeros(2, 0, 2, 128, 128)
        given |= {"state_checkpoints": memory, "checkpoint_every_n_tokens": 64}
    with pytest.raises(ValueError, match=f"^{name}: expected (no gradients|None when gradients)"):
        chunk_kda(**given)
