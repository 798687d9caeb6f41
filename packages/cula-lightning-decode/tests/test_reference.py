"""The plain torch implementation against the recurrence written out number by number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cula_core.reference import lightning_decode as reference
from cula_core.reference.lightning_decode import stochastic_round_bf16
from cula_testing.comparing import bits, same
from cula_testing.tensors import int32

EPSILON = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
EPSILON |= {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
KEEP = settings(deadline=None, derandomize=True, max_examples=40)


def literal(inputs, slots, scale, state_v_first=False, accepted=None):
    """Outputs and pool after the call, as lists of Python floats; accepted: tokens per row, None for all."""
    q, k, v, pool, decay = (
        inputs[name].double().tolist() for name in ("q", "k", "v", "state", "decay")
    )
    tokens, heads, heads_v = len(q[0]), len(q[0][0]), len(v[0][0])
    dim_k, dim_v = len(q[0][0][0]), len(v[0][0][0])
    outputs = [[[[0.0] * dim_v for _ in range(heads_v)] for _ in range(tokens)] for _ in slots]
    for b, slot in enumerate(slots):
        if slot < 0:
            continue
        for h in range(heads_v):
            source = h // (heads_v // heads)
            matrix, keep = pool[slot][h], math.exp(-decay[h])
            for t in range(tokens if accepted is None else accepted[b]):
                for j in range(dim_v):
                    total = 0.0
                    for i in range(dim_k):
                        r, c = (j, i) if state_v_first else (i, j)
                        matrix[r][c] = keep * matrix[r][c] + k[b][t][source][i] * v[b][t][h][j]
                        total += q[b][t][source][i] * matrix[r][c]
                    outputs[b][t][h][j] = scale * total
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(pool, dtype=torch.float64)


def assert_near(actual: Tensor, expected: Tensor, work: torch.dtype = torch.float32) -> None:
    """Within one rounding to the dtype of `actual` and the noise of sums in the working precision."""
    dtype, magnitude = actual.dtype, 1.0 + expected.abs().max().item()
    bound = expected.abs() * EPSILON[dtype] + 64 * EPSILON[work] * magnitude
    # The spacing of fp16 stops shrinking below its smallest normal number.
    bound = bound + (2.0**-25 if dtype == torch.float16 else 0.0)
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), (error - bound).max().item()


@st.composite
def problems(draw):
    batch, heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    pool = batch + draw(st.integers(0, 3))
    shape = {
        "batch": batch,
        "tokens": draw(st.integers(1, 8)),
        "heads": heads,
        "heads_v": heads * draw(st.integers(1, 3)),
        "dim_k": draw(st.sampled_from((1, 2, 5))),
        "dim_v": draw(st.sampled_from((2, 4))),
        "pool": pool,
        "dtype": draw(
            st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16))
        ),
        "state_dtype": draw(st.sampled_from(tuple(EPSILON))),
        "state_v_first": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    slots = draw(st.permutations(range(pool)))[:batch]
    slots = [draw(st.sampled_from((slot, slot, -1, -7))) for slot in slots]
    accepted = [draw(st.integers(0, shape["tokens"])) for _ in range(batch)]
    return shape, slots, accepted


def working(shape) -> torch.dtype:
    """The precision the arithmetic is documented to have."""
    double = torch.float64 in (shape["dtype"], shape["state_dtype"])
    return torch.float64 if double else torch.float32


@KEEP
@given(problems(), st.sampled_from((None, 0.3, -2.0)), st.booleans())
def test_decode_is_the_recurrence(make_inputs, problem, scale, indexed):
    shape, slots, _ = problem
    inputs = make_inputs(**shape)
    slots = slots if indexed else list(range(shape["batch"]))
    factor = shape["dim_k"] ** -0.5 if scale is None else scale
    expected, pool = literal(inputs, slots, factor, shape["state_v_first"])
    out = reference.linear_attention_decode(
        **inputs,
        state_indices=int32(*slots) if indexed else None,
        scale=scale,
        state_v_first=shape["state_v_first"],
    )
    assert out.dtype == shape["dtype"] and out.shape == expected.shape
    assert_near(out, expected, working(shape))
    assert_near(inputs["state"], pool, working(shape))


@KEEP
@given(problems())
def test_verify_then_commit_is_decode_of_the_accepted_tokens(make_inputs, problem):
    shape, slots, accepted = problem
    inputs = make_inputs(**shape)
    layout = {"state_indices": int32(*slots), "state_v_first": shape["state_v_first"]}
    before = inputs["state"].clone()
    whole = before.clone()
    drafted = reference.linear_attention_decode(**inputs, **layout, commit=False)
    assert same(inputs["state"], before)
    decoded = reference.linear_attention_decode(**(inputs | {"state": whole}), **layout)
    assert same(drafted, decoded)

    expected, pool = literal(inputs, slots, 1.0, shape["state_v_first"], accepted)
    keys = {name: inputs[name] for name in ("k", "v", "state", "decay")}
    assert (
        reference.linear_attention_commit(**keys, num_accepted=int32(*accepted), **layout) is None
    )
    assert_near(inputs["state"], pool, working(shape))
    for row, (slot, count) in enumerate(zip(slots, accepted)):
        if slot < 0:
            continue
        single = before.clone()
        if count:
            one = {name: inputs[name][row : row + 1, :count] for name in ("q", "k", "v")}
            one |= {"state": single, "decay": inputs["decay"]}
            reference.linear_attention_decode(
                **one, state_indices=int32(slot), state_v_first=shape["state_v_first"]
            )
        assert same(inputs["state"][slot], single[slot])


@pytest.mark.parametrize("accepted", [[-3, 0, 9], [2, -1, 4]])
def test_counts_beyond_the_tokens_are_clamped(make_inputs, accepted):
    inputs = make_inputs(3, 4, 1, 2, 4, 4)
    _, pool = literal(inputs, [0, 1, 2], 1.0, accepted=[min(max(n, 0), 4) for n in accepted])
    keys = {name: inputs[name] for name in ("k", "v", "state", "decay")}
    reference.linear_attention_commit(**keys, num_accepted=int32(*accepted))
    assert_near(inputs["state"], pool)


@KEEP
@given(problems(), st.data())
def test_any_split_into_calls_is_the_same(make_inputs, problem, data):
    shape, slots, _ = problem
    inputs = make_inputs(**(shape | {"state_dtype": working(shape)}))
    layout = {"state_indices": int32(*slots), "state_v_first": shape["state_v_first"]}
    pool = inputs["state"].clone()
    whole = reference.linear_attention_decode(**inputs, **layout)
    parts, first = [], 0
    while first < shape["tokens"]:
        last = data.draw(st.integers(first + 1, shape["tokens"]))
        part = {name: inputs[name][:, first:last] for name in ("q", "k", "v")}
        part |= {"state": pool, "decay": inputs["decay"]}
        parts.append(reference.linear_attention_decode(**part, **layout))
        first = last
    assert same(torch.cat(parts, 1), whole)
    assert same(pool, inputs["state"])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("slots", [[-1, 0, -5, 2], [0, -1, -1, -1], [-1, -2, -3, -4]])
def test_padding_rows_give_zero_and_change_nothing(make_inputs, slots, state_v_first):
    inputs = make_inputs(4, 3, 2, 4, 4, 6, pool=5, state_v_first=state_v_first)
    padding = [row for row, slot in enumerate(slots) if slot < 0]
    for name in ("q", "k", "v"):
        inputs[name][padding] = torch.tensor([math.nan, math.inf, -math.inf]).view(1, 3, 1, 1)
    before = inputs["state"].clone()
    _, pool = literal(inputs, slots, 0.5, state_v_first)
    out = torch.full_like(inputs["v"], math.nan)
    layout = {"state_indices": int32(*slots), "state_v_first": state_v_first}
    reference.linear_attention_decode(**inputs, **layout, scale=0.5, out=out)
    assert not out[padding].any() and torch.isfinite(out).all()
    untouched = [slot for slot in range(5) if slot not in slots]
    assert same(inputs["state"][untouched], before[untouched])
    assert_near(inputs["state"], pool)

    state = before.clone()
    keys = {name: inputs[name] for name in ("k", "v", "decay")}
    counts = int32(2, 3, 0, 1)
    reference.linear_attention_commit(**keys, state=state, num_accepted=counts, **layout)
    assert same(state[untouched], before[untouched])
    _, pool = literal(inputs | {"state": before}, slots, 1.0, state_v_first, counts.tolist())
    assert_near(state, pool)


def test_padding_does_not_see_a_broken_slot_zero(make_inputs):
    inputs = make_inputs(2, 2, 1, 1, 4, 4)
    inputs["state"][0] = math.nan
    before = inputs["state"][0].clone()
    out = reference.linear_attention_decode(**inputs, state_indices=int32(-1, 1))
    assert not out[0].any() and torch.isfinite(out[1]).all()
    assert same(inputs["state"][0], before)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pool_may_be_any_view(make_inputs, state_dtype, state_v_first):
    inputs = make_inputs(
        3, 2, 1, 2, 4, 6, pool=4, state_dtype=state_dtype, state_v_first=state_v_first
    )
    layout = {"state_indices": int32(3, 0, 2), "state_v_first": state_v_first}
    plain = inputs["state"].clone()
    expected = reference.linear_attention_decode(**(inputs | {"state": plain}), **layout)

    gaps = torch.full((9, 3, *plain.shape[2:]), 7.0, dtype=state_dtype)
    transposed = torch.empty_like(plain.transpose(2, 3), memory_format=torch.contiguous_format)
    for view in (gaps[1::2, 1:], transposed.transpose(2, 3)):
        assert view.shape == plain.shape
        view.copy_(inputs["state"])
        out = reference.linear_attention_decode(**(inputs | {"state": view}), **layout)
        assert same(out, expected) and same(view, plain)
    assert (gaps[::2] == 7).all() and (gaps[:, 0] == 7).all()


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_state_rounds_once_per_call(make_inputs, state_dtype):
    inputs = make_inputs(2, 8, 1, 1, 4, 4, state_dtype=state_dtype)
    exact = inputs | {"state": inputs["state"].float()}
    reference.linear_attention_decode(**inputs)
    reference.linear_attention_decode(**exact)
    assert same(inputs["state"], exact["state"].to(state_dtype))


def test_empty_batch(make_inputs):
    inputs = make_inputs(0, 2, 1, 2, 4, 4, pool=3)
    before = inputs["state"].clone()
    assert reference.linear_attention_decode(**inputs).shape == (0, 2, 2, 4)
    keys = {name: inputs[name] for name in ("k", "v", "state", "decay")}
    reference.linear_attention_commit(**keys, num_accepted=int32())
    assert same(inputs["state"], before)


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """The largest bf16 <= value and the smallest bf16 >= value."""
    nearest = value.to(torch.bfloat16)
    infinity = torch.full_like(nearest, math.inf)
    low = torch.where(nearest.float() > value, torch.nextafter(nearest, -infinity), nearest)
    high = torch.where(nearest.float() < value, torch.nextafter(nearest, infinity), nearest)
    return low, high


@KEEP
@given(st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1))
def test_stochastic_rounding_gives_a_neighbour(data_seed, seed):
    generator = torch.Generator().manual_seed(data_seed)
    # Every bit pattern: normal, subnormal, infinite, NaN, and fp32 numbers above the largest bf16.
    value = torch.randint(-(2**31), 2**31, (2, 16, 32), generator=generator).to(torch.int32)
    # NaN whose payload is lost with the low half, or that one more bit would carry over into zero.
    value[1, 0, :4] = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1], dtype=torch.int32)
    value = value.view(torch.float32)
    value[0, 0, :4] = torch.tensor([3.4e38, -3.4e38, 1e-45, 0.0])
    rounded = stochastic_round_bf16(value, seed, torch.tensor([3, 4]))
    finite = torch.isfinite(value)
    low, high = neighbours(value)
    assert ((rounded == low) | (rounded == high))[finite].all()
    assert torch.equal(rounded[value.isinf()].float(), value[value.isinf()])
    assert rounded[value.isnan()].isnan().all()


def test_stochastic_rounding_keeps_exact_values():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(1, 256, 256)
    every = torch.where(every.isnan(), torch.zeros_like(every), every)
    for seed in range(8):
        rounded = stochastic_round_bf16(every.float(), seed, torch.tensor([seed]))
        assert same(rounded, every)


def test_stochastic_rounding_is_unbiased():
    seeds, rows, cols = 400, 64, 64
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn((1, rows, cols), generator=generator).to(torch.bfloat16).float()
    exact[exact == 0] = 1.0
    low, high = exact, torch.nextafter(exact.bfloat16(), exact.sign().bfloat16() * math.inf).float()
    step = high - low
    # A quarter of the way to the next number: always lost when rounding to the nearest.
    value = low + 0.25 * step
    assert torch.equal(value.bfloat16().float(), low)
    total, squares = torch.zeros_like(value), 0.0
    for seed in range(seeds):
        error = (stochastic_round_bf16(value, seed, torch.tensor([5])).float() - value) / step
        total += error
        squares += error.mean().item() ** 2
    deviation = math.sqrt(0.25 * 0.75)
    # Five standard deviations of the mean of all; six and a half for the worst of 4096 elements.
    assert abs(total.mean().item() / seeds) < 5 * deviation / math.sqrt(seeds * rows * cols)
    assert total.abs().max().item() / seeds < 6.5 * deviation / math.sqrt(seeds)
    # Elements of one call are independent: the variance of their mean is that of 4096 free draws (+-5 sd).
    ratio = squares / seeds / (deviation**2 / (rows * cols))
    assert abs(ratio - 1) < 5 * math.sqrt(2 / seeds)


@pytest.mark.parametrize("fraction", [0.5 / 2**16, 0.125, 0.5, 0.9, 1 - 1.5 / 2**16])
def test_stochastic_rounding_goes_up_as_often_as_the_distance_says(fraction):
    count = 1 << 18
    ulp = 2.0**-7
    value = torch.full((1, 512, 512), 1.0 + round(fraction * 2**16) / 2**16 * ulp)
    share = (stochastic_round_bf16(value, 11, torch.tensor([0])) > 1).double().mean().item()
    probability = round(fraction * 2**16) / 2**16
    deviation = math.sqrt(max(probability * (1 - probability), 2.0**-17) / count)
    assert abs(share - probability) < 5 * deviation


def test_stochastic_rounding_is_a_function_of_seed_and_place():
    generator = torch.Generator().manual_seed(2)
    value = torch.rand((1, 64, 64), generator=generator).expand(3, 64, 64) + 1
    heads = torch.tensor([7, 8, 9])

    def ups(seed, numbers=heads) -> Tensor:
        return stochastic_round_bf16(value, seed, numbers).float() > value

    first = ups(123)
    assert torch.equal(first, ups(123)) and torch.equal(first, ups(torch.tensor([123])))
    assert torch.equal(first.flip(0), ups(123, heads.flip(0)))
    # Independent decisions at uniform fractions u agree with probability u^2 + (1 - u)^2, on average 2/3.
    others = [ups(seed)[0] for seed in (124, 123 + (1 << 32), 123 - (1 << 63), -123)]
    for other in (first[1], first[2], *others):
        agree = (first[0] == other).double().mean().item()
        assert abs(agree - 2 / 3) < 5 * math.sqrt(2 / 9 / 4096)
    for shift, axis in ((1, 1), (1, 0), (2, 1)):
        pair = torch.stack((first[0].flatten(), first[0].roll(shift, axis).flatten()))
        assert abs(torch.corrcoef(pair.double())[0, 1].item()) < 5 / 64


def test_stochastic_state_follows_what_rounding_to_nearest_loses():
    """256 tokens that each add an eighth of the state's spacing."""
    k = torch.full((1, 1, 1, 64), 2.0**-5, dtype=torch.bfloat16)
    v = k.clone()
    decay = torch.zeros(1)
    count = int32(1)
    nearest = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
    stochastic = nearest.clone()
    for step in range(256):
        reference.linear_attention_commit(k, v, nearest, decay, count)
        reference.linear_attention_commit(k, v, stochastic, decay, count, rounding_seed=step)
    assert (nearest == 1).all()
    deviation = 2.0**-7 * math.sqrt(256 * (1 / 8) * (7 / 8))
    assert abs(stochastic.float().mean().item() - 1.25) < 5 * deviation / 64
    assert stochastic.float().std().item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_stochastic_rounding_in_a_call(make_inputs, state_v_first):
    inputs = make_inputs(
        3, 2, 1, 2, 4, 6, pool=5, state_dtype=torch.bfloat16, state_v_first=state_v_first
    )
    layout = {"state_indices": int32(4, -1, 1), "state_v_first": state_v_first}
    exact = inputs | {"state": inputs["state"].float()}
    out = reference.linear_attention_decode(**exact, **layout)
    keys = {name: inputs[name] for name in ("k", "v", "decay")}

    def run(seed, order=slice(None), commit=False):
        state = inputs["state"].clone()
        rows = {name: inputs[name][order] for name in ("q", "k", "v")}
        picked = {"state_indices": int32(4, -1, 1)[order], "state_v_first": state_v_first}
        if commit:
            reference.linear_attention_commit(
                **keys, state=state, num_accepted=int32(2, 2, 2), **layout, rounding_seed=seed
            )
        else:
            result = reference.linear_attention_decode(
                **rows, state=state, decay=inputs["decay"], **picked, rounding_seed=seed
            )
            # The outputs come from the fp32 state, before it is rounded.
            assert same(result, out[order])
        return state

    state = run(17)
    low, high = neighbours(exact["state"])
    assert ((state == low) | (state == high)).all()
    assert same(state[[0, 2, 3]], inputs["state"][[0, 2, 3]])
    assert same(state, run(17)) and same(state, run(torch.tensor([17])))
    # The draw belongs to the slot and the head: the order of the rows does not matter, nor which call commits.
    assert same(state, run(17, torch.tensor([2, 0, 1]))) and same(state, run(17, commit=True))
    assert not same(state, run(18))


