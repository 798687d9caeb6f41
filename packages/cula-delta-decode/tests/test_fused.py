"""The short convolution before decode and the gated norm behind it, in the emulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from delta_problems import POOL, Case, Inputs, exact, make_inputs, problem_of
from emulated_runs import fused_of
from fused_problems import (
    EITHER_WAY,
    LIVE,
    WRITTEN,
    assert_close,
    beside_serial,
    convolved,
    make_convolution,
    make_norm,
)
from torch import Tensor

from cula_core.reference.decode_fused import normalize
from cula_core.reference.delta_decode import Replay
from cula_delta_decode.config import DTYPES, NORM_ACTIVATIONS
from cula_emulator import mutation
from cula_emulator.covering import covering_cases
from cula_testing.comparing import same

FACTORS = {
    "arch": ("sm_80", "sm_89", "sm_90a", "sm_100a"),
    "gate": (("softplus", False), ("safe", True)),
    "tokens": (1, 2, 5),
    "dims": ((64, 64), (128, 64), (64, 128)),
    "heads": ((1, 2), (2, 2)),
    "state_dtype": DTYPES,
    "state_v_first": (True, False),
    "packed": (False, True),
    "convolution": (None, "plain", "bias"),
    "norm": (None, *NORM_ACTIVATIONS),
    "weight": ("float32", "bfloat16"),
}
CASES = covering_cases(FACTORS, lambda case: bool(case["convolution"] or case["norm"]))


def label(case: dict) -> str:
    order = "VK" if case["state_v_first"] else "KV"
    dims = "x".join(map(str, case["dims"]))
    what = f"{case['convolution']}-{case['norm']}"
    return f"{case['arch']}-{what}-{case['state_dtype']}-{dims}-{order}-T{case['tokens']}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, relative_rmse, case):
    names = ("arch", "convolution", "norm", "weight")
    arch, convolution, norm, weight = (case[name] for name in names)
    case = Case(**{name: value for name, value in case.items() if name not in names})
    x = make_inputs(case)
    x.state[[slot for slot in range(POOL) if slot not in WRITTEN]] = math.nan
    before = x.state.clone()
    given, slack, seen = {}, 1e-6, x
    if convolution is not None:
        taps = make_convolution(case, x, bias=convolution == "bias", weight=weight)
        given["convolution"] = taps
        seen, ring = convolved(case, x, taps)
        slack = EITHER_WAY
    expected, state = exact(case, seen)
    if norm is not None:
        given["norm"] = make_norm(case, x, norm, weight)
        expected = normalize(expected, given["norm"])
    out = run(case, x, arch, next_state=x.state, **given)
    if case.packed:
        used = sum(x.lengths[n] for n in LIVE)
        rows = torch.cat([torch.arange(x.cu_seqlens[n], x.cu_seqlens[n + 1]) for n in LIVE])
        assert len(rows) == used
        out, expected = out[:, rows], expected[:, rows]
    else:
        assert not out[1].any()
        out, expected = out[LIVE], expected[LIVE]
    assert_close(out, expected, relative_rmse, slack)
    assert_close(x.state[WRITTEN], state[WRITTEN], relative_rmse, slack)
    unused = [slot for slot in range(POOL) if slot not in WRITTEN]
    assert same(x.state[unused], before[unused])
    if convolution is not None:
        assert same(given["convolution"].inputs, ring)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
def test_replay_behind_a_convolution_is_serial_decoding(run, relative_rmse, tokens, v_first):
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first)

    def decode(x: Inputs, **options) -> Tensor:
        return run(case, x, **options)

    def flush(x: Inputs, replay: Replay, accepted: Tensor) -> None:
        run.flush(case, x, replay, accepted)

    for _, found, expected in beside_serial(case, decode, flush, steps=4):
        assert_close(found, expected, relative_rmse, EITHER_WAY)


# (tokens, state_v_first, stored, V) -> barriers of the kernel
BARRIERS = {
    (1, True, True, 64): 3,
    (2, True, False, 64): 3,
    (1, False, True, 64): 4,  # the one before the update is the norm's as well
    (2, False, True, 64): 6,
    (1, False, False, 64): 4,
    (2, True, True, 128): 2,  # without a convolution, and those of a cluster
}
# That a CTA runs, before its shared memory is written; and that all sums of squares are there.
CLUSTER = ["arrive.relaxed", "wait", "arrive", "wait"]


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("tokens, v_first, stored, dim_v", BARRIERS)
def test_every_barrier_matters(run, relative_rmse, tokens, v_first, stored, dim_v):
    case = Case(tokens=tokens, state_v_first=v_first, heads=(1, 1), dims=(64, dim_v))

    def check(options) -> None:
        x = make_inputs(case)
        norm, seen = make_norm(case, x), x
        given = {"next_state": x.state} if stored else {}
        if dim_v == 64:
            given["convolution"] = make_convolution(case, x)
            seen, _ = convolved(case, x, given["convolution"])
        expected, state = exact(case, seen)
        out = run(case, x, norm=norm, **given, **vars(options))
        assert torch.isfinite(out).all(), "not finite"
        assert_close(out[LIVE], normalize(expected, norm)[LIVE], relative_rmse, EITHER_WAY)
        if stored:
            assert_close(x.state[WRITTEN], state[WRITTEN], relative_rmse, EITHER_WAY)

    x = make_inputs(case)
    fused = fused_of(make_convolution(case, x) if dim_v == 64 else None, make_norm(case, x))
    kernel = run.compiled(problem_of(case, fused=fused, ends=stored), "sm_90a")
    schedules = [replace(o, detect_races=True) for o in mutation.SCHEDULES]
    report = mutation.run(check, kernel, schedules=schedules, exhaustive=True)
    count = BARRIERS[tokens, v_first, stored, dim_v]
    cluster = [f"barrier.cluster.{text}" for text in CLUSTER] if dim_v == 128 else []
    noticed, missed = [m.text for m in report.noticed], [m.text for m in report.unnoticed]
    assert sorted(noticed + missed) == ["bar.sync 0"] * count + sorted(cluster), str(report)
    # The CTAs of a cluster all run from the start in the emulator, so nothing can show that one waits for that.
    assert missed == cluster[1:2] and not report.not_reached, str(report)
