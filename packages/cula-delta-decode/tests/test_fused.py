"""The short convolution before decode and the gated norm behind it, in the emulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from delta_problems import POOL, SLOTS, Case, Inputs, exact, make_inputs, new_replay, problem_of
from emulated_runs import fused_of
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution, convolve, normalize
from cula_delta_decode.config import DTYPES, NORM_ACTIVATIONS
from cula_emulator import mutation
from cula_emulator.covering import covering_cases
from cula_testing.comparing import same

LENGTH = 16
LIVE = [n for n, slot in enumerate(SLOTS) if slot >= 0]
WRITTEN = [slot for slot in SLOTS if slot >= 0]
# A value that lies halfway between two numbers of its dtype may round either way behind the convolution, and what
# follows with it. Without the rounding, or with one tap wrong, the error is ten times this one and more.
EITHER_WAY = 3e-4
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


def make_norm(
    case: Case, x: Inputs, activation: str = "silu", weight: str = "float32"
) -> GatedNorm:
    generator = torch.Generator().manual_seed(1)
    gate = torch.randn(x.v.shape, generator=generator).to(x.v.dtype)
    scale = torch.randn(case.dims[1], generator=generator).to(getattr(torch, weight))
    return GatedNorm(gate, scale, 1e-5, activation)


def make_convolution(
    case: Case, x: Inputs, *, bias: bool = False, weight: str = "bfloat16", positions=(5, 9, 1, 700)
) -> ShortConvolution:
    """Rings that hold NaN wherever the next call must not look."""
    (heads, heads_v), (dim_k, dim_v) = case.heads, case.dims
    channels = 2 * heads * dim_k + heads_v * dim_v
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ring = torch.full((POOL, LENGTH, channels), math.nan, dtype=x.q.dtype)
    for slot, position in zip(SLOTS, positions):
        for p in range(max(position - 3, 0), position):
            ring[slot, p % LENGTH] = normal(channels)
    dtype = getattr(torch, weight)
    return ShortConvolution(
        ring, torch.tensor(positions, dtype=torch.int32), (normal(channels, 4) / 2).to(dtype),
        normal(channels).to(dtype) if bias else None,
    )  # fmt: skip


def convolved(case: Case, x: Inputs, convolution: ShortConvolution) -> tuple[Inputs, Tensor]:
    """The inputs behind the convolution, rounded to their dtype, and the rings afterwards."""
    ring = convolution.inputs.clone()
    parts = [part.double() for part in (x.q, x.k, x.v)]
    q, k, v = convolve(
        *parts, convolution._replace(inputs=ring.double()), state_indices=x.slots,
        cu_seqlens=x.cu_seqlens, max_tokens=case.tokens if case.packed else None,
    )  # fmt: skip
    convolve(
        x.q, x.k, x.v, convolution._replace(inputs=ring), state_indices=x.slots,
        cu_seqlens=x.cu_seqlens, max_tokens=case.tokens if case.packed else None,
    )  # fmt: skip
    dtype = x.q.dtype
    return replace(x, q=q.to(dtype), k=k.to(dtype), v=v.to(dtype)), ring


def assert_close(actual: Tensor, expected: Tensor, relative_rmse, slack: float) -> None:
    floor = relative_rmse(expected.to(actual.dtype), expected)
    error = relative_rmse(actual, expected)
    assert error <= 1.05 * floor + slack, (error, floor)


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
    """Rejected tokens leave the rings of the convolution by being written over: positions go on where they were."""
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first)
    generator = torch.Generator().manual_seed(tokens)
    replay = new_replay(case, 16)
    first = make_inputs(case)
    taps = make_convolution(case, first, positions=(0, 0, 2, 9))
    # Serial decoding sees accepted tokens only.
    history = {n: taps.inputs[slot].clone() for n, slot in enumerate(SLOTS) if slot >= 0}
    pool, wide = first.state, first.state.double()
    positions, previous = taps.positions.clone(), None
    for step in range(4):
        x = make_inputs(case, seed=step)
        x.A_log, x.dt_bias = first.A_log, first.dt_bias
        accepted = torch.randint(0, tokens + 1, (4,), generator=generator, dtype=torch.int32)
        if previous is not None:
            raw, seen = previous
            commit(case, seen, wide, accepted)
            for n, ring in history.items():
                for t in range(int(accepted[n])):
                    parts = [part[n, t].flatten() for part in (raw.q, raw.k, raw.v)]
                    ring[(int(positions[n]) + t) % LENGTH] = torch.cat(parts)
            positions = positions + accepted
        exact_ring = torch.full_like(taps.inputs, math.nan)
        for n, ring in history.items():
            exact_ring[SLOTS[n]] = ring
        taps = taps._replace(positions=positions)
        seen, _ = convolved(case, x, taps._replace(inputs=exact_ring))
        expected, _ = exact(case, replace(seen, state=wide), next_state=None)
        x.state = pool
        out = run(case, x, replay=replay, accepted=accepted, convolution=taps)
        assert_close(out[LIVE], expected[LIVE], relative_rmse, EITHER_WAY)
        previous = x, seen
    accepted = torch.full((4,), tokens, dtype=torch.int32)
    commit(case, previous[1], wide, accepted)
    x.state = pool
    run.flush(case, x, replay, accepted)
    assert_close(pool[WRITTEN], wide[WRITTEN], relative_rmse, EITHER_WAY)


def commit(case: Case, x: Inputs, wide: Tensor, accepted: Tensor) -> None:
    """Advances states in fp64 by the accepted tokens."""
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    reference.delta_rule_commit(
        k, v, g, beta, wide, accepted, state_indices=x.slots, **given, **case.options()
    )


# (tokens, state_v_first, stored, V) -> barriers of the kernel
BARRIERS = {
    (1, True, True, 64): 2,
    (2, True, False, 64): 2,
    (1, False, True, 64): 3,  # the one before the update is the norm's as well
    (2, False, True, 64): 5,
    (1, False, False, 64): 3,
    (2, True, True, 128): 2,  # and those of a cluster
}
# That a CTA runs, before its shared memory is written; and that all sums of squares are there.
CLUSTER = ["arrive.relaxed", "wait", "arrive", "wait"]


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("tokens, v_first, stored, dim_v", BARRIERS)
def test_every_barrier_matters(run, relative_rmse, tokens, v_first, stored, dim_v):
    case = Case(tokens=tokens, state_v_first=v_first, heads=(1, 1), dims=(64, dim_v))

    def check(options) -> None:
        x = make_inputs(case)
        norm, taps = make_norm(case, x), make_convolution(case, x)
        seen, _ = convolved(case, x, taps)
        expected, state = exact(case, seen)
        given = {"next_state": x.state} if stored else {}
        out = run(case, x, convolution=taps, norm=norm, **given, **vars(options))
        assert torch.isfinite(out).all(), "not finite"
        assert_close(out[LIVE], normalize(expected, norm)[LIVE], relative_rmse, EITHER_WAY)
        if stored:
            assert_close(x.state[WRITTEN], state[WRITTEN], relative_rmse, EITHER_WAY)

    x = make_inputs(case)
    fused = fused_of(make_convolution(case, x), make_norm(case, x))
    kernel = run.compiled(problem_of(case, fused=fused, ends=stored), "sm_90a")
    schedules = [replace(o, detect_races=True) for o in mutation.SCHEDULES]
    report = mutation.run(check, kernel, schedules=schedules, exhaustive=True)
    count = BARRIERS[tokens, v_first, stored, dim_v]
    cluster = [f"barrier.cluster.{text}" for text in CLUSTER] if dim_v == 128 else []
    noticed, missed = [m.text for m in report.noticed], [m.text for m in report.unnoticed]
    assert sorted(noticed + missed) == ["bar.sync 0"] * count + sorted(cluster), str(report)
    # The CTAs of a cluster all run from the start in the emulator, so nothing can show that one waits for that.
    assert missed == cluster[1:2] and not report.not_reached, str(report)
