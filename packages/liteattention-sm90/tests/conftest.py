"""What the tests of this package share; the plugin is that of all packages."""

from __future__ import annotations

import sys
from pathlib import Path

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption"]

sys.path.insert(0, str(Path(__file__).parent))
