"""The one place that compiles: CuTe DSL is not safe for several threads at once."""

from __future__ import annotations

import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cutlass.base_dsl.dsl as dsl
import cutlass.base_dsl.runtime.cuda as runtime
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir, RemarkFilter, RemarkOutput
from cutlass.cute.runtime import make_fake_stream

_LOCK = threading.Lock()


def compile(
    kernel: object, *arguments: object, arch: str, options: tuple = ()
) -> Callable[..., None]:
    """Compiles a kernel object for an architecture and returns what launches it on torch's current stream.

    arguments: fake tensors and numbers in the order of the kernel's `__call__`, without the stream, which is added.
    arch: "sm_80", "sm_90a", ... options: further options of `cute.compile`. Threads take turns.
    """
    with _LOCK:
        return _compile(kernel, arguments, arch, options)


def compile_artifacts(
    kernel: object, *arguments: object, arch: str, entry: str
) -> tuple[str, bytes, bytes, str, tuple[int, ...]]:
    """Compiles as `compile` does, but asks no GPU, and returns PTX, machine code, the object file of the host code with
    the function `entry`, the assembler's log, and the dynamic shared memory of each launch."""
    with _LOCK, _no_device(), _no_locations(), tempfile.TemporaryDirectory() as place:
        host, remarks = Path(place, "host.o"), Path(place, "remarks.yaml")
        options = (
            cute.KeepPTX,
            cute.KeepCUBIN,
            DumpDir(place),
            RemarkFilter("ptxas"),
            RemarkOutput(str(remarks)),
        )
        made: Any = _compile(kernel, arguments, arch, options)
        made.export_to_c(str(host), function_name=entry)
        found = made.artifacts
        log = assembler_log(remarks.read_text())
        shared = tuple(launch_shared_bytes(str(made.ir_module)))
        return str(found.PTX), bytes(found.CUBIN), host.read_bytes(), log, shared


def _compile(
    kernel: object, arguments: tuple[object, ...], arch: str, options: tuple
) -> Callable[..., None]:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with warnings.catch_warnings():
        # Loops over the registers of a thread are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        chosen = (cute.GPUArch(arch), cute.EnableTVMFFI, *options)
        return cute.compile[chosen](kernel, *arguments, stream)


@contextmanager
def _no_device():
    """What is compiled must not depend on the card at hand, which `min_blocks_per_mp` may ask for its shared memory."""

    def refuse(attribute: object, *_: object, **__: object) -> int:
        raise RuntimeError(f"the kernel asks the current device for {attribute}")

    original, runtime.get_device_attribute = runtime.get_device_attribute, refuse
    try:
        yield
    finally:
        runtime.get_device_attribute = original


@contextmanager
def _no_locations():
    """Remarks make the DSL look up the source of every operation, which doubles the time of a compile and changes
    neither code nor log."""
    original = dsl._set_enable_frame_filtering
    dsl._set_enable_frame_filtering = lambda _: original(False)
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = original


def assembler_log(remarks: str) -> str:
    """Returns what the assembler printed, out of the DSL's remarks (YAML), but for the time that it took."""
    texts = re.findall(r"- Remark:\s+'ptxas output: ((?:[^']|'')*)'", remarks)
    lines = "\n".join(texts).replace("''", "'").splitlines()
    return "\n".join(line for line in lines if "Compile time" not in line)


def launch_shared_bytes(host_code: str) -> list[int]:
    """Returns the bytes of dynamic shared memory of every launch in host code (MLIR text) that asks for a constant."""
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
