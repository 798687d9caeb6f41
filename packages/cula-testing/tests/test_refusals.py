"""A refusal is held to its exception, its message and to changing nothing."""

from __future__ import annotations

import pytest
import torch

from cula_testing.refusals import (
    CPU,
    Table,
    assert_refused,
    by_name,
    cases,
    contents,
    on_device,
    resized,
)
from cula_testing.tensors import (
    every_other,
    gapped,
    misplaced,
    normals,
    scattered,
    shifted,
    spaced,
    turned,
)

TABLE = Table(("one", "other"))
GOOD = {"q": torch.ones(2, 3), "out": torch.zeros(4)}
NEGATIVE = TABLE.value("q", -1, ValueError, "a tensor", "-1")


def refuse(message: str, error: type[Exception] = ValueError):
    def function(q, out):
        raise error(message)

    return function


def test_the_right_refusal_passes():
    assert_refused(refuse("q: expected a tensor, got -1"), NEGATIVE, GOOD)


@pytest.mark.parametrize(
    "function",
    [
        refuse("q: expected a tensor, got -2"),
        refuse("q: expected a number, got -1"),
        refuse("k: expected a tensor, got -1"),
        refuse("q: a tensor, please"),
        refuse("q: expected a tensor, got -1", UnicodeError),
    ],
    ids=["other value", "other rule", "other argument", "other form", "other class"],
)
def test_another_refusal_fails(function):
    with pytest.raises(AssertionError):
        assert_refused(function, NEGATIVE, GOOD)


def test_an_acceptance_fails():
    with pytest.raises(pytest.fail.Exception):
        assert_refused(lambda q, out: None, NEGATIVE, GOOD)


def test_a_change_is_found_even_between_the_elements_of_a_view():
    storage = torch.zeros(8)

    def function(q, out):
        storage[1] = 1.0
        raise ValueError("q: expected a tensor, got -1")

    with pytest.raises(AssertionError, match="out has changed"):
        assert_refused(function, NEGATIVE, GOOD | {"out": storage[::2]})


def test_a_table_is_dealt_out_by_mode_and_device():
    table = [
        NEGATIVE,
        TABLE.several("both", {"q": on_device([1]), "out": resized("q", (1, 5))}, TypeError, "q", "", "",
                      ("one",), CPU),
    ]  # fmt: skip
    assert [case.id for case in cases(table, "cpu")] == ["one-q=-1", "other-q=-1", "one-both"]
    assert [case.id for case in cases(table, "cuda")] == ["one-q=-1", "other-q=-1"]
    changed = table[1].change(GOOD)
    assert torch.equal(changed["q"], torch.tensor([1])) and changed["out"].shape == (2, 5)
    missing = TABLE.several(
        "some", {"q": on_device([1]), "k": on_device([2])}, TypeError, "q", "", ""
    )
    assert missing.change(GOOD).keys() == {"q"}
    assert by_name(GOOD, torch.Tensor.half, "q", "k").keys() == {"q"}
    assert contents({"x": torch.ones(1, device="meta"), "y": 3}) == {}


@pytest.mark.parametrize("how", [turned, spaced, scattered, every_other, misplaced])
def test_layouts_keep_values(how):
    x = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    assert torch.equal(how(x), x)


def test_normal_numbers_are_the_same_for_every_dtype():
    draw = normals(torch.Generator().manual_seed(1))
    first, second = draw(3, 4), draw(5)
    again = normals(torch.Generator().manual_seed(1))
    assert torch.equal(again(3, 4), first) and torch.equal(again(5), second)
    assert first.dtype == torch.float64 and not torch.equal(draw(5), second)


def test_layouts_are_what_they_say():
    x = torch.zeros(2, 3, 4, 5)
    assert not gapped(x).is_contiguous() and gapped(x).shape == x.shape
    assert shifted(x).data_ptr() % 16 == 4 and misplaced(x).data_ptr() % 16
    assert every_other(x).stride(-1) == 2 and spaced(x).stride(-2) == 13
