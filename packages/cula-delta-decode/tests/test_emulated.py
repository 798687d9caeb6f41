"""The compiled kernels on the CPU, for their real architectures, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from delta_problems import SLOTS, Case, Inputs, exact, make_inputs, problem_of
from torch import Tensor

from cula_core.reference.delta_decode import Replay
from cula_delta_decode import launch
from cula_delta_decode.config import DTYPES, Problem
from cula_delta_decode.plan import select
from cula_emulator.covering import covering_cases
from cula_testing.comparing import same
from cula_testing.compiled import emulated_kernel

FACTORS = {
    "gate": (
        ("softplus", False),
        ("safe", True),
        ("none", False),
        ("log", False),
        ("log", True),
        ("softplus", True),
        ("safe", False),
    ),
    "strength": ("logits", "given", "one"),
    "tokens": (1, 2, 4, 8, 3),
    "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"),
    "dims": ((64, 64), (128, 64), (64, 128)),
    "heads": ((1, 1), (2, 2), (1, 3), (2, 4)),
    "state_dtype": DTYPES,
    "dtype": ("bfloat16", "float16"),
    "gate_dtype": ("bfloat16", "float32"),
    "state_v_first": (False, True),
    "indexed": (False, True),
    "packed": (False, True),
    "l2norm": (True, False),
    "doubled": (False, True),
    "bias": ("float32", None),
}
CASES = covering_cases(FACTORS, lambda case: True)


def label(case: dict) -> str:
    order = "VK" if case["state_v_first"] else "KV"
    gate = case["gate"][0] + "-channels" * case["gate"][1]
    dims = "x".join(map(str, case["dims"]))
    packed = "-packed" * case["packed"]
    return f"{case['arch']}-{gate}-{case['state_dtype']}-{dims}-{order}-T{case['tokens']}{packed}"


@pytest.fixture
def run(emulated) -> Callable[..., Tensor]:
    """run(case, inputs, arch, ...) launches one emulated call and returns its output, filled with NaN before."""

    def run(
        case: Case,
        x: Inputs,
        arch: str = "sm_90a",
        *,
        scale: float | None = None,
        next_state: Tensor | None = None,
        next_slots: Tensor | None = None,
        accepted: Tensor | None = None,
        token_states: Tensor | None = None,
        token_slots: Tensor | None = None,
        replay: Replay | None = None,
        **changes,
    ) -> Tensor:
        problem = problem_of(
            case,
            slots=0 if x.slots is None else x.slots.dim(),
            ends=next_state is not None,
            redirected=next_slots is not None,
            every_token=token_states is not None,
            replay=replay is not None,
        )
        out = emulated.empty_like(x.v)
        scale = case.dims[0] ** -0.5 if scale is None else scale
        bound = -5.0 if case.gate[0] == "safe" else 1.0
        state = x.state if case.begins else None
        rows = len(x.lengths)
        kernel = compiled(problem, arch)
        kernel(
            x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, out, state, next_state, x.slots, next_slots, accepted,
            token_states, token_slots, x.cu_seqlens, *(replay or (None,) * 4), scale, bound, 20.0, case.null_slot,
            rows, **changes,
        )  # fmt: skip
        return out

    def compiled(problem: Problem, arch: str):
        assert problem.illegal() is None
        return emulated_kernel(emulated, launch.unit(select(problem, arch), arch))

    run.compiled = compiled
    return run


def live_rows(case: Case) -> list[int]:
    return [n for n, slot in enumerate(SLOTS) if slot >= 0] if case.indexed else [0, 1, 2, 3]


def assert_rounded_once(actual: Tensor, expected: Tensor, relative_rmse) -> None:
    floor = relative_rmse(expected.to(actual.dtype), expected)
    error = relative_rmse(actual, expected)
    assert error <= 1.05 * floor + 1e-6, (error, floor)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, emulated, relative_rmse, case):
    arch = case["arch"]
    case = Case(**{name: value for name, value in case.items() if name != "arch"})
    x = make_inputs(case)
    live = live_rows(case)
    slots = [SLOTS[n] for n in live] if case.indexed else live
    unused = [slot for slot in range(len(x.state)) if slot not in slots]
    x.state[unused] = math.nan
    before = x.state.clone()
    expected, state = exact(case, x)
    x.state = emulated.empty_like(x.state).copy_(before)
    out = run(case, x, arch, next_state=x.state)
    if not case.packed:
        padding = [n for n in range(4) if n not in live]
        assert not out[padding].any()
        out, expected = out[live], expected[live]
    else:
        used = sum(x.lengths)
        assert out[:, used:].isnan().all()
        out, expected = out[:, :used], expected[:, :used]
    assert_rounded_once(out, expected, relative_rmse)
    assert_rounded_once(x.state[slots], state[slots], relative_rmse)
    assert same(x.state[unused], before[unused])
