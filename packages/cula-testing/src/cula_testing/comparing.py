"""How tests compare tensors: bit for bit, or by relative RMSE."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Returns the tensor as integers, so that NaN equals NaN and the zeros differ."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape and the same bits."""
    return first.shape == second.shape and torch.equal(bits(first), bits(second))


def relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """Returns the RMS of the difference over the RMS of `expected`, in fp64.

    NaN in either gives NaN, which no bound admits.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    size = expected.double().square().sum()
    error = (actual.double() - expected.double()).square().sum()
    return 0.0 if error == size == 0 else (error / size).sqrt().item()


def assert_within(
    actual: Tensor, expected: Tensor, bound: float, rows: float = 3.0, name: str = "result"
) -> float:
    """Holds the relative RMSE to `bound`, and that of a single row to `rows` times as much; returns the first.

    A row is the last dimension. Its error is taken relative to its own norm plus that of an average row.
    """
    __tracebackhide__ = True
    error = relative_rmse(actual, expected)
    assert error <= bound, f"{name}: relative RMSE {error:.3e}, limit {bound:.3e}"
    if error == 0:
        return error
    size = expected.double().norm(dim=-1)
    row_errors = (actual.double() - expected.double()).norm(dim=-1)
    row_errors /= size + size.square().mean().sqrt()
    worst = row_errors.max().item()
    assert worst <= rows * bound, f"{name}: a row is off by {worst:.3e}, limit {rows * bound:.3e}"
    return error


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """Holds a result to what one rounding of the exact one loses, 5 % and the noise of fp32 arithmetic; 5e-3 at most.

    Nothing that returns the same dtype can lose less, so this is also within 1.5 times any other implementation.
    """
    __tracebackhide__ = True
    floor = relative_rmse(expected.to(actual.dtype), expected)
    error = relative_rmse(actual, expected)
    limit = min(1.05 * floor + 1e-6, 5e-3)
    assert error <= limit, f"relative RMSE {error:.3e}, limit {limit:.3e}"
