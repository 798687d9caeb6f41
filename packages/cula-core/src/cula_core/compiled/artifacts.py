"""What the DSL makes of a kernel, kept on disk: PTX, machine code, and the host code that checks and launches.

The folder is $CULA_CACHE_DIR, else $XDG_CACHE_HOME/cula, else ~/.cache/cula. An entry is found without tracing and
without importing the DSL; it is made again when a source that it depends on, its config, the architecture or the
installed compiler changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .key import STORE, asked_for, edited, made_with
from .turns import turn

ENTRY = "cula_kernel"  # of the host code: the exported function is __tvm_ffi_cula_kernel
_PARTS = ("ptx", "cubin", "o", "log", "shared")
_uncached: ContextVar[bool] = ContextVar("uncached", default=False)
compiles = 0  # of this process, for tests


@dataclass(frozen=True)
class Unit:
    """A kernel that can be compiled: the function `kernel` of a module returns it and its fake arguments, without the
    stream, for a config, an architecture and parts.

    config: all that tells it apart from other kernels of the same source. parts: "module:name" of classes that it is
    made of besides. Only a kernel that is compiled imports its module.
    """

    module: str
    config: object
    arch: str
    parts: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Where its source begins; what these import is followed."""
        parts = (part.partition(":")[0] for part in self.parts)
        return self.module, *parts, "cula_core.cute.compile", __name__

    @property
    def asked(self) -> str:
        """The hash of what is asked for, whatever compiles it."""
        return asked_for(self.config, self.arch, self.modules)

    def make(self) -> tuple[object, ...]:
        """Returns the kernel and its fake arguments."""
        return import_module(self.module).kernel(self.config, self.arch, *self.parts)


def part(name: str | None) -> type:
    """Returns the class of a "module:name"."""
    module, _, kind = str(name).partition(":")
    return getattr(import_module(module), kind)


@dataclass(frozen=True)
class Artifacts:
    """What the DSL made of a kernel.

    host_object: an object file whose only function is ENTRY. log: what the assembler said of the machine code.
    dynamic_shared_bytes: of each launch in the host code that asks for a constant amount.
    """

    ptx: str
    cubin: bytes
    host_object: bytes
    log: str
    dynamic_shared_bytes: tuple[int, ...]


@contextmanager
def uncached() -> Iterator[None]:
    """Neither reads nor writes the cache inside: for kernels that are changed in memory, which no source tells."""
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


def artifacts(unit: Unit) -> Artifacts:
    """Returns what the DSL makes of a kernel, from the cache where it holds it. Processes wait for each other."""
    if _uncached.get():
        return _compiled(unit)
    name = f"kernels/{made_with()}/{unit.asked}"
    found = _find(name)
    if found is None:
        with STORE.lock(name):
            found = _find(name)
            if found is None:
                found = _compiled(unit)
                if not edited(unit.modules):
                    _keep(name, unit, found)
    return found


def _find(name: str) -> Artifacts | None:
    """An entry is its `.json`, which is written last, and parts that it holds the digests of."""
    facts_path = STORE.find(f"{name}.json")
    if facts_path is None:
        return None
    try:
        digests = json.loads(facts_path.read_text())["sha256"]
        parts = {}
        for part in _PARTS:
            path = STORE.find(f"{name}.{part}")
            data = b"" if path is None else path.read_bytes()
            if hashlib.sha256(data).hexdigest() != digests[part]:
                raise ValueError(f"{name}.{part} is damaged")
            parts[part] = data
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"an entry of {facts_path.parent} is made again: {error}", RuntimeWarning, stacklevel=3
        )
        STORE.discard(facts_path)
        return None
    ptx, cubin, host_object, log, shared = parts.values()
    return Artifacts(ptx.decode(), cubin, host_object, log.decode(), tuple(json.loads(shared)))


def _keep(name: str, unit: Unit, made: Artifacts) -> None:
    shared = json.dumps(made.dynamic_shared_bytes).encode()
    every = (made.ptx.encode(), made.cubin, made.host_object, made.log.encode(), shared)
    parts = dict(zip(_PARTS, every))
    digests = {part: hashlib.sha256(data).hexdigest() for part, data in parts.items()}
    facts = {
        "config": repr(unit.config),
        "arch": unit.arch,
        "modules": unit.modules,
        "sha256": digests,
    }
    with STORE.scratch() as place:
        for part, data in (*parts.items(), ("json", json.dumps(facts).encode())):
            fresh = Path(place, part)
            fresh.write_bytes(data)
            STORE.publish(fresh, f"{name}.{part}")


def is_uncached() -> bool:
    """Returns whether the cache is left alone here."""
    return _uncached.get()


def _compiled(unit: Unit) -> Artifacts:
    global compiles
    if os.environ.get("CULA_JIT") == "0":
        raise RuntimeError(
            f"CULA_JIT=0 forbids compiling, and neither a bundle nor the cache holds {unit.config} of {unit.module} "
            f"for {unit.arch}: make a bundle with python -m cula compile"
        )
    with turn():
        from ..cute.compile import compile_artifacts

        compiles += 1
        return Artifacts(*compile_artifacts(*unit.make(), arch=unit.arch, entry=ENTRY))
