"""What a release is checked with: archives that can be built again, licences, the SBOM, types as users see them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import noxfile
from tools import downstream, licences, reproducible, sbom, version

NEW_YEAR = (2030, 1, 1, 0, 0, 0)


def wheel(path: Path, *members: tuple[str, str], mode: int = 0o644, time: tuple = NEW_YEAR) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members:
            entry = zipfile.ZipInfo(name, time)
            entry.external_attr = mode << 16
            archive.writestr(entry, text)


def sdist(path: Path, *members: tuple[str, str], mode: int = 0o644, time: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(text), mode, time
            archive.addfile(entry, io.BytesIO(text.encode()))


A, B = ("x/a.py", "1"), ("x/b.py", "2")


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ((A, ("x/b.py", "3")), {}, "x-1.whl: x/b.py: sha256"),
        ((A,), {}, "x-1.whl: x/b.py only in the first"),
        ((A, B, ("x/c.py", "")), {}, "x-1.whl: x/c.py only in the second"),
        ((A, B), {"mode": 0o600}, "x-1.whl: x/a.py: mode 0o644 and 0o600"),
        ((A, B), {"time": (2031, *NEW_YEAR[1:])}, "x-1.whl: x/a.py: time (2030, 1, 1, 0, 0, 0)"),
        ((B, A), {}, "x-1.whl: the order of its members"),
    ],
)
def test_a_wheel_that_differs_is_named_with_its_member(
    members: tuple, options: dict, message: str, tmp_path: Path
) -> None:
    wheel(tmp_path / "1/x-1.whl", A, B)
    wheel(tmp_path / "2/x-1.whl", *members, **options)
    assert reproducible.differences(tmp_path / "1", tmp_path / "2")[0].startswith(message)
    wheel(tmp_path / "2/x-1.whl", A, B)
    assert reproducible.differences(tmp_path / "1", tmp_path / "2") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": 0o755}, "a.py: mode 0o644 and 0o755"), ({"time": 7}, "a.py: time 0 and 7")],
)
def test_an_sdist_that_differs_is_named_with_its_member(
    options: dict, message: str, tmp_path: Path
) -> None:
    sdist(tmp_path / "1/x-1.tar.gz", A)
    sdist(tmp_path / "2/x-1.tar.gz", A, **options)
    assert reproducible.differences(tmp_path / "1", tmp_path / "2") == [f"x-1.tar.gz: x/{message}"]


def test_an_archive_that_is_missing_or_padded_is_named(tmp_path: Path) -> None:
    wheel(tmp_path / "1/x-1.whl", A)
    wheel(tmp_path / "2/x-1.whl", A)
    wheel(tmp_path / "2/y-1.whl", A)
    with zipfile.ZipFile(tmp_path / "2/x-1.whl", "a") as archive:
        archive.comment = b"built on a Monday"
    assert reproducible.differences(tmp_path / "1", tmp_path / "2") == [
        "x-1.whl: the bytes around its members",
        f"y-1.whl: only in {tmp_path / '2'}",
    ]


def test_a_distribution_is_built_again_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a repository of one distribution, with a file that git ignores."""
    package = tmp_path / "root/meta/src/one/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text('__version__ = "1.0"\n')
    (tmp_path / "root/meta/pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "one"\nversion = "1.0"\nrequires-python = ">=3.10"\n'
    )
    (tmp_path / "root/.gitignore").write_text("*.log\n")
    (tmp_path / "root/meta/src/one/run.log").write_text("ignored\n")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "root")], check=True)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1893456000")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path / "root/meta", check=True, capture_output=True)
    assert reproducible.main([str(tmp_path / "dist")], tmp_path / "root") == 0
    assert capsys.readouterr().out == "reproducible: 2 archives are the same, byte for byte\n"
    package.write_text('__version__ = "1.1"\n')
    assert reproducible.main([str(tmp_path / "dist")], tmp_path / "root") == 1
    assert "one-1.0-py3-none-any.whl: one/__init__.py: sha256" in capsys.readouterr().out
    (tmp_path / "root/meta/pyproject.toml").write_text("[project]\n")
    assert reproducible.main([str(tmp_path / "dist")], tmp_path / "root") == 1
    assert "the second build failed: meta: " in capsys.readouterr().err


def test_a_second_build_needs_the_time_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with pytest.raises(SystemExit):
        reproducible.main([str(tmp_path)])
    assert "SOURCE_DATE_EPOCH: expected seconds since 1970" in capsys.readouterr().err


