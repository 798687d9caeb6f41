"""Kernels as libraries: which are compiled, linked and loaded, in one process after the other, and out of bundles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cula_core.compiled import artifacts, bundles, key, libraries, load
from cula_core.compiled.artifacts import Unit, uncached
from cula_core.delta_rule.config import MergeConfig, TableConfig
from cula_core.store import Store

# The smallest kernel: it makes a table of segments from offsets.
UNIT = Unit("cula_core.delta_rule.build", TableConfig("int32"), "sm_90a")
CHILD = """
import sys
from cula_core.compiled import artifacts, libraries
from cula_core.delta_rule.config import TableConfig
unit = artifacts.Unit("cula_core.delta_rule.build", TableConfig("int32"), "sm_90a")
kernel = libraries.kernel(unit)
try:
    kernel(1)
except TypeError as error:
    print(artifacts.compiles, "cutlass" in sys.modules, str(error).splitlines()[0])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, without the temporary folder and the warnings of another test, and no bundle."""
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("CULA_BUNDLE", "CULA_RECORD", "CULA_JIT", "CULA_CACHE_LIMIT"):
        monkeypatch.delenv(variable, raising=False)
    store = Store("CULA_CACHE_DIR", "cula")
    for module in (artifacts, key, libraries):
        monkeypatch.setattr(module, "STORE", store)
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    """What a process knows of sources and bundles."""
    for function in (key.closure, key.source_digest, bundles._kernels):
        function.cache_clear()


def count() -> int:
    return artifacts.compiles


def said(**environment: str) -> list[str]:
    """What a process of its own says that loads the kernel and calls it with too few arguments."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(maxsplit=2)


def refused(kernel) -> None:
    """The kernel's own host code checks its arguments."""
    with pytest.raises((TypeError, ValueError), match="Expects 5 parameters"):
        kernel(torch.zeros(3))


def test_a_second_process_neither_compiles_nor_imports_the_dsl():
    cold, warm = said(), said()
    assert cold[:2] == ["1", "True"] and warm[:2] == ["0", "False"]
    assert cold[2] == warm[2] and "Expects 5 parameters" in warm[2]


def test_a_kernel_that_may_not_be_compiled(monkeypatch):
    monkeypatch.setenv("CULA_JIT", "0")
    with pytest.raises(RuntimeError, match="CULA_JIT=0 forbids compiling.*TableConfig.*sm_90a"):
        libraries.kernel(UNIT)
    monkeypatch.delenv("CULA_JIT")
    libraries.kernel(UNIT)
    monkeypatch.setenv("CULA_JIT", "0")
    refused(libraries.kernel(UNIT))


@pytest.mark.parametrize("damage", ["truncated", "facts"])
def test_a_damaged_library_is_made_again_with_one_warning(folder, damage):
    libraries.kernel(UNIT)
    (library,) = folder.glob("libraries/*/*.so")
    if damage == "truncated":
        os.truncate(library, 3000)
    else:
        library.with_suffix(".json").write_text("[]")
    before = count()
    with pytest.warns(RuntimeWarning, match="a kernel of the cache is made again") as warned:
        found = libraries.library(UNIT)
    assert len(warned) == 1 and found == library and count() == before
    assert key.digest_of(found) == json.loads(found.with_suffix(".json").read_text())["sha256"]


def test_without_a_linker_the_dsl_loads_the_kernel(monkeypatch):
    def refuse(*_) -> None:
        raise FileNotFoundError("there is no C compiler driver to link with")

    monkeypatch.setattr(libraries, "link", refuse)
    with pytest.warns(RuntimeWarning, match="by way of CuTe DSL.*no C compiler driver"):
        refused(libraries.kernel(UNIT))


def test_uncached_leaves_no_library(folder):
    with uncached():
        refused(libraries.kernel(UNIT))
    assert not list(folder.glob("libraries/*/*"))


def test_a_driver_that_serves_no_runtime_is_refused(monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match="the runtime library of nvidia-cutlass-dsl is not installed"
    ):
        load.runtime.__wrapped__()


# ---- bundles ---------------------------------------------------------------------------------------------------------


