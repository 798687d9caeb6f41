"""Launches of emulated kernels that can be repeated alone, for mutation tests of one kernel among several of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cula_emulator import Options
from cula_emulator.pytest_plugin import BoundKernel

from .comparing import same


class Repeated:
    """An emulated kernel that keeps what the tensors of its last launch held before and behind it.

    check: for `mutation.run`: repeats the launch, and every tensor must hold the same bits again.
    """

    def __init__(self, kernel: BoundKernel) -> None:
        self.kernel = kernel
        self._before: list[Any] = []
        self._behind: list[Any] = []

    def __call__(self, *arguments: Any) -> None:
        self._before = _copies(arguments)
        self.kernel(*arguments)
        self._behind = _copies(arguments)

    def check(self, changes: Options) -> None:
        arguments = _copies(self._before)
        self.kernel(*arguments, **vars(changes))
        pairs = zip(arguments, self._behind, strict=True)
        assert all(same(*pair) for pair in pairs if isinstance(pair[0], Tensor))


def _copies(arguments: Any) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in arguments]
