"""Bundles: folders of compiled kernels that an image ships, and lists of kernels to put there.

A bundle holds `manifest.json`, which says what each file is, a library per kernel, and what the sources of these
kernels were. Its kernels go by what was asked for alone: whoever loads them needs the DSL's runtime library, which a
bundle may hold as well, but neither its compiler nor a C compiler.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .artifacts import Unit
from .key import bundles, closure_name, closure_names, described, digest_of, revived

FORMAT = 1
MANIFEST = "manifest.json"
RECORD = "CULA_RECORD"  # names a file that is told what processes ask for


def find(unit: Unit) -> Path | None:
    """Returns the library of a kernel in one of the bundles that $CULA_BUNDLE names, None if there is none."""
    for folder in bundles():
        entry = _entries(folder, "kernels").get(unit.asked)
        path = entry and _whole(folder, entry)
        if path is not None:
            return path
    return None


def runtimes() -> dict[int, Path]:
    """Returns the runtime libraries in the bundles that $CULA_BUNDLE names by version of CUDA, the first of each."""
    found: dict[int, Path] = {}
    for folder in bundles():
        for cuda, entry in _entries(folder, "runtimes").items():
            path = _whole(folder, entry)
            if path is not None:
                found.setdefault(int(cuda), path)
    return found


def write(folder: Path, units: Iterable[Unit], with_runtime: bool = False) -> int:
    """Makes a bundle of kernels, from the cache where it holds them; adds to the bundle that the folder has.

    with_runtime: the runtime libraries of the installed DSL are put there too. Returns how many kernels it holds then.

    Raises ValueError for a folder with another manifest, OSError where it cannot be written or nothing can be linked.
    """
    from .libraries import library
    from .load import runtimes as installed

    folder = Path(folder)
    manifest = folder / MANIFEST
    facts: dict[str, Any] = _read(manifest) if manifest.exists() else {"format": FORMAT}
    held = facts.setdefault("kernels", {})
    if with_runtime:
        facts["runtimes"] = {}
        for cuda, path in installed().items():
            name = f"cu{cuda}/{path.name}"
            _put(folder / name, path.read_bytes())
            facts["runtimes"][str(cuda)] = {"file": name, "sha256": digest_of(folder / name)}
        if not facts["runtimes"]:
            raise FileNotFoundError("the runtime library of nvidia-cutlass-dsl is not installed")
    for unit in units:
        source, name = library(unit), f"{unit.asked}.so"
        _put(folder / name, source.read_bytes())
        _put(folder / closure_name(unit.modules), closure_names(unit.modules))
        held[unit.asked] = {"file": name, "sha256": digest_of(folder / name), **_facts(unit)}
    _put(manifest, json.dumps(facts, indent=1).encode())
    return len(held)


def record(unit: Unit) -> None:
    """Tells the file that $CULA_RECORD names, if any, what was asked for: a line that `recorded` reads."""
    if path := os.environ.get(RECORD):
        # One write: lines of several processes do not mix.
        line = (json.dumps(_facts(unit)) + "\n").encode()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def recorded(path: Path) -> list[Unit]:
    """Returns the kernels that a recorded file names, each once; those that this version does not have are left out
    with a warning.

    Raises OSError if the file cannot be read, ValueError if a line is none of `record`.
    """
    found: dict[Unit, None] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            facts = json.loads(line)
            module, arch, parts = facts["module"], facts["arch"], tuple(facts["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no recorded kernel ({error})") from error
        try:
            found[Unit(module, revived(facts["config"]), arch, parts)] = None
        except (ImportError, TypeError, ValueError) as error:
            warnings.warn(
                f"{path}, line {number} is left out: {error}", RuntimeWarning, stacklevel=2
            )
    return list(found)


def _facts(unit: Unit) -> dict:
    return {
        "module": unit.module,
        "config": described(unit.config),
        "arch": unit.arch,
        "parts": unit.parts,
    }


@functools.cache
def _entries(folder: Path, kind: str) -> dict:
    """Returns the kernels of a bundle by what was asked for, or its runtimes by version of CUDA; empty, with a warning,
    if it is none."""
    try:
        return _read(folder / MANIFEST).get(kind, {})
    except (OSError, ValueError) as error:
        warnings.warn(f"{folder} is no bundle of kernels: {error}", RuntimeWarning, stacklevel=5)
        return {}


def _whole(folder: Path, entry: dict) -> Path | None:
    """Returns a file of a bundle, None with a warning where it is not what the manifest says."""
    path = Path(folder, entry["file"])
    if path.is_file() and digest_of(path) == entry["sha256"]:
        return path
    warnings.warn(f"{path} of a bundle is damaged", RuntimeWarning, stacklevel=5)
    return None


def _read(manifest: Path) -> dict:
    try:
        facts = json.loads(manifest.read_text())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}, expected {FORMAT}")
        return {**facts, "kernels": dict(facts["kernels"])}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is no manifest of a bundle") from error


def _put(path: Path, data: bytes) -> None:
    """Writes a file whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(data)
    os.replace(fresh, path)
