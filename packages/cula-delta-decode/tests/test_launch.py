"""The host's way from a public call to a kernel, with the emulator in place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_problems import Case, exact, make_inputs, public
from emulated_runs import emulated_kernel_of
from fused_problems import (
    EITHER_WAY,
    LIVE,
    WRITTEN,
    assert_close,
    convolved,
    make_convolution,
    make_norm,
)

from cula_core.reference import delta_decode as reference
from cula_core.reference.decode_fused import normalize
from cula_delta_decode import delta_rule_decode, launch, new_replay, ops
from cula_delta_decode.config import Fused
from cula_delta_decode.plan import select
from cula_testing.comparing import same

pytestmark = pytest.mark.emulated(schedules="immediate")


@pytest.fixture
def problems(emulated, monkeypatch) -> list:
    """Sends launches to the emulator; the problems that kernels were asked for."""
    asked = []

    def kernel_for(problem, device, few):
        assert problem.illegal() is None
        asked.append(problem)
        return emulated_kernel_of(emulated, select(problem, "sm_90a", few=few), "sm_90a")

    monkeypatch.setattr(launch, "kernel_for", kernel_for)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda x: True)
    return asked


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(gate=("safe", True), tokens=2, state_v_first=False, state_dtype="bfloat16"),
        Case(gate=("log", True), strength="given", l2norm=False, packed=True, tokens=2),
        Case(gate=("none", False), strength="one", indexed=False),
        Case(gate=("softplus", True), doubled=True, bias=None, rate=False),
    ],
)
def test_decode(problems, case):
    x = make_inputs(case)
    expected, state = exact(case, x)
    x.state = x.state.clone()
    out = delta_rule_decode(x.q, x.k, x.v, **public(case, x))
    used = sum(x.lengths) if case.packed else None
    close(out[:, :used], expected[:, :used])
    close(x.state[WRITTEN], state[WRITTEN])
    (problem,) = problems
    assert problem.gate == case.static_gate()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "convolves, activation", [(True, None), (False, "silu"), (True, "sigmoid")]
)
def test_decode_with_what_is_around_it(problems, relative_rmse, convolves, activation, packed):
    """Slices of one projection, and a gate beside them."""
    case = Case(tokens=2, packed=packed, heads=(2, 4), state_v_first=packed)
    x = make_inputs(case)
    whole = torch.cat([part.flatten(2) for part in (x.q, x.k, x.v, x.v)], 2)
    widths = [part.shape[2] * part.shape[3] for part in (x.q, x.k, x.v, x.v)]
    views = whole.split(widths, 2)
    x.q, x.k, x.v = (
        view.unflatten(2, part.shape[2:]) for view, part in zip(views, (x.q, x.k, x.v))
    )
    seen, ring, options = x, None, {}
    if convolves:
        taps = make_convolution(case, x, bias=packed)
        options["convolution"] = taps
        seen, ring = convolved(case, x, taps)
    expected, state = exact(case, seen)
    if activation is not None:
        norm = make_norm(case, x, activation, "bfloat16")
        gate = views[3].unflatten(2, x.v.shape[2:]).copy_(norm.gate)
        options["norm"] = norm._replace(gate=gate, eps=1)  # an integer is a number as well
        expected = normalize(expected, options["norm"])
    out = delta_rule_decode(x.q, x.k, x.v, **public(case, x), **options)
    (problem,) = problems
    assert problem.fused == Fused(
        "bfloat16" if convolves else None, convolves and packed, activation,
        "bfloat16" if activation else "float32",
    )  # fmt: skip
    rows = slice(0, sum(x.lengths)) if packed else LIVE
    found, wanted = (out[0, rows], expected[0, rows]) if packed else (out[rows], expected[rows])
    if packed:
        start, end = x.cu_seqlens[1:3]
        kept = [t for t in range(sum(x.lengths)) if not start <= t < end]
        assert not found[start:end].any()
        found, wanted = found[kept], wanted[kept]
    assert_close(found, wanted, relative_rmse, EITHER_WAY)
    assert_close(x.state[WRITTEN], state[WRITTEN], relative_rmse, EITHER_WAY)
    assert ring is None or same(taps.inputs, ring)


def test_gates_are_read_as_they_come(problems):
    """The gates of all heads side by side, A_log in another dtype, dt_bias at an odd address, transposed states, a slot
    that means padding."""
    case = Case(gate=("safe", True), state_v_first=False)
    x = make_inputs(case)
    x.A_log = x.A_log.bfloat16().float()
    x.slots = torch.tensor([5, 2, 0, 3], dtype=torch.int32)
    expected, state = exact(case, x, null_slot=2)
    given = public(case, x) | {"A_log": x.A_log.bfloat16(), "g": x.g.flatten(2), "null_slot": 2}
    stored = x.state.transpose(2, 3).contiguous()
    given |= {"state": stored.transpose(2, 3)}
    shifted = torch.empty(x.dt_bias.numel() + 1)[1:]
    given |= {"dt_bias": shifted.copy_(x.dt_bias.flatten())}
    close(delta_rule_decode(x.q, x.k, x.v, **given), expected)
    close(stored.transpose(2, 3), state)
    assert problems[0].state_v_first


def test_states_of_every_token(problems):
    case = Case(tokens=2)
    x = make_inputs(case, rows=2)
    table = torch.tensor([[4, 1], [3, 6]], dtype=torch.int32)
    accepted = torch.tensor([2, 1], dtype=torch.int32)
    wide = x.state.double()
    options = {"next_state": None, "token_states": wide, "token_state_indices": table}
    expected, _ = exact(case, x, state_indices=table, num_accepted=accepted, **options)
    given = public(case, x) | {"state_indices": table, "num_accepted": accepted, "commit": False}
    given |= {"token_states": x.state, "token_state_indices": table}
    close(delta_rule_decode(x.q, x.k, x.v, **given), expected)
    close(x.state, wide)


def test_commit_replay_and_flush(problems):
    case = Case(gate=("safe", True), tokens=2)
    x = make_inputs(case)
    serial, pool = x.state.double(), x.state.clone()
    replay = new_replay(pool, case.heads[0], max_tokens=2, channels=True)
    accepted = torch.tensor([2, 1, 0, 1], dtype=torch.int32)
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    options = {"state_indices": x.slots, **given, **case.options()}
    reference.delta_rule_commit(k, v, g, beta, serial, accepted, **options)

    flags = (-5.0, 1.0, 20.0, True, True, False, True, True)
    bias = x.dt_bias.flatten()
    launch.commit(
        x.k, x.v, x.g, x.beta, x.A_log, bias, x.state, accepted, x.slots, None, *flags, 2, None
    )
    close(x.state, serial)

    y = replace(x, state=pool)
    delta_rule_decode(y.q, y.k, y.v, **public(case, y), replay=replay)
    launch.flush(pool, *replay, accepted, y.slots, True, None)
    close(pool, serial)
    assert [p.flushes for p in problems] == [False, False, True]
    assert [p.commits for p in problems] == [True, False, False]


@pytest.mark.parametrize("tokens, packed", [(1, False), (11, False), (11, True)])
def test_recurrent(problems, tokens, packed):
    case = Case(gate=("safe", True), tokens=tokens, indexed=False)
    x = make_inputs(case, rows=1 if packed else 2)
    offsets = torch.tensor([0, 3, 11]) if packed else None
    x.state, x.cu_seqlens = x.state[:2], offsets
    start, final = x.state.clone(), torch.empty_like(x.state)
    wide = final.double()
    expected, _ = exact(replace(case, packed=packed), x, next_state=wide)
    out = torch.empty_like(x.v)
    flags = (-5.0, 1.0, 20.0, True, True, False, True, True)
    launch.recurrent(
        x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.state, offsets, 64**-0.5, *flags, out, final
    )  # fmt: skip
    close(out, expected)
    close(final, wide)
    assert torch.equal(x.state, start)
    assert problems[0].long == (tokens > 8)


@pytest.mark.parametrize("offset", [1, 8])
def test_views_that_are_not_aligned_get_a_kernel_of_their_own(problems, monkeypatch, offset):
    """The host code of the first kernel refuses them; any other refusal is an error."""
    of_problem = launch.kernel_for

    def refusing(problem, device, few):
        run = of_problem(problem, device, few)

        def host_code(*arguments):
            x = launch.Arguments(*arguments)
            if problem.aligned and not launch.aligned(x.q, x.k, x.g):
                raise ValueError("Misaligned Tensor data")
            if x.scale == 0.0:
                raise ValueError("another reason")
            run(*arguments)

        return host_code

    monkeypatch.setattr(launch, "kernel_for", refusing)
    case = Case(gate=("safe", True), dims=(64, 128))
    x = make_inputs(case)
    expected, _ = exact(case, x)
    width = x.q[0, 0].numel()
    whole = torch.full((4, 1, width + offset + 3), torch.nan, dtype=torch.bfloat16)
    x.q = whole[..., offset : offset + width].unflatten(2, x.q.shape[2:]).copy_(x.q)
    out = delta_rule_decode(x.q, x.k, x.v, **public(case, x))
    live = x.slots >= 0
    close(out[live], expected[live])
    assert [p.aligned for p in problems] == [True, False]

    given = public(case, x) | {"scale": 0.0}
    with pytest.raises(ValueError, match="another reason"):
        delta_rule_decode(x.q, x.k, x.v, **given)
    aligned = x.q.contiguous()
    with pytest.raises(ValueError, match="another reason"):
        delta_rule_decode(aligned, x.k, x.v, **given)
