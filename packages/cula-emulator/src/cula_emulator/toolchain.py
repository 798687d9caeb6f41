"""The C++ compiler: which one, what it can do, and what it says when it fails."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Toolchain:
    """A compiler command, which may hold arguments, the user's flags, and what `--version` says."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """All that decides what comes out of the same source: the compiler, its flags, the processor."""
        return "\n".join(
            (self.version, *self.command, *self.flags, platform.machine(), _processor())
        )

    def supported(self, *wanted: str) -> list[str]:
        """Those of the flags that the compiler takes without a complaint."""
        return list(_supported(self.command, wanted))

    def run(self, arguments: Sequence[str], hidden: Path) -> None:
        """Runs the compiler. Raises BuildError with its first errors, in which the folder `hidden` is left out."""
        done = _execute([*self.command, *arguments])
        if done.returncode < 0:
            raise BuildError(
                f"{self.command[0]} was ended by signal {-done.returncode}; is the memory full?"
            )
        if done.returncode:
            message = first_errors(done.stderr).replace(f"{hidden}{os.sep}", "")
            raise BuildError(f"{self.command[0]} failed:\n{message}")


def first_errors(stderr: str) -> str:
    """The first errors of a compiler or linker, each with the line of source below it."""
    lines = [line[:300] for line in stderr.splitlines()]
    summaries = ("ld returned", "linker command failed")  # the linker's own lines say more
    marks = [
        n
        for n, line in enumerate(lines)
        if "error:" in line and not any(s in line for s in summaries)
    ]
    if not marks:
        return "\n".join(lines[:20]) or "(it printed nothing)"
    shown = [line for n in marks[:_SHOWN_ERRORS] for line in lines[n : n + 2]]
    more = len(marks) - _SHOWN_ERRORS
    return "\n".join([*shown, f"... and {more} more errors"] if more > 0 else shown)


def find() -> Toolchain:
    """$CXX, else g++, else clang++. Raises BuildError with one line if there is none."""
    names = ("CXX", "CULA_EMULATOR_CXXFLAGS", "PATH")
    return _find(*(os.environ.get(name, "") for name in names))


@functools.cache
def _find(chosen: str, flags: str, path: str) -> Toolchain:
    try:
        command, extra = shlex.split(chosen), shlex.split(flags)
    except ValueError as error:
        raise BuildError(f"CXX or CULA_EMULATOR_CXXFLAGS: {error}") from None
    if command:
        if not shutil.which(command[0], path=path):
            raise BuildError(f"CXX is {chosen!r}, but there is no program {command[0]!r}")
    else:
        command = [name for name in ("g++", "clang++") if shutil.which(name, path=path)][:1]
    if not command:
        raise BuildError(
            "cula_emulator compiles kernels with a C++17 compiler and finds neither g++ nor clang++; install one "
            '("apt install g++", "dnf install gcc-c++", "conda install gxx") or name one in CXX'
        )
    done = _execute([*command, "--version"])
    if done.returncode:
        raise BuildError(
            f"{shlex.join(command)} --version failed:\n{first_errors(done.stderr or done.stdout)}"
        )
    return Toolchain(tuple(command), tuple(extra), done.stdout)


def _execute(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]!r}: {error.strerror}") from None


@functools.cache
def _supported(command: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    def works(*flags: str) -> bool:
        probe = [*command, "-Werror", *flags, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
        return _execute(probe).returncode == 0

    # Most compilers take all, so that is one run.
    return wanted if works(*wanted) else tuple(flag for flag in wanted if works(flag))


def _processor() -> str:
    """The features that -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
