"""The plain torch implementation against the recurrence written out for one row, head and token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference import kda
from cula_core.reference.delta_decode import Gates, Replay
from cula_testing.comparing import same
from cula_testing.tensors import int32

KEEP = settings(deadline=None, derandomize=True, max_examples=30)
F64 = torch.float64
POOL, HEADS, HEADS_V, DIM_K, DIM_V = 6, 2, 4, 5, 3
BOUND = -5.0
# kind of the gate, a gate per channel, what beta is, twice its sigmoid, l2norm
FORMS = [
    ("none", False, "one", False, True),
    ("log", False, "given", False, False),
    ("log", True, "one", False, True),
    ("softplus", False, "logits", False, True),
    ("softplus", True, "logits", True, False),
    ("safe", False, "given", False, True),
    ("safe", True, "logits", True, True),
]


def make(form, rows: int, tokens: int, seed: int = 0, v_first: bool = True) -> dict[str, Any]:
    """The arguments of the reference, in fp64."""
    kind, channels, strength, doubled, l2norm = form
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    width = (DIM_K,) if channels else ()
    raw = kind in ("softplus", "safe")
    g = None if kind == "none" else 2 * normal(rows, tokens, HEADS_V, *width)
    beta = None if strength == "one" else normal(rows, tokens, HEADS_V)
    scale = 1.0 if l2norm else DIM_K**-0.5
    parameters = torch.Generator().manual_seed(99)
    A_log = torch.randn(HEADS_V, generator=parameters, dtype=F64) / 2
    dt_bias = torch.randn(HEADS_V, *width, generator=parameters, dtype=F64)
    matrix = (DIM_V, DIM_K) if v_first else (DIM_K, DIM_V)
    return {
        "q": normal(rows, tokens, HEADS, DIM_K),
        "k": normal(rows, tokens, HEADS, DIM_K) * scale,
        "v": normal(rows, tokens, HEADS_V, DIM_V),
        "g": -g.abs() / 4 if kind == "log" else g,
        "beta": beta.sigmoid() if strength == "given" else beta,
        "A_log": A_log if raw else None,
        "dt_bias": dt_bias if raw else None,
        "gates": Gates(raw, BOUND if kind == "safe" else None, 1.5, 2.0, strength == "logits", doubled),
        "l2norm": l2norm,
        "state_v_first": v_first,
        "state": normal(POOL, HEADS_V, *matrix),
    }  # fmt: skip


def softplus(x: float, beta: float, threshold: float) -> float:
    return x if beta * x > threshold else math.log1p(math.exp(beta * x)) / beta


def decay(a: dict[str, Any], n: int, t: int, h: int) -> Tensor:
    """The log decays [K] of one token and value head."""
    if a["g"] is None:
        return torch.zeros(DIM_K, dtype=F64)
    raw = a["g"][n, t, h].expand(DIM_K)
    gates = a["gates"]
    if not gates.in_kernel:
        return raw
    bias = torch.zeros(()) if a["dt_bias"] is None else a["dt_bias"][h]
    rate = 1.0 if a["A_log"] is None else math.exp(a["A_log"][h].item())
    found = []
    for x in (raw + bias).tolist():
        if gates.lower_bound is not None:
            found.append(gates.lower_bound / (1 + math.exp(-rate * x)))
        else:
            found.append(-rate * softplus(x, gates.softplus_beta, gates.softplus_threshold))
    return torch.tensor(found, dtype=F64)


def literal(
    a: dict[str, Any], starts: list[Tensor | None], lengths: list[int], scale: float = DIM_K**-0.5
) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs [N, T, HV, V], and each row's states [HV, K, V] after 0, 1, ... tokens. A start of None: padding."""
    outputs = torch.zeros_like(a["v"])
    histories: list[list[Tensor]] = []
    for n, start in enumerate(starts):
        if start is None:
            histories.append([])
            continue
        states = [start.clone()]
        for t in range(lengths[n]):
            following = states[-1].clone()
            for h in range(HEADS_V):
                q, k = (a[name][n, t, h // (HEADS_V // HEADS)] for name in ("q", "k"))
                if a["l2norm"]:
                    q, k = (x / math.sqrt(x.dot(x).item() + 1e-6) for x in (q, k))
                b = 1.0
                if a["beta"] is not None:
                    b = a["beta"][n, t, h].item()
                    if a["gates"].beta_sigmoid:
                        b = (1 + a["gates"].neg_eigval) / (1 + math.exp(-b))
                S = torch.diag(decay(a, n, t, h).exp()) @ following[h]
                u = b * (a["v"][n, t, h] - S.T @ k)
                S = S + torch.outer(k, u)
                following[h] = S
                outputs[n, t, h] = scale * (S.T @ q)
            states.append(following)
        histories.append(states)
    return outputs, histories


def kv(a: dict[str, Any], states: Tensor) -> Tensor:
    """States [.., K, V] of either layout."""
    return states.transpose(-1, -2) if a["state_v_first"] else states


def close(actual: Tensor, expected: Tensor, bound: float = 1e-12) -> bool:
    return actual.shape == expected.shape and bool(
        ((actual - expected).abs() <= bound * (1 + expected.abs())).all()
    )


def run(a: dict[str, Any], **options: Any) -> Tensor:
    return reference.delta_rule_decode(**a | options)


def part(a: dict[str, Any], rows: slice, tokens: slice = slice(None)) -> dict[str, Any]:
    """The arguments of some rows and tokens; the pool is the same."""
    cut = {n: None if a[n] is None else a[n][rows, tokens] for n in ("q", "k", "v", "g", "beta")}
    return a | cut


def keys(a: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a commit."""
    return {name: x for name, x in a.items() if name != "q"}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decode_is_the_recurrence(form, v_first):
    a = make(form, 4, 3, v_first=v_first)
    slots = [3, -1, 0, 5]
    starts = [None if slot < 0 else kv(a, a["state"][slot]) for slot in slots]
    expected, histories = literal(a, starts, [3] * 4)
    before = a["state"].clone()
    out = run(a, next_state=a["state"], state_indices=int32(*slots))
    assert close(out, expected)
    for slot, history in zip(slots, histories):
        if slot >= 0:
            assert close(kv(a, a["state"][slot]), history[-1])
    assert same(a["state"][[1, 2, 4]], before[[1, 2, 4]])


@pytest.mark.parametrize("scale", [0.25, -3.0])
def test_scale_and_rows_that_begin_at_zero(scale):
    a = make(FORMS[3], 3, 2)
    zero = torch.zeros(HEADS_V, DIM_K, DIM_V, dtype=F64)
    expected, _ = literal(a, [zero] * 3, [2] * 3, scale)
    assert close(run(a | {"state": None}, scale=scale), expected)


@pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")], ids=str)
@pytest.mark.parametrize("form", FORMS[3:], ids=str)
def test_parameters_that_are_missing_are_zero(form, missing):
    a = make(form, 2, 2) | dict.fromkeys(missing)
    expected, _ = literal(a, list(kv(a, a["state"][:2])), [2, 2])
    assert close(run(a), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_gate_per_channel_may_be_flat(form):
    a = make(form, 2, 3)
    if not form[1]:
        a["dt_bias"] = None if a["dt_bias"] is None else a["dt_bias"][:, None]
        assert close(run(a), run(make(form, 2, 3)), 0)
        return
    flat = a | {"g": a["g"].flatten(2)}
    flat["dt_bias"] = None if a["dt_bias"] is None else a["dt_bias"].flatten()
    assert same(run(flat), run(a))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tokens_of_one_call_are_calls_of_one_token(form):
    a = make(form, 3, 4)
    pool = a["state"].clone()
    whole = run(a, next_state=a["state"])
    for t in range(4):
        one = part(a, slice(None), slice(t, t + 1)) | {"state": pool}
        assert close(run(one, next_state=pool), whole[:, t : t + 1])
    assert close(pool, a["state"])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packed_rows_are_rows_alone(form):
    lengths, slots = [2, 0, 5, 1], [4, 2, 0, -1]
    a = make(form, 1, 10)
    offsets = int32(0, 2, 2, 7, 8)
    pool = a["state"].clone()
    out = run(a, next_state=a["state"], state_indices=int32(*slots), cu_seqlens=offsets)
    first = 0
    for length, slot in zip(lengths, slots):
        tokens = slice(first, first + length)
        if slot < 0:
            assert not out[:, tokens].any()
        elif length:
            one = part(a, slice(None), tokens) | {"state": pool}
            assert close(out[:, tokens], run(one, next_state=pool, state_indices=int32(slot)))
        first += length
    assert not out[:, 8:].any()
    assert close(a["state"], pool)


def test_packed_rows_of_no_tokens():
    a = make(FORMS[6], 1, 0)
    before = a["state"].clone()
    out = run(a, next_state=a["state"], cu_seqlens=int32(0, 0, 0), max_tokens=4)
    assert out.shape == (1, 0, HEADS_V, DIM_V)
    reference.delta_rule_commit(**keys(a), num_accepted=int32(3, 0), cu_seqlens=int32(0, 0, 0))
    assert same(a["state"], before)


@pytest.mark.parametrize("lower_bound", [None, BOUND])
def test_it_is_the_recurrence_of_a_prefill(lower_bound):
    """The prefill knows softplus with its usual parameters alone."""
    a = make(("softplus", True, "logits", True, True), 3, 6)
    a["gates"] = Gates(lower_bound=lower_bound, neg_eigval=True)
    expected, finals = kda.recurrent_prefill(
        *(a[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), a["state"], int32(5, -1, 2),
        gate="softplus" if lower_bound is None else "safe", lower_bound=lower_bound or 0.0, l2norm=True,
        beta_sigmoid=True, neg_eigval=True, state_v_first=True,
    )  # fmt: skip
    out = run(a, next_state=a["state"], state_indices=int32(5, -1, 2))
    # Beyond the threshold softplus is the identity, which is off by exp(-20).
    assert close(out, expected, 1e-8 if lower_bound is None else 1e-12)
    assert close(a["state"][[5, 2]], finals[[0, 2]], 1e-8 if lower_bound is None else 1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_commit_after_verification_is_decode_of_the_accepted_prefix(form, packed):
    a = make(form, 1 if packed else 5, 15 if packed else 3, v_first=not packed)
    slots, accepted = [2, 0, -1, 4, 1], [2, 0, 3, 9, -4]
    before, serial = a["state"].clone(), a["state"].clone()
    given: dict[str, Any] = {"state_indices": int32(*slots)}
    if packed:
        given["cu_seqlens"] = int32(0, 3, 6, 9, 12, 15)
    drafted = run(a, **given)
    assert same(a["state"], before)
    arguments = keys(a) | given
    assert reference.delta_rule_commit(**arguments, num_accepted=int32(*accepted)) is None
    for n, (slot, count) in enumerate(zip(slots, accepted)):
        count = min(max(count, 0), 3)
        if slot < 0 or count == 0:
            continue
        rows = slice(None) if packed else slice(n, n + 1)
        tokens = slice(3 * n, 3 * n + count) if packed else slice(count)
        one = part(a, rows, tokens) | {"state": serial}
        out = run(one, next_state=serial, state_indices=int32(slot))
        assert close(drafted[rows, tokens], out)
    assert close(a["state"], serial)


@pytest.mark.parametrize("v_first", [False, True])
def test_token_states_are_those_of_single_tokens(v_first):
    a = make(FORMS[5], 3, 3, v_first=v_first)
    starts = [kv(a, a["state"][slot]) if slot >= 0 else None for slot in (1, -1, 4)]
    _, histories = literal(a, starts, [3] * 3)
    kept = torch.full((8, *a["state"].shape[1:]), math.nan, dtype=F64)
    table = torch.tensor([[7, -1, 0], [1, 2, 3], [5, 6, 4]], dtype=torch.int32)
    before = a["state"].clone()
    run(a, state_indices=int32(1, -1, 4), token_states=kept, token_state_indices=table, null_slot=6)
    for n, t, slot in ((0, 0, 7), (0, 2, 0), (2, 0, 5), (2, 2, 4)):
        assert close(kv(a, kept[slot]), histories[n][t + 1])
    assert kept[[1, 2, 3, 6]].isnan().all()
    assert same(a["state"], before)


@KEEP
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=5))
def test_a_table_of_slots_is_decode_of_accepted_tokens(pattern):
    """Speculative decoding with a slot per token: every row goes on from that of its last accepted token."""
    form, tokens = FORMS[3], 4
    pool = make(form, 2, tokens)["state"].repeat(2, 1, 1, 1)
    table = torch.tensor([[3, 7, 1, 9], [4, 0, 8, 2]], dtype=torch.int32)
    serial = pool[table[:, 0].long()].clone()
    accepted = int32(1, 1)
    for step, counts in enumerate(pattern):
        a = make(form, 2, tokens, seed=step)
        expected = run(a | {"state": serial})
        out = run(a | {"state": pool}, state_indices=table, num_accepted=accepted, token_states=pool,
                  token_state_indices=table)  # fmt: skip
        assert close(out, expected)
        accepted = int32(*counts).clamp(min=1)
        reference.delta_rule_commit(**keys(a) | {"state": serial}, num_accepted=accepted)
    last = table.gather(1, accepted[:, None].long() - 1)[:, 0].long()
    assert close(pool[last], serial)


def test_the_result_may_go_to_another_slot():
    a = make(FORMS[4], 3, 2)
    before = a["state"].clone()
    out = run(
        a,
        next_state=a["state"],
        state_indices=int32(0, 0, -1),
        output_state_indices=int32(3, -1, 5),
    )
    alone = before.clone()
    first = part(a, slice(0, 1)) | {"state": alone}
    assert close(out[:1], run(first, next_state=alone, state_indices=int32(0)))
    assert close(a["state"][3], alone[0])
    rest = [0, 1, 2, 4, 5]
    assert same(a["state"][rest], before[rest])
    assert out[1].any() and not out[2].any()


def rings(a: dict[str, Any], records: int) -> Replay:
    """Empty rings, NaN where nothing has been recorded."""
    factors = (HEADS_V, DIM_K) if a["g"] is not None and a["g"].dim() == 4 else (HEADS_V,)
    new = [
        (POOL, records, HEADS, DIM_K),
        (POOL, records, HEADS_V, DIM_V),
        (POOL, records, *factors),
    ]
    full = [torch.full(shape, math.nan, dtype=F64) for shape in new]
    return Replay(*full, torch.zeros(POOL, HEADS_V, 1, dtype=torch.int32))


@st.composite
def replays(draw):
    tokens = draw(st.integers(1, 4))
    least = 1 << (2 * tokens - 1).bit_length()
    records = least << draw(st.integers(0, 2))
    counts = st.lists(st.integers(0, tokens), min_size=3, max_size=3)
    steps = draw(st.lists(st.one_of(st.none(), counts), min_size=1, max_size=12))
    order = st.permutations([3, 0, 5, -1])
    return (
        draw(st.sampled_from(FORMS)),
        draw(st.booleans()),
        tokens,
        records,
        steps,
        draw(order)[:3],
    )


@KEEP
@given(replays())
def test_replay_is_a_commit_after_every_call(problem):
    """Whatever is accepted, and however large the rings: outputs and, once flushed, states."""
    form, v_first, tokens, records, steps, slots = problem
    pool = make(form, 3, tokens, v_first=v_first)["state"]
    serial, previous = pool.clone(), None
    given_slots = {"state_indices": int32(*slots)}
    replay = rings(make(form, 3, tokens), records)
    untouched = [slot for slot in range(POOL) if slot not in slots]
    pool[untouched] = math.nan
    before = pool.clone()
    for step, counts in enumerate(steps):
        a = make(form, 3, tokens, seed=step, v_first=v_first)
        certain = None if counts is None else int32(*counts)
        if previous is not None:
            everything = int32(tokens, tokens, tokens) if certain is None else certain
            reference.delta_rule_commit(
                **keys(previous) | {"state": serial}, num_accepted=everything, **given_slots
            )
        expected = run(a | {"state": serial}, **given_slots)
        out = run(a | {"state": pool}, replay=replay, num_accepted=certain, **given_slots)
        assert close(out, expected)
        previous = a
    begin, count, pending = (replay.cursor >> shift & 255 for shift in (0, 8, 16))
    live = [slot for slot in slots if slot >= 0]
    assert (begin < records).all() and (count + pending <= records).all()
    assert (pending[live] == tokens).all() and not replay.cursor[untouched].any()
    # Half of the ring is free for certain records before the state is stored.
    assert (count[live] + tokens <= max(records // 2, tokens)).all()
    last = int32(*(n % (tokens + 1) for n in range(3)))
    reference.delta_rule_commit(
        **keys(previous) | {"state": serial}, num_accepted=last, **given_slots
    )
    reference.delta_rule_flush(pool, replay, last, state_v_first=v_first, **given_slots)
    assert close(pool[live], serial[live])
    assert same(pool[untouched], before[untouched])
    assert not (replay.cursor[live] >> 8).any()


def test_a_state_is_stored_when_the_ring_is_more_than_half_full():
    a = make(FORMS[3], 1, 1)
    replay, stored = rings(a, 8), []
    for _ in range(12):
        before = a["state"].clone()
        run(a, replay=replay)
        stored.append(not same(a["state"], before))
    assert stored == [step in (4, 8) for step in range(12)]


def test_flush_of_the_whole_pool_takes_every_record():
    a = make(FORMS[6], 2, 2)
    replay, pool = rings(a, 4), a["state"].clone()
    run(a, replay=replay, state_indices=int32(4, 1))
    untouched = a["state"].clone()
    run(a | {"state": pool}, next_state=pool, state_indices=int32(4, 1))
    reference.delta_rule_flush(a["state"], replay)
    assert close(a["state"][[4, 1]], pool[[4, 1]])
    assert same(a["state"][[0, 2, 3, 5]], untouched[[0, 2, 3, 5]])
    again = a["state"].clone()
    reference.delta_rule_flush(a["state"], replay)
    assert same(a["state"], again)


def test_flush_leaves_padding_alone():
    a = make(FORMS[6], 3, 2)
    replay, before = rings(a, 4), a["state"].clone()
    run(a, replay=replay, state_indices=int32(0, 2, 3))
    cursor = replay.cursor.clone()
    reference.delta_rule_flush(a["state"], replay, state_indices=int32(2, -1, 3), null_slot=3)
    assert same(a["state"][[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    assert not same(a["state"][2], before[2])
    assert same(replay.cursor[[0, 1, 3, 4, 5]], cursor[[0, 1, 3, 4, 5]])


def test_the_null_slot_of_rows_in_order_is_padding():
    a = make(FORMS[3], 3, 2)
    b = a | {"state": a["state"].clone()}
    out = run(a, next_state=a["state"], null_slot=1)
    assert same(out, run(b, next_state=b["state"], state_indices=int32(0, -1, 2)))
    assert same(a["state"], b["state"]) and not out[1].any()


@pytest.mark.parametrize("accepted", [[0, 3], [-5, 9]])
def test_counts_beyond_a_table_are_its_ends(accepted):
    a = make(FORMS[3], 2, 2)
    table = torch.tensor([[4, 1, 3], [2, 5, 0]], dtype=torch.int32)
    out = run(a, state_indices=table, num_accepted=int32(*accepted))
    assert same(out, run(a, state_indices=int32(4, 0)))


def test_longer_rows_are_cut_off():
    a = make(FORMS[3], 1, 7)
    b = a | {"state": a["state"].clone()}
    out = run(a, next_state=a["state"], cu_seqlens=int32(0, 4, 7), max_tokens=2)
    assert out[:, [0, 1, 4, 5]].any((0, 2, 3)).all() and not out[:, [2, 3, 6]].any()
    for n, tokens in enumerate((slice(0, 2), slice(4, 6))):
        run(part(b, slice(None), tokens), next_state=b["state"], state_indices=int32(n))
    assert close(a["state"], b["state"])


def test_packed_rows_have_eight_tokens_at_most():
    a = make(FORMS[3], 1, 10)
    out = run(a, cu_seqlens=int32(0, 10))
    assert out[:, :8].any((0, 2, 3)).all() and not out[:, 8:].any()


@pytest.mark.parametrize("null_slot", [None, 0, 4])
@pytest.mark.parametrize("mode", ["decode", "commit", "replay", "tokens"])
def test_padding_changes_nothing_and_is_not_seen(mode, null_slot):
    """Neither the inputs of padding nor slots that no row has are read into anything."""
    a = make(FORMS[3], 3, 2)
    padding = -7 if null_slot is None else null_slot
    slots = int32(padding, 2, -1)
    for name in ("q", "k", "v", "g", "beta"):
        a[name][[0, 2]] = math.nan
    a["state"][[0, 1, 3, 4, 5]] = math.nan
    before = a["state"].clone()
    given_slots = {"state_indices": slots, "null_slot": null_slot}
    alone = part(a, slice(1, 2)) | {"state": a["state"].clone()}
    expected = run(alone, next_state=alone["state"], state_indices=int32(2))
    replay = rings(a, 4)
    if mode == "commit":
        reference.delta_rule_commit(**keys(a), num_accepted=int32(2, 2, 2), **given_slots)
    else:
        out = torch.full_like(a["v"], math.nan)
        options = {
            "decode": {"next_state": a["state"]},
            "replay": {"replay": replay},
            "tokens": {
                "token_states": a["state"],
                "token_state_indices": torch.tensor(
                    [[1, 3], [padding, 2], [5, 4]], dtype=torch.int32
                ),
            },
        }[mode]
        assert run(a, **given_slots, **options, out=out) is out
        assert not out[[0, 2]].any() and close(out[1:2], expected)
    if mode == "replay":
        assert same(a["state"], before)
        reference.delta_rule_flush(a["state"], replay, **given_slots)
    assert close(a["state"][2], alone["state"][2])
    assert same(a["state"][[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


def test_an_empty_pool_has_padding_alone():
    a = make(FORMS[3], 2, 2)
    a["state"] = a["state"][:0]
    replay = Replay(*(x[:0] for x in rings(a, 4)))
    for options in ({"next_state": a["state"]}, {"replay": replay}):
        assert not run(a, state_indices=int32(-1, -9), **options).any()
    reference.delta_rule_flush(a["state"], replay, state_indices=int32(-1))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["decode", "commit", "tokens", "flush"])
def test_a_state_is_rounded_once_when_it_is_stored(mode, state_dtype):
    """In fp64 here, so that the rounding is that of the store."""
    a = make(FORMS[3], 2, 3)
    narrow = a["state"].to(state_dtype)
    exact = narrow.double()
    table = torch.tensor([[2, 3, 4], [5, -1, 1]], dtype=torch.int32)

    def store(pool: Tensor) -> Tensor:
        given_pool = a | {"state": pool}
        if mode == "decode":
            run(given_pool, next_state=pool)
        elif mode == "commit":
            reference.delta_rule_commit(**keys(given_pool), num_accepted=int32(2, 3))
        elif mode == "tokens":
            run(given_pool, token_states=pool, token_state_indices=table)
        else:
            replay = rings(a, 8)
            run(given_pool, replay=replay)
            reference.delta_rule_flush(pool, replay, int32(3, 1), state_indices=int32(0, 1))
        return pool

    start = narrow.clone()
    stored = store(narrow)
    assert stored.dtype == state_dtype and not same(stored, start)
    if mode == "flush":
        # The arithmetic of a flush is fp32 unless the pool is fp64.
        expected = store(exact).to(state_dtype).float()
        assert close(stored.float(), expected, 2 * torch.finfo(state_dtype).eps)
    else:
        assert same(stored, store(exact).to(state_dtype))


def test_low_precision_is_fp32_arithmetic_of_the_same_numbers():
    a = make(FORMS[6], 2, 3)
    narrow = {
        n: x.to(torch.bfloat16) if n in ("q", "k", "v", "g", "beta") else x.float() if isinstance(x, Tensor) else x
        for n, x in a.items()
    }  # fmt: skip
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in narrow.items()}
    out = run(narrow, next_state=narrow["state"])
    expected = run(wide, next_state=wide["state"])
    assert out.dtype == torch.bfloat16
    assert close(out.double(), expected, 2**-8)
    assert close(narrow["state"].double(), wide["state"], 1e-5)


def test_nothing_is_read_back_to_the_host():
    """Fake tensors have no values: any read-back would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    a = make(FORMS[6], 2, 3)
    replay = rings(a, 8)
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in a.items()}
        slots = mode.from_tensor(int32(1, -1))
        records = Replay(*map(mode.from_tensor, replay))
        options = {"state_indices": slots, "num_accepted": slots, "null_slot": 3}
        out = run(fake, replay=records, **options)
        reference.delta_rule_flush(fake["state"], records, slots, state_indices=slots)
        reference.delta_rule_commit(**keys(fake), **options)
    assert out.shape == (2, 3, HEADS_V, DIM_V)
