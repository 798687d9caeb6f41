"""The one version of all distributions: `python tools/version.py [NEW]` prints it, or sets it everywhere.

It stands in the `__version__` of every distribution, in each requirement that one of them makes of another, and at the
head of CHANGELOG.md. Without an argument the command fails where they differ. With one it brings all of them to NEW; on
an error no file is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from packaging.version import InvalidVersion, Version

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.install_lines import distributions
from tools.layout import ROOT

CHANGELOG = "CHANGELOG.md"
_ASSIGNMENT = re.compile(r'^(__version__ = ")([^"\n]*)(")$', re.MULTILINE)
_HEADING = re.compile(r"^## (Unreleased \()?([^\s()]+).*$", re.MULTILINE)


class VersionError(Exception):
    """What is wrong, in one line that says what was expected."""


def exact(version: Version) -> str:
    """The requirement that admits this version alone."""
    return f"=={version}"


def compatible(version: Version) -> str:
    """The requirement that admits the versions of its series; a pre-release begins its series at itself."""
    if version.is_prerelease:
        return f"~={version}"
    return f"~={version.major}.{version.minor}.0"


def parse(text: str) -> Version:
    """A version that every distribution may have: PEP 440, three numbers, no epoch and no local part."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise VersionError(
            f"{text!r} is no version; expected one of PEP 440, such as 0.2.0 or 0.2.0rc1"
        ) from None
    if len(version.release) != 3 or version.epoch or version.local:
        raise VersionError(
            f"{text!r}: expected three numbers, such as 0.2.0 or 0.2.0rc1, without an epoch or a local part"
        )
    return version


def current(root: Path = ROOT) -> dict[str, Version]:
    """The `__version__` of every distribution, by the path of its file."""
    found = {}
    for path in _modules(root):
        matches = _ASSIGNMENT.findall(path.read_text())
        if len(matches) != 1:
            raise VersionError(
                f'{_name(path, root)}: expected one line __version__ = "...", found {len(matches)}'
            )
        found[_name(path, root)] = parse(matches[0][1])
    if not found:
        raise VersionError(f"{root}: expected distributions in meta/ and packages/, found none")
    return found


def differences(version: Version, root: Path = ROOT) -> list[str]:
    """One line per place that does not say `version`."""
    return [
        f"{_name(path, root)} does not say {version} where it should"
        for path, text in _rewritten(version, root).items()
        if path.read_text() != text
    ]


def set_version(text: str, root: Path = ROOT) -> list[str]:
    """Brings every place to the version and returns the files that changed; all of them change, or none."""
    new = parse(text)
    newest = max(current(root).values())
    if new < newest:
        raise VersionError(f"{new} is older than {newest}; expected {newest} or a later version")
    changed = {
        path: text for path, text in _rewritten(new, root).items() if path.read_text() != text
    }
    _write(changed)
    return [_name(path, root) for path in changed]


def _rewritten(version: Version, root: Path) -> dict[Path, str]:
    """The text that each file has to have at `version`."""
    names = distributions(root)
    edits: dict[Path, Callable[[str], str]] = {
        path: lambda text: _ASSIGNMENT.sub(rf"\g<1>{version}\g<3>", text) for path in _modules(root)
    }
    for path in _projects(root):
        edits[path] = lambda text, path=path: _pinned(text, version, names, _name(path, root))
    edits[root / CHANGELOG] = lambda text: _headed(text, version)
    return {path: edit(path.read_text()) for path, edit in edits.items()}


def _pinned(text: str, version: Version, names: set[str], where: str) -> str:
    """A pyproject.toml whose requirements of our distributions are those of `version`."""
    ours = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    rules = {"==": exact(version), "~=": compatible(version)}

    def replaced(match: re.Match[str]) -> str:
        operator = match["operator"]
        if operator not in rules or "," in match["rest"]:
            raise VersionError(f'{where}: {match[0]}: expected one requirement with "==" or "~="')
        return f'"{match["name"]}{rules[operator]}{match["marker"] or ""}"'

    requirement = re.compile(
        rf'"(?P<name>(?:{ours})(?:\[[\w,-]+\])?)\s*(?P<operator>[=<>~!]+)(?P<rest>[^";]*)(?P<marker>;[^"]*)?"'
    )
    return requirement.sub(replaced, text)


def _headed(text: str, version: Version) -> str:
    """A changelog whose first section is that of `version`.

    A section that is still open for an earlier pre-release of the same numbers goes on under the new name; any other is
    closed, and an empty one is put above it.
    """
    first = _HEADING.search(text)
    if not first:
        raise VersionError(f'{CHANGELOG}: expected a heading such as "## Unreleased (0.1.0)"')
    heading, (start, end) = f"## Unreleased ({version})", first.span()
    there = parse(first[2])
    if there == version:
        return text
    if not first[1]:
        return f"{text[:start]}{heading}\n\n{text[start:]}"
    if there.release == version.release:
        return f"{text[:start]}{heading}{text[end:]}"
    return f"{text[:start]}{heading}\n\n## {there}{text[end:]}"


def _write(texts: dict[Path, str]) -> None:
    """Replaces files. Every new text is on the disk before the first file is replaced."""
    staged = {path: path.with_name(f".{path.name}.new") for path in texts}
    try:
        for path, text in texts.items():
            staged[path].write_text(text)
            staged[path].chmod(path.stat().st_mode)
        for path, new in staged.items():
            os.replace(new, path)
    finally:
        for new in staged.values():
            new.unlink(missing_ok=True)


def _projects(root: Path) -> list[Path]:
    return [root / "meta/pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]


def _modules(root: Path) -> list[Path]:
    return [
        module
        for project in _projects(root)
        for module in sorted(project.parent.glob("src/*/__init__.py"))
    ]


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="version", description=__doc__.splitlines()[0])
    parser.add_argument("new", nargs="?", metavar="NEW", help="a PEP 440 version, such as 0.2.0")
    new = parser.parse_args(argv).new
    try:
        if new is not None:
            for name in set_version(new, root):
                print(f"{name}: written")
        found = current(root)
        version = max(found.values())
        wrong = differences(version, root)
    except (VersionError, OSError) as error:
        print(f"version: {error}", file=sys.stderr)
        return 1
    for line in wrong:
        print(f"version: {line}", file=sys.stderr)
    print(version)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
