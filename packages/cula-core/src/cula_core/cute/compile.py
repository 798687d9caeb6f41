"""The one place that compiles."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cutlass.base_dsl.dsl as dsl
import cutlass.base_dsl.runtime.cuda as runtime
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir, RemarkFilter, RemarkOutput
from cutlass.cute.runtime import make_fake_stream

from ..compiled.texts import assembler_log, launch_shared_bytes
from ..compiled.turns import turn


def compile_artifacts(
    kernel: object, *arguments: object, arch: str, entry: str
) -> tuple[str, bytes, bytes, str, tuple[int, ...]]:
    """Compiles a kernel object for an architecture, without asking a GPU. Threads take turns.

    arguments: fake tensors and numbers in the order of the kernel's `__call__`, without the stream, which is added.
    arch: "sm_80", "sm_90a", ... Returns PTX, machine code, the object file of the host code with the function `entry`,
    the assembler's log, and the dynamic shared memory of each launch.
    """
    with turn(), _no_device(), without_locations(), tempfile.TemporaryDirectory() as place:
        host, remarks = Path(place, "host.o"), Path(place, "remarks.yaml")
        chosen = (
            cute.GPUArch(arch),
            cute.EnableTVMFFI,
            cute.KeepPTX,
            cute.KeepCUBIN,
            DumpDir(place),
            RemarkFilter("ptxas"),
            RemarkOutput(str(remarks)),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        with warnings.catch_warnings():
            # Loops over the registers of a thread are unrolled on purpose.
            warnings.filterwarnings("ignore", message="This static loop has")
            made: Any = cute.compile[chosen](kernel, *arguments, stream)
        made.export_to_c(str(host), function_name=entry)
        found = made.artifacts
        log = assembler_log(remarks.read_text())
        shared = tuple(launch_shared_bytes(str(made.ir_module)))
        return str(found.PTX), bytes(found.CUBIN), host.read_bytes(), log, shared


def load_object(path: Path, entry: str) -> Callable[..., None]:
    """Returns the function `entry` of an object file of host code, which the DSL links in memory."""
    with turn():
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), entry)


@contextmanager
def _no_device() -> Iterator[None]:
    """What is compiled must not depend on the card at hand, which `min_blocks_per_mp` may ask for its shared memory."""

    def refuse(attribute: object, *_: object, **__: object) -> int:
        raise RuntimeError(f"the kernel asks the current device for {attribute}")

    original, runtime.get_device_attribute = runtime.get_device_attribute, refuse
    try:
        yield
    finally:
        runtime.get_device_attribute = original


@contextmanager
def without_locations() -> Iterator[None]:
    """Remarks make the DSL look up the source of every operation, which doubles the time of a compile and changes
    neither code nor log."""
    original = getattr(dsl, "_set_enable_frame_filtering", None)
    if original is None:  # another version of the DSL, which then takes its time
        yield
        return
    dsl._set_enable_frame_filtering = lambda enable: original(False)
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = original
