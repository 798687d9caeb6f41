"""Kernels for tests through the cache of `cula_core`: a kernel that was compiled once is not compiled again until its
sources, its config or the compiler change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cula_core
from cula_core.compiled.artifacts import ENTRY, Unit, artifacts, uncached
from cula_core.compiled.key import closure
from cula_emulator import resources
from cula_emulator.pytest_plugin import BoundKernel, Emulated


def emulated_kernel(emulated: Emulated, unit: Unit, *, may_spill: bool = False) -> BoundKernel:
    """Returns a unit's kernel as the emulator runs it, under the schedule of a test.

    Its machine code must spill no register, unless `may_spill`: what is emulated need not be asked that once more.
    """
    made = artifacts(unit)
    spilled = re.findall(r"[1-9]\d* bytes spill \w+", made.log)
    assert may_spill or not spilled, f"{unit}: {', '.join(spilled)}"
    return emulated.load(made.ptx, made.host_object, ENTRY)


def report(unit: Unit) -> resources.Report:
    """Returns what a unit's machine code asks of a GPU, with the log of the assembler that made it."""
    made = artifacts(unit)
    return resources.report(
        made.cubin, unit.arch, log=made.log, dynamic_shared_bytes=made.dynamic_shared_bytes
    )


def assert_closed(unit: Unit) -> None:
    """Compiles a unit and checks that every source of ours that runs meanwhile is one that its key depends on.

    Ours are `cula_core` and the packages of the unit's modules.
    """
    roots = {Path(str(cula_core.__file__)).parent}
    roots |= {Path(str(sys.modules[m.partition(".")[0]].__file__)).parent for m in unit.modules}
    seen = {path for path in _files_run(unit) if roots & set(path.parents)}
    known = set(closure(unit.modules).values())
    # The cache itself runs around the compile; a kernel must run too, or nothing was seen.
    assert {path for path in seen if "kernels" in path.parts or path.stem == "schedule"}
    assert seen <= known, sorted(map(str, seen - known))


def _files_run(unit: Unit) -> set[Path]:
    """Returns the files of all code that runs while a unit is compiled."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        names.add(frame.f_code.co_filename)

    before: Callable | None = sys.getprofile()
    sys.setprofile(note)
    try:
        with uncached():
            artifacts(unit)
    finally:
        sys.setprofile(before)
    return {Path(name).resolve() for name in names}
