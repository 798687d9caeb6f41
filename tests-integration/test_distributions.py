"""The distributions as users install them: versions, extras, contents, discovery."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.version import Version

import noxfile
from tools.layout import HOSTS
from tools.version import compatible

DISTRIBUTIONS = noxfile.DISTRIBUTIONS


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path, extra: str | None = None) -> set[str]:
    """Requirements of a wheel, of one extra or of none, without spaces."""
    chosen = set()
    for line in metadata(wheel).get_all("Requires-Dist", []):
        requirement, _, marker = line.replace(" ", "").replace('"', "'").partition(";")
        if marker == (f"extra=='{extra}'" if extra else ""):
            chosen.add(requirement)
    return chosen


PROGRAM = """
import json, sys
from importlib.metadata import entry_points
specs = {e.name: e.load() for e in entry_points(group="cula.kernels")}
rows = [[s.NAME, s.OP, list(s.ARCHS), s.PRIORITY, s.supports(future_key=1), callable(s.load)] for s in specs.values()]
print(json.dumps([rows, sorted({"cutlass", "triton"} & set(sys.modules))]))
from cula.__main__ import main
sys.exit(main(["info"]))
"""


@pytest.fixture(scope="module")
def told(site: Path) -> tuple[str, str]:
    """What an interpreter that sees the installed distributions prints: of the entry points, and as `cula info`."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=site)
    assert done.returncode == 0, done.stderr
    points, _, info = done.stdout.partition("\n")
    return points, info


def run_installed(program: str, *folders: Path, **env: str) -> None:
    """Runs a program that sees the folders alone, the first of which is that of the installed distributions."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **env}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folders[0])
    assert done.returncode == 0, done.stderr


def test_the_plug_in_for_vllm_is_found_and_light(site: Path) -> None:
    program = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="cula")
point.load()()
assert not {"torch", "vllm"} & set(sys.modules)
"""
    run_installed(program, site, CULA_VLLM="0")


# The two modules of SGLang 0.5.23 that the plug-in imports when it is called.
SGLANG = {
    "srt/arg_groups/choices.py": """
LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton"]
add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
""",
    "srt/plugins/hook_registry.py": """
from enum import Enum
HookType = Enum("HookType", "AFTER AROUND")
class HookRegistry:
    hooks = []
    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook_type))
""",
}


def test_the_plug_in_for_sglang_is_found_and_light(site: Path, tmp_path: Path) -> None:
    for name, text in SGLANG.items():
        (tmp_path / "sglang" / name).parent.mkdir(parents=True)
        (tmp_path / "sglang" / name).write_text(text)
    program = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group="sglang.srt.plugins", name="cula")
register = point.load()
assert "sglang" not in sys.modules
register(), register()
from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
assert choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "cula"]
((target, when),) = HookRegistry.hooks
assert target.endswith(".resolve_linear_attn_backends") and when is HookType.AFTER
assert "torch" not in sys.modules
"""
    run_installed(program, site, tmp_path)


def test_the_plug_in_for_sglang_says_that_sglang_is_missing(site: Path) -> None:
    program = """
from importlib.metadata import entry_points
(point,) = entry_points(group="sglang.srt.plugins", name="cula")
try:
    point.load()()
except ImportError as error:
    assert "sglang" in str(error)
else:
    raise AssertionError("no error")
