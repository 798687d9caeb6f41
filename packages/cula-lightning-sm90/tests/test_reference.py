"""Rung 1: the chunked form is the recurrence, however sequences are cut, packed, stored or left out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cula_lightning_sm90 import reference
from cula_testing.tensors import int32

EXACT = 1e-10
# The fixtures are functions of their arguments alone, so examples may share them.
KEEP = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FORMS = {"recurrent": reference.recurrent_prefill, "chunked": reference.chunked_prefill}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_layout = pytest.mark.parametrize("v_first", [False, True])
# Nothing lost, nearly nothing, half of the state, all but 3e-4 of it, everything.
DECAYS = (0.0, 1e-4, 0.7, 8.0, 1e4)
GATES = (0.0, -1e-4, -0.5, -20.0, -1e4)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_near(actual: Tensor, expected: Tensor, bound: float = EXACT) -> None:
    """Within `bound` of the largest value that was expected, NaN where it was expected."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float64
    size = max(1.0, expected.nan_to_num().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=bound * size, equal_nan=True)


def poisoned(batch: int, rows: int, state: Tensor) -> Tensor:
    """Checkpoints, NaN until somebody writes them."""
    return torch.full((batch, rows, *state.shape[1:]), math.nan, dtype=torch.float64)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """K = V = 1 and one head: every token is three numbers."""
    return {name: x.view(1, -1, 1, 1) for name, x in (("q", q), ("k", k), ("v", v))}


@each_form
def test_three_tokens_by_hand(form):
    """Half of the state is lost per token: S = 0.5 * 8 + 2 = 6, then 3 + 3 * 5 = 18, then 9 + 1 = 10."""
    tokens = one_head(doubles(1, 2, -1), doubles(1, 3, 1), doubles(2, 5, 1))
    decay, state = torch.tensor([math.log(2.0)]), doubles(8).view(1, 1, 1, 1)
    o, final = form(**tokens, head_decay=decay, initial_state=state, scale=1.0)
    # log 2 in fp32 halves to 2e-8.
    torch.testing.assert_close(o.flatten(), doubles(6, 36, -10), rtol=1e-7, atol=0)
    torch.testing.assert_close(final.flatten(), doubles(10), rtol=1e-7, atol=0)
    assert state.item() == 8


@each_form
def test_gates_by_hand(form):
    """The state keeps a half before token 0, nothing before token 1, a quarter before token 2."""
    tokens = one_head(doubles(1, 1, 1), doubles(1, 1, 1), doubles(2, 5, 1))
    g = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64).log().view(1, 3, 1)
    state = doubles(8).view(1, 1, 1, 1)
    o, final = form(**tokens, g=g, initial_state=state, scale=2.0)
    assert_near(o.flatten(), doubles(12, 10, 4.5))
    assert_near(final.flatten(), doubles(2.25))


@each_form
def test_a_gate_and_a_head_decay_multiply(form):
    """A half by g times a half by g_gamma: S = 16 / 4 + 1 = 5."""
    tokens = one_head(doubles(1), doubles(1), doubles(1))
    g = doubles(0.5).log().view(1, 1, 1)
    gamma = doubles(0.5).log()
    o, final = form(
        **tokens, g=g, head_decay=gamma, decay_sign=1, scale=1.0,
        initial_state=doubles(16).view(1, 1, 1, 1),
    )  # fmt: skip
    assert_near(o.flatten(), doubles(5))
    assert_near(final.flatten(), doubles(5))


@each_form
def test_matrices_and_heads_by_hand(form):
    """Two value heads share one query head; head 1 forgets everything before its token."""
    q, k = doubles(1, 2, 0, 1).view(1, 2, 1, 2), doubles(1, 0, 2, 1).view(1, 2, 1, 2)
    v = doubles(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12).view(1, 2, 2, 3)
    decay = torch.tensor([0.0, 1e4])
    o, final = form(q, k, v, None, decay, scale=1.0)
    # Head 0: S = [[1, 2, 3], [0, 0, 0]], then + [[14, 16, 18], [7, 8, 9]]. Head 1: the last token alone.
    assert_near(o[0, 0], doubles(1, 2, 3, 4, 5, 6).view(2, 3))
    assert_near(o[0, 1], doubles(7, 8, 9, 10, 11, 12).view(2, 3))
    first, second = doubles(15, 18, 21, 7, 8, 9), doubles(20, 22, 24, 10, 11, 12)
    assert_near(final, torch.cat((first, second)).view(1, 2, 2, 3))
    _, turned = form(q, k, v, None, decay, scale=1.0, state_v_first=True)
    assert_near(turned, final.transpose(2, 3))


