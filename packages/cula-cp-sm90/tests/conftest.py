"""Loads the plugin that the tests of all packages share."""

from cula_testing.loading import pytest_addoption

__all__ = ["pytest_addoption"]
