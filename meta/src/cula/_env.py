"""The environment variables of cula. They are read once, when the first function is dispatched, and only here, but for
CULA_FLA, which the package itself reads when it is imported, and CULA_VLLM, which the plug-in for vLLM reads."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Env:
    """What the environment asks for.

    impl (CULA_IMPL): implementation that `impl="auto"` means, for the ops that have one of that name.
    disable (CULA_DISABLE): comma-separated names of implementations that are not used.
    log (CULA_LOG): level at which the logger "cula" writes to stderr; unset leaves logging to the application.
    """

    impl: str = "auto"
    disable: frozenset[str] = frozenset()
    log: str | None = None


@functools.cache
def env() -> Env:
    """The settings, read from the process environment at the first call."""
    log = os.environ.get("CULA_LOG", "").strip().lower() or None
    if log is not None and log not in _LEVELS:
        raise ValueError(f"CULA_LOG: expected one of {', '.join(_LEVELS)}, got {log!r}")
    disable = os.environ.get("CULA_DISABLE", "").split(",")
    return Env(
        impl=os.environ.get("CULA_IMPL", "").strip() or "auto",
        disable=frozenset(name.strip() for name in disable if name.strip()),
        log=log,
    )


@functools.cache
def configure_logging() -> None:
    """Sends the logger "cula" to stderr at the level of CULA_LOG, when that is set."""
    level = env().log
    if level is None:
        return
    logger = logging.getLogger("cula")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
