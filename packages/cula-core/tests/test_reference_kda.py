"""Rung 1: the reference is the recurrence, however sequences are cut, packed, stored or left out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cula_core.reference import kda as reference
from cula_core.reference.common import normalized
from cula_core.reference.kda import recurrent_prefill
from cula_testing.kda.inputs import BOUNDED_KINDS, GATES, KINDS, LOWER_BOUNDS, inputs
from cula_testing.tensors import int32, spaced, turned

DOUBLE = torch.float64
EXACT = 1e-10
# The fixtures are functions of their arguments alone, so examples may share them.
KEEP = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TOKENS = ("q", "k", "v", "g", "beta")
each_layout = pytest.mark.parametrize("v_first", [False, True])
each_kind = pytest.mark.parametrize("kind", KINDS)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def logs(*values: float) -> Tensor:
    return doubles(*values).log()


def assert_near(actual: Tensor, expected: Tensor, bound: float = EXACT) -> None:
    """Within `bound` of the largest value that was expected, and fp64."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == DOUBLE
    size = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=bound * size)


def one_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> dict[str, Tensor]:
    """K = V = 1 and one head: every token is five numbers."""
    tokens = {name: x.view(1, -1, 1, 1) for name, x in (("q", q), ("k", k), ("v", v), ("g", g))}
    return tokens | {"beta": beta.view(1, -1, 1)}


def scalars(*values: float) -> Tensor:
    """States of one number each."""
    return doubles(*values).view(-1, 1, 1, 1)


def by_matrices(q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor, s: Tensor) -> tuple:
    """One head, S_t = (I - b k k^T) diag(exp d) S_(t-1) + b k v^T with every matrix written out; q comes scaled."""
    outputs = []
    identity = torch.eye(k.shape[1], dtype=DOUBLE)
    for t in range(q.shape[0]):
        kept = (identity - b[t] * torch.outer(k[t], k[t])) @ torch.diag(d[t].exp())
        s = kept @ s + b[t] * torch.outer(k[t], v[t])
        outputs.append(s.T @ q[t])
    return (torch.stack(outputs) if outputs else torch.zeros_like(v)), s


# Numbers worked out by hand.


def test_three_tokens_by_hand():
    """S: 8 -> 4, + (2 - 4) / 2 = 3. -> 3, + 2 (5 - 6) / 4 = 2.5. -> 0.25, + 1 (4 - 0.25) = 4."""
    tokens = one_head(
        doubles(1, 2, -1), doubles(1, 2, 1), doubles(2, 5, 4), logs(0.5, 1, 0.1), doubles(0.5, 0.25, 1)
    )  # fmt: skip
    state = scalars(8)
    o, final = recurrent_prefill(**tokens, initial_state=state, scale=1.0)
    assert_near(o.flatten(), doubles(3, 5, -4))
    assert_near(final.flatten(), doubles(4))
    assert state.item() == 8
    o, final = recurrent_prefill(**tokens, initial_state=state, scale=-0.5)
    assert_near(o.flatten(), doubles(-1.5, -2.5, 2))
    assert_near(final.flatten(), doubles(4))


def test_matrices_and_heads_by_hand():
    """Two value heads read one key head. Head 0 keeps (1, 1/2) of its channels, head 1 nothing; beta 1 and 1/2."""
    q, k = doubles(1, 0, 1, 1).view(1, 2, 1, 2), doubles(1, 0, 0.6, 0.8).view(1, 2, 1, 2)
    v = doubles(10, 20, 1, 2, 30, 40, 3, 4).view(1, 2, 2, 2)
    g = torch.cat((logs(1, 0.5), doubles(-1000, -1000))).view(1, 1, 2, 2).expand(1, 2, 2, 2)
    beta = doubles(1, 0.5).expand(1, 2, 2)
    given_ = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 1.0}
    o, final = recurrent_prefill(**given_)
    # Head 0: S = [[10, 20], [0, 0]] reads (6, 12) back with key (.6, .8), so (24, 28) is missing.
    assert_near(o[0, :, 0], doubles(10, 20, 10 + 1.4 * 24, 20 + 1.4 * 28).view(2, 2))
    assert_near(final[0, 0], doubles(24.4, 36.8, 19.2, 22.4).view(2, 2))
    # Head 1: half of its value each time, on an empty state.
    assert_near(o[0, :, 1], doubles(0.5, 1, 1.4 * 1.5, 1.4 * 2).view(2, 2))
    assert_near(final[0, 1], doubles(0.9, 1.2, 1.2, 1.6).view(2, 2))
    _, other = recurrent_prefill(**given_, state_v_first=True)
    assert_near(other, final.transpose(2, 3))


