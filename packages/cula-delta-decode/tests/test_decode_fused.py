"""Convolution and norm in the launch of decode, on a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from delta_problems import POOL, SLOTS, Case, Inputs, exact, make_inputs, public
from fused_problems import (
    EITHER_WAY,
    LENGTH,
    LIVE,
    WRITTEN,
    assert_close,
    beside_serial,
    convolved,
    make_convolution,
    make_norm,
    to_device,
)
from torch import Tensor

from cula_core.reference.decode_fused import GatedNorm, ShortConvolution, normalize
from cula_core.reference.delta_decode import Replay
from cula_delta_decode import (
    delta_rule_decode,
    delta_rule_flush,
    fill_convolution_ring,
    new_convolution_ring,
    new_replay,
)
from cula_delta_decode.config import DTYPES
from cula_testing.comparing import same
from cula_testing.tensors import unsynchronised

pytestmark = pytest.mark.gpu

GATES = (("softplus", False), ("safe", True), ("none", False), ("log", True))
HEADS = ((1, 1), (2, 2), (1, 3), (2, 8))
KINDS = (
    ("plain", "silu"),
    ("bias", "sigmoid"),
    ("bias", None),
    (None, "silu"),
    ("plain", "sigmoid"),
)
# All head dimensions, state dtypes and layouts, each with both options and once more with others; the rest takes turns.
CASES = [
    (
        Case(
            gate=GATES[(i + again) % 4], strength=("logits", "given", "one")[i % 3], tokens=1 + (3 * i + 5 * again) % 8,
            dims=dims, heads=HEADS[(i + i // 4 + again) % 4], state_v_first=v_first,
            dtype=("bfloat16", "float16")[i // 2 % 2], state_dtype=state_dtype, l2norm=i % 7 != 0,
            packed=(i + again) % 4 == 3,
        ),
        *KINDS[i % 2 if again == 0 else i % 5],
        DTYPES[(i + again) % 3],
    )
    for i, (dims, state_dtype, v_first) in enumerate(
        itertools.product(itertools.product((64, 128), (64, 128)), DTYPES, (False, True))
    )
    for again in (0, 1)
]  # fmt: skip


def label(case: tuple) -> str:
    facts, convolution, norm, weight = case
    order = "VK" if facts.state_v_first else "KV"
    dims = "x".join(map(str, facts.dims))
    kind = f"{'-'.join(map(str, facts.gate))}-{convolution}-{norm}-{weight}"
    return f"{kind}-{facts.state_dtype}-{dims}-{order}-T{facts.tokens}{'-packed' * facts.packed}"


def decode(case: Case, x: Inputs, **options) -> Tensor:
    return delta_rule_decode(x.q, x.k, x.v, **public(case, x) | options)


def assert_numbers(
    case: Case,
    device,
    relative_rmse,
    *,
    convolution: ShortConvolution | None,
    norm: GatedNorm | None,
    x: Inputs,
) -> None:
    """One call on a GPU against the reference in fp64: outputs, states, rings, and what must stay as it was."""
    before, seen, ring, options = x.state.clone(), x, None, {}
    if convolution is not None:
        seen, ring = convolved(case, x, convolution)
        options["convolution"] = to_device(convolution, device)
    expected, state = exact(case, seen)
    if norm is not None:
        expected = normalize(expected, norm)
        options["norm"] = to_device(norm, device)
    there = x.to(device)
    out = torch.full_like(there.v, math.nan)
    assert decode(case, there, out=out, **options) is out
    out = out.cpu()
    rows = torch.arange(len(x.lengths))
    live = rows if x.slots is None else rows[x.slots[: len(rows)] >= 0]
    if case.packed:
        starts = x.cu_seqlens.tolist()
        at = [t for n in live.tolist() for t in range(starts[n], starts[n + 1])]
        found, wanted = out[0, at], expected[0, at]
        assert not out[0, [t for t in range(starts[-1]) if t not in at]].any()
        assert out[0, starts[-1] :].isnan().all()
    else:
        found, wanted = out[live], expected[live]
        assert not out[[n for n in rows.tolist() if n not in live]].any()
    slack = 1e-6 if convolution is None else EITHER_WAY
    assert_close(found, wanted, relative_rmse, slack)
    written = live if x.slots is None else x.slots[live].long()
    assert_close(there.state.cpu()[written], state[written], relative_rmse, slack)
    unused = [slot for slot in range(len(before)) if slot not in written]
    assert same(there.state.cpu()[unused], before[unused])
    if convolution is not None:
        assert same(options["convolution"].inputs.cpu(), ring)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(cuda, relative_rmse, case):
    case, convolution, norm, weight = case
    x = make_inputs(case)
    x.state[[slot for slot in range(POOL) if slot not in WRITTEN]] = math.nan
    taps = gated = None
    if convolution is not None:
        taps = make_convolution(case, x, bias=convolution == "bias", weight=weight)
    if norm is not None:
        gated = make_norm(case, x, norm, weight)
    assert_numbers(case, cuda, relative_rmse, convolution=taps, norm=gated, x=x)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_token_counts(cuda, relative_rmse, tokens, v_first, state_dtype):
    """The second row's sequence begins: what its ring holds does not count."""
    case = Case(
        gate=("safe", True), tokens=tokens, dims=(128, 128), heads=(2, 4), state_v_first=v_first,
        state_dtype=state_dtype,
    )  # fmt: skip
    x = make_inputs(case, seed=tokens)
    taps = make_convolution(case, x, bias=True, positions=(13, 0, 0, 2))
    norm = make_norm(case, x)
    assert_numbers(case, cuda, relative_rmse, convolution=taps, norm=norm, x=x)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_large_batch(cuda, relative_rmse, tokens, v_first):
    """Many waves of CTAs, four value heads to a query head."""
    rows = 130
    case = Case(
        gate=("safe", True), tokens=tokens, dims=(128, 128), heads=(4, 16), state_v_first=v_first, indexed=False
    )  # fmt: skip
    x = make_inputs(case, rows=rows)
    x = replace(x, state=torch.randn(rows, 16, 128, 128))
    ring = new_convolution_ring(x.state, 4, max_tokens=8, state_v_first=v_first)
    ring.normal_()
    weight = torch.randn(ring.shape[2], 4) / 2
    taps = ShortConvolution(ring, torch.arange(rows, dtype=torch.int32), weight)
    norm = make_norm(case, x)
    assert_numbers(case, cuda, relative_rmse, convolution=taps, norm=norm, x=x)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("gate", [("softplus", False), ("safe", True)])
