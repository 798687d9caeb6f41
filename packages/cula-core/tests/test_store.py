"""The folder that keeps what was compiled: which one it is, and what happens where it refuses or is not trusted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from cula_core import store
from cula_core.store import Store

VARIABLE = "CULA_STORE_OF_TESTS"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The folder that the environment names; it does not exist."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "place"))
    return tmp_path / "place"


@pytest.fixture
def kept(place) -> Store:
    """A store in that folder, without the temporary folder and the warnings of another test."""
    return Store(VARIABLE, "store-of-tests")


def put(kept: Store, name: str, text: str = "text") -> Path:
    with kept.scratch() as scratch:
        (scratch / "fresh").write_text(text)
        return kept.publish(scratch / "fresh", name)


def test_what_is_published_is_found_and_nothing_unfinished_is_left(kept, place):
    assert kept.find("a/b.txt") is None
    path = put(kept, "a/b.txt")
    assert path == kept.find("a/b.txt") == place / "a" / "b.txt" and path.read_text() == "text"
    assert [p.name for p in place.rglob("*")] == ["a", "b.txt"]
    assert place.stat().st_mode & 0o777 == 0o700


def test_what_is_empty_does_not_count(kept):
    put(kept, "crashed", "")
    assert kept.find("crashed") is None


def test_discarded_files_are_gone(kept):
    path = put(kept, "name")
    kept.discard(path)
    assert kept.find("name") is None and not path.exists()
    assert put(kept, "name") == kept.find("name") == path


def test_the_environment_names_the_folder(kept, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert kept.configured() == Path("/a")
    monkeypatch.delenv(VARIABLE)
    assert kept.configured() == Path("/b/store-of-tests")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept.configured() == Path("/c/.cache/store-of-tests")


# ---- folders that refuse ---------------------------------------------------------------------------------------------


def below_a_file(place, monkeypatch):
    place.write_text("")
    monkeypatch.setenv(VARIABLE, str(place / "below"))
    return "Not a directory"


def a_file(place, monkeypatch):
    place.write_text("")
    return "File exists"


def no_home(place, monkeypatch):
    def refuse():
        raise RuntimeError("no home")

    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    return "there is no home folder"


def read_only(place, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store.tempfile, "TemporaryFile", refuse)
    return "Read-only file system"


def foreign(place, monkeypatch):
    place.mkdir()
    monkeypatch.setattr(store.os, "getuid", lambda: place.stat().st_uid + 1)
    if place.stat().st_uid == 0:  # what the administrator owns is trusted
        os.chown(place, 12345, -1)
        monkeypatch.setattr(store.os, "getuid", lambda: 0)
    return "it belongs to somebody else"


def world_writable(place, monkeypatch):
    place.mkdir()
    place.chmod(0o1777)
    return "everybody may write to it"


@pytest.mark.parametrize(
    "refusal", [below_a_file, a_file, no_home, read_only, foreign, world_writable]
)
def test_a_folder_that_refuses_gives_a_temporary_one_and_one_warning(
    kept, place, monkeypatch, refusal
):
    reason = refusal(place, monkeypatch)
    with pytest.warns(RuntimeWarning) as warned:
        path = put(kept, "name")
        assert put(kept, "other").parent == path.parent
    assert [reason in str(w.message) and VARIABLE in str(w.message) for w in warned] == [True]
    assert kept.find("name") == path and path.parent.name.startswith("store-of-tests-")
    assert kept.find("absent") is None
    assert not place.is_dir() or not list(place.iterdir())


@pytest.mark.parametrize("distrust", [foreign, world_writable])
def test_nothing_is_read_from_a_folder_that_others_can_write(kept, place, monkeypatch, distrust):
    distrust(place, monkeypatch)
    (place / "name").write_text("planted")
    assert kept.find("name") is None


def test_a_folder_that_the_administrator_owns_is_trusted(kept, place, monkeypatch):
    put(kept, "name")
    real = Path.stat

    def of_root(path, **named):
        facts = list(real(path, **named))
        facts[4] = 0
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "stat", of_root)
    monkeypatch.setattr(store.os, "getuid", lambda: 1000)
    assert kept.find("name") == place / "name"


def test_a_read_only_folder_is_read(kept, place, monkeypatch):
    put(kept, "name")
    read_only(place, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.find("name") == place / "name"
    with pytest.warns(RuntimeWarning, match="Read-only"):
        path = put(kept, "new")
    assert kept.find("new") == path and kept.find("name") == place / "name"


def test_a_damaged_file_that_cannot_be_deleted_is_not_found_again(kept, place, monkeypatch):
    path = put(kept, "name", "damaged")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    kept.discard(path)
    assert kept.find("name") is None
    read_only(place, monkeypatch)
    with pytest.warns(RuntimeWarning, match="Read-only"):
        fresh = put(kept, "name", "right")
    assert kept.find("name") == fresh != path


def test_a_refused_rename_goes_to_a_temporary_folder(kept, place, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        path = put(kept, "a/name")
    assert place not in path.parents and kept.find("a/name") == path


# ---- locks -----------------------------------------------------------------------------------------------------------

HOLDER = f"""
import time
from cula_core.store import Store
with Store("{VARIABLE}", "store-of-tests").lock("a/name"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_is_waited_for_but_not_for_ever_and_freed_by_a_dead_process(kept, place):
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        begin = time.monotonic()
        with kept.lock("a/name", timeout=0.3):
            assert time.monotonic() - begin >= 0.3
        with kept.lock("a/other", timeout=60):
            assert time.monotonic() - begin < 30
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    begin = time.monotonic()
    with kept.lock("a/name", timeout=60):
        assert time.monotonic() - begin < 30
    assert not list(place.rglob("*.lock"))


def test_a_lock_keeps_threads_apart(kept):
    inside = worst = 0

    def hold():
        nonlocal inside, worst
        with kept.lock("name"):
            inside += 1
            worst = max(worst, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


def test_a_file_system_without_locks(kept, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with kept.lock("name"):
        assert put(kept, "name") == kept.find("name")