@pytest.mark.parametrize(
    "gate, bound, rate, bias, kept",
    [
        # softplus(0) = log 2, softplus(log 3) = log 4, sigmoid(log 3) = 3/4.
        ("softplus", 0.0, 1, [0, 0], [1 / 2, 1 / 2]),
        ("softplus", 0.0, 2, [0, math.log(3)], [1 / 4, 1 / 16]),
        ("safe", -4.0, 1, [0, math.log(3)], [math.exp(-2), math.exp(-3)]),
        ("safe", -4.0, 2, [0, math.log(3) / 2], [math.exp(-2), math.exp(-3)]),
        ("safe", -1.0, None, None, [math.exp(-0.5), math.exp(-0.5)]),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_gates_by_hand(gate, bound, rate, bias, kept, flat):
    """Strength 0: the state of ones only decays. The raw gate is 1 beside a bias that is 1 lower."""
    ones = torch.ones(1, 1, 1, 2, dtype=DOUBLE)
    dt_bias = None if bias is None else doubles(*bias).view(1, 2) - 1
    _, final = recurrent_prefill(
        ones, ones, ones, ones if bias is not None else 0 * ones, 0 * ones[..., 0],
        None if rate is None else logs(rate),
        dt_bias.flatten() if flat and bias is not None else dt_bias,
        torch.ones(1, 1, 2, 2, dtype=DOUBLE), gate=gate, lower_bound=bound,
    )  # fmt: skip
    assert_near(final[0, 0], doubles(*kept)[:, None].expand(2, 2))


def test_far_gates_neither_overflow_nor_lose_their_tail():
    """softplus(x) is x + exp(-x) for large x and exp(x) for very negative ones, the sigmoid 1 and exp(x)."""
    g = doubles(-30, 21, 1000).view(1, 1, 1, 3)
    decays = reference._log_decay(g, None, None, "softplus", 0.0).flatten()
    expected = doubles(-math.exp(-30), -21 - math.exp(-21), -1000)
    torch.testing.assert_close(decays, expected, rtol=1e-12, atol=0)
    decays = reference._log_decay(g, None, None, "safe", -5.0).flatten()
    expected = doubles(-5 * math.exp(-30), -5 + 5 * math.exp(-21), -5)
    torch.testing.assert_close(decays, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("signed, expected", [(False, [0.5, 0.75]), (True, [1.0, 1.5])])
def test_strengths_by_hand(signed, expected):
    """The sigmoid of 0 is 1/2, that of log 3 is 3/4; the state forgets all before each token."""
    one, none = doubles(1, 1), doubles(-1e4, -1e4)
    o, _ = recurrent_prefill(
        **one_head(one, one, one, none, doubles(0, math.log(3))), beta_sigmoid=True, neg_eigval=signed
    )  # fmt: skip
    assert_near(o.flatten(), doubles(*expected))


def test_normalized_keys_by_hand():
    """q = (3, 4) and k = (0, 2) become (0.6, 0.8) and (0, 1) up to 1e-6 beside the squares."""
    q, k, v = (x.view(1, 1, 1, -1) for x in (doubles(3, 4), doubles(0, 2), doubles(10)))
    rest = {"v": v, "g": torch.zeros_like(q), "beta": torch.ones(1, 1, 1, dtype=DOUBLE)}
    o, final = recurrent_prefill(q, k, **rest, scale=1.0, l2norm=True)
    length_q, length_k = math.sqrt(25 + 1e-6), math.sqrt(4 + 1e-6)
    assert_near(o.flatten(), doubles(4 / length_q * 2 / length_k * 10))
    assert_near(final.flatten(), doubles(0, 2 / length_k * 10))
    zero = recurrent_prefill(0 * q, 0 * k, **rest, l2norm=True)
    assert not zero[0].any() and not zero[1].any()


def test_the_default_scale_is_the_root_of_k():
    x = torch.ones(1, 1, 1, 16, dtype=DOUBLE)
    o, _ = recurrent_prefill(x, x / 4, x, 0 * x, x[..., 0])
    assert_near(o.flatten(), torch.ones(16, dtype=DOUBLE))


# What the delta rule must do, whatever the numbers.


@each_kind
def test_a_full_strength_write_is_read_back(kind):
    """beta = 1 and a unit key: the state answers it with the value just written, whatever it held."""
    x = inputs(1, 60, 1, 2, kind, DOUBLE, "log", initial=True, dim_k=5, dim_v=3, normalized=True)
    x |= {"q": x["k"], "beta": torch.ones_like(x["beta"])}
    o, _ = recurrent_prefill(**x, scale=1.0)
    assert_near(o, x["v"])


def test_a_strength_of_two_is_a_reflection():
    """No decay and v = 0: the second write with the same key undoes the first."""
    x = inputs(
        1, 1, 1, 1, dtype=DOUBLE, initial=True, dim_k=5, dim_v=3, normalized=True, gate="log"
    )
    twice = {name: x[name].expand(1, 2, *x[name].shape[2:]) for name in TOKENS}
    twice |= {name: torch.zeros_like(twice[name]) for name in ("v", "g")}
    twice["beta"] = torch.full_like(twice["beta"], 2.0)
    o, final = recurrent_prefill(**twice, initial_state=x["initial_state"], scale=1.0)
    assert_near(final, x["initial_state"])
    q, k, state = x["q"].flatten(), x["k"].flatten(), x["initial_state"][0, 0]
    assert_near(o[0, 0, 0], state.T @ (q - 2 * (q @ k) * k))


@each_kind
def test_a_segment_is_a_matrix_and_what_it_adds(kind):
    """Context parallelism rests on it: final = M initial + added, M from the identity and v = 0."""
    x = inputs(2, 40, 1, 2, kind, DOUBLE, "log", initial=True, dim_k=4, dim_v=4)
    state = x.pop("initial_state")
    _, whole = recurrent_prefill(**x, initial_state=state, l2norm=True)
    _, added = recurrent_prefill(**x, l2norm=True)
    identity = torch.eye(4, dtype=DOUBLE).expand(2, 2, 4, 4)
    still = x | {"v": torch.zeros_like(x["v"])}
    _, matrix = recurrent_prefill(**still, initial_state=identity, l2norm=True)
    assert_near(whole, matrix @ state + added)


def test_a_reset_forgets_what_was_before_it():
    """exp(-1000) is zero: behind such a token the first half of the sequence cannot be told from another."""
    x = inputs(1, 40, 1, 1, "moderate", DOUBLE, "log", dim_k=4, dim_v=3)
    x["g"][:, 20] = -1000
    o, final = recurrent_prefill(**x, l2norm=True)
    late = {name: x[name][:, 20:] for name in TOKENS}
    alone, alone_final = recurrent_prefill(**late, l2norm=True)
    assert torch.equal(o[:, 20:], alone) and torch.equal(final, alone_final)


# Against matrices written out; packed, split, padded, stored otherwise.


@st.composite
def problems(draw) -> dict:
    """What `inputs` takes, the options of the recurrence, and rows of a pool."""
    gate = draw(st.sampled_from(GATES))
    kinds = BOUNDED_KINDS if gate == "safe" else KINDS
    sizes = st.one_of(st.sampled_from([0, 1, 2, 16]), st.integers(0, 20))
    lengths = draw(st.none() | st.lists(sizes, min_size=1, max_size=4))
    heads = draw(st.integers(1, 2))
    count = draw(st.integers(0, 2)) if lengths is None else len(lengths)
    initial, logits, l2norm = draw(st.tuples(*[st.booleans()] * 3))
    slots = None
    if initial and draw(st.booleans()):
        rows = draw(st.permutations(range(count + 1)))[:count]
        slots = [draw(st.sampled_from([row, row, -1 - row])) for row in rows]
    v_first = draw(st.booleans())
    make = {
        "batch": 1 if lengths is not None else count,
        "tokens": sum(lengths) if lengths is not None else draw(sizes),
        "heads": heads, "heads_v": heads * draw(st.integers(1, 3)), "kind": draw(st.sampled_from(kinds)),
        "dtype": DOUBLE, "gate": gate, "seed": draw(st.integers(0, 2**31)), "lengths": lengths,
        "initial": initial, "dim_k": draw(st.integers(1, 5)), "dim_v": draw(st.integers(1, 5)),
        "logits": logits, "normalized": not l2norm, "states": count + 1 if slots is not None else count,
        "state_v_first": v_first,
    }  # fmt: skip
    options = {
        "gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": l2norm, "beta_sigmoid": logits,
        "neg_eigval": logits and draw(st.booleans()), "state_v_first": v_first,
        "scale": draw(st.sampled_from([None, 1.0, -0.3])),
    }  # fmt: skip
    return {"make": make, "options": options, "slots": slots}


def activated(x: dict, options: dict) -> tuple[Tensor, ...]:
    """q (scaled), k, log decays and strengths, from the formulas."""
    q, k, g, beta = (x[name] for name in ("q", "k", "g", "beta"))
    if options["l2norm"]:
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    if options["gate"] != "log":
        rate = x["A_log"].double().exp()[:, None]
        g = g + x["dt_bias"].double().reshape(-1, g.shape[-1])
        safe = options["gate"] == "safe"
        g = -5 / (1 + torch.exp(-rate * g)) if safe else -rate * torch.log1p(torch.exp(g))
        g = torch.where(torch.isinf(g), -1e3, g)
    if options["beta_sigmoid"]:
        beta = (2 if options["neg_eigval"] else 1) / (1 + torch.exp(-beta))
    scale = options["scale"]
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k, g, beta


@KEEP
@given(problems())
def test_the_recurrence_is_a_product_of_matrices(problem):
    x, options, slots = inputs(**problem["make"]), problem["options"], problem["slots"]
    before = None if x["initial_state"] is None else x["initial_state"].clone()
    indices = None if slots is None else int32(*slots)
    o, final = recurrent_prefill(**x, state_indices=indices, **options)
    assert before is None or torch.equal(x["initial_state"], before)
    q, k, d, b = activated(x, options)
    batch, tokens, heads_v, dim_v = x["v"].shape
    packed = x["cu_seqlens"] is not None
    bounds = x["cu_seqlens"].tolist() if packed else [0, tokens]
    places = [(r, i, j) for r in range(batch) for i, j in zip(bounds[:-1], bounds[1:])]
    assert o.shape == x["v"].shape and len(final) == len(places)
    for n, (row, start, stop) in enumerate(places):
        piece, slot = slice(start, stop), n if slots is None else slots[n]
        if slot < 0:
            assert not o[row, piece].any() and not final[n].any()
            continue
        for head in range(heads_v):
            source = head // (heads_v // problem["make"]["heads"])
            state = torch.zeros(k.shape[-1], dim_v, dtype=DOUBLE)
            if before is not None:
                state = before[slot, head].T if options["state_v_first"] else before[slot, head]
            expected, last = by_matrices(
                q[row, piece, source], k[row, piece, source], x["v"][row, piece, head],
                d[row, piece, head], b[row, piece, head], state,
            )  # fmt: skip
            assert_near(o[row, piece, head], expected)
            assert_near(final[n, head], last.T if options["state_v_first"] else last)
        if start == stop and before is not None:
            assert torch.equal(final[n], before[slot])


@KEEP
@given(problems())
def test_packed_sequences_equal_one_by_one(problem):
    make = problem["make"]
    lengths = make["lengths"] or [make["tokens"]]
    count = len(lengths)
    make = make | {"lengths": lengths, "batch": 1, "tokens": sum(lengths), "states": count}
    x = inputs(**make)
    o, final = recurrent_prefill(**x, **problem["options"])
    bounds = x.pop("cu_seqlens").tolist()
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        single = x | {name: x[name][:, start:stop] for name in TOKENS}
        if x["initial_state"] is not None:
            single["initial_state"] = x["initial_state"][n : n + 1]
        o_n, final_n = recurrent_prefill(**single, **problem["options"])
        assert_near(o[:, start:stop], o_n)
        assert_near(final[n : n + 1], final_n)


@KEEP
@given(problems(), st.data())
def test_any_split_into_calls_is_the_same(problem, data):
    make = problem["make"] | {"lengths": None, "batch": 2, "initial": True, "states": 2}
    x, first, parts = inputs(**make), 0, []
    whole, final = recurrent_prefill(**x, **problem["options"])
    state = x.pop("initial_state")
    while first < make["tokens"]:
        last = data.draw(st.integers(first + 1, make["tokens"]))
        part = x | {name: x[name][:, first:last] for name in TOKENS}
        o, state = recurrent_prefill(**part, initial_state=state, **problem["options"])
        parts.append(o)
        first = last
    assert_near(torch.cat(parts, 1) if parts else whole, whole)
    assert_near(state, final)


@each_layout
def test_padding_gives_zero_and_reads_nothing(v_first):
    x = inputs(
        1, 70, 1, 2, dtype=DOUBLE, gate="safe", lengths=(20, 30, 0, 20), initial=True, states=4,
        dim_k=4, dim_v=3, state_v_first=v_first,
    )  # fmt: skip
    for name in TOKENS:
        x[name][:, 20:50] = math.nan
    x["initial_state"][[0, 2]] = math.nan
    o, final = recurrent_prefill(
        **x, state_indices=int32(3, -1, -7, 1), gate="safe", lower_bound=-5.0, state_v_first=v_first
    )
    assert not o[:, 20:50].any() and torch.isfinite(o).all() and o[:, :20].any()
    assert not final[1:3].any() and torch.isfinite(final).all() and final[3].any()


def test_nothing_but_padding_or_no_token_at_all():
    x = inputs(2, 5, 1, 2, dtype=DOUBLE, initial=True, dim_k=4, dim_v=3, gate="log")
    o, final = recurrent_prefill(**x, state_indices=int32(-1, -2))
    assert not o.any() and not final.any()
    no_rows = x | {"initial_state": x["initial_state"][:0]}
    o, final = recurrent_prefill(**no_rows, state_indices=int32(-1, -2))
    assert not o.any() and not final.any()
    empty = x | {name: x[name][:, :0] for name in TOKENS}
    o, final = recurrent_prefill(**empty)
    assert o.shape == (2, 0, 2, 3) and torch.equal(final, x["initial_state"])
    nobody = {name: x[name][:0] for name in TOKENS}
    o, final = recurrent_prefill(**nobody)
    assert o.shape == (0, 5, 2, 3) and final.shape == (0, 2, 4, 3)


def run(x: dict, final: Tensor | None, slots: Tensor | None = None, **options) -> Tensor:
    """`reference.prefill` into an output of NaN, which it returns; gate "safe" and the L2 norm."""
    out = torch.full_like(x["v"], math.nan, memory_format=torch.contiguous_format)
    settings_ = {
        "scale": 0.5, "gate": "safe", "lower_bound": -5.0, "l2norm": True, "beta_sigmoid": True,
        "neg_eigval": False, "state_v_first": False,
    }  # fmt: skip
    reference.prefill(
        *(x[name] for name in TOKENS), x["A_log"], x["dt_bias"], x["initial_state"], slots, final,
        x["cu_seqlens"], out, **settings_ | options,
    )  # fmt: skip
    return out


@each_layout
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_prefill_replaces_the_rows_of_a_pool_that_it_read(v_first, packed, indexed):
    x = inputs(
        1 if packed else 3, 30, 1, 2, dtype=DOUBLE, lengths=(10, 0, 20) if packed else None,
        initial=True, states=5, dim_k=3, dim_v=4, logits=True, state_v_first=v_first,
    )  # fmt: skip
    slots = int32(4, -1, 0) if indexed else None
    before, final = x["initial_state"].clone(), torch.full_like(x["initial_state"][:3], math.nan)
    o = run(x, final, slots, state_v_first=v_first)
    assert torch.isfinite(o).all() and torch.equal(x["initial_state"], before)
    expected = before.clone()
    for n, row in enumerate((4, -1, 0) if indexed else (0, 1, 2)):
        if row >= 0:
            expected[row] = final[n]
    assert not torch.equal(expected, before)
    assert not indexed or not final[1].any()
    assert torch.equal(run(x, x["initial_state"], slots, state_v_first=v_first), o)
    assert torch.equal(x["initial_state"], expected)
    # A pool of the other strides is written where it lies.
    x["initial_state"] = turned(before)
    address = x["initial_state"].data_ptr()
    assert torch.equal(run(x, x["initial_state"], slots, state_v_first=v_first), o)
    assert torch.equal(x["initial_state"], expected) and x["initial_state"].data_ptr() == address


def test_strided_arguments_are_the_same():
    x = inputs(2, 20, 1, 2, dtype=DOUBLE, initial=True, dim_k=4, dim_v=3, logits=True)
    expected = run(x, None)
    views = x | {name: spaced(x[name]) for name in TOKENS}
    assert not views["q"].is_contiguous()
    assert torch.equal(run(views, None), expected)
    heads_first = {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TOKENS}
    assert torch.equal(run(x | heads_first, None), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exact", [torch.float32, torch.bfloat16])
def test_low_precision_is_computed_in_fp32_and_rounded_once(relative_rmse, dtype, exact):
    x = inputs(
        2, 60, 1, 2, dtype=dtype, initial=True, dim_k=16, dim_v=16, logits=True, gate_dtype=exact,
        beta_dtype=exact,
    )  # fmt: skip
    options = {"gate": "safe", "lower_bound": -5.0, "l2norm": True, "beta_sigmoid": True}
    options["scale"] = 0.5
    o, final = recurrent_prefill(**x, **options, dtype=DOUBLE)
    got, got_final = recurrent_prefill(**x, **options)
    assert got.dtype == got_final.dtype == torch.float32 and o.dtype == final.dtype == DOUBLE
    assert relative_rmse(got, o) < 1e-6 and relative_rmse(got_final, final) < 1e-6
    state = torch.empty_like(x["initial_state"])
    assert torch.equal(run(x, state), got.to(dtype)) and torch.equal(state, got_final)


# The inputs themselves.


@each_kind
@pytest.mark.parametrize("gate", GATES)
def test_kinds_are_what_they_say(assert_within, kind, gate):
    """Every gate gives the decays of the kind, in bounds if it is bounded; fp32 is enough for it."""
    make = {"dim_k": 8, "dim_v": 8, "initial": True, "kind": kind}
    if kind == "resets" and gate == "safe":
        with pytest.raises(ValueError, match="no resets decays from a safe gate"):
            inputs(1, 200, 1, 2, gate=gate, **make)
        return
    direct = inputs(1, 200, 1, 2, dtype=DOUBLE, gate="log", **make)["g"]
    x = inputs(1, 200, 1, 2, dtype=DOUBLE, gate=gate, **make)
    options = {"gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": True}
    decays = reference._log_decay(x["g"], x["A_log"], x["dt_bias"], gate, LOWER_BOUNDS[gate])
    torch.testing.assert_close(decays, direct, rtol=1e-5, atol=0)
    assert (direct < 0).all() and direct.min() >= (-5 if kind in BOUNDED_KINDS else -1000)
    o, final = recurrent_prefill(**x, **options)
    got, got_final = recurrent_prefill(**x, **options, dtype=torch.float32)
    assert_within(got, o, 2e-5)
    assert_within(got_final, final, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16])
@each_kind
def test_kinds_survive_16_bits(kind, dtype, gate_dtype):
    x = inputs(1, 64, 1, 1, kind, dtype, "log", dim_k=8, gate_dtype=gate_dtype, beta_dtype=dtype)
    assert x["g"].dtype == gate_dtype and x["beta"].dtype == x["q"].dtype == dtype
    assert (x["g"] < 0).all() and torch.isfinite(x["g"]).all()
    if kind == "equal_keys":
        same = (x["k"][:, 1:] == x["k"][:, :-1]).all(-1).flatten()
        assert same.tolist() == [t % 8 != 7 for t in range(63)]
    if kind == "one_key":
        assert (x["k"] == x["k"][:, :1]).all() and (x["beta"] == 1).all()


@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 64)])
@pytest.mark.parametrize("gate", ["safe", "softplus", "log"])
def test_intermediates_give_the_recurrence(lengths, gate):
    """With them and the state in front of a chunk the recurrence takes whole chunks at once."""
    tokens = 135 if lengths is None else sum(lengths)
    kind = "moderate" if gate == "safe" else "resets"
    x = inputs(1, tokens, 1, 2, kind, torch.float64, gate, lengths=lengths)
    options = {
        "scale": 0.3, "gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": True, "beta_sigmoid": False,
        "neg_eigval": False,
    }  # fmt: skip
    del x["initial_state"]
    expected, finals = recurrent_prefill(**x, **options)
    found = reference.intermediates(**x, **options)
    decays = reference._log_decay(x["g"], x["A_log"], x["dt_bias"], gate, LOWER_BOUNDS[gate])
    k = normalized(x["k"]).repeat_interleave(2, 2)
    start = 0
    for n, length in enumerate(lengths or (tokens,)):
        state = finals.new_zeros(2, 128, 128)
        for first in range(start, start + length, 64):
            rows = slice(first, min(first + 64, start + length))
            aqk, akk, w, u, qg, kg = (t[0, rows] for t in found)
            u_new = u - torch.einsum("thk,hkv->thv", w, state)
            out = 0.3 * torch.einsum("thk,hkv->thv", qg, state)
            out += torch.einsum("ihj,jhv->ihv", aqk[..., : len(aqk)], u_new)
            torch.testing.assert_close(out, expected[0, rows], rtol=1e-10, atol=1e-10)
            sums = decays[0, rows].cumsum(0)
            state = sums[-1].exp()[..., None] * state + torch.einsum("thk,thv->hkv", kg, u_new)
            strong = x["beta"][0, rows, :, None] * sums.exp() * k[0, rows]
            again = torch.einsum("ihj,jhk->ihk", akk[..., : len(akk)], strong)
            torch.testing.assert_close(w, again, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state, finals[n], rtol=1e-10, atol=1e-10)
        start += length