@each_form
def test_normalized_keys_by_hand(form):
    """q = (3, 4) and k = (0, 2) become (0.6, 0.8) and (0, 1) up to 1e-6 beside the squares."""
    q, k, v = (x.view(1, 1, 1, -1) for x in (doubles(3, 4), doubles(0, 2), doubles(10)))
    o, final = form(q, k, v, scale=1.0, l2norm=True)
    length_q, length_k = math.sqrt(25 + 1e-6), math.sqrt(4 + 1e-6)
    assert_near(o.flatten(), doubles(4 / length_q * 2 / length_k * 10))
    assert_near(final.flatten(), doubles(0, 2 / length_k * 10))
    zero = form(torch.zeros_like(q), torch.zeros_like(k), v, l2norm=True)
    assert not zero[0].any() and not zero[1].any()


@each_form
def test_the_default_scale_is_the_root_of_k(form):
    q = torch.ones(1, 1, 1, 16, dtype=torch.float64)
    assert_near(form(q, q, q)[0].flatten(), torch.full((16,), 4.0, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 128])
def test_a_partial_chunk_advances_by_its_own_length(length):
    """k = 0 everywhere: all that happens to the state is its decay, exp(-0.01) per token."""
    q = k = torch.zeros(1, length, 1, 2, dtype=torch.float64)
    v = torch.ones(1, length, 1, 3, dtype=torch.float64)
    state = torch.full((1, 1, 2, 3), 5.0, dtype=torch.float64)
    decay = torch.tensor([2.0**-7])
    for form in FORMS.values():
        _, final = form(q, k, v, None, decay, state)
        assert_near(final, torch.full_like(state, 5.0 * math.exp(-length / 128)))


@st.composite
def problems(draw) -> dict:
    """Shapes of a packed or dense call, its decays and flags."""
    packed = draw(st.booleans())
    heads = draw(st.integers(1, 2))
    problem = {
        "heads": heads,
        "heads_v": heads * draw(st.integers(1, 2)),
        "dim_k": draw(st.integers(1, 5)),
        "dim_v": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 2**31)),
        "packed": packed,
        "gated": draw(st.sampled_from(["", "g", "decay", "g decay"])),
        "state": draw(st.booleans()),
        "l2norm": draw(st.booleans()),
        "v_first": draw(st.booleans()),
        "every": draw(st.sampled_from([0, 64, 128])),
    }
    sizes = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 129]), st.integers(0, 200))
    problem["lengths"] = draw(st.lists(sizes, min_size=1, max_size=4)) if packed else None
    problem["batch"] = 1 if packed else draw(st.integers(0, 2))
    problem["tokens"] = sum(problem["lengths"]) if packed else draw(sizes)
    count = len(problem["lengths"]) if packed else problem["batch"]
    slots = list(draw(st.permutations(range(count + 1))))[:count]
    padding = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    indexed = problem["state"] and draw(st.booleans())
    problem["slots"] = [-1 - s if p else s for s, p in zip(slots, padding)] if indexed else None
    problem["head_decays"] = draw(st.lists(st.sampled_from(DECAYS), min_size=4, max_size=4))
    return problem


def arguments(make_inputs, problem: dict) -> dict:
    """What both forms take, checkpoints excepted. Every token of every head draws its gate from GATES."""
    p = problem
    count = len(p["lengths"]) if p["packed"] else p["batch"]
    inputs = make_inputs(
        p["batch"], p["tokens"], p["heads"], p["heads_v"], p["dim_k"], p["dim_v"], dtype=torch.float64,
        state_dtype=torch.float64, states=count + 1 if p["slots"] is not None else count,
        state_v_first=p["v_first"], seed=p["seed"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(p["seed"])
    drawn = torch.randint(len(GATES), inputs["g"].shape, generator=generator)
    offsets = None
    if p["packed"]:
        offsets = torch.tensor([0, *p["lengths"]]).cumsum(0)
    return {
        **{name: inputs[name] for name in ("q", "k", "v")},
        "g": doubles(*GATES)[drawn] if "g" in p["gated"].split() else None,
        "head_decay": torch.tensor(p["head_decays"][: p["heads_v"]]) if "decay" in p["gated"] else None,
        "initial_state": inputs["state"] if p["state"] else None,
        "state_indices": None if p["slots"] is None else int32(*p["slots"]),
        "cu_seqlens": offsets,
        "state_v_first": p["v_first"],
        "l2norm": p["l2norm"],
    }  # fmt: skip


@KEEP
@given(problems())
def test_chunks_equal_the_recurrence(make_inputs, problem):
    given_ = arguments(make_inputs, problem)
    before = None if given_["initial_state"] is None else given_["initial_state"].clone()
    results = []
    for form in FORMS.values():
        saved, every = None, problem["every"]
        if every:
            matrix = [problem["dim_k"], problem["dim_v"]]
            shape = (problem["batch"], problem["tokens"] // every, problem["heads_v"])
            matrix = matrix[::-1] if problem["v_first"] else matrix
            saved = torch.full((*shape, *matrix), math.nan, dtype=torch.float64)
        o, final = form(**given_, checkpoints=saved, checkpoint_every=every)
        results.append((o, final, saved))
    expected, actual = results
    for a, e in zip(actual, expected):
        if e is not None:
            assert_near(a, e)
    assert before is None or torch.equal(given_["initial_state"], before)


@KEEP
@given(problems())
def test_packed_sequences_equal_one_by_one(make_inputs, problem):
    problem = problem | {"packed": True, "batch": 1, "slots": None}
    problem["lengths"] = problem["lengths"] or [problem["tokens"]]
    given_ = arguments(make_inputs, problem)
    offsets = given_.pop("cu_seqlens").tolist()
    o, final = reference.chunked_prefill(**given_, cu_seqlens=torch.tensor(offsets))
    for n, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:])):
        single = dict(given_)
        for name in ("q", "k", "v", "g"):
            if single[name] is not None:
                single[name] = single[name][:, start:stop]
        if single["initial_state"] is not None:
            single["initial_state"] = single["initial_state"][n : n + 1]
        o_n, final_n = reference.chunked_prefill(**single)
        assert_near(o[:, start:stop], o_n)
        assert_near(final[n : n + 1], final_n)
        if start == stop and problem["state"]:
            assert torch.equal(final[n], given_["initial_state"][n])


