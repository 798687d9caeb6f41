"""Numbers that a user sets in the environment."""

from __future__ import annotations

import os


def bytes_of(variable: str) -> int | None:
    """Returns the number of bytes that an environment variable says; None where it is not set.

    Raises ValueError where it is no number.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{variable}: expected a number of bytes, got {text!r}")
    return int(text)
