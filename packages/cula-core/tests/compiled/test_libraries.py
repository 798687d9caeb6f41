"""Kernels as libraries: which are compiled, linked and loaded, in one process after the other, and out of bundles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cula_core.compiled import artifacts, bundles, key, libraries, load
from cula_core.compiled.artifacts import Unit, uncached
from cula_core.delta_rule.config import MergeConfig
from cula_core.store import Store

# A small kernel.
UNIT = Unit("cula_core.delta_rule.build", MergeConfig(), "sm_90a")
CHILD = """
import sys
from cula_core.compiled import artifacts, libraries
from cula_core.delta_rule.config import MergeConfig
unit = artifacts.Unit("cula_core.delta_rule.build", MergeConfig(), "sm_90a")
kernel = libraries.kernel(unit)
try:
    kernel(1)
except TypeError as error:
    print(artifacts.compiles, "cutlass" in sys.modules, str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A cache that holds what the compiler made of the kernel, but no library."""
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CULA_CACHE_DIR", str(place))
        patch.setattr(artifacts, "STORE", Store("CULA_CACHE_DIR", "cula"))
        artifacts.artifacts(UNIT)
    return place


@pytest.fixture(autouse=True)
def folder(compiled, tmp_path, monkeypatch) -> Path:
    """A copy of that cache, without the temporary folder and the warnings of another test, and no bundle."""
    shutil.copytree(compiled, tmp_path / "cache")
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("CULA_BUNDLE", "CULA_RECORD", "CULA_JIT", "CULA_CACHE_LIMIT"):
        monkeypatch.delenv(variable, raising=False)
    store = Store("CULA_CACHE_DIR", "cula")
    for module in (artifacts, key, libraries):
        monkeypatch.setattr(module, "STORE", store)
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def cold(folder) -> Path:
    """The cache when it is empty."""
    shutil.rmtree(folder)
    return folder


def forget() -> None:
    """What a process knows of sources and bundles."""
    for function in (key.closure, key.source_digest, bundles._entries):
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
    with pytest.raises((TypeError, ValueError), match="Expects 11 parameters"):
        kernel(torch.zeros(3))


def test_a_second_process_neither_compiles_nor_imports_the_dsl(cold):
    cold, warm = said(), said()
    assert cold[:2] == ["1", "True"] and warm[:2] == ["0", "False"]
    assert cold[2] == warm[2] and "Expects 11 parameters" in warm[2]


def test_processes_that_start_at_once_compile_once(cold):
    racing = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    words = [process.communicate(timeout=120)[0].split(maxsplit=2) for process in racing]
    assert sorted(word[0] for word in words) == ["0", "0", "1"]
    assert len({word[2] for word in words}) == 1
    assert len(list(cold.glob("libraries/*/*.so"))) == 1


FORK = """
import os, sys, warnings
from dataclasses import replace
from cula_core.compiled import artifacts, libraries
from cula_core.delta_rule.config import MergeConfig
warnings.simplefilter("ignore")  # the compiler has threads of its own
unit = artifacts.Unit("cula_core.delta_rule.build", MergeConfig(), "sm_90a")
def called(unit):
    try:
        libraries.kernel(unit)(1)
    except TypeError as error:
        return "Expects" in str(error)
print(called(unit), flush=True)
child = os.fork()
if child == 0:
    fine = called(unit) and called(replace(unit, config=MergeConfig(fades=True)))
    os._exit(0 if fine and artifacts.compiles == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_loads_and_compiles(cold):
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["True", "0"]


def test_threads_that_ask_for_different_kernels_at_once(cold):
    wanted = (
        MergeConfig(index_dtype=dtype, fades=f) for dtype in (None, "int32") for f in (False, True)
    )
    units = [replace(UNIT, config=config) for config in wanted]
    start = threading.Barrier(len(units))

    def work(unit: Unit):
        start.wait()
        return libraries.kernel(unit)

    before = count()
    with ThreadPoolExecutor(len(units)) as pool:
        kernels = list(pool.map(work, units))
    assert count() == before + len(units) and len(set(map(id, kernels))) == len(units)
    for kernel in kernels:
        with pytest.raises(TypeError, match="Expects"):
            kernel(1)


def test_a_kernel_that_may_not_be_compiled(cold, monkeypatch):
    monkeypatch.setenv("CULA_JIT", "0")
    with pytest.raises(RuntimeError, match="CULA_JIT=0 forbids compiling.*MergeConfig.*sm_90a"):
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


@pytest.mark.parametrize(
    "name, text",
    [("link", "there is no C compiler driver to link with"), ("load", "failed to map segment")],
)
def test_where_nothing_can_be_linked_or_opened_the_dsl_loads_the_kernel(monkeypatch, name, text):
    def refuse(*_) -> None:
        raise OSError(text)

    monkeypatch.setattr(libraries, name, refuse)
    with pytest.warns(RuntimeWarning, match=f"by way of CuTe DSL.*{text}"):
        refused(libraries.kernel(UNIT))


def test_uncached_leaves_no_library(folder):
    with uncached():
        refused(libraries.kernel(UNIT))
    assert not list(folder.glob("libraries/*/*"))


def test_a_driver_that_serves_no_runtime_is_refused(monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match="the runtime library of nvidia-cutlass-dsl is neither installed nor in a bundle",
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


WITHOUT_DSL = """
import sys
sys.modules |= dict.fromkeys(("nvidia_cutlass_dsl", "cutlass"))
"""


def test_a_bundle_with_the_runtime_needs_no_dsl(tmp_path):
    bundle = tmp_path / "bundle"
    environment = {"CULA_BUNDLE": str(bundle), "CULA_JIT": "0"}

    def run() -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", WITHOUT_DSL + CHILD]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)

    assert bundles.write(bundle, [UNIT]) == 1
    assert "neither installed nor in a bundle" in run().stderr
    assert bundles.write(bundle, [], with_runtime=True) == 1
    done = run()
    assert done.stdout.startswith("0 True ") and "Expects 11 parameters" in done.stdout, done.stderr
    assert bundles.write(bundle, [UNIT]) == 1 and run().stdout == done.stdout
    (runtime,) = bundle.glob("cu*/libcute_dsl_runtime.so")
    os.truncate(runtime, 1000)
    assert "neither installed nor in a bundle" in run().stderr and "is damaged" in run().stderr


def test_a_bundle_is_added_to(tmp_path, monkeypatch):
    bundle, other = (
        tmp_path / "bundle",
        replace(UNIT, config=MergeConfig(fades=True)),
    )
    assert bundles.write(bundle, [UNIT]) == 1 and bundles.write(bundle, [UNIT, other]) == 2
    monkeypatch.setenv("CULA_BUNDLE", f"{tmp_path / 'none'}{os.pathsep}{bundle}")
    with pytest.warns(RuntimeWarning, match="none is no bundle of kernels"):
        assert bundles.find(UNIT) == bundle / f"{UNIT.asked}.so"
    assert bundles.find(other) == bundle / f"{other.asked}.so"
    assert bundles.find(replace(UNIT, config=MergeConfig(index_dtype="int64"))) is None


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
    "config", [("x", 1, None, (2.5, True)), MergeConfig(index_dtype="int32", fades=True)], ids=str
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
    other = replace(UNIT, config=MergeConfig(fades=True))
    libraries.library(other)
    assert [path.stem for path in folder.glob("libraries/*/*.so")] == [other.asked]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(libraries.kernel(UNIT))
