"""Loads the plugin from a source tree."""

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption"]
