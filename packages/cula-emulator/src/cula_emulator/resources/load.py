"""The report of anything compiled: a cubin, PTX, a file of either, or what `cute.compile` returned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cute import from_artifacts
from .kernels import Report, from_cubin, with_dynamic
from .ptxas import compile_ptx, target


def report(
    compiled: object,
    arch: str | None = None,
    *,
    log: str | None = None,
    dynamic_shared_bytes: Sequence[int] = (),
) -> Report:
    """Resources of everything in a compiled module.

    compiled: bytes of a cubin; PTX text; a path to a .cubin or .ptx file; or the result of `cute.compile` with
    cute.KeepCUBIN (or KeepPTX, which is then compiled again). arch: e.g. "sm_90a", for PTX another than its .target.
    log, dynamic_shared_bytes: what its assembler printed and what the launches of its host code ask for, of a cubin
    that they were kept with.
    Raises CubinError, AssemblerNotFound or AssemblyFailed for PTX, ValueError for anything else.
    """
    if isinstance(compiled, Path) or (isinstance(compiled, str) and "\n" not in compiled):
        data = Path(compiled).read_bytes()
        compiled = data if data.startswith(b"\x7fELF") else data.decode()
    if isinstance(compiled, (bytes, bytearray, memoryview)):
        return with_dynamic(from_cubin(bytes(compiled), arch, log), dynamic_shared_bytes)
    if isinstance(compiled, str):
        cubin, log = compile_ptx(compiled, arch)
        return from_cubin(cubin, arch or target(compiled), log)
    return from_artifacts(compiled, arch)
