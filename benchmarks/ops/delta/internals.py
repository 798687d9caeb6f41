"""What the benchmarks use of cula_delta_decode and of its oracle beyond public functions; no other file here does."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.ops.part_of_card import planned_for
from benchmarks.ops.tiles import arch_here
from cula_core import tensors
from cula_core.reference import decode_fused as fused
from cula_core.reference import delta_decode as reference
from cula_core.reference.delta_decode import Gates, Replay
from cula_delta_decode import ops
from cula_delta_decode.config import Config, Gate, Problem
from cula_delta_decode.plan import candidates, select

__all__ = [
    "Config",
    "Gate",
    "Gates",
    "Problem",
    "Replay",
    "candidates",
    "compile_ahead",
    "compiled_here",
    "fused",
    "launched",
    "multiprocessors",
    "reference",
    "select",
]


def launched(call: Callable[[], Any]) -> tuple[Problem, Any]:
    """The problem and the arguments of the one kernel that a call launches on a GPU; it is not launched."""
    from cula_delta_decode import launch

    found = []
    with (
        mock.patch.object(launch, "_launch", lambda *given: found.append(given)),
        mock.patch.object(ops, "is_plain_cuda_call", lambda k: True),
    ):
        call()
    (only,) = found
    return only


_compiled: dict[Config, Any] = {}


def compile_ahead(configs: Iterable[Config]) -> None:
    """Compiles kernels for the GPU of this machine in processes, one for every core, and loads them."""
    missing = [config for config in configs if config not in _compiled]
    if missing:
        arch = arch_here()
        hosts = _pool().map(functools.partial(_host_object, arch=arch), missing)
        for config, host in zip(missing, hosts, strict=True):
            _compiled[config] = _loaded(host)


def compiled_here(config: Config) -> Any:
    """The kernel of a configuration, compiled for the GPU of this machine."""
    from cula_delta_decode import launch

    if config not in _compiled:
        _compiled[config] = launch.compile(config, arch_here())
    return _compiled[config]


@functools.cache
def _pool() -> ProcessPoolExecutor:
    workers = len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _host_object(config: Config, arch: str) -> bytes:
    """The object file of a kernel's host code, which holds its machine code too."""
    from cula_core.compiled.artifacts import artifacts
    from cula_delta_decode import launch

    return artifacts(launch.unit(config, arch)).host_object


def _loaded(host_object: bytes) -> Any:
    """The function of an object file that `_host_object` returned."""
    from cutlass.cute.runtime import load_module

    from cula_core.compiled.artifacts import ENTRY

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "host.o")
        path.write_bytes(host_object)
        return getattr(load_module(str(path), enable_tvm_ffi=True), ENTRY)


def multiprocessors(count: int) -> AbstractContextManager[None]:
    """Inside the block the package chooses tiles as for a card of `count` multiprocessors."""
    from cula_delta_decode import launch

    return planned_for(count, tensors, launch)