ENGINE_LENGTHS = (130, 0, 64, 200)


def engine_call(**more):
    """A packed call on a pool of 8 rows whose rows of no use are NaN; each sequence alone beside it."""
    x = inputs(
        1, sum(ENGINE_LENGTHS), 1, 2, gate="log", normalized=True, initial=True, lengths=ENGINE_LENGTHS, states=8,
        dim_k=8, dim_v=4, dtype=torch.float64,
    )  # fmt: skip
    pool = x.pop("initial_state")
    out = torch.empty_like(x["v"])
    options = {
        "scale": 1.0,
        "gate": "log",
        "lower_bound": 0.0,
        "l2norm": False,
        "beta_sigmoid": False,
    }
    options |= {"neg_eigval": False, "state_v_first": False}
    before = pool.clone()
    tensors = {name: x[name] for name in ("q", "k", "v", "g", "beta")}

    def run(rows, final=pool):
        reference.prefill(
            *tensors.values(),
            None,
            None,
            pool,
            rows,
            final,
            x["cu_seqlens"],
            out,
            **options,
            **more,
        )

    def alone(n, state, tokens=None):
        first = sum(ENGINE_LENGTHS[:n])
        last = first + (ENGINE_LENGTHS[n] if tokens is None else tokens)
        part = [t[:, first:last] for t in tensors.values()]
        found = reference.recurrent_prefill(*part, initial_state=state, scale=1.0, gate="log")
        return found[0], found[1][0]

    return run, alone, pool, before, out


