"""PTX to machine code with whichever assembler is installed, and its log.

The DSL and Triton bring an assembler of their own; this is for PTX text. Nothing here needs a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import EmulatorError


class AssemblerNotFound(EmulatorError):
    """No ptxas and no nvJitLink on this machine; the message says what to install."""


class AssemblyFailed(EmulatorError):
    """The assembler rejected the PTX; the message is its log."""


_NOTHING_FOUND = (
    "no assembler for PTX found: `pip install nvidia-cuda-nvcc` brings ptxas, "
    "or set CUDA_HOME to a CUDA toolkit"
)
# Where pip packages keep their files, below a folder of sys.path.
_PTXAS_IN_PACKAGES = (
    "nvidia/cu*/bin/ptxas",  # nvidia-cuda-nvcc
    "nvidia/cuda_nvcc/bin/ptxas",  # nvidia-cuda-nvcc-cu12
    "triton/backends/nvidia/bin/ptxas-blackwell",
    "triton/backends/nvidia/bin/ptxas",
)
_NVJITLINK_IN_PACKAGES = (
    "nvidia/cu*/lib/libnvJitLink.so.*",
    "nvidia/nvjitlink/lib/libnvJitLink.so.*",
)


@dataclass(frozen=True)
class Spills:
    """Of one function, in bytes per thread, as the assembler's log says."""

    stack: int
    stores: int
    loads: int


def compile_ptx(
    ptx: str, arch: str | None = None, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Machine code and log for PTX text.

    arch: e.g. "sm_90a"; None takes the PTX's own .target. options: further options of ptxas, e.g. "--maxrregcount=64".
    The log is that of `ptxas -v`: registers, spills and warnings of each function.
    Tries ptxas of pip packages, then of a CUDA toolkit, then the nvJitLink library, which ignores `setmaxnreg` (and
    says so in the log). PTX of a newer version than an assembler knows is offered to it under its own version.
    Raises AssemblerNotFound or AssemblyFailed.
    """
    arch = arch or target(ptx)
    failures = []
    for run in _assemblers():
        cubin, log = run(ptx, arch, options)
        newest = re.search(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'", log)
        if cubin is None and newest:
            cubin, log = run(
                re.sub(r"(?m)^(\s*\.version\s+)[\d.]+", rf"\g<1>{newest[1]}", ptx, count=1),
                arch,
                options,
            )
        if cubin is not None:
            return cubin, log
        failures.append(log.strip())
    if not failures:
        raise AssemblerNotFound(_NOTHING_FOUND)
    # The first is the preferred one; the others complain about the same PTX.
    raise AssemblyFailed(f"PTX for {arch} was rejected:\n{failures[0]}")


def target(ptx: str) -> str:
    """The architecture of the .target directive, e.g. "sm_90a"."""
    found = re.search(r"(?m)^\s*\.target\s+(sm_\w+)", ptx)
    if not found:
        raise AssemblyFailed("PTX without a .target directive; pass arch=")
    return found[1]


def parse_spills(log: str) -> dict[str, Spills]:
    """Stack and spills per function."""
    pattern = (
        r"Function properties for '?([^\s':]+)'?:?\s*\n[^\n]*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    )
    return {name: Spills(*map(int, amounts)) for name, *amounts in re.findall(pattern, log)}


def parse_warnings(log: str) -> tuple[str, ...]:
    """Warnings and notes with a code, without "ptxas info" in front: serialised or waited-for WGMMA and the like."""
    found = []
    for line in log.splitlines():
        prefix, _, text = line.partition(":")
        is_note = re.search(r"\(C\d+\)|Performance Loss", text)
        if re.match(r"ptxas\b|info|warning", prefix.strip()) and ("warning" in prefix or is_note):
            found.append(text.strip())
    return tuple(dict.fromkeys(found))


def _assemblers() -> Iterator:
    for path in _ptxas_paths():
        yield lambda ptx, arch, options, path=path: _run_ptxas(path, ptx, arch, options)
    for path in _in_packages(_NVJITLINK_IN_PACKAGES):
        yield lambda ptx, arch, options, path=path: _run_nvjitlink(path, ptx, arch, options)


def _in_packages(patterns: Sequence[str]) -> Iterator[Path]:
    for folder in dict.fromkeys(sys.path):
        for pattern in patterns:
            yield from sorted(Path(folder or ".").glob(pattern), reverse=True)


def _ptxas_paths() -> Iterator[Path]:
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [
        *_in_packages(_PTXAS_IN_PACKAGES),
        *(Path(home, "bin", "ptxas") for home in (*toolkits, "/usr/local/cuda") if home),
        Path(shutil.which("ptxas") or ""),
    ]
    for path in dict.fromkeys(candidates):
        if path.is_file() and os.access(path, os.X_OK):
            yield path


def _run_ptxas(path: Path, ptx: str, arch: str, options: Sequence[str]) -> tuple[bytes | None, str]:
    with tempfile.TemporaryDirectory() as scratch:
        # Relative names: the assembler writes its command line into the cubin.
        Path(scratch, "kernel.ptx").write_text(ptx)
        command = [
            str(path.absolute()),
            "-v",
            f"-arch={arch}",
            *options,
            "kernel.ptx",
            "-o",
            "kernel.cubin",
        ]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        cubin = Path(scratch, "kernel.cubin").read_bytes() if done.returncode == 0 else None
        return cubin, done.stdout + done.stderr


def _run_nvjitlink(
    path: Path, ptx: str, arch: str, options: Sequence[str]
) -> tuple[bytes | None, str]:
    library = ctypes.CDLL(str(path))
    # Its header maps the plain names to the newest version of the interface; any version does here.
    version = next(
        f"{major}_{minor}"
        for major in range(20, 11, -1)
        for minor in range(12, -1, -1)
        if hasattr(library, f"__nvJitLinkCreate_{major}_{minor}")
    )

    def call(name: str, *arguments: object) -> int:
        return getattr(library, f"__nvJitLink{name}_{version}")(*arguments)

    def fetch(what: str) -> bytes:
        size = ctypes.c_size_t()
        call(f"Get{what}Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        call(f"Get{what}", handle, buffer)
        return buffer.raw[: size.value]

    texts = [
        f"-arch={arch}".encode(),
        b"-Xptxas=-v",
        *(f"-Xptxas={option}".encode() for option in options),
    ]
    handle, source = ctypes.c_void_p(), ptx.encode() + b"\0"
    is_ptx = 2
    if call("Create", ctypes.byref(handle), len(texts), (ctypes.c_char_p * len(texts))(*texts)):
        return None, f"nvJitLink refuses the options {texts}"
    try:
        failed = call(
            "AddData", handle, is_ptx, source, ctypes.c_size_t(len(source)), b"kernel.ptx"
        )
        failed = failed or call("Complete", handle)
        log = (fetch("ErrorLog") + fetch("InfoLog")).replace(b"\0", b"").decode(errors="replace")
        return (None if failed else fetch("LinkedCubin")), log
    finally:
        call("Destroy", ctypes.byref(handle))