@KEEP
@given(problems(), st.data())
def test_any_split_into_calls_is_the_same(make_inputs, problem, data):
    problem = problem | {"packed": False, "slots": None, "lengths": None, "batch": 2, "state": True}
    given_ = arguments(make_inputs, problem)
    whole, final = reference.recurrent_prefill(**given_)
    state, first, parts = given_.pop("initial_state"), 0, []
    while first < problem["tokens"]:
        last = data.draw(st.integers(first + 1, problem["tokens"]))
        part = dict(given_)
        for name in ("q", "k", "v", "g"):
            if part[name] is not None:
                part[name] = part[name][:, first:last]
        o, state = reference.chunked_prefill(**part, initial_state=state)
        parts.append(o)
        first = last
    assert_near(torch.cat(parts, 1) if parts else whole, whole)
    assert_near(state, final)


@pytest.mark.parametrize("value", DECAYS)
@pytest.mark.parametrize("dtype, bound", [(torch.float64, EXACT), (torch.float32, 3e-6)])
def test_adversarial_head_decays(make_inputs, relative_rmse, value, dtype, bound):
    a = make_inputs(1, 200, 1, 2, 4, 3, dtype=dtype, state_dtype=dtype, seed=3)
    decay = torch.tensor([value, 0.0])
    o, final = reference.recurrent_prefill(a["q"], a["k"], a["v"], None, decay, a["state"])
    got, got_final = reference.chunked_prefill(a["q"], a["k"], a["v"], None, decay, a["state"])
    assert got.dtype == dtype
    for head in range(2):
        assert relative_rmse(got[:, :, head], o[:, :, head]) < bound
        assert relative_rmse(got_final[:, head], final[:, head]) < bound
    if value == 1e4:
        # exp(-1e4) is zero: the state is the last token alone.
        alone = torch.einsum("k,v->kv", a["k"][0, -1, 0], a["v"][0, -1, 0])
        assert relative_rmse(got_final[0, 0], alone) < bound


@pytest.mark.parametrize("dtype, bound", [(torch.float64, EXACT), (torch.float32, 3e-6)])
def test_a_gate_that_forgets_does_not_blur_the_ones_after_it(
    make_inputs, relative_rmse, dtype, bound
):
    """-1e4 in every tenth token: differences of running sums would lose the gates of -1e-4 between them."""
    a = make_inputs(1, 128, 1, 1, 4, 4, dtype=dtype, state_dtype=dtype)
    g = torch.full((1, 128, 1), -1e-4)
    g[:, ::10], g[:, 5::20] = -1e4, -20.0
    o, final = reference.recurrent_prefill(a["q"], a["k"], a["v"], g, None, a["state"])
    got, got_final = reference.chunked_prefill(a["q"], a["k"], a["v"], g, None, a["state"])
    assert relative_rmse(got, o) < bound and relative_rmse(got_final, final) < bound


