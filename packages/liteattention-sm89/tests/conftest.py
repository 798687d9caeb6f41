"""What the tests of this package share; the plugin is that of all packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cula_testing.loading import pytest_addoption
from liteattention_sm89 import choice

__all__ = ["pytest_addoption"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def own_kernels() -> Iterator[None]:
    """Calls are served by the kernels of this package, also on a card that another one has kernels for."""
    with choice.forced(choice.OWN):
        yield
