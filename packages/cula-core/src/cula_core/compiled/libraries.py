"""From a kernel that is asked for to what launches it: out of a bundle, out of the cache, or compiled and kept.

A bundle is a folder that an image ships: `manifest.json`, which says what each file holds, and a library per kernel.
Its kernels go by what was asked for alone, so the compiler need not be installed. $CULA_BUNDLE names bundles, as PATH
does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from .artifacts import ENTRY, Unit, artifacts, is_uncached
from .key import STORE, described, edited, made_with, remember
from .load import link, load

FORMAT = 1  # of bundles
MANIFEST = "manifest.json"
RECORD = "CULA_RECORD"  # a file that is told what a process asks for


def kernel(unit: Unit) -> Callable[..., None]:
    """Returns what launches a kernel on torch's current stream. Raises RuntimeError if it may not be compiled."""
    record(unit)
    path = bundled(unit)
    if path is None:
        try:
            path = library(unit)
        except (OSError, subprocess.CalledProcessError) as error:
            return _through_the_dsl(unit, error)
    return load(path, ENTRY)


def library(unit: Unit) -> Path:
    """Returns the library of a kernel, from the cache where it holds it. Processes wait for each other.

    Raises OSError or subprocess.CalledProcessError where nothing can be linked.
    """
    if is_uncached() or edited(unit.modules):
        return _linked(unit, Path(tempfile.mkdtemp(dir=STORE.private())))[0]
    name = f"libraries/{made_with()}/{unit.asked}"
    found = _find(name)
    if found is None:
        with STORE.lock(name):
            found = _find(name)
            if found is None:
                found = _keep(name, unit)
    return found


def record(unit: Unit) -> None:
    """Tells the file that $CULA_RECORD names, if any, what was asked for: a line that `asked_again` reads."""
    if path := os.environ.get(RECORD):
        facts = {
            "module": unit.module,
            "config": described(unit.config),
            "arch": unit.arch,
            "parts": unit.parts,
        }
        # One write: lines of several processes do not mix.
        line = (json.dumps(facts) + "\n").encode()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def bundled(unit: Unit) -> Path | None:
    """Returns the library of a kernel in one of the bundles, None if there is none."""
    value = os.environ.get("CULA_BUNDLE")
    if not value:
        return None
    asked = unit.asked
    for folder in value.split(os.pathsep):
        entry = _manifest(folder).get(asked)
        if entry is not None:
            path = Path(folder, entry["file"])
            if _digest(path) == entry["sha256"]:
                return path
            warnings.warn(f"{path} of a bundle is damaged", RuntimeWarning, stacklevel=3)
    return None


@functools.cache
def _manifest(folder: str) -> dict:
    """Returns the kernels of a bundle by what was asked for; empty, with a warning, if it is none."""
    try:
        manifest = json.loads(Path(folder, MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, expected {FORMAT}")
        return dict(manifest["kernels"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{folder} is no bundle of kernels: {error}", RuntimeWarning, stacklevel=4)
        return {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find(name: str) -> Path | None:
    """An entry is its `.json`, which is written last, and a library that it holds the digest of."""
    facts, path = STORE.find(f"{name}.json"), STORE.find(f"{name}.so")
    if facts is None or path is None:
        return None
    try:
        if json.loads(facts.read_text())["sha256"] == _digest(path):
            return path
        reason = f"{path} is damaged"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    warnings.warn(f"a kernel of the cache is made again: {reason}", RuntimeWarning, stacklevel=4)
    STORE.discard(facts)
    STORE.discard(path)
    return None


def _keep(name: str, unit: Unit) -> Path:
    with STORE.scratch() as place:
        fresh, facts = _linked(unit, place)
        told = Path(place, "json")
        told.write_text(json.dumps(facts))
        kept = STORE.publish(fresh, f"{name}.so")
        STORE.publish(told, f"{name}.json")
    remember(unit.modules)
    return kept


def _linked(unit: Unit, place: Path) -> tuple[Path, dict]:
    """Compiles and links a kernel in a folder; returns the library, and what is to be known of it."""
    host, target = Path(place, "kernel.o"), Path(place, "kernel.so")
    host.write_bytes(artifacts(unit).host_object)
    link(host, target)
    return target, {
        "sha256": _digest(target),
        "module": unit.module,
        "config": described(unit.config),
        "arch": unit.arch,
        "parts": unit.parts,
    }


def _through_the_dsl(unit: Unit, reason: Exception) -> Callable[..., None]:
    """Loads a kernel where nothing can be linked, or a library cannot be opened; the DSL is imported for it."""
    from ..cute.compile import load_object

    warnings.warn(
        f"kernels are loaded by way of CuTe DSL, which takes half a second: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )
    place = Path(tempfile.mkdtemp(dir=STORE.private()), "kernel.o")
    place.write_bytes(artifacts(unit).host_object)
    return load_object(place, ENTRY)
