"""What every package's `_spec` answers in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cula_core import spec


def assert_answer(
    supports: Callable[..., str | None], problem: dict[str, Any], reason: str | None
) -> None:
    """Holds a spec to serving a problem where there is no reason, else to a refusal that gives it."""
    answer = supports(**problem)
    assert answer is None if reason is None else answer is not None and reason in answer, answer


def assert_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    supports: Callable[..., str | None],
    missing: str,
    distribution: str,
) -> None:
    """Holds a spec to naming the part of the kernel language that misses, and the command that installs it."""
    monkeypatch.setattr(spec, "find_spec", lambda name: None if name == missing else name)
    command = f"pip install --find-links dist {distribution}"
    assert supports() == f"its dependency {missing} is missing: {command}"
