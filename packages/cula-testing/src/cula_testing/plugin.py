"""pytest plugin of everything that tests kernels of cula: the emulator's plugin, the marker `gpu`, shared fixtures.

The module is the pytest11 entry point of the distribution. From a source tree a conftest.py loads it:

    from cula_testing.loading import pytest_addoption
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.register_assert_rewrite(
    "cula_testing.comparing",
    "cula_testing.refusals",
    "cula_testing.machine_code",
    "cula_testing.specs",
    "cula_testing.kda",
)

import torch  # noqa: E402

from . import comparing  # noqa: E402


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Loads the emulator's plugin from a source tree; where it is installed its entry point does so."""
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


@pytest.fixture(scope="session")
def relative_rmse() -> Callable[..., float]:
    """`comparing.relative_rmse`."""
    return comparing.relative_rmse


@pytest.fixture(scope="session")
def assert_within() -> Callable[..., float]:
    """`comparing.assert_within`."""
    return comparing.assert_within


@pytest.fixture(scope="session")
def assert_rounded_once() -> Callable[..., None]:
    """`comparing.assert_rounded_once`."""
    return comparing.assert_rounded_once


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """`torch.compile` without what earlier tests left, and nothing left for later ones."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
