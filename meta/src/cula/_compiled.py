"""`python -m cula compile` and `python -m cula cache`: kernels before they are needed, and those that are kept."""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cula_core.compiled.artifacts import Unit

FOLDERS = ("kernels", "libraries", "closures")


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Adds both to the subcommands of a parser."""
    compile = commands.add_parser(
        "compile", help="compile the kernels that an earlier run recorded, without a GPU"
    )
    compile.add_argument(
        "list", type=Path, nargs="+", help="files that CULA_RECORD named in such a run"
    )
    compile.add_argument(
        "--out",
        type=Path,
        help="make a bundle in this folder, which CULA_BUNDLE then names; default: fill the cache",
    )
    compile.add_argument(
        "--with-runtime",
        action="store_true",
        help="put CuTe DSL's runtime library into the bundle too: its images need no nvidia-cutlass-dsl",
    )
    compile.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
    cache = commands.add_parser("cache", help="where compiled kernels are kept, and how many")
    cache.add_argument("--clear", action="store_true", help="delete them")


def compile(options: argparse.Namespace) -> int:
    """Compiles what the lists name; returns the exit code: 0 done, 1 a kernel could not be compiled, 2 bad lists."""
    from cula_core.compiled import bundles

    if options.jobs < 1:
        return _fail(f"--jobs: expected at least 1, got {options.jobs}", 2)
    if options.with_runtime and options.out is None:
        return _fail("--with-runtime: expected --out, the folder of a bundle", 2)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            units = list(
                dict.fromkeys(unit for path in options.list for unit in bundles.recorded(path))
            )
    except (OSError, ValueError) as error:
        return _fail(str(error), 2)
    for warning in told:
        print(warning.message, file=sys.stderr)
    failed = 0
    # Processes, because the DSL compiles one kernel at a time.
    with ProcessPoolExecutor(min(options.jobs, max(len(units), 1)), get_context("spawn")) as pool:
        for unit, failure in zip(units, pool.map(_make, units), strict=True):
            failed += failure is not None
            print(f"{unit.module} {unit.config} {unit.arch}: {failure or 'compiled'}", flush=True)
    if failed:
        return _fail(f"{failed} of {len(units)} kernels could not be compiled", 1)
    if options.out is None:
        print(f"{len(units)} kernels are in the cache")
        return 0
    try:
        held = bundles.write(options.out, units, options.with_runtime)
    except (OSError, ValueError) as error:
        return _fail(str(error), 1)
    size = _size(_files(options.out))
    print(f"{options.out} has {held} kernels, {size} KiB; use them with CULA_BUNDLE={options.out}")
    return 0


def cache(options: argparse.Namespace) -> int:
    """Says what is kept, or deletes it; returns the exit code."""
    from cula_core.compiled.key import STORE

    folder = STORE.configured()
    if folder is None:
        return _fail("there is no home folder; CULA_CACHE_DIR names a folder", 1)
    kept = [path for name in FOLDERS for path in _files(folder / name)]
    libraries = sum(path.suffix == ".so" for path in kept)
    print(f"{folder}: {libraries} kernels, {_size(kept)} KiB")
    if options.clear:
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        left = sum(1 for name in FOLDERS for _ in _files(folder / name))
        if left:
            return _fail(f"{left} files of {folder} could not be deleted", 1)
        print("deleted")
    return 0


def _make(unit: Unit) -> str | None:
    """Fills the cache with a kernel, in a process of its own; returns what went wrong."""
    from cula_core.compiled.libraries import library

    try:
        library(unit)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _size(files: Iterable[Path]) -> int:
    return round(sum(path.stat().st_size for path in files) / 1024)


def _fail(text: str, code: int) -> int:
    print(f"python -m cula: {text}", file=sys.stderr)
    return code