def test_replay_behind_a_convolution_is_serial_decoding(
    cuda, relative_rmse, gate, tokens, v_first, dims
):
    case = Case(gate=gate, tokens=tokens, dims=dims, heads=(2, 4), state_v_first=v_first)

    def run(x: Inputs, *, accepted: Tensor, **options) -> Tensor:
        return decode(case, x, num_accepted=accepted, **options)

    def flush(x: Inputs, replay: Replay, accepted: Tensor) -> None:
        delta_rule_flush(x.state, replay, accepted, state_indices=x.slots, state_v_first=v_first)

    for _, found, expected in beside_serial(case, run, flush, steps=10, device=cuda):
        assert_close(found, expected, relative_rmse, EITHER_WAY)


def around(case: Case, x: Inputs, device) -> dict:
    """Both options and a replay, on a GPU."""
    taps = make_convolution(case, x, bias=True)
    taps = taps._replace(inputs=taps.inputs.nan_to_num(nan=1.0))
    replay = new_replay(
        x.state.to(device), case.heads[0], max_tokens=case.tokens, channels=case.gate[1],
        state_v_first=case.state_v_first,
    )  # fmt: skip
    return {
        "convolution": to_device(taps, device),
        "norm": to_device(make_norm(case, x), device),
        "replay": replay,
    }


def memory(x: Inputs, options: dict) -> list[Tensor]:
    """All that calls change but outputs."""
    return [x.state, options["convolution"].inputs, *options["replay"]]


