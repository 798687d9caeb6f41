"""Loads the plugin from a source tree: a conftest.py imports `pytest_addoption` from here."""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Registers the plugin unless the entry point of the installed distribution has done so."""
    from . import plugin

    if not pluginmanager.is_registered(plugin):
        pluginmanager.register(plugin, plugin.__name__)
