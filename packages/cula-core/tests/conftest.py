"""Loads the plugin that the tests of all packages share."""

import sys
from pathlib import Path

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption"]

sys.path.insert(0, str(Path(__file__).parent))