def differences(found: list[Tensor], expected: list[Tensor]) -> Tensor:
    """How many bytes differ, without waiting for the GPU."""
    pairs = ((x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, expected))
    return torch.stack([(x != y).sum() for x, y in pairs]).sum()


@pytest.mark.parametrize(
    "tokens, v_first, state_dtype",
    [(1, True, "float32"), (4, True, "bfloat16"), (1, False, "float32"), (3, False, "float16")],
)
def test_two_thousand_runs_are_bit_identical(cuda, tokens, v_first, state_dtype):
    """Two calls each, of which the second finds tokens that were rejected."""
    case = Case(
        gate=("safe", True), tokens=tokens, dims=(128, 128), heads=(2, 4), state_v_first=v_first,
        state_dtype=state_dtype,
    )  # fmt: skip
    x = make_inputs(case).to(cuda)
    options = around(case, make_inputs(case), cuda)
    changed = memory(x, options)
    start = [tensor.clone() for tensor in changed]
    accepted = torch.tensor([tokens, 0, 1, 0], dtype=torch.int32, device=cuda)
    positions = options["convolution"].positions
    second = options | {
        "convolution": options["convolution"]._replace(positions=positions + accepted)
    }

    def run() -> list[Tensor]:
        for tensor, before in zip(changed, start):
            tensor.copy_(before)
        first = decode(case, x, **options)
        return [first, decode(case, x, num_accepted=accepted, **second), *changed]

    expected = [tensor.clone() for tensor in run()]
    assert all(tensor.isfinite().all() for tensor in expected[:2])
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(2_000):
        wrong += differences(run(), expected)
    assert wrong.item() == 0


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_graph_replay_sees_new_contents(cuda, tokens, v_first):
    """Of every tensor: tokens, slots, positions, rings, what was accepted, the gate and the weights."""
    case = Case(gate=("safe", True), tokens=tokens, heads=(1, 2), state_v_first=v_first)
    x, accepted = make_inputs(case).to(cuda), torch.zeros(4, dtype=torch.int32, device=cuda)
    options = around(case, make_inputs(case), cuda)
    out, last = torch.empty_like(x.v), options["convolution"].inputs[:4, :3].clone()
    prefilled = torch.full((4,), -1, dtype=torch.int32, device=cuda)

    def step(x: Inputs, out: Tensor, options: dict) -> Tensor:
        convolution = options["convolution"]
        fill_convolution_ring(convolution.inputs, last, convolution.positions, prefilled)
        return decode(case, x, out=out, num_accepted=accepted, **options)

    before = [tensor.clone() for tensor in memory(x, options)]
    step(x, out, options)
    for tensor, kept in zip(memory(x, options), before):
        tensor.copy_(kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, out, options)
    for seed, slots, begun in (
        (1, (0, 1, 2, 3), (3, -1, -1, 0)),
        (2, (-1, -1, 6, -1), (-1,) * 4),
        (3, SLOTS, (-1,) * 4),
    ):
        other, another = (
            make_inputs(case, seed=seed).to(cuda),
            around(case, make_inputs(case, seed=seed), cuda),
        )
        for name in ("q", "k", "v", "g", "beta"):
            getattr(x, name).copy_(getattr(other, name))
        x.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        prefilled.copy_(torch.tensor(begun, dtype=torch.int32))
        accepted.fill_(seed % (tokens + 1))
        options["convolution"].positions.copy_(
            torch.tensor([seed, 0, 17 * seed, 5], dtype=torch.int32)
        )
        options["convolution"].weight.copy_(another["convolution"].weight * seed)
        options["norm"].gate.copy_(another["norm"].gate)
        last.normal_()
        twin = replace(x, state=x.state.clone())
        copies = {
            "convolution": options["convolution"]._replace(
                inputs=options["convolution"].inputs.clone()
            ),
            "norm": options["norm"],
            "replay": Replay(*(tensor.clone() for tensor in options["replay"])),
        }
        expected = step(twin, torch.empty_like(out), copies)
        graph.replay()
        assert same(out, expected)
        for found, wanted in zip(memory(x, options), memory(twin, copies)):
            assert same(found, wanted)


