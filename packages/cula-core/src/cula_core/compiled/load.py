"""Shared libraries of compiled kernels, and their functions. Nothing of the DSL is imported.

A library names two others that it needs, the DSL's runtime and tvm-ffi, and finds them by the names under which they
are already open: neither has to be on a search path, nor open its symbols to the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

# No C library, no record of the build, and every symbol must be known.
_FLAGS = ("-shared", "-nostdlib", "-s", "-Wl,-z,defs,--as-needed,--hash-style=gnu,--build-id=none")
NEWEST = 10**6  # a version of CUDA that is newer than all


def load(path: Path, entry: str) -> Callable[..., None]:
    """Returns the function `entry` of a library, which launches a kernel on torch's current stream.

    The system knows libraries by path: a path must never hold another library than the first one loaded from there.
    Whoever calls this has compared the content: a truncated library kills the process.
    """
    import tvm_ffi

    runtime()
    library = ctypes.CDLL(str(path))
    address = ctypes.cast(library[f"__tvm_ffi_{entry}"], ctypes.c_void_p).value
    assert address is not None
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)


def link(host_object: Path, target: Path) -> None:
    """Makes a library of an object file. Raises OSError or subprocess.CalledProcessError where there is no linker."""
    import tvm_ffi

    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    needed = (runtime()._name, tvm_ffi.libinfo.find_libtvm_ffi())
    for command in dict.fromkeys((compiler, "cc", "gcc", "clang")):
        with suppress(FileNotFoundError):
            call = (command, *_FLAGS, str(host_object), *needed, "-o", str(target))
            subprocess.run(call, check=True, capture_output=True, text=True)
            return
    raise FileNotFoundError("there is no C compiler driver to link with")


def runtimes() -> dict[int, Path]:
    """Returns the runtime libraries of the installed DSL by version of CUDA."""
    spec = find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return {
        int(path.parents[1].name[2:]): path
        for root in roots
        for path in Path(root).glob("cu*/lib/libcute_dsl_runtime.so")
    }


@functools.cache
def runtime() -> ctypes.CDLL:
    """Opens the DSL's runtime library, of the newest CUDA that the driver serves; without a driver the newest one.

    It is that of the installed DSL, or else of a bundle. Raises ImportError where there is none.
    """
    from .bundles import runtimes as bundled

    found = runtimes() or bundled()
    version = ctypes.c_int(NEWEST)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    served = [cuda for cuda in found if cuda <= version.value // 1000]
    if not served:
        raise ImportError(
            f"nvidia-cutlass-dsl has a runtime for CUDA {sorted(found)}, and the driver serves {version.value // 1000}"
            if found
            else "the runtime library of nvidia-cutlass-dsl is neither installed nor in a bundle"
        )
    return ctypes.CDLL(str(found[max(served)]))
