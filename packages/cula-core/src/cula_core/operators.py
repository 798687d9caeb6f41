"""Registers how operators run in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def register_fake(name: str, function: Callable[..., Any] = lambda *_: None) -> None:
    """Registers what an operator `package::name` returns for tensors without contents; nothing by default.

    torch notes where it was called, and for every new file looks through all modules that are loaded. Called from here
    it does so once, which takes a tenth off the import of the packages.
    """
    torch.library.register_fake(name, function)


def no_second_derivative(ctx: object, *_: object) -> NoReturn:
    """The backward of an operator of gradients: it has none."""
    raise RuntimeError("cula: the derivative of a gradient is not implemented")
