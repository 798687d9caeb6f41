"""Finds lines that tell a reader to install one of our distributions so that it fails: `python tools/install_lines.py`.

No wheels of this repository are on a package index, so `pip install` needs a path, or `--find-links` and the folder
that `bash .ci/run build` fills. Documents are read, and the messages in sources and tests.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

SUFFIXES = (".md", ".py", ".toml", ".txt", ".yml", ".yaml", ".sh")
# A command ends where its quotation, its line or its sentence does.
_COMMAND = re.compile(r"\bpip3? +install\b([^`#;()\n]*)")
# The name of a kernel package in a message that the package writes.
_PLACEHOLDERS = ("{NAME}",)


def distributions(root: Path = ROOT) -> set[str]:
    """Names of the distributions of the repository."""
    projects = [root / "meta" / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    found = (re.search(r'^name = "([^"]+)"', path.read_text(), re.MULTILINE) for path in projects)
    return {match[1] for match in found if match}


def offences(text: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """The number of every line with such a command, and the name that an index does not have."""
    for command in _COMMAND.finditer(text):
        words = [word.strip("\"'.,:") for word in command[1].split()]
        if any(
            word in ("-f", "--find-links") or word.startswith("--find-links=") for word in words
        ):
            continue
        for word in words:
            name = re.split(r"[\[=<>~!]", word)[0]
            if name.lower().replace("_", "-") in names or name in _PLACEHOLDERS:
                yield text.count("\n", 0, command.start()) + 1, name
                break


def violations(root: Path = ROOT) -> list[str]:
    """One line per command that fails: `path:line: what`."""
    names = distributions(root)
    lines = []
    for path in _texts(root):
        lines += [
            f"{path.relative_to(root).as_posix()}:{number}: pip finds no {name} on an index; "
            "name a path, or --find-links dist"
            for number, name in offences(path.read_text(), names)
        ]
    return lines


def _texts(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(b for b in below if not b.startswith(".") and b not in ("dist", "build"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(SUFFIXES))


def main(root: Path = ROOT) -> int:
    broken = violations(root)
    for line in broken:
        print(line)
    print(f"install lines: {len(broken)} would fail" if broken else "install lines: all work")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
