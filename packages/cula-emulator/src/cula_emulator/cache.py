"""The folder that keeps what was compiled.

It is $CULA_EMULATOR_CACHE, else $XDG_CACHE_HOME/cula-emulator, else ~/.cache/cula-emulator, and behaves as
`cula_core.store` says.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cula_core.store import SCRATCH, Store

_SUFFIXES = (".so", ".o", ".h", ".gch", ".json", ".verdicts", ".cpp", ".lock")
STORE = Store("CULA_EMULATOR_CACHE", "cula-emulator")
configured, folder, find = STORE.configured, STORE.folder, STORE.find
publish, discard, scratch, lock = STORE.publish, STORE.discard, STORE.scratch, STORE.lock


def entries() -> list[Path]:
    """Every file of the configured folder that belongs to this package."""
    place = configured()
    if place is None or not place.is_dir():
        return []
    return sorted(p for p in place.iterdir() if p.is_file() and p.suffix in _SUFFIXES)


def clear() -> int:
    """Deletes the entries and what interrupted builds left; returns how many entries there were."""
    found = entries()
    for path in found:
        discard(path)
    place = configured()
    if place is not None and place.is_dir():
        for left in place.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
    return len(found)
