"""What the tests of this package share; the plugin is that of all packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption", "pytest_configure"]

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    # Loops over the registers of a thread are unrolled on purpose; `cula_core` says so where it compiles.
    config.addinivalue_line("filterwarnings", "ignore:This static loop has")
