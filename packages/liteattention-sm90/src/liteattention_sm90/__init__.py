"""Skip-list softmax attention with Hopper's own instructions: kernels for `liteattention_sm89`, and its public names.

The names are imported from there at their first use, so that a list, a module or a state of one package is the other's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liteattention_sm89 import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("_"):
        import liteattention_sm89 as host

        if name == "__all__":
            return [*host.__all__]
        if name in host.__all__:
            return getattr(host, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    import liteattention_sm89 as host

    return sorted({*globals(), *host.__all__})
