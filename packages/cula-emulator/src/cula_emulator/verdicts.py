"""Verdicts of mutation tests, kept in the cache folder until something that they depend on changes.

A verdict belongs to a test as pytest names it, the sources of that test and of all that it imports, the emulator, the
PTX that the test ran and how often each line of the mutated kernel was executed, and the schedules. The unchanged
kernel runs every time; only its mutants are left out when all of that is as it was.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, toolchain

_LIBRARY = Path(sysconfig.get_path("stdlib"))
_FORMAT = "1"


@dataclass
class Test:
    """A test that runs now.

    root: the folder up to which its conftest files count. runs, hits: how many reports it asked for and were kept ones.
    """

    name: str
    path: Path
    root: Path
    runs: int = 0
    hits: int = 0


_current: Test | None = None


@contextmanager
def kept_for(test: Test | None) -> Iterator[None]:
    """Lets `mutation.run` keep its verdicts for a test; None: it runs every mutant."""
    global _current
    before, _current = _current, test
    try:
        yield
    finally:
        _current = before


def current() -> Test | None:
    return _current


def key(test: Test, *facts: Any) -> str:
    """Names the verdicts of the next run of a test. facts: what else they depend on, with a meaningful repr."""
    test.runs += 1
    machine = (_FORMAT, sys.version, toolchain.find().key)
    return _digest(
        map(repr, (*machine, test.name, test.runs, sources(test.path, test.root), *facts))
    )


def load(name: str) -> Any:
    """What `save` was given under this name, or None."""
    found = cache.find(f"{name}.verdicts")
    if found is None:
        return None
    try:
        return json.loads(found.read_text())
    except (OSError, ValueError):
        cache.discard(found)
        return None


def save(name: str, findings: Any) -> None:
    with cache.scratch() as folder:
        fresh = folder / "verdicts"
        fresh.write_text(json.dumps(findings))
        cache.publish(fresh, f"{name}.verdicts")


# ---- sources -------------------------------------------------------------------------------------


@functools.cache
def sources(test: Path, root: Path) -> str:
    """A digest of a test file, the conftest files above it, the emulator, and all that these import.

    A package counts with all its files, since it may import some of them by computed names; what pip installed counts
    with its list of files and their digests.
    """
    folders = [test.parent, *test.parent.parents]
    above = folders[: folders.index(root) + 1] if root in folders else folders[:1]
    conftests = [folder / "conftest.py" for folder in above]
    own = [test, *(path for path in conftests if path.is_file())]
    parts = {path.name + str(n): _content(path) for n, path in enumerate(own)}
    waiting, seen = ["cula_emulator", *_imports(own)], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for place in _places(name):
            site = next((p for p in place.parents if p.name.endswith("-packages")), None)
            if site:
                parts[f"installed {site.name}"] = _installed(site)
            elif _LIBRARY not in place.parents:
                files = _files(place)
                for path in files:
                    parts[f"{name} {path.relative_to(place.parent)}"] = _content(path)
                waiting += _imports(path for path in files if path.suffix == ".py")
    return _digest(f"{name}\0{part}" for name, part in sorted(parts.items()))


def _imports(files: Iterable[Path]) -> list[str]:
    """The first names of what Python files import, anywhere in them, or load as plugins of pytest."""
    return sorted({name for path in files for name in _imported_by(path.read_bytes())})


@functools.cache
def _imported_by(source: bytes) -> frozenset[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # nothing can import it
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Assign) and "pytest_plugins" in map(_target, node.targets):
            with suppress(ValueError):
                value = ast.literal_eval(node.value)
                found.update([value] if isinstance(value, str) else value)
    return frozenset(name.partition(".")[0] for name in found)


def _target(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _places(name: str) -> list[Path]:
    """The file of a module, or the folders of a package; nothing where it is built in or absent."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    every = place.rglob("*")
    return sorted(p for p in every if p.is_file() and p.suffix != ".pyc")


@functools.cache
def _installed(site: Path) -> str:
    return _digest(
        f"{p.parent.name} {_content(p)}" for p in sorted(site.glob("*.dist-info/RECORD"))
    )


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(parts: Iterable[str]) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(f"{len(part)}\0{part}".encode())
    return h.hexdigest()[:40]