def test_every_slot_and_head_draws_for_itself(make_inputs):
    inputs = make_inputs(1, 1, 1, 1, 16, 16, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    k, v = (inputs[name].expand(3, 1, 2, 16) for name in ("k", "v"))
    state = inputs["state"].expand(5, 2, 16, 16).clone()
    options = {"state_indices": int32(4, 0, 1), "rounding_seed": 6}
    count = int32(1, 1, 1)
    reference.linear_attention_commit(k, v, state, torch.full((2,), 0.3), count, **options)
    drawn = {
        tuple(bits(state[slot, head]).flatten().tolist()) for slot in (4, 0, 1) for head in range(2)
    }
    assert len(drawn) == 6


def test_nothing_accepted_leaves_the_bits_under_any_seed(make_inputs):
    inputs = make_inputs(3, 4, 1, 2, 4, 6, state_dtype=torch.bfloat16)
    inputs["state"][0, 0, 0] = torch.tensor([math.inf, -math.inf, -0.0, 0.0, 1e-40, 3.3e38])
    before = inputs["state"].clone()
    keys = {name: inputs[name] for name in ("k", "v", "state", "decay")}
    for seed in (0, -1, 2**62):
        reference.linear_attention_commit(**keys, num_accepted=int32(0, 0, 0), rounding_seed=seed)
        assert same(inputs["state"], before)


def test_the_step_is_traced_without_reading_a_value_back(make_inputs):
    """Fake tensors have no values: any read-back of data to the host would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = make_inputs(2, 3, 1, 2, 4, 6, state_dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
        rows = mode.from_tensor(int32(1, -1))
        out = reference.linear_attention_decode(**fake, state_indices=rows, rounding_seed=3)
        keys = {name: fake[name] for name in ("k", "v", "state", "decay")}
        reference.linear_attention_commit(**keys, num_accepted=rows, state_indices=rows)
    assert out.shape == (2, 3, 2, 6)
