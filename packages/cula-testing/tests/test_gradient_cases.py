"""The judge of gradients: what it lets pass and what it does not."""

from __future__ import annotations

import pytest
import torch

from cula_core.reference.kda_backward import Gradients
from cula_testing.kda.gradient_cases import CLASSES, NAMES, check, gradient_case


@pytest.fixture(scope="module")
def case():
    return gradient_case("mixed", (70, 0, 5), heads=(1, 2), dim=16, initial=True, dht=True)


def test_rounded_results_pass(case):
    given = (case.given[name] for name in NAMES)
    rounded = (
        d if x.dtype == torch.float32 else d.to(x.dtype) for x, d in zip(given, case.expected)
    )
    errors = check(Gradients(*rounded), case)
    assert set(errors) == set(Gradients._fields) and 1e-3 < errors["dq"] < 2e-3


@pytest.mark.parametrize("name", Gradients._fields)
def test_one_head_that_is_off_does_not_pass(case, name):
    wrong = getattr(case.expected, name).clone()
    parts = {
        "dh0": (..., -1, slice(None), slice(None)),
        "dA_log": ...,
        "ddt_bias": slice(-16, None),
    }
    # What dA_log sums up cancels, and may be off by a part of its terms.
    factor, error = (1.05, "5.00e-02") if name == "dA_log" else (1.004, "4.00e-03")
    wrong[parts.get(name, (slice(None), slice(None), -1))] *= factor
    with pytest.raises(AssertionError, match=f"of a head: {name} {error}"):
        check(case.expected._replace(**{name: wrong}), case)


@pytest.mark.parametrize("name", ["dq", "dh0"])
def test_nan_and_missing_gradients_do_not_pass(case, name):
    wrong = getattr(case.expected, name).clone()
    wrong.view(-1)[3] = torch.nan
    with pytest.raises(AssertionError, match=f"{name} nan"):
        check(case.expected._replace(**{name: wrong}), case)
    with pytest.raises(AssertionError, match=name):
        check(case.expected._replace(**{name: None}), case)


def test_classes_are_what_they_say():
    """As decays, by a gate of any form."""
    ranges = {"mixed": (-4.95, -1e-4), "moderate": (-0.32, -0.02), "strong": (-4.9, -2.0)}
    for kind in CLASSES:
        decays = gradient_case(kind, (70,), dim=16, gate="log").given["g"]
        low, high = ranges.get(kind, (-1.2e-4, -2e-5))
        assert low * 1.001 <= decays.min() and decays.max() <= high * 0.999, kind
        for gate in ("safe", "softplus"):
            raw = (
                gradient_case(kind, (70,), dim=16, gate=gate, parameters=False).given["g"].double()
            )
            found = -5 * raw.sigmoid() if gate == "safe" else -torch.nn.functional.softplus(raw)
            torch.testing.assert_close(found, decays.double(), rtol=1e-4, atol=0)
    keys = gradient_case("equal_keys", (70,), dim=16).given["k"][0, :, 0]
    assert [bool((a == b).all()) for a, b in zip(keys[:-1], keys[1:])] == [
        t % 8 != 7 for t in range(69)
    ]
    assert gradient_case("weak_strengths", (70,), dim=16).given["beta"].min() < -12
