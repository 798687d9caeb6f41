"""A small study of quality against speed on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.harness.timers import Timing
from benchmarks.ops.lite.quality_study import ALL, Case, HostBackend, Study
from benchmarks.ops.lite.workloads import Shape


@pytest.fixture(scope="session")
def tiny() -> dict[str, Case]:
    """Every workload on 256 tokens, by name."""
    return {w.name: Case(w, Shape(1, (2, 8, 16), 4, 32)) for w in ALL}


@pytest.fixture(scope="session")
def study_of() -> Callable[..., Study]:
    """Makes a study of three steps, two thresholds and one target; options replace these."""

    def make(backend: Any = None, **options: Any) -> Study:
        given = {"steps": 3, "tried": 3, "thresholds": (-1.0, -8.0), "targets": (0.05,)} | options
        timing = Timing(rounds=2, block=1, eager_calls=1, warmup=1)
        return Study("cpu", backend or HostBackend(), timing, 0, **given)

    return make


@pytest.fixture(scope="session")
def study(study_of: Callable[..., Study], tiny: dict[str, Case]) -> Study:
    """A study that ran two workloads."""
    found = study_of()
    with torch.inference_mode():
        found.run(tiny["local"])
        found.run(tiny["drift-refresh"])
    return found


@pytest.fixture
def studied(study: Study, toy_result: dict[str, Any]) -> dict[str, Any]:
    """The content of that study's result file; a test may change it."""
    origin = {**toy_result["provenance"], "gpu": "cpu"}
    return copy.deepcopy(study.result(origin, toy_result["place"]))
