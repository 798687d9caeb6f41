# Vendored from packages/cula-cp-sm90/tests/kda_compiled.py by "nox -s vendor": edit the master.
"""Compiles configs for the tests of machine code, and says what a compiled kernel must fit into."""

from __future__ import annotations

import warnings
from dataclasses import fields

from cutlass.cute.runtime import make_fake_stream

from cula_emulator import resources
from cula_kda_sm100 import launch

SHARED_BYTES = 233_472  # of a multiprocessor
SYSTEM_BYTES = 1024  # of shared memory, per CTA


def label(value: object) -> str:
    """A target, or of a config the values that are not flags and the names of the flags that are set."""
    if isinstance(value, str):
        return value
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    words = [name if value is True else str(value) for name, value in values.items() if value]
    return "-".join(words) or "plain"


def build(target: str, config: launch.Config) -> resources.KernelResources:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        report = resources.compile(*launch.kernel(config), stream, arch=target)
    return report.kernel


def assert_ctas_fit(kernel: resources.KernelResources, ctas: int) -> None:
    """So many at once on a multiprocessor."""
    registers = -(-kernel.registers // 8) * 8 * kernel.threads[0]
    assert ctas * registers <= resources.REGISTERS_PER_SM, kernel.registers
    shared = kernel.shared_bytes + kernel.dynamic_shared_bytes
    assert ctas * (shared + SYSTEM_BYTES) <= SHARED_BYTES, shared
