"""Lets tests import what they share from this folder, and gives those of public functions a fresh registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the environment, and nothing decided about who serves; the same afterwards."""
    from cula import _env, _registry

    for name in ("CULA_IMPL", "CULA_DISABLE", "CULA_LOG"):
        monkeypatch.delenv(name, raising=False)
    _env.env.cache_clear()
    _registry.refresh()
    yield
    _registry.refresh()
