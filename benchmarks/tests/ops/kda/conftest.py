"""Small problems, and what these tests use of the KDA packages beyond their public functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda.internals import kernel_of
from cula_core.delta_rule.config import PrepareConfig
from cula_core.delta_rule.plan import CostModel


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 channels, and an oracle with chunks of 32 tokens."""
    monkeypatch.setattr(kda, "DIM", 16)
    monkeypatch.setattr(kda, "ORACLE_CHUNK", 32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Names of launched kernels with their arguments, as if this machine had a Hopper GPU; nothing runs."""
    from cula_core import tensors
    from cula_core.delta_rule import launch, prefill

    calls: list[tuple[str, tuple[Any, ...]]] = []

    def kernels_of(target: Any, device: torch.device) -> Callable[[Any], Callable[..., None]]:
        return lambda config: lambda *given: calls.append((kernel_of(config), given))

    monkeypatch.setattr(launch, "kernels_of", kernels_of)
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(prefill, "is_plain_cuda_call", lambda q: True)
    monkeypatch.setattr(prefill, "_capability", lambda device: (9, 0))
    return calls


@pytest.fixture
def segments_chosen() -> Callable[[], int]:
    """The number of segments that the planner for Hopper takes now; it is the same for all shapes where it is set."""
    return lambda: CostModel.parts_of(None, 0, 0, "auto")


def instructions(package: str, config: Any, arch: str) -> Counter[str]:
    """How often each opcode, without its modifiers, stands in the machine code of a kernel."""
    from cula_core.compiled.artifacts import artifacts
    from cula_core.delta_rule import launch
    from cula_emulator.resources import report

    target = import_module(f"{package}.arch").TARGET
    kernel = report(artifacts(launch.unit(target, config, arch)).cubin).kernel
    counts: Counter[str] = Counter()
    for name, count in kernel.instructions.items():
        counts[name.split(".")[0]] += count
    return counts


@pytest.fixture
def instructions_of_prepare() -> Callable[[str, str], Counter[str]]:
    """Counts the instructions of prepare with bf16 inputs, for (package, target)."""

    def count(package: str, target: str) -> Counter[str]:
        return instructions(package, PrepareConfig(*["bfloat16"] * 3), target)

    return count


@pytest.fixture
def instructions_of_recurrence() -> Callable[[str, str, bool], Counter[str]]:
    """Counts the instructions of the recurrence with bf16 values, or of the scan, for (package, target, scan)."""

    def count(package: str, target: str, scan: bool) -> Counter[str]:
        of_package = import_module(f"{package}.arch").TARGET
        config = of_package.recurrence_config(
            "bfloat16", scan=scan, split=scan, final_state=not scan
        )
        return instructions(package, config, target)

    return count
