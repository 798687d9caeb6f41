"""The command that moves every distribution to a version, on a copy of what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import noxfile
from tools import version


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """A copy of the pyproject files, the modules that hold versions, and the changelog, at 0.1.0."""
    patterns = ("pyproject.toml", "src/*/__init__.py")
    folders = (root / "meta", *(root / "packages").iterdir())
    found = [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]
    for path in (*found, root / version.CHANGELOG):
        copy = tmp_path / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (tmp_path / version.CHANGELOG).write_text(
        "# Changelog\n\nNewest first.\n\n## Unreleased (0.1.0)\n\nNews.\n"
    )
    now = str(max(version.current(root).values()))
    for path in tmp_path.rglob("*.*"):
        path.write_text(path.read_text().replace(now, "0.1.0"))
    return tmp_path


def texts(tree: Path) -> dict[str, str]:
    return {path.as_posix(): path.read_text() for path in tree.rglob("*") if path.is_file()}


def requirements(tree: Path) -> set[str]:
    """What our distributions require of each other, as one set of `name operator version`."""
    found = set()
    for name in noxfile.DISTRIBUTIONS:
        project = noxfile.nox.project.load_toml(tree / noxfile._folder(name) / "pyproject.toml")
        lines = list(project["project"]["dependencies"])
        for extra in project["project"]["optional-dependencies"].values():
            lines += extra
        for line in map(Requirement, lines):
            if line.name in noxfile.DISTRIBUTIONS and line.specifier:
                found.add(f"{line.name} {line.specifier}")
    return found


def test_the_tree_has_one_version(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert version.main([]) == 0
    (only,) = set(version.current(root).values())
    assert capsys.readouterr().out == f"{only}\n"


@pytest.mark.parametrize(
    ("text", "base", "tools"),
    [
        ("0.2.0", "==0.2.0", "~=0.2.0"),
        ("0.2.3", "==0.2.3", "~=0.2.0"),
        ("1.0.0rc1", "==1.0.0rc1", "~=1.0.0rc1"),
        ("0.1.0.post1", "==0.1.0.post1", "~=0.1.0"),
        ("v0.3.0-dev2", "==0.3.0.dev2", "~=0.3.0.dev2"),
    ],
)
def test_setting_a_version_sets_it_everywhere(
    tree: Path, text: str, base: str, tools: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert version.main([text], tree) == 0
    new = base.removeprefix("==")
    assert capsys.readouterr().out.splitlines()[-1] == new
    assert len(version.current(tree)) == len(noxfile.DISTRIBUTIONS)
    assert set(map(str, version.current(tree).values())) == {new}
    exact = {line for line in requirements(tree) if "==" in line}
    series = requirements(tree) - exact
    assert exact == {f"cula-core {base}"}
    names = (*noxfile.PACKAGES, "cula-emulator", "cula-testing", "cula-core")
    assert series == {f"{name} {tools}" for name in names}
    assert all(Requirement(line).specifier.contains(new, prereleases=True) for line in series)
    assert version.main([], tree) == 0


def test_other_requirements_stay(tree: Path) -> None:
    before = (tree / "packages/cula-core/pyproject.toml").read_text()
    version.set_version("0.2.0", tree)
    after = (tree / "packages/cula-core/pyproject.toml").read_text()
    assert after == before.replace("~=0.1.0", "~=0.2.0")
    assert '"nvidia-cutlass-dsl>=' in after


def test_a_version_heads_a_section_of_the_changelog(tree: Path) -> None:
    changelog = tree / version.CHANGELOG
    version.set_version("0.2.0.dev0", tree)
    head = "# Changelog\n\nNewest first.\n\n## "
    end = "## 0.1.0\n\nNews.\n"
    assert changelog.read_text() == f"{head}Unreleased (0.2.0.dev0)\n\n{end}"
    version.set_version("0.2.0", tree)  # goes on with the section of its pre-release
    assert changelog.read_text() == f"{head}Unreleased (0.2.0)\n\n{end}"
    assert version.set_version("0.2.0", tree) == []
    changelog.write_text(f"{head}0.2.0 (2030-01-31)\n\n{end}")  # as it stands once released
    version.set_version("0.2.0", tree)
    assert changelog.read_text() == f"{head}0.2.0 (2030-01-31)\n\n{end}"
    version.set_version("0.3.0", tree)
    assert changelog.read_text() == f"{head}Unreleased (0.3.0)\n\n## 0.2.0 (2030-01-31)\n\n{end}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.0.9", "0.0.9 is older than 0.1.0; expected 0.1.0 or a later version"),
        ("0.1.0rc1", "0.1.0rc1 is older than 0.1.0"),
        ("next", "'next' is no version; expected one of PEP 440"),
        ("", "'' is no version"),
        ("0.2", "'0.2': expected three numbers"),
        ("1!0.2.0", "without an epoch"),
        ("0.2.0+mine", "or a local part"),
    ],
)
def test_a_wrong_version_changes_nothing(
    tree: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = texts(tree)
    assert version.main([text], tree) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert texts(tree) == before


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("packages/cula-testing/pyproject.toml", "~=0.1.0", ">=0.1.0", "expected one requirement"),
        (
            "meta/src/cula/__init__.py",
            "__version__",
            "version",
            'expected one line __version__ = "',
        ),
        ("CHANGELOG.md", "## Un", "Un", "expected a heading"),
    ],
)
def test_a_tree_that_cannot_be_read_is_left_alone(
    tree: Path, path: str, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / path).write_text((tree / path).read_text().replace(old, new))
    before = texts(tree)
    assert version.main(["0.2.0"], tree) == 1
    assert message in capsys.readouterr().err
    assert texts(tree) == before


def test_a_failed_write_changes_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write, calls = texts(tree), Path.write_text, []

    def full(path: Path, text: str) -> int:
        calls.append(path)
        if len(calls) == 5:
            raise OSError("no space left on the device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    assert version.main(["0.2.0"], tree) == 1
    monkeypatch.undo()
    assert texts(tree) == before


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("packages/cula-emulator/src/cula_emulator/__init__.py", '"0.1.0"', '"0.2.0"'),
        ("packages/cula-cp-sm90/pyproject.toml", "==0.1.0", "==0.0.9"),
        ("meta/pyproject.toml", "cula-cp-sm90~=0.1.0", "cula-cp-sm90~=0.0.9"),
        ("CHANGELOG.md", "0.1.0", "0.0.9"),
    ],
)
def test_drift_is_found_and_mended(
    tree: Path, path: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / path).write_text((tree / path).read_text().replace(old, new))
    assert version.main([], tree) == 1
    assert "where it should" in capsys.readouterr().err
    newest = max(version.current(tree).values())
    assert version.main([str(newest)], tree) == 0
    assert version.main([], tree) == 0
    assert Version(capsys.readouterr().out.splitlines()[-1]) == newest
