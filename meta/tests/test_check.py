"""Every argument of every public function: wrong values are named, and nothing is changed by a refused call."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from check_cases import (
    DELTA,
    FUNCTIONS,
    GATED,
    HV,
    KDA,
    META,
    OF_GATED,
    OF_KDA_STATES,
    OF_LIGHTNING_PREFILL,
    Case,
    T,
    cases,
    good,
    strided,
)
from torch.fx.experimental.proxy_tensor import make_fx

from cula import lightning

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)])
def test_wrong_argument_is_named_and_nothing_changes(case: Case) -> None:
    function, blamed, changes, error, expected = case
    base = good(function)
    parameters = inspect.signature(FUNCTIONS[function]).parameters
    arguments = dict(base)
    for name, value in changes.items():
        # `packed` cuts every activation there is; a function that lacks one goes without.
        if name in base or (name in parameters and name not in ("q", "k", "v", "g", "beta")):
            arguments[name] = value(base) if callable(value) else value
    before = {
        n: (x.detach().clone(), x._version)
        for n, x in arguments.items()
        if isinstance(x, torch.Tensor)
    }
    with pytest.raises(error, match=f"^{blamed}: expected .*{re.escape(expected)}") as caught:
        FUNCTIONS[function](**arguments)
    assert type(caught.value) is error
    for name, (values, version) in before.items():
        assert arguments[name]._version == version, name
        if arguments[name].device.type == "cpu":
            assert torch.equal(
                torch.nan_to_num(arguments[name].detach()), torch.nan_to_num(values)
            ), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_has_a_case(function: str) -> None:
    covered = {blamed for name, blamed, *_ in CASES if name == function}
    expected = set(inspect.signature(FUNCTIONS[function]).parameters)
    if function == GATED:
        expected -= OF_GATED
    elif function == "chunk_kda":
        expected -= OF_KDA_STATES
    elif function not in DELTA:
        expected -= OF_LIGHTNING_PREFILL
    assert covered == expected


@pytest.mark.parametrize("function", FUNCTIONS)
def test_good_arguments_are_accepted(function: str) -> None:
    FUNCTIONS[function](**good(function))


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "lite_attention"])
def test_strided_views_and_transposed_states_are_accepted(function: str) -> None:
    """A view with gaps between rows gives what its contiguous copy gives."""
    base = good(function)
    wide = dict(base)
    for name in ("q", "k", "v", "g", "beta"):
        if isinstance(base.get(name), torch.Tensor):
            wide[name] = torch.cat((base[name], base[name]), -1)[..., : base[name].shape[-1]]
            assert not wide[name].is_contiguous()
    for name in (
        "initial_state_indices",
        "state_indices",
        "output_state_indices",
        "num_accepted",
        "has_initial_state",
    ):
        if isinstance(base.get(name), torch.Tensor):
            wide[name] = torch.stack((base[name], ~base[name]), 1)[:, 0]
    pool = next((name for name in ("state", "state_pool") if name in base), None)
    if pool:
        wide[pool] = base[pool].mT.contiguous().mT
    for x, y in zip(
        _tensors(FUNCTIONS[function](**base)), _tensors(FUNCTIONS[function](**wide)), strict=True
    ):
        torch.testing.assert_close(x, y)
    if pool:
        torch.testing.assert_close(wide[pool], base[pool])


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checks_read_no_device(function: str) -> None:
    """On meta tensors, which have no contents, everything that looks at contents would raise."""
    arguments = {
        n: x.to(META) if isinstance(x, torch.Tensor) else x for n, x in good(function).items()
    }
    result = FUNCTIONS[function](**arguments)
    assert all(x.device == META for x in _tensors(result))


def test_scale_may_be_any_finite_number() -> None:
    base = good("lightning_attn_fwd")
    one, _ = lightning.lightning_attn_fwd(**base, scale=1)
    for scale in (0, 0.0, -2.5):
        found, _ = lightning.lightning_attn_fwd(**base, scale=scale)
        torch.testing.assert_close(found, one * scale)


@pytest.mark.parametrize("function", DELTA)
def test_numbers_per_head_may_have_any_strides(function: str) -> None:
    base = good(function)
    one, _ = FUNCTIONS[function](**base)
    for name in ("beta",) if function in KDA else ("beta", "g"):
        other, _ = FUNCTIONS[function](**base | {name: strided(base[name])})
        assert torch.equal(one, other)


@pytest.mark.parametrize("function", DELTA)
def test_a_rate_may_have_any_floating_dtype(function: str) -> None:
    gate = good(function) | {"use_gate_in_kernel": True}
    rate = torch.linspace(-2, 2, HV).bfloat16()
    one, _ = FUNCTIONS[function](**gate, A_log=rate.float())
    other, _ = FUNCTIONS[function](**gate, A_log=rate)
    assert torch.equal(one, other)


@pytest.mark.parametrize("function", DELTA)
def test_a_raw_gate_may_be_positive(function: str) -> None:
    raw = good(function) | {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
    raw["g"] = -raw["g"]
    o, _ = FUNCTIONS[function](**raw)
    assert o.isfinite().all()


@pytest.mark.parametrize("function", ["linear_attention_decode", "lightning_attn_fwd_varlen"])
def test_a_state_that_is_only_read_may_be_read_twice(function: str) -> None:
    name = "state_indices" if "decode" in function else "initial_state_indices"
    reads = {"commit": False} if "decode" in function else {"update_state_pool": False}
    arguments = good(function) | reads
    arguments[name] = torch.tensor([2, 2], dtype=torch.int32)
    both = FUNCTIONS[function](**arguments)
    for rows in ([2, -1], [-1, 2]):
        one = FUNCTIONS[function](**arguments | {name: torch.tensor(rows, dtype=torch.int32)})
        live = rows.index(2)
        part = slice(live, live + 1) if "decode" in function else slice(live, T if live else 1)
        got, want = (x if "decode" in function else x[0][0] for x in (one, both))
        assert torch.equal(got[part], want[part])


@pytest.mark.parametrize("function", ["chunk_kda", "chunk_gated_delta_rule", "chunk_simple_gla"])
def test_a_trace_does_not_look_at_values(function: str) -> None:
    arguments = good(function)
    names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[function](**arguments | dict(zip(names, tensors, strict=True)))[0]

    tensors = [arguments[name] for name in names]
    traced = make_fx(run)(*tensors)
    torch.testing.assert_close(traced(*tensors), run(*tensors))
