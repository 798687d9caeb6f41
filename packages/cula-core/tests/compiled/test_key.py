"""What a compiled kernel depends on gives another key, and what it does not depend on gives the same."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cula_core.compiled import key
from cula_core.compiled.artifacts import Unit
from cula_core.delta_rule.config import Config as DeltaRuleConfig
from cula_core.delta_rule.config import FactorsConfig, MergeConfig
from cula_testing.compiled import assert_closed

BUILD = "cula_core.delta_rule.build"
# A package with every kind of import statement. `unrelated` imports all; nobody imports it.
SOURCES = {
    "__init__.py": "from . import unrelated\n",
    "launch.py": "import json\nfrom .config import Config\nfrom . import schedule\n"
    "def run():\n    from .late import late\n",
    "config.py": "from __future__ import annotations\n",
    "schedule.py": "import {package}.kernels.deep.kernel\n",
    "late.py": "",
    "kernels/__init__.py": "from .unrelated import x\n",
    "kernels/unrelated.py": "",
    "kernels/deep/__init__.py": "from ..named import *\n",
    "kernels/named.py": "nothing = None\n",
    "kernels/deep/kernel.py": "from ...tiles import TILES\nfrom .. import layout\nfrom . import nothing\n",
    "kernels/layout.py": "from cula_core.compiled.key import digest\n",
    "tiles.py": "TILES = 1\n",
    "unrelated.py": "from . import launch\n",
}
UNRELATED = {"unrelated.py", "kernels/unrelated.py"}


@pytest.fixture(autouse=True)
def forget():
    """Sources and compilers change between the calls of these tests."""

    def clear():
        for function in (key.made_with, key.source_digest, key.closure):
            function.cache_clear()

    clear()
    yield clear
    clear()


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The folder of a package that is found but not imported."""
    folder = tmp_path / "package_for_tests"
    for name, text in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(package=folder.name))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Config:
    """Every kind of field that a config may have."""

    flag: bool = False
    count: int = 1
    rate: float = 1.0
    name: str = "a"
    maybe: str | None = None
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner = Inner()


@dataclass(frozen=True)
class Namesake:
    """The same fields as Inner."""

    size: int = 1


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_the_closure_follows_every_import_statement(package):
    found = key.closure((f"{package.name}.launch",))
    ours = {
        path.relative_to(package).as_posix()
        for name, path in found.items()
        if name.startswith(package.name)
    }
    assert ours == SOURCES.keys() - UNRELATED
    assert {name for name in found if name.startswith("cula_core")} >= {
        "cula_core",
        "cula_core.compiled",
        "cula_core.compiled.key",
    }
    assert not {"json", "torch", "cutlass"} & found.keys()
    assert package.name not in sys.modules


@pytest.mark.parametrize("name", SOURCES)
def test_a_line_changes_the_key_where_the_kernel_depends_on_it(package, forget, name):
    modules = (f"{package.name}.launch",)
    before = key.asked_for(None, "sm_90a", modules)
    with (package / name).open("a") as file:
        file.write("# a line\n")
    forget()
    assert (key.asked_for(None, "sm_90a", modules) == before) == (name in UNRELATED)


def test_a_new_module_in_the_place_of_a_name_changes_the_key(package, forget):
    modules = (f"{package.name}.launch",)
    before = key.asked_for(None, "sm_90a", modules)
    (package / "kernels" / "deep" / "nothing.py").write_text("")
    forget()
    assert key.asked_for(None, "sm_90a", modules) != before


def test_a_source_that_is_younger_than_the_process_is_seen(package):
    modules = (f"{package.name}.launch",)
    for name in SOURCES:
        os.utime(package / name, (1e9, 1e9))
    assert not key.edited(modules)
    os.utime(package / "unrelated.py")
    assert not key.edited(modules)
    os.utime(package / "tiles.py")
    assert key.edited(modules)


@pytest.mark.parametrize(
    "name", ["cula_core.absent", "no_such_package.launch", "__main__", "json.decoder.absent"]
)
def test_a_module_without_a_source_is_refused(name):
    with pytest.raises(ValueError, match=f"needs the source of {name}, which is not found"):
        key.asked_for(None, "sm_90a", ("cula_core.once", name))


def test_kernels_of_the_delta_rule_do_not_depend_on_contracts():
    found = key.closure((BUILD,)).keys()
    folder = "cula_core.delta_rule"
    assert found >= {
        BUILD,
        f"{folder}.kernels.prepare",
        f"{folder}.config",
        "cula_core.cute.compile",
    }
    assert not found & {f"{folder}.contract", f"{folder}.prefill", f"{folder}.spec", "cula_core.reference"}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        MergeConfig(initial_state=True),
        FactorsConfig("bfloat16", "float16", None),
    ],
    ids=["merge", "factors"],
)
def test_the_key_of_a_kernel_holds_every_source_that_makes_it(config: DeltaRuleConfig):
    assert_closed(Unit(BUILD, config, "sm_90a"))


# ---- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"flag": True}, {"count": 2}, {"count": True}, {"rate": 1.5}, {"rate": 1}, {"name": "b"}, {"maybe": "a"},
        {"maybe": ""}, {"sizes": (1, 2, 3)}, {"sizes": (2, 1)}, {"sizes": ((1, 2),)}, {"inner": Inner(2)},
        {"inner": Namesake()}, {"inner": None},
    ],
    ids=str,
)  # fmt: skip
def test_every_field_of_a_config_counts(change):
    asked = [key.asked_for(c, "sm_90a", ()) for c in (Config(), replace(Config(), **change))]
    assert asked[0] != asked[1]


