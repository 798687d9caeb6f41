"""Comparisons fail where they must."""

from __future__ import annotations

import math

import pytest
import torch

from cula_testing.comparing import (
    assert_rounded_once,
    assert_within,
    bits,
    relative_rmse,
    same,
)

DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_integers_of_the_same_size(dtype):
    x = torch.ones(3, dtype=dtype)
    assert bits(x).element_size() == x.element_size() and not bits(x).dtype.is_floating_point


def test_same_means_the_same_bits():
    x = torch.tensor([1.0, math.nan, 0.0])
    assert same(x, x.clone()) and same(x[::2], x[::2].clone())
    assert not same(x, torch.tensor([1.0, math.nan, -0.0]))
    assert not same(x, x[:, None])
    assert not same(x, x.nextafter(torch.tensor(2.0)))


def test_relative_rmse_by_hand():
    x = torch.tensor([3.0, 4.0])
    assert relative_rmse(x, x) == 0
    assert relative_rmse(torch.tensor([3.0, 4.5]), x) == pytest.approx(0.1)
    assert relative_rmse(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_rmse(x, torch.zeros(2)) == math.inf
    assert math.isnan(relative_rmse(torch.tensor([3.0, math.nan]), x))
    with pytest.raises(AssertionError):
        relative_rmse(x, x[None])


def test_a_bound_holds_for_all_and_for_every_row():
    expected = torch.ones(100, 4)
    actual = expected * 1.01
    assert assert_within(actual, expected, 0.011) == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(AssertionError, match="^state: relative RMSE 1.000e-02, limit 9.000e-03"):
        assert_within(actual, expected, 0.009, name="state")
    actual = expected.clone()
    actual[7] *= 1.09
    assert_within(actual, expected, 0.01, rows=5)
    with pytest.raises(AssertionError, match="^result: a row is off by 4.500e-02, limit 3.000e-02"):
        assert_within(actual, expected, 0.01)


@pytest.mark.parametrize("where", ["actual", "expected"])
def test_nan_is_within_no_bound(where):
    x = {"actual": torch.ones(2), "expected": torch.ones(2)}
    x[where] = torch.tensor([1.0, math.nan])
    with pytest.raises(AssertionError, match="relative RMSE nan"):
        assert_within(**x, bound=math.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_rounding_is_admitted_and_more_is_not(dtype):
    expected = torch.randn(1000, dtype=torch.float64)
    assert_rounded_once(expected.to(dtype), expected)
    off = (expected * 1.004).to(dtype)
    with pytest.raises(AssertionError, match="^relative RMSE .*, limit "):
        assert_rounded_once(off, expected)


def test_a_coarse_result_is_not_excused_by_its_dtype():
    expected = torch.randn(1000, dtype=torch.float64)
    coarse = expected.to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="limit 5.000e-03"):
        assert_rounded_once(coarse, expected)
