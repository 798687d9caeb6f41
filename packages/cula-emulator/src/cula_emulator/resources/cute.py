"""CuTe DSL front end. nvidia-cutlass-dsl is imported when `compile` is called, not before."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cute import without_driver
from .kernels import Report, from_cubin, with_dynamic
from .ptxas import compile_ptx, target


def compile(
    kernel: Any,
    *fake_arguments: Any,
    arch: str = "sm_90a",
    compile_options: tuple = (),
    **named: Any,
) -> Report:
    """Compiles a CuTe DSL function for `arch` and reports on it, with the log of the DSL's own assembler.

    Arguments as for `cula_emulator.compile`. The log gives spills and warnings of the very code that would run on
    a GPU. dynamic_shared_bytes is known if the module has one kernel and asks for a constant amount.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, RemarkFilter, RemarkOutput

    with tempfile.TemporaryDirectory() as scratch, without_driver(), _without_locations():
        remarks = Path(scratch, "remarks.yaml")
        chosen = (
            cute.GPUArch(arch),
            cute.EnableTVMFFI,
            cute.KeepPTX,
            cute.KeepCUBIN,
            DumpDir(scratch),
            RemarkFilter("ptxas"),
            RemarkOutput(str(remarks)),
            *compile_options,
        )
        compiled = cute.compile[chosen](kernel, *fake_arguments, **named)
        log = _assembler_log(remarks.read_text() if remarks.exists() else "")
    return from_artifacts(compiled, arch, log)


@contextmanager
def _without_locations() -> Iterator[None]:
    """Remarks make the DSL look up the source of every operation, which doubles the time of a compile and changes
    neither code nor log."""
    import cutlass.base_dsl.dsl as dsl

    original = getattr(dsl, "_set_enable_frame_filtering", None)
    if original is None:  # another version of the DSL, which then takes its time
        yield
        return
    dsl._set_enable_frame_filtering = lambda _: original(False)
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = original


def from_artifacts(compiled: Any, arch: str | None = None, log: str | None = None) -> Report:
    """The report of what `cute.compile` returned; ValueError if it kept neither cubin nor PTX."""
    artifacts = getattr(compiled, "artifacts", None)
    cubin, ptx = getattr(artifacts, "CUBIN", None), getattr(artifacts, "PTX", None)
    if not cubin and not ptx:
        raise ValueError(
            "neither a cubin nor PTX: compile with cute.KeepCUBIN, or use cula_emulator.resources.compile"
        )
    if not cubin:
        cubin, log = compile_ptx(str(ptx), arch)
    found = from_cubin(cubin, arch or (target(str(ptx)) if ptx else None), log)
    return with_dynamic(found, launch_shared_bytes(str(compiled.ir_module)))


def launch_shared_bytes(host_code: str) -> list[int]:
    """Dynamic shared memory, in bytes, of every launch in the host code (MLIR text) that asks for a constant amount."""
    # Field 2 of cudaLaunchConfig_t; SSA names are unique within a function only.
    config = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    field = rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] [^\n]*{config}"
    found = []
    for function in re.split(r"(?m)^  llvm\.func ", host_code):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        for name in re.findall(field, function):
            stored = re.search(rf"llvm\.store (%\w+), {name} : i64", function)
            if stored and stored[1] in constants:
                found.append(int(constants[stored[1]]))
    return found


def _assembler_log(remarks: str) -> str | None:
    """What the assembler printed, out of the DSL's remarks (YAML); None if there is nothing."""
    texts = re.findall(r"- Remark:\s+'ptxas output: ((?:[^']|'')*)'", remarks)
    return "\n".join(text.replace("''", "'") for text in texts) or None
