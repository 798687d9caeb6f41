"""What threads of a process do one after the other.

CuTe DSL is not safe for several threads at once. It parses sources besides, as the key of a kernel does, and Python
3.11 raises SystemError where two threads build syntax trees at the same time.
"""

from __future__ import annotations

import os
import threading

_lock = threading.RLock()


def turn() -> threading.RLock:
    """Returns what to hold while a source is parsed or a kernel is compiled: `with turn():`."""
    return _lock


def _renew() -> None:
    """A forked process does not have the thread that may hold the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
