# Vendored from packages/cula-cp-sm90/tests/conftest.py by "nox -s vendor": edit the master.
"""What the tests of this package share; nothing outside this folder is needed to run them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Loads the emulator's plugin from a source tree; where it is installed its entry point has done so."""
    from cula_emulator import pytest_plugin

    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, pytest_plugin.__name__)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu: needs a CUDA GPU and fails without one; -m 'not gpu' leaves it out"
    )


@pytest.fixture
def cuda() -> torch.device:
    """The GPU; a machine without one fails the test in one line."""
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU; -m 'not gpu' leaves such tests out", pytrace=False)
    return torch.device("cuda", torch.cuda.current_device())


def _relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of `expected`, in fp64; NaN in either gives NaN, which no bound admits."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    size = expected.double().square().sum()
    error = (actual.double() - expected.double()).square().sum()
    return 0.0 if error == size == 0 else (error / size).sqrt().item()


@pytest.fixture(scope="session")
def relative_rmse() -> Callable[[Tensor, Tensor], float]:
    return _relative_rmse


def _assert_within(actual: Tensor, expected: Tensor, bound: float, rows: float = 3.0) -> float:
    """Holds the relative RMSE to `bound`, and that of a single row to `rows` times as much; returns the first.

    A row is the last dimension. Its error is taken relative to its own norm plus that of an average row.
    """
    __tracebackhide__ = True
    error = _relative_rmse(actual, expected)
    assert error <= bound, f"relative RMSE {error:.3e}, limit {bound:.3e}"
    if error == 0:
        return error
    size = expected.double().norm(dim=-1)
    row_errors = (actual.double() - expected.double()).norm(dim=-1)
    row_errors /= size + size.square().mean().sqrt()
    worst = row_errors.max().item()
    assert worst <= rows * bound, f"a row is off by {worst:.3e}, limit {rows * bound:.3e}"
    return error


@pytest.fixture(scope="session")
def assert_within() -> Callable[..., float]:
    return _assert_within