def test_calls_neither_synchronise_nor_allocate(cuda):
    case = Case(tokens=2)
    x = make_inputs(case).to(cuda)
    options = around(case, make_inputs(case), cuda)
    out, accepted = torch.empty_like(x.v), torch.ones(4, dtype=torch.int32, device=cuda)

    def step() -> None:
        decode(case, x, out=out, num_accepted=accepted, **options)
        decode(case, x, out=out, convolution=options["convolution"], norm=options["norm"])
        decode(case, x, out=out, norm=options["norm"], commit=False)

    step()
    ring = options["convolution"].inputs
    last = ring[:4, :3].clone()
    fill_convolution_ring(ring, last, options["convolution"].positions, x.slots)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with unsynchronised():
        step()
    assert torch.cuda.max_memory_allocated() == before
    with unsynchronised():  # torch operations, which allocate
        fill_convolution_ring(ring, last, options["convolution"].positions, x.slots, 3)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_activations_may_be_any_view(cuda, tokens, v_first, offset):
    """Slices of one fused projection, aligned or not, the gate among them: the same bits as dense tensors."""
    case = Case(gate=("safe", True), tokens=tokens, state_v_first=v_first, dims=(64, 128))
    x = make_inputs(case).to(cuda)
    options = around(case, make_inputs(case), cuda)
    del options["replay"]
    ring, state = options["convolution"].inputs.clone(), x.state.clone()
    expected = decode(case, x, **options)
    parts = (x.q, x.k, x.v, options["norm"].gate)
    widths = [part[0, 0].numel() for part in parts]
    whole = torch.full(
        (4, tokens, sum(widths) + offset + 3), math.nan, dtype=x.q.dtype, device=cuda
    )
    views = whole[..., offset : offset + sum(widths)].split(widths, 2)
    q, k, v, gate = (
        view.unflatten(2, part.shape[2:]).copy_(part) for view, part in zip(views, parts)
    )
    sliced = {
        "convolution": options["convolution"]._replace(inputs=ring),
        "norm": options["norm"]._replace(gate=gate),
    }
    twin = replace(x, q=q, k=k, v=v, state=state)
    assert same(decode(case, twin, **sliced), expected)
    assert same(state, x.state) and same(ring, options["convolution"].inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ring_is_filled_as_on_a_cpu(cuda, dtype):
    state = torch.zeros(POOL, 2, 64, 64)
    here = new_convolution_ring(state, 1, max_tokens=3, dtype=dtype)
    there = new_convolution_ring(state.to(cuda), 1, max_tokens=3, dtype=dtype)
    assert there.is_cuda and there.shape == (POOL, 8, 256)
    inputs = torch.randn(4, 4, 300).to(dtype)[..., 7:263]
    positions, slots = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in ((2, 9, 5, 1000), SLOTS)
    )
    fill_convolution_ring(here, inputs, positions, slots, 3)
    given = (tensor.to(cuda) for tensor in (inputs, positions, slots))
    fill_convolution_ring(there, *given, 3)
    assert here.any() and same(there.cpu(), here)


def test_prefill_and_decode_meet(cuda, relative_rmse):
    """Inputs that a prefill leaves count as those of earlier calls do."""
    case = Case(gate=("safe", True), dims=(128, 128))
    x = make_inputs(case)
    taps = make_convolution(case, x, positions=(3, 1, 2, 40))
    _, channels = taps.inputs.shape[1:]
    last = torch.randn(4, 3, channels).to(x.q.dtype)
    filled = torch.full_like(taps.inputs, math.nan)
    fill_convolution_ring(filled, last, taps.positions, x.slots)
    for n in LIVE:
        for i, position in enumerate(range(int(taps.positions[n]) - 3, int(taps.positions[n]))):
            if position >= 0:
                assert same(filled[SLOTS[n], position % LENGTH], last[n, i])
    taps = taps._replace(inputs=filled)
    assert_numbers(case, cuda, relative_rmse, convolution=taps, norm=make_norm(case, x), x=x)
