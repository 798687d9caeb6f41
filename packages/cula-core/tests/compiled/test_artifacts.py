"""The cache of compiled kernels: what is found, what is made again, and what several processes and threads make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from cula_core.compiled import artifacts as cache
from cula_core.compiled import key
from cula_core.compiled.artifacts import Artifacts, Unit, artifacts, uncached
from cula_core.store import Store

MADE = Artifacts("ptx", b"cubin", b"object", "log", (1024, 0))
UNIT = Unit("cula_core.once", ("config", 1), "sm_90a")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, without the temporary folder and the warnings of another test."""
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "STORE", Store("CULA_CACHE_DIR", "cula"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(folder, monkeypatch) -> list[Unit]:
    """What was compiled, by a compiler that makes the same of everything."""
    asked: list[Unit] = []

    def compile(unit: Unit) -> Artifacts:
        asked.append(unit)
        return MADE

    monkeypatch.setattr(cache, "_compiled", compile)
    return asked


def entry(folder: Path) -> dict[str, Path]:
    """The files of the only entry, by suffix."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.with_suffix("") for path in files}) == 1
    return {path.suffix[1:]: path for path in files}


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(folder, compiled):
    first = artifacts(UNIT)
    assert first == artifacts(UNIT) == artifacts(replace(UNIT)) == MADE
    assert compiled == [UNIT]
    parts = entry(folder)
    assert parts.keys() == {"ptx", "cubin", "o", "log", "shared", "json"}
    facts = json.loads(parts["json"].read_text())
    assert (facts["config"], facts["arch"]) == ("('config', 1)", "sm_90a")


@pytest.mark.parametrize(
    "change",
    [{"config": ("config", 2)}, {"arch": "sm_100a"}, {"module": "cula_core.dtypes"}],
    ids=str,
)
def test_another_unit_is_another_entry(compiled, change):
    artifacts(UNIT)
    other = replace(UNIT, **change)
    for _ in range(2):
        artifacts(other)
    assert compiled == [UNIT, other]


def test_another_compiler_is_another_entry(compiled, monkeypatch):
    artifacts(UNIT)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    key.made_with.cache_clear()
    try:
        artifacts(UNIT)
    finally:
        monkeypatch.undo()
        key.made_with.cache_clear()
    assert len(compiled) == 2


def test_an_empty_log_is_found(compiled, monkeypatch):
    monkeypatch.setattr(f"{__name__}.MADE", replace(MADE, log="", dynamic_shared_bytes=()))
    assert artifacts(UNIT) == artifacts(UNIT) == MADE and len(compiled) == 1


def test_a_config_that_has_no_key_is_not_compiled(compiled):
    with pytest.raises(TypeError, match="no stable text to hash"):
        artifacts(replace(UNIT, config=object()))
    assert not compiled


def test_uncached_neither_reads_nor_writes(folder, compiled):
    with uncached():
        artifacts(UNIT)
        assert not folder.exists()
    artifacts(UNIT)
    with uncached():
        artifacts(UNIT)
    assert len(compiled) == 3
    artifacts(UNIT)
    assert len(compiled) == 3


def test_uncached_holds_for_its_own_thread(compiled):
    artifacts(UNIT)
    with uncached():
        other = threading.Thread(target=artifacts, args=(UNIT,))
        other.start()
        other.join()
    assert len(compiled) == 1


def test_what_may_come_from_another_source_is_not_kept(compiled, monkeypatch):
    monkeypatch.setattr(cache, "edited", lambda modules: modules == UNIT.modules)
    for _ in range(2):
        artifacts(UNIT)
    assert len(compiled) == 2


def test_an_error_of_the_compiler_leaves_nothing(folder, monkeypatch):
    def fail(unit: Unit) -> Artifacts:
        raise ValueError("refused")

    monkeypatch.setattr(cache, "_compiled", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="^refused$"):
            artifacts(UNIT)
    assert not [path for path in folder.rglob("*") if path.is_file()]


# ---- damage ----------------------------------------------------------------------------------------------------------


def damaged_json(text: str):
    return lambda parts: parts["json"].write_text(text)


def one_digest_missing(parts):
    facts = json.loads(parts["json"].read_text())
    del facts["sha256"]["cubin"]
    parts["json"].write_text(json.dumps(facts))


DAMAGE = {
    "truncated": lambda parts: os.truncate(parts["o"], 3),
    "emptied": lambda parts: os.truncate(parts["ptx"], 0),
    "one bit": lambda parts: parts["cubin"].write_bytes(b"cubio"),
    "log": lambda parts: parts["log"].write_bytes(b"\xff"),
    "shared": lambda parts: parts["shared"].write_text("[1024]"),
    **{f"no {part}": lambda parts, part=part: parts[part].unlink() for part in cache._PARTS},
    "json that is none": damaged_json('{"sha256": {"pt'),
    "json that is no text": lambda parts: parts["json"].write_bytes(b"\xff\xfe\xff"),
    "json of a list": damaged_json("[]"),
    "json without digests": damaged_json("{}"),
    "json with other digests": damaged_json('{"sha256": "abc"}'),
    "json without one digest": one_digest_missing,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_made_again_with_one_warning(folder, compiled, damage):
    artifacts(UNIT)
    damage(entry(folder))
    with pytest.warns(RuntimeWarning, match="an entry of .* is made again") as warned:
        assert artifacts(UNIT) == MADE
    assert [Path(w.filename).name for w in warned] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifacts(UNIT) == MADE
    assert len(compiled) == 2


@pytest.mark.parametrize("left", ["empty", "no"])
def test_an_entry_that_a_crash_left_unfinished_is_made_again(folder, compiled, left):
    """Its facts are written last, so nobody has seen the entry."""
    artifacts(UNIT)
    facts = entry(folder)["json"]
    os.truncate(facts, 0) if left == "empty" else facts.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifacts(UNIT) == artifacts(UNIT) == MADE
    assert len(compiled) == 2


def test_a_damaged_entry_that_cannot_be_deleted(folder, compiled, monkeypatch):
    artifacts(UNIT)
    DAMAGE["truncated"](entry(folder))

    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.warns(RuntimeWarning) as warned:
        assert artifacts(UNIT) == artifacts(UNIT) == MADE
    texts = " ".join(str(w.message) for w in warned)
    assert len(warned) == 2 and "is made again" in texts and "cannot be used" in texts
    assert len(compiled) == 2


# ---- several at a time -----------------------------------------------------------------------------------------------


def test_threads_compile_once(folder, monkeypatch):
    start, asked, found = threading.Barrier(3), [], []

    def compile(unit: Unit) -> Artifacts:
        asked.append(unit)
        time.sleep(0.1)
        return MADE

    def work() -> None:
        start.wait()
        found.append(artifacts(UNIT))

    monkeypatch.setattr(cache, "_compiled", compile)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [MADE] * 3 and asked == [UNIT]


# A small kernel, as `launch.unit` has it.
SMALL = """
from cula_core.compiled.artifacts import Unit
from cula_core.delta_rule.config import MergeConfig
unit = Unit("cula_core.delta_rule.build", MergeConfig(), "sm_90a")
"""
CHILD = (
    SMALL
    + """
import hashlib, sys
from cula_core.compiled import artifacts as cache
def digest(made):
    return hashlib.sha256(repr(made).encode()).hexdigest()
print("ready", flush=True)
sys.stdin.readline()
print(cache.compiles, digest(cache.artifacts(unit)), cache.compiles, "cutlass" in sys.modules)
"""
)


def child(seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=os.environ | {"PYTHONHASHSEED": str(seed)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_processes_compile_once_and_two_builds_are_equal_byte_for_byte(folder):
    racing = [child(seed) for seed in (1, 2, 3)]
    for process in racing:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0].split() for process in racing]
    assert sum(int(words[2]) for words in said) == 1
    # Who finds an entry does not need the DSL.
    assert sorted(words[2:] for words in said) == [["0", "False"]] * 2 + [["1", "True"]]

    scope: dict = {}
    exec(SMALL, scope)
    kept = artifacts(scope["unit"])
    with uncached():
        again = artifacts(scope["unit"])
    assert kept == again and kept.host_object.startswith(b"\x7fELF")
    exec(CHILD.partition("print")[0], scope)
    assert {words[1] for words in said} == {scope["digest"](kept)}
