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

import noxfile

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


def run(code: str, site: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=site
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_table_names_every_package_of_the_tree(root: Path) -> None:
    named = (*noxfile.PACKAGES, *noxfile.DEVELOPMENT_TOOLS)
    assert sorted(named) == sorted(path.name for path in (root / "packages").iterdir())
    assert {arch for archs in noxfile.PACKAGES.values() for arch in archs} <= set(
        noxfile.ARCHITECTURES
    )


def test_versions_move_in_lock_step(wheels: dict[str, Path]) -> None:
    versions = {name: metadata(wheel)["Version"] for name, wheel in wheels.items()}
    assert set(versions) == set(DISTRIBUTIONS)
    assert len(set(versions.values())) == 1, versions


def test_extras_of_cula_equal_the_table(wheels: dict[str, Path]) -> None:
    series = ".".join(metadata(wheels["cula"])["Version"].split(".")[:2])
    for arch in noxfile.ARCHITECTURES:
        listed = {name for name, archs in noxfile.PACKAGES.items() if arch in archs}
        assert requirements(wheels["cula"], arch) == {f"{name}~={series}.0" for name in listed}
    every = set().union(*(requirements(wheels["cula"], arch) for arch in noxfile.ARCHITECTURES))
    assert requirements(wheels["cula"], "all") == every


def test_extra_for_cuda_13_is_that_of_every_package(wheels: dict[str, Path]) -> None:
    """So that `cula[sm90,cu13]` brings what each package with its own `cu13` would."""
    wanted = requirements(wheels["cula"], "cu13")
    assert wanted and all("cu13" in line for line in wanted)
    for name in noxfile.PACKAGES:
        assert requirements(wheels[name], "cu13") == wanted, name


def test_cula_needs_torch_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert requirements(wheels["cula"]) == {"torch>=2.8"}


def test_no_extra_of_cula_brings_a_development_tool(wheels: dict[str, Path]) -> None:
    every = metadata(wheels["cula"]).get_all("Requires-Dist", [])
    assert not {re.match(r"[\w.-]+", line)[0] for line in every} & set(noxfile.DEVELOPMENT_TOOLS)


@pytest.mark.parametrize("name", (*noxfile.PACKAGES, *noxfile.DEVELOPMENT_TOOLS))
def test_package_depends_on_none_of_ours(name: str, wheels: dict[str, Path]) -> None:
    """Except that the tests of a kernel package, and they alone, may need a tool of the same series."""
    series = ".".join(metadata(wheels[name])["Version"].split(".")[:2])
    tools = set() if name in noxfile.DEVELOPMENT_TOOLS else set(noxfile.DEVELOPMENT_TOOLS)
    every = {line.replace(" ", "") for line in metadata(wheels[name]).get_all("Requires-Dist", [])}
    every -= {f"{tool}~={series}.0;extra=='test'" for tool in tools}
    needed = {re.match(r"[\w.-]+", line)[0] for line in every}
    assert any(line.startswith("torch>=") for line in every)
    assert not needed & set(DISTRIBUTIONS)


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


def test_kernel_packages_are_discovered_by_entry_point(site: Path) -> None:
    code = """
import json, sys
from importlib.metadata import entry_points
specs = {e.name: e.load() for e in entry_points(group="cula.kernels")}
rows = [[s.NAME, s.OP, list(s.ARCHS), s.PRIORITY, s.supports(future_key=1), callable(s.load)] for s in specs.values()]
print(json.dumps([rows, sorted({"cutlass", "triton"} & set(sys.modules))]))
"""
    rows, heavy = json.loads(run(code, site))
    assert heavy == []
    assert {row[0] for row in rows} == set(noxfile.PACKAGES)
    for name, op, archs, priority, reason, loadable in rows:
        assert "." in op and archs and isinstance(priority, int) and loadable, name
        assert reason is None or isinstance(reason, str), name
        declared = set(noxfile.PACKAGES[name])
        assert declared <= set(archs), f"{name} is in extras {declared} but serves {archs}"


def test_info_lists_every_kernel_package(site: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "cula", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=site)
    assert done.returncode == 0, done.stderr
    for name in noxfile.PACKAGES:
        assert name in done.stdout