def test_a_bundle_needs_no_cache_and_no_compiler(tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    assert bundles.write(bundle, [UNIT]) == 1
    environment = {"CULA_BUNDLE": str(bundle), "CULA_JIT": "0"}
    elsewhere = {"CULA_CACHE_DIR": str(tmp_path / "other")}
    assert said(**environment, **elsewhere)[:2] == ["0", "False"]
    assert not list((tmp_path / "other").rglob("*.so"))


def test_a_bundle_is_added_to(tmp_path, monkeypatch):
    bundle, other = tmp_path / "bundle", replace(UNIT, config=MergeConfig(None, False))
    assert bundles.write(bundle, [UNIT]) == 1 and bundles.write(bundle, [UNIT, other]) == 2
    monkeypatch.setenv("CULA_BUNDLE", f"{tmp_path / 'none'}{os.pathsep}{bundle}")
    with pytest.warns(RuntimeWarning, match="none is no bundle of kernels"):
        assert bundles.find(UNIT) == bundle / f"{UNIT.asked}.so"
    assert bundles.find(other) == bundle / f"{other.asked}.so"
    assert bundles.find(replace(UNIT, config=TableConfig("int64"))) is None


def test_a_damaged_bundle_is_not_used(tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    bundles.write(bundle, [UNIT])
    os.truncate(bundle / f"{UNIT.asked}.so", 100)
    monkeypatch.setenv("CULA_BUNDLE", str(bundle))
    with pytest.warns(RuntimeWarning, match="of a bundle is damaged"):
        refused(libraries.kernel(UNIT))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0, "kernels": {}}', '{"format": 1}'])
def test_another_manifest_is_refused(tmp_path, monkeypatch, text):
    manifest = tmp_path / bundles.MANIFEST
    manifest.write_text(text)
    with pytest.raises(ValueError):
        bundles.write(tmp_path, [])
    monkeypatch.setenv("CULA_BUNDLE", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="is no bundle of kernels"):
        assert bundles.find(UNIT) is None
    assert manifest.read_text() == text


def test_names_of_sources_come_from_the_bundle(tmp_path, monkeypatch, folder):
    bundle = tmp_path / "bundle"
    bundles.write(bundle, [UNIT])
    found = key.closure(UNIT.modules)
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("CULA_BUNDLE", str(bundle))
    monkeypatch.setattr(key, "_followed", lambda modules: pytest.fail("sources are parsed again"))
    forget()
    assert key.closure(UNIT.modules) == found


# ---- what was asked for ----------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_recorded(tmp_path, monkeypatch):
    path = tmp_path / "asked"
    monkeypatch.setenv("CULA_RECORD", str(path))
    for _ in range(2):
        libraries.kernel(UNIT)
    assert len(path.read_text().splitlines()) == 2 and bundles.recorded(path) == [UNIT]


@pytest.mark.parametrize(
    "config", [("x", 1, None, (2.5, True)), MergeConfig("int32", True)], ids=str
)
def test_a_config_comes_back(config):
    text = json.loads(json.dumps(key.described(config)))
    assert key.revived(text) == config


@pytest.mark.parametrize(
    "name",
    [
        "cula_core.delta_rule.config:Gone",
        "cula_core.gone:Config",
        "cula_core.once:once",
        "Config",
        None,
    ],
)
def test_a_kernel_of_another_version_is_left_out(tmp_path, monkeypatch, name):
    path = tmp_path / "asked"
    monkeypatch.setenv("CULA_RECORD", str(path))
    bundles.record(UNIT)
    facts = json.loads(path.read_text())
    facts["config"]["class"] = name
    path.write_text(json.dumps(facts) + "\n" + path.read_text())
    with pytest.warns(RuntimeWarning, match="line 1 is left out"):
        assert bundles.recorded(path) == [UNIT]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"module": "x", "arch": "y", "config": 1}'])
def test_a_line_that_is_none(tmp_path, line):
    path = tmp_path / "asked"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1: no recorded kernel"):
        bundles.recorded(path)


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "1 GB", "-1"])
def test_a_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("CULA_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match="CULA_CACHE_LIMIT: expected a number of bytes"):
        libraries.library(UNIT)


def test_what_is_old_makes_room(folder, monkeypatch):
    monkeypatch.setenv("CULA_CACHE_LIMIT", "0")
    libraries.library(UNIT)
    assert len(list(folder.glob("libraries/*/*.so"))) == 1  # younger than a day
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    other = replace(UNIT, config=MergeConfig(None, False))
    libraries.library(other)
    assert [path.stem for path in folder.glob("libraries/*/*.so")] == [other.asked]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(libraries.kernel(UNIT))
