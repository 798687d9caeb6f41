"""Calls can be trained in these tests, whether the package offers it yet or not."""

import pytest

from cula_cp_sm90.arch import TARGET


@pytest.fixture(autouse=True)
def backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGET.__dict__, "backward", True)
