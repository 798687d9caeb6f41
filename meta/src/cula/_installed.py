"""What is installed, asked without importing it, and how to install what is not."""

from __future__ import annotations

import importlib.util


def importable(package: str) -> bool:
    """Whether a top-level package is there, without importing it. A bare directory of that name does not count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def how_to_install(what: str) -> str:
    """The command for a distribution of this repository or an extra of `cula`, whose wheels are on no package index."""
    return f"pip install --find-links dist '{what}' (dist: bash .ci/run build in a clone)"
