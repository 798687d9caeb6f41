"""Results of decode with the delta rule that no GPU gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.ops.delta import (
    delta_decode,
    delta_decode_80sm,
    delta_decode_fused,
    flashinfer_calls,
    flashinfer_replay,
    fused_providers,
    providers,
)
from benchmarks.ops.delta import problem as delta

# Microseconds of a row and token.
COSTS = {
    "cula": 1.0,
    "cula_write": 1.2,
    "cula_commit": 1.5,
    "cula_slots": 2.5,
    "fla": 1.4,
    "fla_inplace": 1.3,
    "flashinfer": 1.1,
    "flashinfer_replay": 1.2,
    "inplace_ceiling": 0.96,
    "cula_chain": 1.6,
    "fla_chain": 2.0,
    "vllm_after_conv": 1.25,
    "vllm": 1.15,
    "sglang": 1.3,
}


@pytest.fixture
def peers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer serves what it can serve where it is installed."""
    monkeypatch.setattr(providers, "_fla_missing", lambda: None)
    for name in ("_gdn_missing", "_kda_missing"):
        monkeypatch.setattr(flashinfer_calls, name, lambda: None)
    monkeypatch.setattr(flashinfer_replay, "_missing", lambda: None)
    for name in ("_fla_missing", "_vllm_decode_missing"):
        monkeypatch.setattr(fused_providers, name, lambda: None)
    monkeypatch.setattr(fused_providers, "_tuned", lambda setting: None)


@pytest.fixture
def delta_result(peers_are_there: None, measured: Callable[..., Any]) -> Callable[..., Any]:
    """delta_result(op, slowdown): all settings of an op on the fake device, where nothing is checked."""

    def make(op: str = "delta_decode", slowdown: float = 1.0) -> dict[str, Any]:
        modules = (delta_decode, delta_decode_80sm, delta_decode_fused)
        (chosen,) = (module.OP for module in modules if module.OP.name == op)

        def cost(name: str, problem: Any) -> float:
            p = problem.params
            return COSTS[name] * p["B"] * (3 + p["T"]) / 4 * (slowdown if name == "cula" else 1)

        return measured(
            chosen,
            cost,
            chosen.settings(False),
            make_inputs=lambda problem, device, seed: seed,
            set_bytes=lambda problem: delta.state_bytes(problem),
            check=lambda provider, problem, device: {},
        )

    return make
