"""Public functions of kernel packages: a call that takes a shortcut launches what the function itself would launch.

Without a GPU the launches are compared, on one the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_samples import SAMPLES, outcome, tensors
from torch import Tensor

# What stands in for a GPU stands in their places.
import cula_core.delta_rule.launch  # noqa: F401
import cula_delta_decode.launch  # noqa: F401
import cula_lightning_decode.launch  # noqa: F401
import cula_lightning_sm90.gated.launch
import cula_lightning_sm90.launch  # noqa: F401
import liteattention_sm89.launch
import liteattention_sm90.launch  # noqa: F401
from cula_testing.shortcuts import Launches, long_way, pretended_gpu
from liteattention_sm89 import choice


@pytest.fixture
def launches():
    with torch.no_grad(), pretended_gpu() as found:
        yield found


def launched(launches: Launches, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Returns what a call launches and returns, or how it fails."""
    launches.begin(tensors(tuple(given.values())))
    try:
        result = launches.described(call(**given))
    except Exception as error:
        return type(error), str(error)
    return list(launches.seen), result


@pytest.mark.parametrize("name", SAMPLES)
def test_the_same_launches(launches, name):
    function, make = SAMPLES[name]
    device = torch.device("cpu")
    found = [
        launched(launches, call, make(device)) for call in (long_way(function), *4 * (function,))
    ]
    assert found[0][0] and isinstance(found[0][0], list), found[0]
    assert all(one == found[0] for one in found)
    assert [isinstance(x, tuple) for x in function.shortcuts.values()] == [True]


def test_a_shortcut_leads_to_the_kernel_that_is_asked_for(launches):
    """Kernels of two packages by turns, each called often enough for a shortcut."""
    function, q = liteattention_sm89.lite_attention, torch.randn(1, 200, 2, 64).bfloat16()

    def modules() -> list[str]:
        launches.begin([q])
        function(q, q.clone(), q.clone())
        return [unit.modules[0].partition(".")[0] for unit, *_ in launches.seen]

    for kernel in ("sm89", "sm90", "sm89", "sm90"):
        with choice.forced(kernel):
            assert [modules() for _ in range(4)] == 4 * [[f"liteattention_{kernel}"]]
            assert [isinstance(x, tuple) for x in function.shortcuts.values()] == [True]
    assert [modules() for _ in range(4)] == 4 * [["liteattention_sm90"]]


def changes(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns calls that differ from this one in one argument."""
    found = []
    for name, x in given.items():
        if isinstance(x, Tensor):
            others = [
                None,
                x.double(),
                x.half(),
                x[..., :-1],
                x.unsqueeze(0),
                x[:0],
                x.mT if x.dim() > 1 else x[::2],
            ]
        elif isinstance(x, bool):
            others = [int(x), not x, None]
        elif isinstance(x, (int, float)):
            others = [float(x), -x, True, None, float("nan")]
        elif isinstance(x, tuple):
            others = [None, tuple(x), x._replace(**{x._fields[0]: x[0].double()})]
        else:
            others = []
        found += [{**given, name: other} for other in others]
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_whatever_is_changed_goes_its_own_way(launches, name):
    function, make = SAMPLES[name]
    given = make(torch.device("cpu"))
    for _ in range(3):
        function(**given)
    for changed in changes(given):
        expected = launched(launches, long_way(function), changed)
        for _ in range(3):
            assert launched(launches, function, changed) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLES)
def test_the_same_results(name):
    """Results, and all that a call writes to, bit for bit; the arguments of each call have other values."""
    function, make = SAMPLES[name]
    with torch.no_grad():
        for seed in range(4):
            found = []
            for call in (long_way(function), function):
                torch.manual_seed(seed)
                found.append(outcome(call, make(torch.device("cuda"))))
            assert found[0]
            for expected, x in zip(*found, strict=True):
                torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
    assert any(isinstance(x, tuple) for x in function.shortcuts.values())
