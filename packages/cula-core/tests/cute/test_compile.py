"""Threads may compile at the same time, and what is made does not depend on the machine at hand."""

from __future__ import annotations

import threading

import cutlass.base_dsl.runtime.cuda as runtime
import pytest

from cula_core.cute import fake
from cula_core.cute.compile import _no_device, compile_artifacts
from cula_core.cute.schedule import SegmentTable
from cula_core.cute.types import INDICES

ARCH, ENTRY = "sm_90a", "entry"


def table(tokens: int = 64, index_dtype: str = "int32") -> tuple:
    """The smallest kernel there is, with its fake arguments."""
    return SegmentTable(tokens), *fake.segment_table_arguments(INDICES[index_dtype])


def test_threads_take_turns():
    """Without the lock "Please start a session before accessing session data" or the like is raised."""
    start, errors, made = threading.Barrier(2), [], []

    def work(tokens: int) -> None:
        start.wait()
        try:
            for n in range(2):
                made.append(compile_artifacts(*table(tokens + n), arch=ARCH, entry=ENTRY))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in (64, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({ptx for ptx, *_ in made}) == 4


def test_what_is_kept_of_a_kernel():
    ptx, cubin, host, log, shared = compile_artifacts(*table(), arch=ARCH, entry=ENTRY)
    assert f".target {ARCH}" in ptx and cubin[:4] == host[:4] == b"\x7fELF"
    assert f"__tvm_ffi_{ENTRY}".encode() in host and cubin in host
    assert "Used " in log and "spill stores" in log and "Compile time" not in log
    assert shared == (1056,)


def test_a_kernel_may_not_ask_the_current_device():
    original = runtime.get_device_attribute
    with (
        _no_device(),
        pytest.raises(RuntimeError, match="^the kernel asks the current device for shared$"),
    ):
        runtime.get_device_attribute("shared", 0)
    assert runtime.get_device_attribute is original
