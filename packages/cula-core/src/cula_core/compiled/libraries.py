"""From a kernel that is asked for to what launches it: out of a bundle, out of the cache, or compiled and kept."""

from __future__ import annotations

import json
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from ..environment import bytes_of
from ..shortcuts import Launcher
from .artifacts import ENTRY, Unit, artifacts, is_uncached
from .bundles import find, record
from .key import STORE, digest_of, edited, made_with, remember
from .load import link, load

LIMIT = 2**30  # bytes of the cache, unless $CULA_CACHE_LIMIT says another number


def kernel(unit: Unit) -> Callable[..., None]:
    """Returns what launches a kernel on torch's current stream. Raises RuntimeError if it may not be compiled."""
    record(unit)
    try:
        return Launcher(load(find(unit) or library(unit), ENTRY))
    except (OSError, subprocess.CalledProcessError) as error:
        return Launcher(_through_the_dsl(unit, error))


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


def _find(name: str) -> Path | None:
    """An entry is its `.json`, which is written last, and a library that it holds the digest of."""
    facts, path = STORE.find(f"{name}.json"), STORE.find(f"{name}.so")
    if facts is None or path is None:
        return None
    try:
        if json.loads(facts.read_text())["sha256"] == digest_of(path):
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
    STORE.trim(bytes_of("CULA_CACHE_LIMIT", LIMIT))
    return kept


def _linked(unit: Unit, place: Path) -> tuple[Path, dict]:
    """Compiles and links a kernel in a folder; returns the library, and what is to be known of it."""
    host, target = Path(place, "kernel.o"), Path(place, "kernel.so")
    host.write_bytes(artifacts(unit).host_object)
    link(host, target)
    return target, {"sha256": digest_of(target), "config": repr(unit.config), "arch": unit.arch}


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
