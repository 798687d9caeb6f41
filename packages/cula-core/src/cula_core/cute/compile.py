"""The one place that compiles: CuTe DSL is not safe for several threads at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

_LOCK = threading.Lock()


def compile(
    kernel: object, *arguments: object, arch: str, options: tuple = ()
) -> Callable[..., None]:
    """Compiles a kernel object for an architecture and returns what launches it on torch's current stream.

    arguments: fake tensors and numbers in the order of the kernel's `__call__`, without the stream, which is added.
    arch: "sm_80", "sm_90a", ... options: further options of `cute.compile`. Threads take turns.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _LOCK, warnings.catch_warnings():
        # Loops over the registers of a thread are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile[(cute.GPUArch(arch), cute.EnableTVMFFI, *options)](
            kernel, *arguments, stream
        )
