"""Compiles kernels for tests of machine code, and says what a compiled kernel must fit into."""

from __future__ import annotations

from dataclasses import fields

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


def assert_ctas_fit(kernel: resources.KernelResources, ctas: int) -> None:
    """Holds a kernel to so many CTAs at once on a multiprocessor."""
    assert kernel.threads is not None and kernel.dynamic_shared_bytes is not None
    registers = -(-kernel.registers // 8) * 8 * kernel.threads[0]
    assert ctas * registers <= resources.REGISTERS_PER_SM, kernel.registers
    shared = kernel.shared_bytes + kernel.dynamic_shared_bytes
    assert ctas * (shared + SYSTEM_BYTES) <= SHARED_BYTES, shared
