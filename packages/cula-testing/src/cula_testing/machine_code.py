"""Compiles kernels for tests of machine code, and says what a compiled kernel must fit into."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

from cutlass.cute.runtime import make_fake_stream

from cula_emulator import resources

SHARED_BYTES = 233_472  # of a multiprocessor
SYSTEM_BYTES = 1024  # of shared memory, per CTA


def label(value: object) -> str:
    """Returns the name of a case: a target as it is, of a config the values and the names of the flags that are set."""
    if isinstance(value, str):
        return value
    values = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    words = [name if value is True else str(value) for name, value in values.items() if value]
    return "-".join(words) or "plain"


def with_stream(kernel: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a kernel and its fake arguments with the stream that `cula_core.cute.compile` adds to them."""
    return *kernel, make_fake_stream(use_tvm_ffi_env_stream=True)


def quietly(compile: Any, *arguments: Any, **named: Any) -> Any:
    """Calls something that compiles; loops over the registers of a thread are unrolled on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")
        return compile(*arguments, **named)


def build(arch: str, kernel: tuple[Any, ...]) -> resources.KernelResources:
    """Compiles a kernel with its fake arguments and returns what it asks of a GPU."""
    return quietly(resources.compile, *with_stream(kernel), arch=arch).kernel


def assert_ctas_fit(kernel: resources.KernelResources, ctas: int) -> None:
    """Holds a kernel to so many CTAs at once on a multiprocessor."""
    assert kernel.threads is not None and kernel.dynamic_shared_bytes is not None
    registers = -(-kernel.registers // 8) * 8 * kernel.threads[0]
    assert ctas * registers <= resources.REGISTERS_PER_SM, kernel.registers
    shared = kernel.shared_bytes + kernel.dynamic_shared_bytes
    assert ctas * (shared + SYSTEM_BYTES) <= SHARED_BYTES, shared