Find = Callable[[str], metadata.Distribution]


def distribution(name: str, *requires: str, **facts: str | list[str]) -> SimpleNamespace:
    message = Message()
    message["Name"] = name
    for key, value in facts.items():
        for line in value if isinstance(value, list) else [value]:
            message[key.replace("_", "-")] = line
    return SimpleNamespace(name=name, requires=list(requires), metadata=message)


@pytest.fixture
def find() -> Find:
    """Distributions by name: one of ours, `ours`, and what it brings."""
    known = [
        distribution(
            "ours",
            "torch>=2",
            'drawing; extra == "demo"',
            'checker; extra == "test"',
            'windows; sys_platform == "win32"',
            'ours[demo]; extra == "all"',
            Provides_Extra=["demo", "test", "all"],
        ),
        distribution("torch", "nvidia-cublas", "Jinja2", License_Expression="BSD-3-Clause"),
        distribution("drawing", "colours[fast]", License="MIT"),
        distribution("colours", 'c-colours; extra == "fast"', License="see LICENSE"),
        distribution(
            "c-colours",
            Classifier=[
                "License :: OSI Approved :: MIT License",
                "Programming Language :: C",
            ],
        ),
        distribution("jinja2", Classifier=["License :: OSI Approved :: BSD License"]),
    ]
    by_name = {d.name: d for d in known}

    def finder(name: str) -> metadata.Distribution:
        try:
            return by_name[name]  # type: ignore[return-value]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    return finder


def test_dependencies_are_followed_through_extras(find: Find) -> None:
    """All of them but `test`; what only a build of PyTorch for CUDA brings is not asked for."""
    found = licences.dependencies({"ours"}, find)
    assert {name: dependency.required_by for name, dependency in found.items()} == {
        "c-colours": {"colours[fast]"},
        "colours": {"drawing"},
        "drawing": {"ours[demo]"},
        "jinja2": {"torch"},
        "torch": {"ours"},
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch", "BSD-3-Clause"),
        ("drawing", "MIT"),
        ("c-colours", "MIT"),
        ("colours", None),
        ("jinja2", None),
    ],
)
def test_a_licence_is_an_expression_or_unknown(name: str, expected: str | None, find: Find) -> None:
    assert licences.licence(find(name)) == expected


