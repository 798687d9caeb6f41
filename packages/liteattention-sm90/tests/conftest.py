"""The plugin is that of all packages."""

from __future__ import annotations

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption"]
