"""A folder that keeps what was compiled, shared by processes.

Names are hashes of all that went into a file, and files appear by an atomic rename, so several processes may use the
folder at once. Where it cannot be written, its entries are still read, and new ones go to a temporary folder of this
process. It can be deleted at any time.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH = "building-"  # begins the names of folders with unfinished files
LOCK_TIMEOUT = 600.0  # seconds; nothing that is built takes longer
HOUR = 3600.0


class Store:
    """The folder that the environment variable `variable` names, else $XDG_CACHE_HOME/`name`, else ~/.cache/`name`."""

    def __init__(self, variable: str, name: str) -> None:
        self.variable, self.name = variable, name
        self._broken: set[Path] = set()
        self._private = functools.cache(self._make_private)
        self._warn = functools.cache(self._warn_always)

    def configured(self) -> Path | None:
        """Returns the folder that the environment names; None where there is no home folder either."""
        if chosen := os.environ.get(self.variable):
            return Path(chosen).absolute()
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            return (Path(base) if base else Path.home() / ".cache") / self.name
        except RuntimeError:
            return None

    def folder(self) -> Path:
        """Returns where new files go: the configured folder, or a temporary one of this process, with one warning."""
        wanted = self.configured()
        reason = _refusal(wanted)
        if reason is None and wanted is not None:
            return wanted
        self._warn(wanted, reason or "")
        return self._private()

    def find(self, name: str) -> Path | None:
        """Returns the file `name`, whichever folder holds it. Nothing empty counts, as a crash may leave it."""
        places = [self._private()] if self._private.cache_info().currsize else []
        wanted = self.configured()
        if wanted is not None and not _foreign(wanted):
            places.append(wanted)
        for place in places:
            with suppress(OSError):
                if place / name not in self._broken and (place / name).stat().st_size:
                    return place / name
        return None

    def private(self) -> Path:
        """Returns a temporary folder of this process, which ends with it."""
        return self._private()

    def publish(self, fresh: Path, name: str) -> Path:
        """Moves a finished file into the folder under `name`, at once and whole; returns where it is now."""
        target = self.folder() / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh, target)
        except OSError as error:
            self._warn(self.configured(), error.strerror or str(error))
            target = self._private() / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fresh, target)
        self._broken.discard(target)
        return target

    def trim(self, limit: int) -> None:
        """Removes the oldest files until the folder has at most `limit` bytes; none that is younger than a day.

        Looks once an hour at most; what a process that died left unfinished goes, too.
        """
        folder, now = self.configured(), time.time()
        if folder is None or _foreign(folder):
            return
        with suppress(OSError):
            looked = folder / "trimmed"
            if looked.exists() and now - looked.stat().st_mtime < HOUR:
                return
            looked.touch()
            files = [(path.stat(), path) for path in folder.glob("*/**/*") if path.is_file()]
            left = sum(facts.st_size for facts, _ in files)
            for facts, path in sorted(files, key=lambda file: file[0].st_mtime):
                if left <= limit or now - facts.st_mtime < 24 * HOUR:
                    break
                path.unlink(missing_ok=True)
                left -= facts.st_size

    def discard(self, path: Path) -> None:
        """Removes a damaged file, or never finds it again where that is not allowed."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self._broken.add(path)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for unfinished files, on the file system of the store."""
        place = tempfile.mkdtemp(prefix=SCRATCH, dir=self.folder())
        try:
            yield Path(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def lock(self, name: str, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Keeps other processes from building `name` too.

        The lock only saves work, so the caller goes on without it where locks do not exist or the holder takes longer
        than `timeout` seconds. The system frees the lock of a process that dies.
        """
        path = self.folder() / f"{name}.lock"
        try:
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
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
                self.discard(path)
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it to a fork

    def _make_private(self) -> Path:
        place, owner = Path(tempfile.mkdtemp(prefix=f"{self.name}-")), os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # forks use the folder, but do not end its life
                shutil.rmtree(place, ignore_errors=True)

        atexit.register(remove)
        return place

    def _warn_always(self, folder: Path | None, reason: str) -> None:
        warnings.warn(
            f"the cache folder {folder or ''} of {self.name} cannot be used ({reason}), so this process compiles "
            f"into a temporary one; {self.variable} names another folder",
            RuntimeWarning,
            stacklevel=3,
        )


def _refusal(folder: Path | None) -> str | None:
    """Why files cannot be created in `folder`, which is made if need be; None if they can."""
    if folder is None:
        return "there is no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return _foreign(folder)
    except OSError as error:
        return error.strerror or str(error)


def _foreign(folder: Path) -> str | None:
    """Why what a folder holds is not trusted, for loading a library is running it; None if it is."""
    with suppress(OSError):
        facts = folder.stat()
        if hasattr(os, "getuid") and facts.st_uid not in (os.getuid(), 0):
            return "it belongs to somebody else"
        if facts.st_mode & stat.S_IWOTH:
            return "everybody may write to it"
    return None