def test_equal_configs_are_one():
    assert key.asked_for(Config(), "sm_90a", ()) == key.asked_for(replace(Config()), "sm_90a", ())


def test_the_architecture_and_the_modules_count():
    asked = {
        key.asked_for(Config(), arch, modules)
        for arch in ("sm_90", "sm_90a")
        for modules in (("cula_core.once",), ("cula_core.store",))
    }
    assert len(asked) == 4


def test_the_host_counts(monkeypatch):
    before = key.asked_for(Config(), "sm_90a", ())
    monkeypatch.setattr(key.platform, "machine", lambda: "another")
    assert key.asked_for(Config(), "sm_90a", ()) != before


@pytest.mark.parametrize(
    "value",
    [object(), {"a": 1}, {1}, Config, b"bytes", len],
    ids=lambda value: type(value).__name__,
)
def test_a_config_without_a_stable_text_is_refused(value):
    for config in (value, (value,), replace(Config(), inner=value)):
        with pytest.raises(TypeError, match="a config holds a .*no stable text to hash"):
            key.asked_for(config, "sm_90a", ())


def test_other_processes_find_the_same_key():
    code = f"""
from cula_core.compiled import key
from cula_core.compiled.artifacts import Unit
from cula_core.delta_rule.config import Config as DeltaRuleConfig
from cula_core.delta_rule.config import FactorsConfig, MergeConfig
from cula_testing.compiled import assert_closed
print(key.made_with(), key.asked_for(("a", 1), "sm_90a", ("{BUILD}",)))
import sys
assert "cutlass" not in sys.modules and "torch" not in sys.modules
"""
    expected = f"{key.made_with()} {key.asked_for(('a', 1), 'sm_90a', (BUILD,))}\n"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == expected, done.stderr


# ---- what it is made with --------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch) -> dict[str, SimpleNamespace]:
    """Distributions in place of the installed ones; each has a library of four bytes and a module."""
    found = {}
    for name in key.DISTRIBUTIONS:
        (tmp_path / f"{name}.so").write_bytes(b"1234")
        lines = [f"{name}.so,sha256=aaaa,4", f"{name}.py,sha256=bbbb,9", f"{name}/RECORD,,"]
        found[name] = SimpleNamespace(version="1.0", record="\n".join(lines))

    def distribution(name):
        if name not in found:
            raise key.importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(
            version=found[name].version,
            read_text=lambda _: found[name].record,
            locate_file=tmp_path.joinpath,
        )

    monkeypatch.setattr(key.importlib.metadata, "distribution", distribution)
    return found


CHANGES = {
    "digest": lambda found, name, folder: _edit(found[name], "aaaa", "cccc"),
    "module": lambda found, name, folder: _edit(found[name], "bbbb", "cccc"),
    "version": lambda found, name, folder: setattr(found[name], "version", "1.1"),
    "overwritten": lambda found, name, folder: (folder / f"{name}.so").write_bytes(b"12345"),
    "deleted": lambda found, name, folder: (folder / f"{name}.so").unlink(),
    "absent": lambda found, name, folder: found.pop(name),
}


def _edit(distribution: SimpleNamespace, old: str, new: str) -> None:
    assert old in distribution.record
    distribution.record = distribution.record.replace(old, new)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", [key.DISTRIBUTIONS[0], key.DISTRIBUTIONS[-1]])
def test_another_compiler_has_another_key(installed, forget, tmp_path, name, change):
    before = key.made_with()
    forget()
    assert key.made_with() == before
    change(installed, name, tmp_path)
    forget()
    assert key.made_with() != before


def test_a_record_in_another_order_is_the_same_compiler(installed, forget):
    before = key.made_with()
    for distribution in installed.values():
        distribution.record = "\n".join(reversed(distribution.record.splitlines()))
    forget()
    assert key.made_with() == before


@pytest.mark.parametrize("name", key.SETTINGS)
def test_settings_of_the_dsl_count(monkeypatch, forget, name):
    before = key.made_with()
    monkeypatch.setenv(f"CUTE_DSL_{name}", "other")
    forget()
    assert key.made_with() != before


def test_every_library_of_the_installed_compiler_is_counted():
    """Those that the tests compile with: a distribution with another name would be missed."""
    versions = {name: key.importlib.metadata.version(name) for name in key.DISTRIBUTIONS[:3]}
    assert set(versions.values()) == {"4.8.1"}


def test_threads_that_follow_imports_at_once(monkeypatch):
    """Python 3.11 fails where a collection of garbage lets another thread go on amid a syntax tree."""
    monkeypatch.setattr(key.STORE, "find", lambda name: None)
    monkeypatch.delenv("CULA_BUNDLE", raising=False)
    threshold = gc.get_threshold()

    def yields(*_: object) -> None:
        time.sleep(0)

    gc.callbacks.append(yields)
    gc.set_threshold(100)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: key.closure((BUILD,)), range(4)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(yields)
    assert all(one == found[0] and BUILD in one for one in found)
