"""What the tests of this package share; nothing outside this folder is needed to run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

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
    # Loops over the registers of a thread are unrolled on purpose; `launch` says so where it compiles.
    config.addinivalue_line("filterwarnings", "ignore:This static loop has")


@pytest.fixture
def cuda() -> torch.device:
    """The GPU; a machine without one fails the test in one line."""
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU; -m 'not gpu' leaves such tests out", pytrace=False)
    return torch.device("cuda", torch.cuda.current_device())
