"""The kernels on a GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from decode_helpers import clone, exact, keys, rows
from torch import Tensor

from cula_core.reference import lightning_decode as reference
from cula_lightning_decode import launch, linear_attention_commit, linear_attention_decode
from cula_testing.comparing import bits, same
from cula_testing.tensors import column, unsynchronised

pytestmark = pytest.mark.gpu

DIMS = (64, 128, 256)
STATES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (torch.bfloat16, torch.float16)
# (H, HV)
HEADS = ((1, 1), (2, 2), (1, 3), (2, 8))
SLOTS = [5, -1, 0, 3]
# All head dimensions, state dtypes and layouts; tokens, activation dtype, heads and indices take turns.
CASES = [
    pytest.param(
        dim_k, dim_v, state_dtype, v_first, 1 + (3 * i + i // 8) % 8,
        ACTIVATIONS[i // 2 % 2], HEADS[(i + i // 4) % 4], i // 3 % 2 == 0,
        id=f"{dim_k}x{dim_v}-{str(state_dtype)[6:]}-{'VK' if v_first else 'KV'}",
    )
    for i, (dim_k, dim_v, state_dtype, v_first) in enumerate(
        itertools.product(DIMS, DIMS, STATES, (False, True))
    )
]  # fmt: skip


@pytest.mark.parametrize("dim_k, dim_v, state_dtype, v_first, tokens, dtype, heads, indexed", CASES)
def test_numbers(
    cuda, make_inputs, assert_rounded_once, relative_rmse,
    dim_k, dim_v, state_dtype, v_first, tokens, dtype, heads, indexed,
):  # fmt: skip
    inputs = make_inputs(
        4, tokens, *heads, dim_k, dim_v, pool=6, dtype=dtype, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    slots = SLOTS if indexed else [0, 1, 2, 3]
    indices = column(rows(cuda, *slots)) if indexed else None
    layout = {"state_v_first": v_first, "state_indices": indices}
    out, state = exact(inputs, **layout)
    before = inputs["state"].clone()

    decoded = torch.full_like(inputs["v"], math.nan)
    assert linear_attention_decode(**inputs, **layout, out=decoded) is decoded
    assert_rounded_once(decoded, out)
    assert_rounded_once(inputs["state"], state)
    padding = [row for row, slot in enumerate(slots) if slot < 0]
    assert not decoded[padding].any()
    unused = [slot for slot in range(6) if slot not in slots]
    assert same(inputs["state"][unused], before[unused])

    inputs["state"].copy_(before)
    drafted = torch.full_like(inputs["v"], math.nan)
    linear_attention_decode(**inputs, **layout, out=drafted, commit=False)
    assert_rounded_once(drafted, out)
    assert same(inputs["state"], before)

    counts = [tokens, tokens, 0, max(tokens - 1, 1)]
    wide = {name: tensor.double() for name, tensor in keys(inputs).items()}
    accepted = column(rows(cuda, *counts))
    reference.linear_attention_commit(**wide, num_accepted=accepted, **layout)
    linear_attention_commit(**keys(inputs), num_accepted=accepted, **layout)
    assert_rounded_once(inputs["state"], wide["state"])
    still = sorted({*unused, slots[2]})
    assert same(inputs["state"][still], before[still])


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_token_counts(cuda, make_inputs, assert_rounded_once, tokens, state_dtype, v_first):
    inputs = make_inputs(
        3, tokens, 2, 4, 64, 64, dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda, seed=tokens,
    )  # fmt: skip
    out, state = exact(inputs, state_v_first=v_first)
    assert_rounded_once(linear_attention_decode(**inputs, state_v_first=v_first), out)
    assert_rounded_once(inputs["state"], state)


@pytest.mark.parametrize("scale", [None, 1, 0.0, -1.5])
def test_scale(cuda, make_inputs, assert_rounded_once, scale):
    inputs = make_inputs(2, 2, 1, 2, 128, 64, dtype=torch.bfloat16, device=cuda)
    out, _ = exact(inputs, scale=scale)
    got = linear_attention_decode(**inputs, scale=scale)
    if scale == 0.0:
        assert not got.any()
    else:
        assert_rounded_once(got, out)


def test_large_batch(cuda, make_inputs, assert_rounded_once):
    """Many waves of CTAs."""
    inputs = make_inputs(257, 1, 8, 16, 64, 64, dtype=torch.bfloat16, device=cuda)
    out, state = exact(inputs)
    assert_rounded_once(linear_attention_decode(**inputs), out)
    assert_rounded_once(inputs["state"], state)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_activations_may_be_any_view(cuda, make_inputs, tokens, state_dtype, v_first, offset):
    """Slices of one fused projection, aligned or not, behind a batch with gaps: the same bits as dense tensors."""
    inputs = make_inputs(
        2, tokens, 2, 4, 64, 128, dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    dense = clone(inputs)
    expected = linear_attention_decode(**dense, state_v_first=v_first)

    widths = {name: inputs[name][0, 0].numel() for name in ("q", "k", "v")}
    pitch = sum(widths.values()) + offset + (8 if offset % 8 == 0 else 1)
    fused = torch.full((4, tokens + 2, pitch), math.nan, dtype=torch.bfloat16, device=cuda)
    first = offset
    for name, width in widths.items():
        view = fused[1::2, 1 : 1 + tokens, first : first + width].unflatten(
            2, inputs[name].shape[2:]
        )
        inputs[name] = view.copy_(inputs[name])
        first += width
    storage = torch.full((2, tokens, 4, 135), 7.0, dtype=torch.bfloat16, device=cuda)
    out = storage[..., 7:].transpose(1, 2).contiguous().transpose(1, 2)
    linear_attention_decode(**inputs, state_v_first=v_first, out=out)
    assert same(out, expected) and same(inputs["state"], dense["state"])

    odd = storage[..., 3:131]
    inputs["state"].copy_(dense["state"])
    after = linear_attention_decode(**dense, state_v_first=v_first)
    linear_attention_decode(**inputs, state_v_first=v_first, out=odd)
    assert same(odd, after) and same(inputs["state"], dense["state"])
    assert (storage[..., :3] == 7).all() and (storage[..., 131:] == 7).all()


def test_strides_of_single_elements_do_not_matter(cuda, make_inputs):
    inputs = make_inputs(1, 1, 1, 1, 64, 64, dtype=torch.bfloat16, device=cuda)
    twin = clone(inputs)
    expected = linear_attention_decode(**twin)
    odd = {n: inputs[n].as_strided(inputs[n].shape, (7, 5, 3, 1)) for n in ("q", "k", "v")}
    odd["state"] = inputs["state"].as_strided(inputs["state"].shape, (12, 20, 64, 1))
    odd["decay"] = inputs["decay"].repeat(3)[::3]
    first = rows(cuda, 0, 5, 5)[::3]
    assert same(linear_attention_decode(**odd, state_indices=first), expected)
    assert same(inputs["state"], twin["state"])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", STATES)
def test_pools_may_have_gaps_or_be_transposed(
    cuda, make_inputs, relative_rmse, v_first, state_dtype
):
    inputs = make_inputs(
        2, 2, 1, 2, 64, 128, pool=3, dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    layout = {"state_indices": rows(cuda, 2, 0), "state_v_first": v_first}
    start = inputs["state"].clone()
    expected = linear_attention_decode(**inputs, **layout)

    gaps = torch.full((7, 5, *start.shape[2:]), 7.0, dtype=state_dtype, device=cuda)
    view = gaps[1::2, 2:4]
    view.copy_(start)
    assert same(linear_attention_decode(**(inputs | {"state": view}), **layout), expected)
    assert same(view, inputs["state"])
    assert (gaps[::2] == 7).all() and (gaps[:, :2] == 7).all() and (gaps[:, 4:] == 7).all()

    turned = start.transpose(2, 3).contiguous().transpose(2, 3)
    out = linear_attention_decode(**(inputs | {"state": turned}), **layout)
    assert relative_rmse(out, expected) < 1e-3 and same(turned, inputs["state"])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("slots", [[-1, 0, -5, 2], [0, -1, -1, -1], [-1, -2, -3, -4]])
def test_padding(cuda, make_inputs, slots, v_first):
    inputs = make_inputs(
        4, 2, 1, 2, 64, 64, pool=5, dtype=torch.bfloat16, state_v_first=v_first, device=cuda
    )
    layout = {"state_indices": rows(cuda, *slots), "state_v_first": v_first}
    padding = [row for row, slot in enumerate(slots) if slot < 0]
    unused = [slot for slot in range(5) if slot not in slots]
    for name in ("q", "k", "v"):
        inputs[name][padding] = math.nan
    inputs["state"][unused] = math.nan
    before = inputs["state"].clone()
    out = torch.full_like(inputs["v"], math.nan)
    linear_attention_decode(**inputs, **layout, out=out)
    linear_attention_commit(**keys(inputs), num_accepted=rows(cuda, 2, 2, 2, 2), **layout)
    assert not out[padding].any() and torch.isfinite(out).all()
    assert same(inputs["state"][unused], before[unused])
    used = [slot for slot in slots if slot >= 0]
    assert not any(same(inputs["state"][s], before[s]) for s in used)


def test_empty_batch(cuda, make_inputs):
    inputs = make_inputs(0, 2, 1, 2, 64, 64, pool=3, dtype=torch.bfloat16, device=cuda)
    before = inputs["state"].clone()
    assert linear_attention_decode(**inputs).shape == (0, 2, 2, 64)
    linear_attention_commit(**keys(inputs), num_accepted=rows(cuda), state_indices=rows(cuda))
    assert same(inputs["state"], before)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 64)])
def test_several_tokens_are_several_calls(cuda, make_inputs, relative_rmse, dims, v_first):
    inputs = make_inputs(
        3, 8, 1, 2, *dims, dtype=torch.bfloat16, state_v_first=v_first, device=cuda
    )
    steps, parts = inputs["state"].clone(), []
    for t in range(8):
        one = {name: inputs[name][:, t : t + 1] for name in ("q", "k", "v")}
        one |= {"state": steps, "decay": inputs["decay"]}
        parts.append(linear_attention_decode(**one, state_v_first=v_first))
    out = linear_attention_decode(**inputs, state_v_first=v_first)
    assert same(inputs["state"], steps)
    # The outputs are sums in the order of the tile; a rounding to bf16 may now and then fall on the other side.
    assert relative_rmse(torch.cat(parts, 1), out) < 3e-4


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", STATES)
def test_commit_is_decode_of_the_accepted_tokens(cuda, make_inputs, state_dtype, v_first):
    inputs = make_inputs(
        6, 4, 1, 2, 128, 64, pool=6, dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    start = inputs["state"].clone()
    # Counts outside 0..T are as the nearest that is inside.
    counts = [0, 1, 4, 3, 9, -2]
    linear_attention_commit(**keys(inputs), num_accepted=rows(cuda, *counts), state_v_first=v_first)
    for row, count in enumerate([0, 1, 4, 3, 4, 0]):
        expected = start.clone()
        if count:
            one = {name: inputs[name][row : row + 1, :count] for name in ("q", "k", "v")}
            one |= {"state": expected, "decay": inputs["decay"]}
            linear_attention_decode(**one, state_indices=rows(cuda, row), state_v_first=v_first)
        assert same(inputs["state"][row], expected[row])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("seed", [0, 12345, -1, (7 << 32) + 5, -(1 << 63)])
def test_stochastic_rounding_has_the_bits_of_the_reference(
    cuda, make_inputs, tokens, v_first, seed
):
    """Without decay every fp32 value is the same on both sides (products of bf16 are exact), so every bit must be."""
    inputs = make_inputs(
        4, tokens, 1, 3, 64, 128, pool=6, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
        state_v_first=v_first,
    )  # fmt: skip
    inputs["decay"].zero_()
    inputs["state"][5, 0, 0, :4] = torch.tensor([math.inf, -math.inf, 3.38e38, -0.0])
    there = {name: tensor.to(cuda) for name, tensor in inputs.items()}
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    layout = {"state_v_first": v_first, "rounding_seed": seed}
    linear_attention_decode(**inputs, state_indices=slots, **layout)
    linear_attention_decode(**there, state_indices=slots.to(cuda), **layout)
    assert same(there["state"].cpu(), inputs["state"])

    counts = torch.tensor([tokens, 1, 0, tokens], dtype=torch.int32)
    layout["rounding_seed"] = torch.tensor([seed])
    linear_attention_commit(**keys(inputs), num_accepted=counts, state_indices=slots, **layout)
    layout["rounding_seed"] = torch.tensor([seed], device=cuda)
    linear_attention_commit(
        **keys(there), num_accepted=counts.to(cuda), state_indices=slots.to(cuda), **layout
    )
    assert same(there["state"].cpu(), inputs["state"])


@pytest.mark.parametrize("v_first", [False, True])
def test_stochastic_rounding_under_decay(cuda, make_inputs, v_first):
    """Where the fp32 values of the CPU and the GPU agree, the rounded ones do."""
    inputs = make_inputs(
        3, 1, 1, 8, 128, 64, dtype=torch.bfloat16, state_dtype=torch.bfloat16, state_v_first=v_first
    )
    there = {name: tensor.to(cuda) for name, tensor in inputs.items()}
    wide = [x | {"state": x["state"].float()} for x in (inputs, there)]
    for x in wide:
        linear_attention_decode(**x, state_v_first=v_first)
    agree = wide[0]["state"] == wide[1]["state"].cpu()
    assert agree.double().mean() > 0.1
    for x in (inputs, there):
        linear_attention_decode(**x, state_v_first=v_first, rounding_seed=77)
    ours, theirs = inputs["state"], there["state"].cpu()
    assert same(ours[agree], theirs[agree])
    # The others are off by fp32 noise, so they are neighbours.
    difference = (ours.double() - theirs.double()).abs()
    assert (difference <= 2.0**-7 * ours.double().abs() + 1e-6).all()


@pytest.mark.parametrize(
    "tokens, state_dtype, v_first, seed",
    [
        (1, torch.float32, False, None),
        (1, torch.float32, True, None),
        (4, torch.float32, False, None),
        (1, torch.bfloat16, False, None),
        (4, torch.bfloat16, True, 3),
    ],
)
def test_ten_thousand_runs_are_bit_identical(cuda, make_inputs, tokens, state_dtype, v_first, seed):
    inputs = make_inputs(
        8, tokens, 2, 8, 128, 128, dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    options = {"state_v_first": v_first}
    if seed is not None:
        options["rounding_seed"] = torch.tensor([seed], device=cuda)
    start = inputs["state"].clone()
    out = torch.full_like(inputs["v"], math.nan)
    linear_attention_decode(**inputs, **options, out=out)
    expected, final = bits(out).clone(), bits(inputs["state"]).clone()
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)

    def repeat() -> None:
        inputs["state"].copy_(start)
        out.fill_(math.nan)
        linear_attention_decode(**inputs, **options, out=out)
        wrong.add_((bits(out) != expected).sum())
        wrong.add_((bits(inputs["state"]) != final).sum())

    repeat()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            repeat()
    wrong.zero_()
    for _ in range(500):
        graph.replay()
    assert wrong.item() == 0
    # The count is able to see a difference.
    inputs["q"].neg_()
    graph.replay()
    assert wrong.item() > 0


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_graph_replay_sees_new_inputs_and_indices(cuda, make_inputs, tokens, v_first):
    inputs = make_inputs(
        4, tokens, 1, 2, 128, 128, pool=6, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    options = {
        "state_indices": rows(cuda, *SLOTS),
        "state_v_first": v_first,
        "rounding_seed": torch.tensor([1], device=cuda),
    }
    verify = {name: options[name] for name in ("state_indices", "state_v_first")}
    accepted = rows(cuda, 1, 0, tokens, 1)
    outs = [torch.empty_like(inputs["v"]) for _ in range(2)]

    def step(x, options, verify, accepted, outs) -> None:
        linear_attention_decode(**x, **verify, out=outs[0], commit=False)
        linear_attention_commit(**keys(x), num_accepted=accepted, **options)
        linear_attention_decode(**x, **options, out=outs[1])

    step(inputs, options, verify, accepted, outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(inputs, options, verify, accepted, outs)
    for seed, slots in ((2, [1, 2, 3, 4]), (3, [-1, 5, -1, 0]), (4, [-1] * 4)):
        fresh = make_inputs(
            4, tokens, 1, 2, 128, 128, pool=6, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
            state_v_first=v_first, device=cuda, seed=seed,
        )  # fmt: skip
        for name, tensor in fresh.items():
            inputs[name].copy_(tensor)
        options["state_indices"].copy_(rows(cuda, *slots))
        options["rounding_seed"].fill_(seed)
        accepted.copy_(rows(cuda, 0, tokens, 1, tokens))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        expected = [torch.full_like(out, math.nan) for out in outs]
        step(fresh, options, verify, accepted, expected)
        assert same(inputs["state"], fresh["state"])
        assert same(outs[0], expected[0]) and same(outs[1], expected[1])


def test_torch_compile_sees_one_graph(cuda, make_inputs, fresh_compiler):
    def step(q, k, v, state, decay, slots, accepted):
        drafted = linear_attention_decode(q, k, v, state, decay, state_indices=slots, commit=False)
        linear_attention_commit(k, v, state, decay, accepted, state_indices=slots)
        return drafted * 2, linear_attention_decode(q, k, v, state, decay, state_indices=slots)

    compiled = torch.compile(step, fullgraph=True)
    for batch in (2, 3, 4):
        inputs = make_inputs(
            batch, 2, 1, 2, 64, 128, pool=6, dtype=torch.bfloat16, device=cuda, seed=batch
        )
        twin = clone(inputs)
        slots, accepted = rows(cuda, *SLOTS[:batch]), rows(cuda, 1, 2, 0, 1)[:batch]
        expected = step(**twin, slots=slots, accepted=accepted)
        got = compiled(**inputs, slots=slots, accepted=accepted)
        assert all(same(a, b) for a, b in zip(got, expected))
        assert same(inputs["state"], twin["state"])


def test_opcheck(cuda, make_inputs):
    a = make_inputs(2, 2, 1, 2, 64, 64, dtype=torch.bfloat16, device=cuda)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    tensors = (a["k"], a["v"], a["state"], a["decay"])
    decode = (a["q"], *tensors, rows(cuda, 1, -1), None, 0.5, False, True, torch.empty_like(a["v"]))
    torch.library.opcheck(torch.ops.cula_lightning_decode.decode.default, decode, test_utils=checks)
    commit = (*tensors, rows(cuda, 1, 2), rows(cuda, 1, -1), None, False)
    torch.library.opcheck(torch.ops.cula_lightning_decode.commit.default, commit, test_utils=checks)


@pytest.mark.parametrize("v_first", [False, True])
def test_pools_beyond_two_billion_elements(cuda, make_inputs, v_first):
    heads, dim = 64, 128
    slots_in_2_31 = 2**31 // (heads * dim * dim)
    slots = [slots_in_2_31 + 1, 0, slots_in_2_31, slots_in_2_31 - 1]
    inputs = make_inputs(
        4, 1, 1, heads, dim, dim, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
        state_v_first=v_first, device=cuda,
    )  # fmt: skip
    layout = {"state_v_first": v_first}
    pool = torch.zeros(slots_in_2_31 + 2, heads, dim, dim, dtype=torch.bfloat16, device=cuda)
    pool[slots] = inputs["state"]
    out = linear_attention_decode(
        **(inputs | {"state": pool}), state_indices=rows(cuda, *slots), **layout
    )
    assert same(out, linear_attention_decode(**inputs, **layout))
    assert same(pool[slots], inputs["state"])
    pool[slots] = 0
    assert pool.count_nonzero().item() == 0


@pytest.mark.parametrize("tokens", [1, 2])
def test_activations_beyond_two_billion_elements(cuda, make_inputs, tokens):
    inputs = make_inputs(2, tokens, 1, 2, 64, 64, dtype=torch.bfloat16, device=cuda)
    twin = clone(inputs)
    expected = linear_attention_decode(**twin)
    far = 2**31 + 16
    storage = torch.zeros(far + 4096, dtype=torch.bfloat16, device=cuda)
    out = storage.as_strided(inputs["v"].shape, (far, 128, 64, 1), 2048)
    first = 0
    for name in ("q", "k", "v"):
        tensor = inputs[name]
        strides = (far, *tensor.stride()[1:])
        inputs[name] = storage.as_strided(tensor.shape, strides, first).copy_(tensor)
        first += 512
    linear_attention_decode(**inputs, out=out)
    assert same(out, expected) and same(inputs["state"], twin["state"])


@pytest.mark.parametrize("function", ["decode", "commit"])
def test_calls_run_on_the_current_stream(cuda, make_inputs, function):
    """The input arrives on a side stream after a long wait; a launch on any other stream would be too early."""
    inputs = make_inputs(2, 1, 1, 2, 64, 64, dtype=torch.bfloat16, device=cuda)
    accepted = rows(cuda, 1, 1)

    def call(x) -> Tensor:
        if function == "decode":
            return linear_attention_decode(**x)
        linear_attention_commit(**keys(x), num_accepted=accepted)
        return x["state"]

    twin = clone(inputs)
    expected = call(twin)
    late = clone(inputs)
    late["k"].zero_()
    late["v"].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late["k"].copy_(inputs["k"])
        late["v"].copy_(inputs["v"])
        got = call(late)
    side.synchronize()
    assert same(got, expected) and same(late["state"], twin["state"])


def test_calls_neither_synchronise_nor_allocate(cuda, make_inputs):
    inputs = make_inputs(
        4, 2, 1, 2, 64, 64, dtype=torch.bfloat16, state_dtype=torch.bfloat16, device=cuda
    )
    options = {
        "state_indices": rows(cuda, 3, -1, 0, 1),
        "rounding_seed": torch.tensor([4], device=cuda),
    }
    accepted, out = rows(cuda, 1, 2, 0, 2), torch.empty_like(inputs["v"])

    def step() -> None:
        linear_attention_decode(**inputs, **options, out=out)
        linear_attention_decode(
            **inputs, state_indices=options["state_indices"], out=out, commit=False
        )
        linear_attention_commit(**keys(inputs), num_accepted=accepted, **options)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with unsynchronised():
        step()
    assert torch.cuda.max_memory_allocated() == before


def test_one_compile_serves_all_sizes(cuda, make_inputs, assert_rounded_once):
    launch.kernel_for.cache_clear()
    launch.compile.cache_clear()
    for batch in range(1, 65):
        heads = 1 + batch % 3
        inputs = make_inputs(
            batch, 2, heads, heads * (1 + batch % 2), 64, 64, pool=batch + batch % 5,
            dtype=torch.bfloat16, device=cuda, seed=batch,
        )  # fmt: skip
        if batch % 4 == 0:
            inputs = {
                n: x if n in ("state", "decay") else x.repeat(2, 1, 1, 1)[batch:]
                for n, x in inputs.items()
            }
        out, state = exact(inputs, scale=1 / batch)
        assert_rounded_once(linear_attention_decode(**inputs, scale=1 / batch), out)
        assert_rounded_once(inputs["state"], state)
    assert launch.compile.cache_info().misses == 1
    assert launch.kernel_for.cache_info().misses == 1


@pytest.mark.parametrize("name", ["q", "k", "v", "state", "decay"])
def test_gradients_need_not_be_off_under_no_grad(cuda, make_inputs, name):
    inputs = make_inputs(1, 1, 1, 1, 64, 64, dtype=torch.bfloat16, device=cuda)
    twin = clone(inputs)
    expected = linear_attention_decode(**twin)
    inputs[name].requires_grad_()
    with torch.no_grad():
        out = linear_attention_decode(**inputs)
    assert same(out, expected) and same(inputs["state"].detach(), twin["state"])
