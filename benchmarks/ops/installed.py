"""Says whether a package can be imported here, and if not, why."""

from __future__ import annotations

import functools
from collections.abc import Callable


def missing(module: str) -> Callable[[], str | None]:
    """A function that returns None if `module` can be imported, and else the reason; it tries once.

    An import of a GPU package can fail in many ways, and each of them is worth showing.
    """

    @functools.cache
    def probe() -> str | None:
        try:
            __import__(module)
        except Exception as error:
            return f"{module} cannot be imported: {error}"
        return None

    return probe
