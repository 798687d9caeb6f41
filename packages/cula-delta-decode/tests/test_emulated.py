"""The compiled kernels on the CPU, for their real architectures, under every schedule, with race detection."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from delta_problems import SLOTS, Case, Inputs, exact, make_inputs, new_replay, problem_of
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference.delta_decode import Replay
from cula_delta_decode.config import DTYPES
from cula_delta_decode.kernels.records import CHUNK
from cula_delta_decode.plan import select
from cula_emulator import mutation
from cula_emulator.covering import covering_cases
from cula_testing.comparing import assert_rounded_once, same
from cula_testing.tensors import column, int32

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
    "tokens": (1, 2, 4, 8),
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


def live_rows(case: Case) -> list[int]:
    return [n for n, slot in enumerate(SLOTS) if slot >= 0] if case.indexed else [0, 1, 2, 3]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(run, emulated, case):
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
    assert_rounded_once(out, expected)
    assert_rounded_once(x.state[slots], state[slots])
    assert same(x.state[unused], before[unused])


@pytest.mark.parametrize("v_first", [False, True])
def test_slots_of_tokens(run, emulated, v_first):
    """Speculative decoding with a slot per token: a row begins at that of its last accepted token."""
    case = Case(gate=("safe", True), tokens=3, state_v_first=v_first, null_slot=0)
    x = make_inputs(case, rows=3)
    table = torch.tensor([[4, 1, 2], [3, 6, -1], [0, 0, 0]], dtype=torch.int32)
    accepted = column(int32(3, 1, 1))
    start = x.state.clone()
    wide = x.state.double()
    options = {
        "next_state": None,
        "token_states": wide,
        "token_state_indices": table,
        "null_slot": 0,
    }
    expected, _ = exact(case, x, state_indices=table, num_accepted=accepted, **options)
    # The oracle reads the pool that it writes.
    x.slots = table
    out = run(case, x, accepted=accepted, token_states=x.state, token_slots=table)
    assert_rounded_once(out[:2], expected[:2])
    assert not out[2].any()
    written = [4, 1, 2, 3, 6]
    assert_rounded_once(x.state[written], wide[written])
    assert same(x.state[[0, 5]], start[[0, 5]])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_another_slot_takes_the_result(run, tokens, v_first):
    case = Case(tokens=tokens, state_v_first=v_first)
    x = make_inputs(case)
    targets = torch.tensor([1, 2, -1, 6], dtype=torch.int32)
    other = torch.full_like(x.state, math.nan)
    before = x.state.clone()
    wide = other.double()
    expected, _ = exact(case, x, next_state=wide, output_state_indices=targets)
    out = run(case, x, next_state=other, next_slots=targets)
    live = live_rows(case)
    assert_rounded_once(out[live], expected[live])
    assert same(x.state, before)
    assert_rounded_once(other[[1, 6]], wide[[1, 6]])
    assert other[[0, 2, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize(
    "channels, tokens, length, v_first",
    [
        (False, 1, 8, True),
        (True, 1, 2, False),
        (False, 2, 4, False),
        (True, 4, 8, True),
        (False, 3, 16, True),
        (True, 3, 16, False),
    ],
)
def test_replay_is_serial_decoding(run, relative_rmse, channels, tokens, length, v_first):
    """Whatever is accepted, outputs and states are those of a pool that was committed after every call."""
    gate = ("safe", True) if channels else ("softplus", False)
    case = Case(gate=gate, tokens=tokens, state_v_first=v_first)
    generator = torch.Generator().manual_seed(tokens)
    replay = new_replay(case, length)
    first = make_inputs(case)
    pool, wide = first.state, first.state.double()
    previous, live = None, live_rows(case)
    for step in range(6):
        x = make_inputs(case, seed=step)
        x.A_log, x.dt_bias = first.A_log, first.dt_bias
        accepted = torch.randint(-1, tokens + 2, (4,), generator=generator, dtype=torch.int32)
        if previous is not None:
            commit(case, previous, wide, accepted)
        x.state = wide.to(torch.float32)
        expected, _ = exact(case, x, next_state=None)
        x.state = pool
        out = run(case, x, replay=replay, accepted=accepted)
        assert_rounded_once(out[live], expected[live])
        assert not out[1].any()
        previous = x
    begin, count, pending = (replay.cursor >> shift & 255 for shift in (0, 8, 16))
    assert (count <= length // 2).all() and (begin < length).all()
    assert (pending[[slot for slot in SLOTS if slot >= 0]] == tokens).all()
    accepted = column(torch.full((4,), tokens, dtype=torch.int32))
    commit(case, previous, wide, accepted)
    x.state = pool
    run.flush(case, x, replay, accepted)
    assert ((replay.cursor >> 8) == 0).all()
    slots = [slot for slot in SLOTS if slot >= 0]
    error = relative_rmse(pool[slots], wide[slots])
    assert error <= 1e-6, error


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_commit_keeps_the_accepted_tokens(run, tokens, packed, v_first):
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first, packed=packed)
    x = make_inputs(case)
    accepted = column(int32(tokens + 4, 1, -2, min(tokens, 2)))
    wide, before = x.state.double(), x.state.clone()
    given = {"cu_seqlens": x.cu_seqlens, "max_tokens": tokens} if packed else {}
    commit(case, x, wide, accepted, **given)
    assert run(case, x, next_state=x.state, accepted=accepted, commits=True) is None
    assert_rounded_once(x.state[[5, 3]], wide[[5, 3]])
    assert same(x.state[[0, 1, 2, 4, 6]], before[[0, 1, 2, 4, 6]])


def commit(case: Case, x: Inputs, wide: Tensor, accepted: Tensor, **options) -> None:
    """Advances states in fp64 by the accepted tokens."""
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    reference.delta_rule_commit(
        k, v, g, beta, wide, accepted.clamp(min=0), state_indices=x.slots, **given, **case.options(), **options
    )  # fmt: skip


@pytest.mark.parametrize("v_first", [False, True])
def test_several_tokens_are_several_calls(run, relative_rmse, v_first):
    """To the order of sums: one token is normalized behind its sums, several before them."""
    case = Case(gate=("safe", True), tokens=4, state_v_first=v_first)
    x = make_inputs(case)
    start = x.state.clone()
    together = run(case, x, next_state=x.state)
    after, x.state = x.state, start
    for t in range(4):
        names = ("q", "k", "v", "g", "beta")
        one = replace(x, **{n: getattr(x, n)[:, t : t + 1] for n in names})
        out = run(replace(case, tokens=1), one, next_state=one.state)
        live = live_rows(case)
        assert (
            relative_rmse(out[live, 0], together[live, t]) <= 2e-3
        )  # a rounding to bf16 that falls differently
    assert relative_rmse(x.state, after) <= 1e-6


@pytest.mark.parametrize(
    "tokens, state_dtype, v_first",
    [
        (1, "float32", True),
        (1, "bfloat16", True),
        (1, "float16", True),
        (3, "float32", True),
        (1, "float32", False),
        (1, "bfloat16", False),
    ],
)
@pytest.mark.parametrize("gate", [("softplus", False), ("safe", True)])
def test_few_states_have_other_tiles_and_the_same_bits(run, gate, tokens, state_dtype, v_first):
    case = Case(
        gate=gate, dims=(128, 128), tokens=tokens, state_dtype=state_dtype, state_v_first=v_first
    )
    tiles = {few: select(problem_of(case), "sm_90a", few=few) for few in (0, 1, 2)}
    assert tiles[2] != tiles[0]
    results = []
    for few in {tile: few for few, tile in tiles.items()}.values():
        x = make_inputs(case)
        results.append((run(case, x, next_state=x.state, few=few), x.state))
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("v_first", [False, True])
def test_overlap_changes_no_bit(run, emulated, tokens, v_first):
    """With and without programmatic dependent launch."""
    case = Case(tokens=tokens, state_v_first=v_first)
    results = []
    for arch in ("sm_89", "sm_90a"):
        x = make_inputs(case)
        results.append((run(case, x, arch, next_state=x.state), x.state))
    assert all(same(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("v_first", [False, True])
def test_views_of_a_fused_projection(run, emulated, v_first):
    """q, k and v as slices of one tensor that starts at an odd element, states with gaps, a column of a table."""
    case = Case(gate=("safe", True), state_v_first=v_first, dims=(64, 128))
    x = make_inputs(case)
    expected, state = exact(case, x)
    widths = [t[0, 0].numel() for t in (x.q, x.k, x.v)]
    whole = torch.full((4, 1, sum(widths) + 3), math.nan, dtype=torch.bfloat16)
    first = 1
    for name, width in zip(("q", "k", "v"), widths):
        own = getattr(x, name)
        view = whole[..., first : first + width].unflatten(2, own.shape[2:]).copy_(own)
        setattr(x, name, view)
        first += width
    rows, columns = x.state.shape[2:]
    gaps = emulated.empty(
        x.state.shape, stride=(5 * x.state[0].numel(), 2 * rows * columns, columns, 1)
    )
    x.state = gaps.copy_(x.state)
    x.slots = torch.stack((torch.full((4,), 6), x.slots), 1).int()[:, 1]
    out = run(case, x, next_state=x.state, concurrent_ctas=3)
    live = live_rows(case)
    assert_rounded_once(out[live], expected[live])
    slots = [slot for slot in SLOTS if slot >= 0]
    assert_rounded_once(x.state[slots], state[slots])


# (tokens, state_v_first, replay) -> barriers of the kernel
BARRIERS = {
    (1, True, False): 1,
    (2, True, False): 1,
    (1, False, False): 3,
    (2, False, False): 5,
    (1, True, True): 5,
    (2, True, True): 4,  # that of the ring is the one behind the tokens as well
    (2, False, True): 7,  # the state after the last token is not computed
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("tokens, v_first, replayed", BARRIERS)
def test_every_barrier_matters(run, relative_rmse, tokens, v_first, replayed):
    """Every schedule notices a barrier that is missing, with the race detector."""
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first, heads=(1, 1))

    def check(options) -> None:
        x = make_inputs(case)
        replay = used_replay(case) if replayed else None
        wide = (
            None
            if replay is None
            else Replay(*(t.double() for t in replay[:3]), replay.cursor.clone())
        )
        before = replace(x, state=x.state.clone())
        given = {} if replayed else {"next_state": x.state}
        out = run(case, x, replay=replay, **given, **vars(options))
        options_of_replay = {"replay": wide, "next_state": None} if replayed else {}
        expected, state = exact(case, before, **options_of_replay)
        live = live_rows(case)
        assert_rounded_once(out[live], expected[live])
        assert_rounded_once(x.state[[5, 0, 3]], state[[5, 0, 3]])

    problem = problem_of(case, ends=not replayed, replay=replayed)
    kernel = run.compiled(problem, "sm_90a")
    schedules = [replace(o, detect_races=True) for o in mutation.SCHEDULES]
    report = mutation.run(check, kernel, schedules=schedules, exhaustive=True)
    assert [m.text for m in report.noticed] == ["bar.sync 0"] * BARRIERS[
        tokens, v_first, replayed
    ], str(report)
    # One kernel runs at a time in the emulator, so nothing can show that it waits for another.
    assert [m.text for m in report.not_modelled] == ["griddepcontrol.wait"]
    assert not report.unnoticed and not report.not_reached


def used_replay(case: Case) -> Replay:
    """Rings that hold more records than are brought to shared memory at a time, and so many that they are full."""
    replay = new_replay(case, 32)
    begin, certain = 25, 2 * CHUNK
    live = [slot for slot in SLOTS if slot >= 0]
    for slot in live:
        for j in range(begin, begin + certain):
            replay.k[slot, j % 32] = torch.randn(replay.k[0, 0].shape)
            replay.u[slot, j % 32] = torch.randn(replay.u[0, 0].shape) / 64
            replay.decay[slot, j % 32] = torch.rand(replay.decay[0, 0].shape)
    replay.cursor[live] = begin | certain << 8
    return replay


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_no_memory_is_touched_before_the_previous_kernel_is_done(run, tokens, v_first):
    """What skipping `griddepcontrol.wait` cannot show: it comes before every access but those to the parameters."""
    ptx = run.compiled(problem_of(Case(tokens=tokens, state_v_first=v_first)), "sm_90a").kernel.ptx
    body = ptx[ptx.index("{") :]
    before, wait, after = body.partition("griddepcontrol.wait")
    access = re.compile(r"\b(?:ld|st|atom|red|cp)\.(?!param)\S+")
    assert wait and access.search(after) and not access.search(before)
    assert not re.search(r"^\S+:", before, re.MULTILINE)  # no label: the wait is on every path


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("v_first", [False, True])
def test_rows_of_any_length(run, packed, begins, v_first):
    """Eight tokens at a time, from states of another tensor, or from zero."""
    lengths = [19, 0, 8, 1] if packed else [11] * 4
    case = Case(
        gate=("safe", True),
        tokens=max(lengths),
        state_v_first=v_first,
        begins=begins,
        indexed=False,
    )
    x = make_inputs(replace(case, tokens=sum(lengths) if packed else 11), rows=1 if packed else 4)
    x.lengths, case = lengths, replace(case, packed=packed)
    if packed:
        x.cu_seqlens = torch.tensor([0, 19, 19, 27, 28], dtype=torch.int32)
    start, final = x.state[:4].clone(), torch.full_like(x.state[:4], math.nan)
    x.state = x.state[:4]
    wide = final.double()
    expected, _ = exact(case, x, next_state=wide)
    out = run(replace(case, tokens=8), x, next_state=final, long=True)
    assert_rounded_once(out, expected)
    assert_rounded_once(final, wide)
    assert same(x.state, start)
