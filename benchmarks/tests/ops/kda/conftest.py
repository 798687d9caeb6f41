"""Small problems, and what these tests use of the KDA packages beyond their public functions."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda.internals import kernel_of


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 channels, and an oracle with chunks of 32 tokens."""
    monkeypatch.setattr(kda, "DIM", 16)
    monkeypatch.setattr(kda, "ORACLE_CHUNK", 32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Names of launched kernels with their arguments, as if this machine had a Hopper GPU; nothing runs."""
    from cula_cp_sm90 import launch, ops

    calls: list[tuple[str, tuple[Any, ...]]] = []

    def compile_for(device: torch.device) -> Callable[[Any], Callable[..., None]]:
        return lambda config: lambda *given: calls.append((kernel_of(config), given))

    monkeypatch.setattr(launch, "_compile_for", compile_for)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(ops, "_is_plain_cuda_call", lambda q: True)
    monkeypatch.setattr(ops, "_require_target", lambda device: None)
    return calls


@pytest.fixture
def segments_chosen() -> Callable[[], int]:
    """The number of segments that the planner for Hopper takes now; it is the same for all shapes where it is set."""
    from cula_cp_sm90 import config

    return lambda: config.parts_of(0, 0, 0, 0, "auto")


def instructions(package: str, config: Any, target: str) -> Counter[str]:
    """How often each opcode, without its modifiers, stands in the machine code of a kernel."""
    from cutlass.cute.runtime import make_fake_stream

    from cula_emulator import resources

    launch = import_module(f"{package}.launch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        report = resources.compile(*launch.kernel(config), stream, arch=target)
    counts: Counter[str] = Counter()
    for name, count in report.kernel.instructions.items():
        counts[name.split(".")[0]] += count
    return counts


@pytest.fixture
def instructions_of_prepare() -> Callable[[str, str], Counter[str]]:
    """Counts the instructions of prepare with bf16 inputs, for (package, target)."""

    def count(package: str, target: str) -> Counter[str]:
        config = import_module(f"{package}.config").PrepareConfig(*["bfloat16"] * 3)
        return instructions(package, config, target)

    return count


@pytest.fixture
def instructions_of_recurrence() -> Callable[[str, str, bool], Counter[str]]:
    """Counts the instructions of the recurrence with bf16 values, or of the scan, for (package, target, scan)."""

    def count(package: str, target: str, scan: bool) -> Counter[str]:
        config = import_module(f"{package}.config").RecurrenceConfig(
            "bfloat16", scan=scan, split=scan, final_state=not scan
        )
        return instructions(package, config, target)

    return count
