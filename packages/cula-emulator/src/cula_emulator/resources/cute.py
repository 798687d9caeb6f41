"""CuTe DSL front end. nvidia-cutlass-dsl is imported when `compile` is called, not before."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cula_core.compiled.texts import assembler_log, launch_shared_bytes

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

    from cula_core.cute.compile import without_locations

    with tempfile.TemporaryDirectory() as scratch, without_driver(), without_locations():
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
        log = assembler_log(remarks.read_text() if remarks.exists() else "") or None
    return from_artifacts(compiled, arch, log)


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