def test_rows_of_a_pool():
    run, alone, pool, before, out = engine_call(
        null_slot=0, has_initial_state=torch.tensor([True, True, True, False]),
        output_state_indices=int32(7, 4, 6, -2),
    )  # fmt: skip
    run(int32(5, 3, 0, 2))
    begins = (before[5:6], before[3:4], None, None)
    ends = {7: 0, 4: 1}
    for n in (0, 1, 3):
        o, state = alone(n, begins[n])
        first = sum(ENGINE_LENGTHS[:n])
        assert torch.equal(out[:, first : first + ENGINE_LENGTHS[n]], o)
        for row in (row for row, of in ends.items() if of == n):
            assert torch.equal(pool[row], state)
    assert not out[:, 130:194].any()
    kept = [row for row in range(8) if row not in ends]
    assert torch.equal(pool[kept], before[kept])


@pytest.mark.parametrize("rows", [None, (9, -1, 3, 4)])
@pytest.mark.parametrize("every", [0, 64])
def test_states_on_the_way(rows, every):
    """They are the final states of shorter calls."""
    offsets = (128, 64, 64, 100)
    saved = torch.full((12, 2, 8, 4), math.nan, dtype=torch.float64)
    options = {"checkpoint_every": every} if every else {"checkpoint_offsets": int32(*offsets)}
    given = saved[:6].view(1, 6, 2, 8, 4) if every and rows is None else saved
    run, alone, pool, before, _ = engine_call(
        checkpoints=given, checkpoint_rows=None if rows is None else int32(*rows), **options
    )
    run(int32(5, 3, 1, 2))
    starts = [sum(ENGINE_LENGTHS[:n]) // 64 for n in range(4)] if every else range(4)
    expected = torch.full_like(saved, math.nan)
    for n, length in enumerate(ENGINE_LENGTHS):
        first = (rows or starts)[n]
        when = [64 * (i + 1) for i in range(length // 64)] if every else [offsets[n]]
        for i, tokens in enumerate(when):
            if first >= 0 and tokens <= length and tokens % 64 == 0:
                row = (5, 3, 1, 2)[n]
                expected[first + i] = alone(n, before[row : row + 1], tokens)[1]
    assert torch.equal(saved.nan_to_num(99.0), expected.nan_to_num(99.0))
