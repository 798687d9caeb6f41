"""The folder that keeps what was compiled.

It is $CULA_EMULATOR_CACHE, else $XDG_CACHE_HOME/cula-emulator, else ~/.cache/cula-emulator. Names are hashes of all
that went into a file, and files appear by an atomic rename, so several processes may use the folder at once. Where it
cannot be written, its entries are still read, and new ones go to a temporary folder of this process. It can be deleted
at any time.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIXES = (".so", ".o", ".h", ".gch", ".json", ".verdicts", ".cpp", ".lock")
_SCRATCH = "building-"
LOCK_TIMEOUT = 600.0  # seconds; nothing that is built here takes longer
_broken: set[Path] = set()


def configured() -> Path | None:
    """The folder that the environment names; None where there is no home folder either."""
    if chosen := os.environ.get("CULA_EMULATOR_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cula-emulator"
    except RuntimeError:
        return None


def _refusal(folder: Path | None) -> str | None:
    """Why files cannot be created in `folder`, which is made if need be; None if they can."""
    if folder is None:
        return "there is no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


@functools.cache
def _private() -> Path:
    place, owner = Path(tempfile.mkdtemp(prefix="cula-emulator-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # forks use the folder, but do not end its life
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(remove)
    return place


@functools.cache
def _warn(folder: Path | None, reason: str) -> None:
    warnings.warn(
        f"the cache folder {folder or ''} of cula_emulator cannot be written ({reason}), so this process compiles into "
        "a temporary one; CULA_EMULATOR_CACHE names another folder",
        RuntimeWarning,
        stacklevel=2,
    )


def folder() -> Path:
    """Where new files go: the configured folder, or a temporary one of this process, with one warning."""
    wanted = configured()
    reason = _refusal(wanted)
    if reason is None and wanted is not None:
        return wanted
    _warn(wanted, reason or "")
    return _private()


def find(name: str) -> Path | None:
    """The file `name`, whichever folder holds it."""
    places = [_private()] if _private.cache_info().currsize else []
    for place in (*places, configured()):
        with suppress(OSError):
            # A linker takes an empty object for a script, so nothing empty counts.
            if place and place / name not in _broken and (place / name).stat().st_size:
                return place / name
    return None


def publish(fresh: Path, name: str) -> Path:
    """Moves a finished file into the cache under `name`, at once and whole; returns where it is now."""
    target = folder() / name
    try:
        os.replace(fresh, target)
    except OSError as error:
        _warn(target.parent, error.strerror or str(error))
        target = _private() / name
        shutil.copyfile(fresh, target)
    return target


def discard(path: Path) -> None:
    """Removes a damaged file, or never finds it again where that is not allowed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        _broken.add(path)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for unfinished files, on the file system of the cache."""
    place = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder())
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def lock(name: str, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Keeps other processes from building `name` too.

    The lock only saves work, so the caller goes on without it where locks do not exist or the holder takes longer than
    `timeout` seconds. The system frees the lock of a process that dies.
    """
    path = folder() / f"{name}.lock"
    try:
        import fcntl

        handle = path.open("a")
    except (ImportError, OSError):
        yield
        return
    with handle:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        try:
            yield
        finally:
            discard(path)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it to a fork


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
        for left in place.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
    return len(found)