def test_an_unknown_licence_fails(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    found = licences.dependencies({"ours"}, find)
    monkeypatch.setattr(licences, "READ_BY_US", {"jinja2": "BSD-3-Clause"})
    with pytest.raises(licences.LicenceError, match="^colours: unknown licence; [^\n]*$"):
        licences.table(found, find)
    read = {"jinja2": "BSD-3-Clause", "colours": "Zlib"}
    monkeypatch.setattr(licences, "READ_BY_US", read)
    assert "| colours | Zlib * | `drawing` |\n" in licences.table(found, find)
    monkeypatch.setattr(licences, "READ_BY_US", {**read, "drawing": "MIT", "gone": "MIT"})
    wrong = "drawing: its metadata say MIT; [^\n]*\ngone: not required"
    with pytest.raises(licences.LicenceError, match=wrong):
        licences.table(found, find)


def test_a_dependency_that_is_not_installed_fails(find: Find) -> None:
    def without_colours(name: str) -> metadata.Distribution:
        return find("nothing" if name == "colours" else name)

    with pytest.raises(licences.LicenceError, match="drawing requires colours, which is not inst"):
        licences.dependencies({"ours"}, without_colours)


def test_a_stale_list_fails_and_is_written(
    find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = {"jinja2": "BSD-3-Clause", "colours": "Zlib"}
    monkeypatch.setattr(licences, "READ_BY_US", read)
    monkeypatch.setattr(licences, "distributions", lambda root: {"ours"})
    original = licences.dependencies
    monkeypatch.setattr(licences, "dependencies", lambda ours: original(ours, find))
    table = licences.table
    monkeypatch.setattr(licences, "table", lambda found: table(found, find))
    (tmp_path / "docs").mkdir()
    assert licences.main(["--check"], tmp_path) == 1
    assert "docs/licences.md: stale" in capsys.readouterr().err
    assert not (tmp_path / licences.DOCUMENT).exists()
    assert licences.main([], tmp_path) == 0
    assert licences.main(["--check"], tmp_path) == 0
    (tmp_path / licences.DOCUMENT).write_text("no licences\n")
    assert licences.main(["--check"], tmp_path) == 1


def test_the_list_names_what_the_distributions_declare(root: Path) -> None:
    """Without the environment of the session `licences`: at least the names in the pyproject files."""
    text = (root / licences.DOCUMENT).read_text().lower().replace("_", "-")
    for name in ("cula", *noxfile.BASE, *noxfile.PACKAGES):
        project = noxfile.nox.project.load_toml(root / noxfile._folder(name) / "pyproject.toml")
        lines = list(project["project"]["dependencies"])
        for extra, more in project["project"]["optional-dependencies"].items():
            lines += more if extra != licences.TESTS else []
        for line in lines:
            other = licences.Requirement(line).name
            assert other in noxfile.DISTRIBUTIONS or f"\n| {other} | " in text, other


def test_the_sbom_has_the_version_of_cula(root: Path, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(sbom.project(root))
    only = {str(v) for v in version.current(root).values()}
    read = noxfile.nox.project.load_toml(project)["project"]
    assert {read["version"]} == only and "dynamic" not in read
    written = {"metadata": {"component": {"name": "cula", "version": "1"}}, "components": [1, 2]}
    (tmp_path / "sbom.json").write_text(json.dumps(written))
    assert sbom.summary(tmp_path / "sbom.json") == "cula 1: 2 components"


def test_an_sbom_that_cannot_be_written_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sbom.main([sys.executable, str(tmp_path / "sbom.json")]) == 1
    assert "sbom: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package `ours`, which is typed, and its site-packages."""
    folder = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    (package,) = (site / "ours" for site in folder.glob("lib/python*/site-packages"))
    package.mkdir()
    (package / "__init__.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (package / "py.typed").write_text("")
    return package


def test_types_are_seen_where_py_typed_is_there(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    call = 'import ours\n\nours.double("2")'

    def reported(text: str) -> list[str]:
        program.write_text(text)
        return downstream.check(
            program, tmp_path / "cache", str(installed.parents[3] / "bin/python")
        )

    assert reported("import ours\n\ntwo: int = ours.double(1)\n") == []
    assert reported(f"{call}  # E: arg-type\n") == []
    (wrong,) = reported(f"{call}\n")
    assert wrong.startswith("program.py:3: Argument 1") and wrong.endswith("[arg-type]")
    missing = "program.py:3: expected an error [arg-type], mypy reports none"
    assert reported("import ours\n\nours.double(2)  # E: arg-type\n") == [missing]
    (installed / "py.typed").unlink()
    untyped, unseen = reported(f"{call}  # E: arg-type\n")
    assert untyped.endswith("[import-untyped]") and unseen == missing
    (installed / "py.typed").touch()


def test_downstream_programs_import_every_distribution(root: Path) -> None:
    for name in ("correct.py", "wrong.py"):
        text = (root / downstream.PROGRAMS / name).read_text()
        assert downstream.not_imported(text, set(noxfile.DISTRIBUTIONS)) == []
        assert bool(downstream.expected(text)) == (name == "wrong.py")
    assert downstream.not_imported("import cula.kda\n", {"cula", "cula-core"}) == ["cula-core"]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("3.9/2.13", "3.9/2.13: expected PYTHON/TORCH, with PYTHON of 3.10 3.11"),
        ("3.12/2.7", "3.12/2.7: expected PYTHON/TORCH"),
        ("3.12", "3.12/: expected PYTHON/TORCH"),
        (None, "failed to find interpreter"),
    ],
)
def test_compatibility_fails_for_what_it_cannot_run(
    pair: str | None, message: str, root: Path, tmp_path: Path
) -> None:
    """Last of all for a Python that is not on PATH, which is no reason to skip."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    missing = next(python for python in noxfile.PYTHONS if python != here)
    arguments = ["-s", "compatibility", "--", pair or f"{missing}/none"]
    command = [sys.executable, "-m", "nox", "-f", str(root / "noxfile.py"), *arguments]
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr


def test_the_pair_of_ci_is_one_that_is_declared_and_pinned(root: Path) -> None:
    python, _, torch = noxfile.CI_PAIR.partition("/")
    assert python in noxfile.PYTHONS and torch in noxfile.TORCHES
    pins = (root / "constraints-ci.txt").read_text()
    assert f"\ntorch=={torch}." in pins and f"Python {python}" in pins.splitlines()[0]
