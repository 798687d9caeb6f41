"""Numbers that a user sets in the environment."""

from __future__ import annotations

import os
from typing import TypeVar

Otherwise = TypeVar("Otherwise")


def bytes_of(variable: str, otherwise: Otherwise) -> int | Otherwise:
    """Returns the number of bytes that an environment variable says, or `otherwise` where it is not set.

    Raises ValueError where it is no number.
    """
    text = os.environ.get(variable)
    if text is None:
        return otherwise
    if not text.isdecimal():
        raise ValueError(f"{variable}: expected a number of bytes, got {text!r}")
    return int(text)