@each_form
@each_layout
def test_padding_gives_zero_and_reads_nothing(make_inputs, form, v_first):
    a = make_inputs(1, 150, 1, 2, 4, 3, dtype=torch.float64, states=4, state_v_first=v_first)
    offsets = int32(0, 70, 140, 140, 150)
    for name in ("q", "k", "v", "g"):
        a[name][:, 70:140] = math.nan
    a["state"][0] = math.nan
    saved = poisoned(1, 2, a["state"])
    o, final = form(
        a["q"], a["k"], a["v"], a["g"], a["decay"], a["state"], int32(3, -1, -7, 1), saved, offsets,
        state_v_first=v_first, checkpoint_every=64,
    )  # fmt: skip
    assert not o[:, 70:140].any() and torch.isfinite(o).all() and o[:, :70].any()
    assert not final[1:3].any() and torch.isfinite(final).all() and final[3].any()
    # Sequence 0 owns row 0; row 1 would be that of the padding slot.
    assert torch.isfinite(saved[0, 0]).all() and saved[0, 1].isnan().all()


@each_form
def test_packed_checkpoints_lie_where_their_sequence_starts(make_inputs, form):
    """n = 64: sequences at 0, 100, 100, 260 write rows 0; none; 1 and 2; 4."""
    offsets = [0, 100, 100, 260, 340]
    a = make_inputs(1, 340, 1, 1, 2, 3, dtype=torch.float64, states=4)
    saved = poisoned(1, 340 // 64, a["state"])
    tensors = {n: a[n] for n in ("q", "k", "v", "g")}
    form(
        **tensors, initial_state=a["state"], checkpoints=saved, cu_seqlens=torch.tensor(offsets),
        checkpoint_every=64,
    )  # fmt: skip
    owners = {0: (0, 64), 1: (2, 64), 2: (2, 128), 4: (3, 64)}
    for row in range(5):
        if row not in owners:
            assert saved[0, row].isnan().all()
            continue
        n, length = owners[row]
        part = {name: x[:, offsets[n] : offsets[n] + length] for name, x in tensors.items()}
        _, state = reference.recurrent_prefill(**part, initial_state=a["state"][n : n + 1])
        assert_near(saved[0, row], state[0])


@each_form
@each_layout
@pytest.mark.parametrize("every", [64, 128, 192])
def test_dense_checkpoints_are_the_states_of_prefixes(make_inputs, form, v_first, every):
    a = make_inputs(
        2, 200, 1, 2, 3, 4, dtype=torch.float64, state_dtype=torch.float64, state_v_first=v_first
    )
    options = {"initial_state": a["state"], "head_decay": a["decay"], "state_v_first": v_first}
    saved = poisoned(2, 200 // every, a["state"])
    form(a["q"], a["k"], a["v"], **options, checkpoints=saved, checkpoint_every=every)
    for i in range(200 // every):
        part = {name: a[name][:, : (i + 1) * every] for name in ("q", "k", "v")}
        _, state = reference.recurrent_prefill(**part, **options)
        assert_near(saved[:, i], state)


@pytest.mark.parametrize("indexed", [False, True])
def test_prefill_replaces_the_rows_of_a_pool_that_it_read(make_inputs, indexed):
    a = make_inputs(1, 100, 1, 1, 3, 4, dtype=torch.float64, state_dtype=torch.float64, states=5)
    tensors = (a["q"], a["k"], a["v"], None, a["decay"])
    offsets = torch.tensor([0, 30, 30, 100])
    slots = int32(4, -1, 0) if indexed else None
    o, final = reference.recurrent_prefill(*tensors, a["state"], slots, None, offsets, scale=1.0)
    pool, out = a["state"].clone(), torch.full_like(a["v"], math.nan)
    reference.prefill(*tensors, pool, slots, pool, None, offsets, out, scale=1.0)
    assert_near(out, o)
    expected = a["state"].clone()
    for n, row in enumerate((4, -1, 0) if indexed else (0, 1, 2)):
        if row >= 0:
            expected[row] = final[n]
    assert_near(pool, expected)
    untouched = [1, 2, 3] if indexed else [1, 3, 4]
    assert torch.equal(pool[untouched], a["state"][untouched])

    pool, separate = a["state"].clone(), torch.full((3, 1, 3, 4), math.nan, dtype=torch.float64)
    reference.prefill(*tensors, pool, slots, separate, None, offsets, out, scale=1.0)
    assert_near(separate, final)
    assert torch.equal(pool, a["state"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_fp32_and_rounded_once(make_inputs, relative_rmse, dtype):
    a = make_inputs(2, 150, 1, 2, 16, 16, dtype=dtype)
    tensors = (a["q"], a["k"], a["v"], a["g"], a["decay"], a["state"])
    o, final = reference.recurrent_prefill(*tensors)
    got, got_final = reference.chunked_prefill(*tensors)
    assert got.dtype == got_final.dtype == torch.float32
    assert relative_rmse(got, o) < 1e-6 and relative_rmse(got_final, final) < 1e-6
    out, state = torch.empty_like(a["v"]), torch.empty_like(a["state"])
    reference.prefill(*tensors, None, state, None, None, out, scale=16**-0.5)
    assert torch.equal(out, got.to(dtype)) and torch.equal(state, got_final)