"""
    run_installed(program, site)


def test_table_names_every_package_of_the_tree(root: Path) -> None:
    named = (*noxfile.BASE, *noxfile.PACKAGES, *noxfile.DEVELOPMENT_TOOLS)
    assert sorted(named) == sorted(path.name for path in (root / "packages").iterdir())
    assert {arch for archs in noxfile.PACKAGES.values() for arch in archs} <= set(
        noxfile.ARCHITECTURES
    )


def test_versions_move_in_lock_step(wheels: dict[str, Path]) -> None:
    versions = {name: metadata(wheel)["Version"] for name, wheel in wheels.items()}
    assert set(versions) == set(DISTRIBUTIONS)
    assert len(set(versions.values())) == 1, versions


def test_extras_of_cula_equal_the_table(wheels: dict[str, Path]) -> None:
    series = compatible(Version(metadata(wheels["cula"])["Version"]))
    for arch in noxfile.ARCHITECTURES:
        listed = {name for name, archs in noxfile.PACKAGES.items() if arch in archs}
        assert requirements(wheels["cula"], arch) == {f"{name}{series}" for name in listed}
    every = set().union(*(requirements(wheels["cula"], arch) for arch in noxfile.ARCHITECTURES))
    assert requirements(wheels["cula"], "all") == every


def test_extra_for_cuda_13_is_that_of_every_package(wheels: dict[str, Path]) -> None:
    """So that `cula[sm90,cu13]` brings what each package with its own `cu13` would."""
    wanted = requirements(wheels["cula"], "cu13")
    assert wanted and all("cu13" in line for line in wanted)
    for name in noxfile.PACKAGES:
        assert requirements(wheels[name], "cu13") == wanted, name


def test_cula_needs_torch_and_the_base_of_its_version(wheels: dict[str, Path]) -> None:
    version = metadata(wheels["cula"])["Version"]
    assert requirements(wheels["cula"]) == {
        "torch>=2.8",
        *(f"{n}=={version}" for n in noxfile.BASE),
    }


def test_no_extra_of_cula_brings_a_development_tool(wheels: dict[str, Path]) -> None:
    every = metadata(wheels["cula"]).get_all("Requires-Dist", [])
    assert not {re.match(r"[\w.-]+", line)[0] for line in every} & set(noxfile.DEVELOPMENT_TOOLS)


def ours(wheel: Path) -> set[str]:
    """What a wheel requires of our distributions, with extras and markers, without spaces."""
    lines = {
        line.replace(" ", "").replace("'", '"')
        for line in metadata(wheel).get_all("Requires-Dist", [])
    }
    return {line for line in lines if re.match(r"[\w.-]+", line)[0] in DISTRIBUTIONS}


def host_of(name: str) -> set[str]:
    """The distribution whose host side a kernel package serves; nothing if it has one of its own."""
    host = HOSTS.get(name.replace("-", "_"))
    return set() if host is None else {host.replace("_", "-")}


@pytest.mark.parametrize("name", noxfile.PACKAGES)
def test_a_kernel_package_needs_the_base_of_its_version_and_its_tests_the_tools(
    name: str, wheels: dict[str, Path]
) -> None:
    version = metadata(wheels[name])["Version"]
    series = compatible(Version(version))
    assert ours(wheels[name]) == {
        f"cula-core[cute]=={version}",
        f'cula-core[cu13]=={version};extra=="cu13"',
        f'cula-testing{series};extra=="test"',
        *(f"{host}{series}" for host in host_of(name)),
    }
    assert "torch>=2.8" in requirements(wheels[name])


def test_the_base_needs_none_of_ours(wheels: dict[str, Path]) -> None:
    """Except that its tests need the tools. It alone says which CuTe DSL the kernels are built with."""
    for name in noxfile.BASE:
        assert requirements(wheels[name]) == {"torch>=2.8"}
        assert not [line for line in ours(wheels[name]) if 'extra=="test"' not in line]
    pinned = {
        name
        for name in (*noxfile.BASE, *noxfile.PACKAGES)
        for line in metadata(wheels[name]).get_all("Requires-Dist", [])
        if line.startswith("nvidia-cutlass-dsl")
    }
    assert pinned == set(noxfile.BASE)


def test_ci_knows_the_oldest_of_what_engines_pin() -> None:
    pins = (noxfile.ROOT / "constraints-ci.txt").read_text()
    changed = set(noxfile.oldest_pins(pins).splitlines()) - set(pins.splitlines())
    families = ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13")
    dsl = {f"nvidia-cutlass-dsl{part}==4.8.0" for part in families}
    assert changed == dsl | {"apache-tvm-ffi==0.1.11"}


def test_the_tools_need_what_they_test_with(wheels: dict[str, Path]) -> None:
    version = metadata(wheels["cula-testing"])["Version"]
    series = compatible(Version(version))
    assert ours(wheels["cula-testing"]) == {
        f"cula-core[cute]=={version}",
        f"cula-emulator{series}",
    }
    assert ours(wheels["cula-emulator"]) == {f"cula-core{series}"}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_a_distribution_declares_of_ours_is_found(name: str) -> None:
    """So that `standalone` and `--no-venv` sessions see nothing less and nothing more."""
    closure = noxfile._closure(name)
    based = name in noxfile.PACKAGES or name in ("cula", "cula-testing")
    assert closure[0] == name
    assert set(closure) - {name} >= (set(noxfile.BASE) if based else set())
    hosts = host_of(name) if name in noxfile.PACKAGES else set()
    assert set(closure) & set(noxfile.PACKAGES) - {name} == hosts
    if name in noxfile.PACKAGES:
        assert set(noxfile._closure(name, "test")) == {
            name,
            *noxfile.BASE,
            *noxfile.DEVELOPMENT_TOOLS,
            *hosts,
        }


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_wheel_holds_the_package_and_nothing_else(
    name: str, wheels: dict[str, Path], root: Path
) -> None:
    source = root / noxfile._folder(name) / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheels[name]) as archive:
        names = set(archive.namelist())
        (licence,) = [n for n in names if n.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence).decode() == (root / "LICENSE").read_text()
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert f"{noxfile._import_name(name)}/py.typed" in names


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_metadata_say_what_an_index_shows(name: str, wheels: dict[str, Path], root: Path) -> None:
    facts = metadata(wheels[name])
    classifiers = facts.get_all("Classifier")
    python = "Programming Language :: Python :: "
    named = [line.removeprefix(python) for line in classifiers if line.startswith(f"{python}3.")]
    assert named == list(noxfile.PYTHONS)
    assert facts["Requires-Python"] == f">={noxfile.PYTHONS[0]}"
    assert f"torch>={noxfile.TORCHES[0]}" in requirements(wheels[name])
    assert "Typing :: Typed" in classifiers
    assert facts["License-Expression"] == "Apache-2.0" and facts["License-File"] == "LICENSE"
    assert facts["Summary"] and facts["Keywords"]
    assert facts["Description-Content-Type"] == "text/markdown"
    readme = root / noxfile._folder(name) / "README.md"
    assert facts.get_payload().strip() == readme.read_text().strip()


def test_kernel_packages_are_discovered_by_entry_point(told: tuple[str, str]) -> None:
    rows, heavy = json.loads(told[0])
    assert heavy == []
    assert {row[0] for row in rows} == set(noxfile.PACKAGES)
    for name, ops, archs, priority, reason, loadable in rows:
        assert all("." in op for op in ([ops] if isinstance(ops, str) else ops)) and ops, name
        assert archs and isinstance(priority, int) and loadable, name
        assert reason is None or isinstance(reason, str), name
        declared = set(noxfile.PACKAGES[name])
        assert declared <= set(archs), f"{name} is in extras {declared} but serves {archs}"


def test_info_lists_every_kernel_package(told: tuple[str, str]) -> None:
    for name in noxfile.PACKAGES:
        assert name in told[1]
