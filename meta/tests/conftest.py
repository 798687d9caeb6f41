"""Lets tests import what they share from this folder, and gives those of public functions a fresh registry."""

from __future__ import annotations

import sys
import warnings
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


@pytest.fixture(scope="module")
def quick_fla():
    """FLA, whatever its import warns of; its kernels take the first candidate, because timing all takes minutes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.ops  # noqa: F401
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:1])
        yield
