"""What a compiled kernel depends on, as hashes. Nothing of the DSL is imported, nor any module that is hashed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from .. import IMPORTED
from ..store import Store
from .turns import turn

STORE = Store("CULA_CACHE_DIR", "cula")
FORMAT = 1
# By name: to walk through all that is installed takes 25 ms, to read these takes one.
DISTRIBUTIONS = (
    *(f"nvidia-cutlass-dsl{part}" for part in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13")),
    "apache-tvm-ffi",
)  # fmt: skip
# Settings of the DSL (CUTE_DSL_...) that change what it makes.
SETTINGS = (
    "COMPILER_OPT", "COMPILER_BACKEND", "ENABLE_ASSERTIONS", "LINEINFO", "DEBUG", "LOC_TRACEBACKS", "ENABLE_PYIR",
    "AUTO_M2S", "TOLERATE_M2M", "LIBS",
)  # fmt: skip


def digest(*parts: object) -> str:
    """Returns the SHA-256 of parts, which cannot be mistaken for other parts that join to the same text."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def described(value: object) -> object:
    """Returns a config as JSON has it: dataclasses by name and field. Raises TypeError for what has no stable text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", **fields}
    raise TypeError(f"a config holds a {type(value).__name__}, which has no stable text to hash")


def revived(value: object) -> object:
    """Returns the config that `described` has described. Raises ValueError for what names no dataclass."""
    if isinstance(value, list):
        return tuple(revived(item) for item in value)
    if not isinstance(value, dict):
        return value
    module, _, name = str(value.get("class")).partition(":")
    kind = getattr(importlib.import_module(module), name, None) if name else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{value.get('class')} is no config of this version")
    return kind(**{field: revived(item) for field, item in value.items() if field != "class"})


def asked_for(config: object, arch: str, modules: tuple[str, ...]) -> str:
    """Returns the hash of what is wanted: a config, an architecture, and the sources that make the kernel."""
    host = (platform.system(), platform.machine())
    text = json.dumps([described(config), arch], sort_keys=True)
    return digest(FORMAT, host, text, source_digest(modules))[:40]


@functools.cache
def made_with() -> str:
    """Returns the hash of the installed compiler: digests that installers record, held against sizes on disk.

    To hash 250 MB takes 0.7 s, to read RECORD a millisecond. Sizes find what another distribution has overwritten,
    which versions do not: several wheels of the DSL unpack into one folder.
    """
    facts: list[object] = [os.environ.get(f"CUTE_DSL_{name}", "") for name in SETTINGS]
    for name in DISTRIBUTIONS:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        lines = [
            line for line in (found.read_text("RECORD") or "").splitlines() if "sha256=" in line
        ]
        facts += [name, found.version, *sorted(lines)]
        for line in lines:
            path, _, size = line.rsplit(",", 2)
            if path.endswith((".so", ".a")):
                facts.append(f"{path} {size == _size(str(found.locate_file(path)))}")
    return digest(*facts)[:16]


def _size(path: str) -> str | None:
    with suppress(OSError):
        return str(os.stat(path).st_size)
    return None


@functools.cache
def source_digest(modules: tuple[str, ...]) -> str:
    """Returns the hash of the sources of modules and of all that they import of their own packages."""
    return digest(
        *(
            part
            for name, path in sorted(closure(modules).items())
            for part in (name, path.read_bytes())
        )
    )


def edited(modules: tuple[str, ...]) -> bool:
    """Returns whether a source has changed since this process began to load ours, so that it may have loaded another
    one than `source_digest` has read."""
    return any(path.stat().st_mtime > IMPORTED for path in closure(modules).values())


@functools.cache
def closure(modules: tuple[str, ...]) -> dict[str, Path]:
    """Returns the files of modules and of every module of ours that they reach by import statements, by name.

    Ours are the packages of `modules` and `cula_core`. Statements inside functions count. A name that a package defines
    may come from what it imports; of a package that is only on the way to a module, its own file counts. Raises
    ValueError for a module that has no source file in a package.

    To parse all that takes 50 to 100 ms, so that the names that were found are kept beside kernels, and in bundles, for
    as long as no source of these packages changes.
    """
    name = closure_name(modules)
    for kept in (STORE.find(name), *(Path(folder, name) for folder in bundles())):
        if kept is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):
                found = {
                    name: path for name in json.loads(kept.read_text()) if (path := _file(name))
                }
                if found:
                    return found
    with turn():
        return _followed(modules)


def remember(modules: tuple[str, ...]) -> None:
    """Keeps what `closure` returns for later processes."""
    name = closure_name(modules)
    if STORE.find(name) is None:
        with STORE.scratch() as place:
            fresh = Path(place, "closure")
            fresh.write_bytes(closure_names(modules))
            STORE.publish(fresh, name)


def closure_name(modules: tuple[str, ...]) -> str:
    """Returns where the names of `closure` are kept, by the sources of all packages that it may reach."""
    return f"closures/{digest(*modules, *map(_tree, sorted(_ours(modules))))[:40]}.json"


def closure_names(modules: tuple[str, ...]) -> bytes:
    """Returns what is kept there."""
    return json.dumps(sorted(closure(modules))).encode()


def bundles() -> list[Path]:
    """Returns the folders of compiled kernels that $CULA_BUNDLE names, as PATH does."""
    return [
        Path(folder) for folder in os.environ.get("CULA_BUNDLE", "").split(os.pathsep) if folder
    ]


@functools.cache
def _tree(package: str) -> str:
    """Returns the hash of all sources of a package, wherever it is."""
    spec = _spec(package)
    roots = [] if spec is None else spec.submodule_search_locations or []
    files = {path.relative_to(root): path for root in roots for path in Path(root).rglob("*.py")}
    return digest(*(part for name in sorted(files) for part in (name, files[name].read_bytes())))


def _ours(modules: tuple[str, ...]) -> set[str]:
    return {name.partition(".")[0] for name in modules} | {"cula_core"}


def _followed(modules: tuple[str, ...]) -> dict[str, Path]:
    ours = _ours(modules)
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        parent = name.rpartition(".")[0]
        if name in found or name.partition(".")[0] not in ours:
            continue
        path = _file(name)
        if path is not None:
            found[name] = path
            waiting += _imported(name, path)
        elif name in modules:
            raise ValueError(f"the key of a kernel needs the source of {name}, which is not found")
        elif parent:
            waiting.append(parent)
    for name in list(found):
        while "." in name:
            name = name.rpartition(".")[0]
            path = _file(name)
            if path is not None:
                found[name] = path
    return found


def _file(name: str) -> Path | None:
    """The source of a module that is not imported for it; None if the name is no module."""
    top, *rest = name.split(".")
    spec = _spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    for root in spec.submodule_search_locations:
        base = Path(root, *rest)
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _spec(package: str) -> ModuleSpec | None:
    """Returns where a package is, which is not imported for it; None if there is none."""
    loaded = sys.modules.get(package)
    return loaded.__spec__ if loaded is not None else importlib.util.find_spec(package)


def _imported(name: str, path: Path) -> list[str]:
    """Every module, and every name in a module, that a module's import statements ask for."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names = []
    for node in _statements(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{parent}.{alias.name}" for alias in node.names]
    return names


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields every statement, however deep. Expressions hold none, and are nine tenths of a tree."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, field, ())
            waiting += found if isinstance(found, list) else ()
