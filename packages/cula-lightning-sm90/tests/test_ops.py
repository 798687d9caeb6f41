"""The operator in torch's machinery, what a GPU is handed, and what importing the package costs."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cula_lightning_sm90
from cula_lightning_sm90 import (
    _spec,
    chunk_lightning_attn,
    chunk_simple_gla,
    lightning_attn_fwd,
    lightning_attn_fwd_varlen,
    ops,
    reference,
)
from cula_lightning_sm90.call import Call
from cula_testing.interpreters import python
from cula_testing.specs import assert_answer, assert_says_what_to_install
from cula_testing.tensors import int32, misplaced, scattered, spaced, turned

CHECKS = ("test_schema", "test_faketensor")
TRACED = "test_aot_dispatch_dynamic"  # a hundred times as slow as the others
OP = torch.ops.cula_lightning_sm90.prefill.default
each_layout = pytest.mark.parametrize("v_first", [False, True])


# Where the state is and where it goes, dtypes, packed, gate; the rest alternates.
OP_CASES = [
    (state, dtype, packed, gated)
    for state, dtype, packed, gated in itertools.product(
        ("none", "initial", "pool"), (torch.bfloat16, torch.float64), (False, True), (False, True)
    )
]
# Of the same facts every pair occurs. Tracing does not look into the operator.
TRACED_CASES = [
    ("none", torch.bfloat16, False, False),
    ("none", torch.float64, True, True),
    ("initial", torch.bfloat16, False, True),
    ("initial", torch.float64, True, False),
    ("pool", torch.float64, False, False),
    ("pool", torch.bfloat16, True, True),
]


def op_arguments(
    make_inputs, state: str, dtype: torch.dtype, packed: bool, gated: bool
) -> tuple[Any, ...]:
    batch, sequences = (1, 3) if packed else (2, 2)
    v_first = gated != packed
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    a = make_inputs(
        batch, 70, 1, 2, 4, 6, dtype=dtype, states=5, state_dtype=exact, state_v_first=v_first
    )
    if gated:
        a |= {name: scattered(a[name]) for name in ("q", "k", "v")}
    indexed = state != "none" and gated
    final = torch.empty(sequences, *a["state"].shape[1:], dtype=exact)
    return (
        a["q"], a["k"], a["v"], a["g"] if gated else None, None if gated and packed else a["decay"],
        a["state"][: None if indexed else sequences] if state == "initial" else None,
        a["state"] if state == "pool" else None,
        int32(*(4, -1, 0)[:sequences]) if indexed else None,
        None if state == "pool" else final,
        torch.zeros(batch, 1, *a["state"].shape[1:], dtype=exact) if packed else None,
        int32(0, 68, 68, 70) if packed else None,
        torch.empty_like(a["v"], memory_format=torch.contiguous_format),
        0.5, -1, v_first, gated, packed, 64 if packed else 0, 1 if gated else None,
    )  # fmt: skip


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_opcheck(make_inputs, case):
    torch.library.opcheck(OP, op_arguments(make_inputs, *case), test_utils=CHECKS)


@pytest.mark.parametrize("case", TRACED_CASES, ids=str)
def test_opcheck_traced(make_inputs, case):
    torch.library.opcheck(OP, op_arguments(make_inputs, *case), test_utils=TRACED)


def test_the_schema_names_what_is_written():
    written = [a.name for a in OP._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["state_pool", "final_state", "checkpoints", "out", "dots"]


@each_layout
def test_a_dense_call_is_the_reference_on_a_cpu(make_inputs, v_first):
    a = make_inputs(2, 100, 1, 2, 8, 16, dtype=torch.bfloat16, state_v_first=v_first)
    before = a["state"].clone()
    saved = torch.zeros(2, 1, *before.shape[1:])
    o, final = lightning_attn_fwd(
        a["q"], a["k"], a["v"], a["decay"], 0.3, a["state"], True, v_first,
        use_qk_l2norm_in_kernel=True, state_checkpoints=saved, checkpoint_every_n_tokens=64,
    )  # fmt: skip
    options = {"scale": 0.3, "state_v_first": v_first, "l2norm": True}
    expected_saved = torch.zeros_like(saved)
    expected, expected_final = reference.chunked_prefill(
        a["q"], a["k"], a["v"], None, a["decay"], a["state"], None, expected_saved, **options,
        checkpoint_every=64,
    )  # fmt: skip
    assert torch.equal(o, expected.bfloat16()) and o.is_contiguous()
    assert torch.equal(final, expected_final) and final.dtype == torch.float32
    assert torch.equal(saved, expected_saved) and saved.any()
    assert torch.equal(a["state"], before)
    assert lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"])[1] is None


@each_layout
@pytest.mark.parametrize("how", [torch.clone, turned], ids=["as it is", "transposed view"])
def test_a_pool_is_updated_in_place(make_inputs, relative_rmse, v_first, how):
    a = make_inputs(1, 90, 1, 2, 8, 16, states=6, state_v_first=v_first)
    offsets, slots = int32(0, 50, 50, 80, 90), int32(5, 0, -1, 2)
    pool = how(a["state"])
    address = pool.data_ptr()
    o, state = lightning_attn_fwd_varlen(
        a["q"], a["k"], a["v"], a["decay"], offsets, None, pool, slots, state_v_first=v_first
    )
    assert state is pool and pool.data_ptr() == address
    expected, finals = reference.recurrent_prefill(
        a["q"], a["k"], a["v"], None, a["decay"], a["state"], slots, None, offsets, state_v_first=v_first
    )  # fmt: skip
    assert relative_rmse(o, expected) < 1e-6
    assert not o[:, 50:80].any()
    assert relative_rmse(pool[[5, 2]], finals[[0, 3]]) < 1e-6
    # An empty sequence keeps its bits, and so do the rows that nobody names.
    assert torch.equal(pool[[0, 1, 3, 4]], a["state"][[0, 1, 3, 4]])


@each_layout
@pytest.mark.parametrize("how", [torch.clone, turned], ids=["as it is", "transposed view"])
def test_a_pool_can_be_only_read(make_inputs, relative_rmse, v_first, how):
    a = make_inputs(1, 90, 1, 2, 8, 16, states=6, state_v_first=v_first)
    offsets, slots, pool = int32(0, 50, 50, 80, 90), int32(5, 0, -1, 2), how(a["state"])
    layout = {"state_v_first": v_first, "update_state_pool": False}
    o, state = lightning_attn_fwd_varlen(
        a["q"], a["k"], a["v"], a["decay"], offsets, None, pool, slots, **layout
    )
    _, finals = reference.recurrent_prefill(
        a["q"], a["k"], a["v"], None, a["decay"], a["state"], slots, None, offsets, state_v_first=v_first
    )  # fmt: skip
    assert torch.equal(pool, a["state"]) and state.shape == (4, *pool.shape[1:])
    assert relative_rmse(state, finals) < 1e-6
    assert torch.equal(state[1], a["state"][0]) and not state[2].any()
    again = lightning_attn_fwd_varlen(
        a["q"], a["k"], a["v"], a["decay"], offsets, None, pool, slots, False, **layout
    )
    assert again[1] is None and torch.equal(again[0], o)


def test_without_a_pool_states_start_from_zero(make_inputs):
    a = make_inputs(1, 20, 1, 1, 4, 4)
    tensors = (a["q"], a["k"], a["v"], a["decay"], int32(0, 20))
    o, state = lightning_attn_fwd_varlen(*tensors)
    zero, final = lightning_attn_fwd(*tensors[:4], None, torch.zeros(1, 1, 4, 4), True)
    assert torch.equal(o, zero) and torch.equal(state, final)
    assert lightning_attn_fwd_varlen(*tensors, output_final_state=False)[1] is None


@each_layout
@pytest.mark.parametrize("in_place", [False, True])
def test_checkpoints_beside_a_transposed_view(make_inputs, relative_rmse, v_first, in_place):
    """The checkpoints keep the caller's layout, and their rows that nobody owns."""
    a = make_inputs(1, 140, 1, 1, 4, 6, states=3, state_v_first=v_first)
    tensors = (a["q"], a["k"], a["v"], a["decay"], int32(0, 10, 20, 140), None)
    results = []
    for pool in (a["state"].clone(), turned(a["state"])):
        saved = torch.full((1, 2, *pool.shape[1:]), 7.0)
        _, state = lightning_attn_fwd_varlen(
            *tensors, pool, state_v_first=v_first, update_state_pool=in_place,
            state_checkpoints=saved, checkpoint_every_n_tokens=64,
        )  # fmt: skip
        results.append((saved, state))
    (saved, state), (saved_turned, state_turned) = results
    assert (saved[0, 1] == 7).all() and torch.equal(saved[0, 1], saved_turned[0, 1])
    assert relative_rmse(saved_turned, saved) < 1e-6 and (saved[0, 0] != 7).all()
    assert relative_rmse(state_turned, state) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_the_decays_of_a_layer(make_inputs, packed):
    """(8 / 4) * (1 - 3 / 12) * h = 1.5 h."""
    a = make_inputs(1, 20, 2, 4, 4, 6, states=2 if packed else 1)
    offsets = int32(0, 12, 20) if packed else None
    o, final = chunk_lightning_attn(a["q"], a["k"], a["v"], 3, 12, 0.7, a["state"], True, offsets)
    gamma = -torch.tensor([0.0, 1.5, 3.0, 4.5])
    expected = chunk_simple_gla(
        a["q"], a["k"], a["v"], None, gamma, 0.7, a["state"], True, False, offsets, offsets
    )
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gates_of_any_dtype_and_stride(make_inputs, relative_rmse, dtype):
    a = make_inputs(2, 70, 1, 2, 4, 6, gate_dtype=dtype)
    expected, finals = reference.recurrent_prefill(
        a["q"], a["k"], a["v"], a["g"], -a["decay"], a["state"], decay_sign=1
    )
    g = a["g"].mT.contiguous().mT
    o, final = chunk_simple_gla(a["q"], a["k"], a["v"], g, -a["decay"], None, a["state"], True)
    assert relative_rmse(o, expected) < 1e-6 and relative_rmse(final, finals) < 1e-6
    assert final.dtype == torch.float32


def test_without_a_decay_it_is_linear_attention(make_inputs, relative_rmse):
    a = make_inputs(1, 70, 1, 1, 4, 6, dtype=torch.float64)
    o, final = chunk_simple_gla(a["q"], a["k"], a["v"], scale=1.0, output_final_state=True)
    q, k, v = (a[n][0, :, 0] for n in ("q", "k", "v"))
    assert relative_rmse(o[0, :, 0], (q @ k.T).tril() @ v) < 1e-12
    assert final.dtype == torch.float64 and relative_rmse(final[0, 0], k.T @ v) < 1e-12


def test_out_is_honoured(make_inputs):
    a = make_inputs(2, 30, 1, 2, 4, 8, dtype=torch.bfloat16)
    tensors = (a["q"], a["k"], a["v"], a["decay"])
    expected, _ = lightning_attn_fwd(*tensors)
    storage = torch.full((2, 60, 5, 14), 7.0, dtype=torch.bfloat16)
    out = storage[:, ::2, 1:3, 3:11]
    assert lightning_attn_fwd(*tensors, out=out)[0] is out
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert (storage == 7).all()


EMPTY = {"no token": (2, 0), "no row": (0, 5), "neither": (0, 0)}


@pytest.mark.parametrize("label", EMPTY)
def test_states_pass_through_an_empty_batch(make_inputs, label):
    batch, tokens = EMPTY[label]
    a = make_inputs(batch, tokens, 1, 2, 4, 6)
    o, final = lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"], None, a["state"], True)
    assert o.shape == (batch, tokens, 2, 6)
    assert torch.equal(final, a["state"]) and final is not a["state"]
    _, final = chunk_simple_gla(a["q"], a["k"], a["v"], a["g"], output_final_state=True)
    assert final.shape == (batch, 2, 4, 6) and not final.any()


@pytest.mark.parametrize("slots", [(), (1, -1, 0)])
def test_states_pass_through_empty_sequences(make_inputs, slots):
    a = make_inputs(1, 0, 1, 2, 4, 6, states=3)
    tensors = (a["q"], a["k"], a["v"], a["decay"], int32(*[0] * (len(slots) + 1)), None)
    pool = a["state"].clone()
    o, state = lightning_attn_fwd_varlen(*tensors, pool, int32(*slots))
    assert o.shape == (1, 0, 2, 6) and state is pool and torch.equal(pool, a["state"])
    _, state = lightning_attn_fwd_varlen(*tensors, pool, int32(*slots), update_state_pool=False)
    assert state.shape == (len(slots), 2, 4, 6)
    for n, slot in enumerate(slots):
        assert torch.equal(state[n], a["state"][slot] if slot >= 0 else torch.zeros(2, 4, 6))


@pytest.fixture
def launched(monkeypatch) -> list[Call]:
    """Sends CPU calls down the way of CUDA calls, to a launcher that records and computes what it was given."""
    calls: list[Call] = []

    def run(call: Call, multiprocessors: int | None, ends: bool) -> None:
        assert multiprocessors is None and not ends
        calls.append(call)
        ops._run_on_cpu(call)

    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda q: type(q) is Tensor)
    monkeypatch.setattr(ops, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops, "_launch", lambda: SimpleNamespace(run=run))
    return calls


def kernel_inputs(make_inputs, **more) -> dict[str, Tensor]:
    return make_inputs(2, 10, 1, 2, 64, 128, dtype=torch.bfloat16, **more)


def test_a_plain_call_hands_its_tensors_over(make_inputs, launched):
    a = kernel_inputs(make_inputs)
    o, final = lightning_attn_fwd(
        a["q"], a["k"], a["v"], a["decay"], None, a["state"], True, exact_state=True, num_splits=3
    )
    (call,) = launched
    for name in ("q", "k", "v"):
        assert getattr(call, name) is a[name]
    assert call.head_decay is a["decay"] and call.initial_state is a["state"]
    assert call.out is o and call.final_state is final
    for name in ("g", "state_indices", "checkpoints", "cu_seqlens"):
        assert getattr(call, name) is None
    options = {"decay_sign": -1, "state_v_first": False, "l2norm": False, "exact_state": True}
    options |= {"checkpoint_every": 0, "num_splits": 3, "scale": 64**-0.5}
    assert {name: getattr(call, name) for name in options} == options


def test_a_pool_is_handed_over_as_both_states(make_inputs, launched):
    a = kernel_inputs(make_inputs)
    packed = {name: a[name][:1] for name in ("q", "k", "v")}
    offsets, slots, saved = int32(0, 10), int32(1), torch.zeros(1, 0, 2, 64, 128)
    lightning_attn_fwd_varlen(
        **packed, decay=a["decay"], cu_seqlens=offsets, scale=2, state_pool=a["state"],
        initial_state_indices=slots, state_checkpoints=saved, checkpoint_every_n_tokens=64,
    )  # fmt: skip
    (call,) = launched
    assert call.initial is call.final is call.state_pool is a["state"]
    assert call.cu_seqlens is offsets and call.state_indices is slots
    assert type(call.scale) is float and call.scale == 2.0
    # Ten tokens hold no checkpoint, so the kernel needs no code for any.
    assert call.checkpoints is None and call.checkpoint_every == 0


def test_gates_reach_the_launcher_in_a_dtype_it_reads(make_inputs, launched):
    for dtype, given in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        a = kernel_inputs(make_inputs, gate_dtype=dtype)
        chunk_simple_gla(a["q"], a["k"], a["v"], a["g"], -a["decay"])
        call = launched.pop()
        assert call.g.dtype == given and call.decay_sign == 1
        assert torch.equal(call.g, a["g"].to(given))


@pytest.mark.parametrize(
    "how, copied", [(misplaced, True), (partial(spaced, gap=4), True), (spaced, False)]
)
def test_views_that_tma_cannot_address_are_copied(make_inputs, launched, how, copied):
    a = kernel_inputs(make_inputs)
    views = {name: how(a[name]) for name in ("q", "k", "v")}
    out = how(torch.full_like(a["v"], math.nan))
    o, _ = lightning_attn_fwd(**views, decay=a["decay"], out=out)
    (call,) = launched
    for name in views:
        assert (getattr(call, name) is not views[name]) == copied and torch.equal(
            getattr(call, name), a[name]
        )
    assert o is out and (call.out is not out) == copied
    for name in ("q", "k", "v", "out"):
        strides = getattr(call, name).stride()
        assert getattr(call, name).data_ptr() % 16 == 0 and not any(s % 8 for s in strides[:3])
    assert torch.equal(out, lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"])[0])


@each_layout
def test_a_transposed_view_is_handed_over_as_it_lies(make_inputs, launched, v_first):
    a = kernel_inputs(make_inputs, state_v_first=v_first)
    state = turned(a["state"])
    options = {"output_final_state": True, "state_v_first": v_first}
    _, final = lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"], None, state, **options)
    (call,) = launched
    assert call.state_v_first is not v_first
    assert call.initial_state.data_ptr() == state.data_ptr()
    for name in ("initial_state", "final_state"):
        assert getattr(call, name).is_contiguous()
    assert final.shape == state.shape and final.data_ptr() == call.final_state.data_ptr()


@pytest.mark.parametrize("label", EMPTY)
def test_an_empty_batch_launches_nothing(make_inputs, launched, label):
    batch, tokens = EMPTY[label]
    a = make_inputs(batch, tokens, 1, 2, 64, 64, dtype=torch.bfloat16)
    _, final = lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"], None, a["state"], True)
    assert torch.equal(final, a["state"])
    _, final = lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"], None, None, True)
    assert not final.any() and not launched


def test_empty_sequences_launch_nothing(make_inputs, launched):
    a = make_inputs(1, 0, 1, 2, 64, 64, dtype=torch.bfloat16, states=4)
    a["state"][0] = math.nan
    tensors = (a["q"], a["k"], a["v"], a["decay"], int32(0, 0, 0, 0), None)
    pool = a["state"].clone()
    _, state = lightning_attn_fwd_varlen(*tensors, pool, int32(2, -1, 1))
    assert torch.equal(pool[1:], a["state"][1:])
    _, state = lightning_attn_fwd_varlen(*tensors, pool, int32(2, -1, 1), update_state_pool=False)
    assert torch.equal(state[[0, 2]], pool[[2, 1]]) and not state[1].any()
    _, state = lightning_attn_fwd_varlen(*tensors, pool, update_state_pool=False)
    assert torch.equal(state[1:], pool[1:3]) and state.shape[0] == 3
    assert not launched


def test_nothing_but_padding_launches_nothing(make_inputs, launched):
    a = kernel_inputs(make_inputs)
    packed = {name: a[name][:1] for name in ("q", "k", "v")}
    o, state = lightning_attn_fwd_varlen(
        **packed, decay=a["decay"], cu_seqlens=int32(0, 4, 10), state_pool=a["state"][:0],
        initial_state_indices=int32(-1, -2), update_state_pool=False, out=torch.full_like(packed["v"], math.nan),
    )  # fmt: skip
    assert not o.any() and not state.any() and state.shape == (2, 2, 64, 128) and not launched


def test_an_error_of_the_launcher_is_passed_on(make_inputs, launched, monkeypatch):
    def run(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ops, "_launch", lambda: SimpleNamespace(run=run))
    a = kernel_inputs(make_inputs)
    with pytest.raises(RuntimeError, match="^out of memory$"):
        lightning_attn_fwd(a["q"], a["k"], a["v"], a["decay"])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused_before_anything(monkeypatch, capability):
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda q: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    message = "needs compute capability 9.0, cpu has {}.{}".format(*capability)
    with pytest.raises(RuntimeError, match=message):
        lightning_attn_fwd(torch.zeros(1), None, None, None)


def test_hopper_is_asked_once(monkeypatch):
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    device = torch.device("cuda", 93)
    ops.require_hopper(device)
    ops.require_hopper(device)
    ops.require_hopper.cache_clear()
    assert asked == [device]


def step(q, k, v, g, decay, state, offsets, slots, saved, v_first=False):
    """Three calls with plain operators around them; the pool and the checkpoints are written."""
    layout = {"state_v_first": v_first}
    o, final = lightning_attn_fwd(q * 2, k, v, decay, 0.5, None, True, **layout)
    first, pool = lightning_attn_fwd_varlen(
        q, k, v, decay, offsets, None, state, slots, **layout, state_checkpoints=saved,
        checkpoint_every_n_tokens=64,
    )  # fmt: skip
    gated, after = chunk_simple_gla(
        q, k, v + first, g, -decay, None, pool[:2], True, v_first, offsets
    )
    layer, _ = chunk_lightning_attn(q, k, v, 1, 2)
    return o + first + gated + layer, final + 1, after


def step_inputs(make_inputs, tokens: int, v_first: bool) -> dict:
    a = make_inputs(
        1, tokens, 1, 2, 4, 8, dtype=torch.bfloat16, states=4, state_v_first=v_first, seed=tokens
    )
    saved = torch.zeros(1, tokens // 64, *a["state"].shape[1:])
    return a | {"offsets": int32(0, 66, tokens), "slots": int32(3, -1), "saved": saved}


@pytest.mark.parametrize("v_first, dynamic", [(False, False), (True, True)])
def test_torch_compile_sees_one_graph(make_inputs, fresh_compiler, v_first, dynamic):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (70, 131):
        a = step_inputs(make_inputs, tokens, v_first)
        twin = a | {name: a[name].clone() for name in ("state", "saved")}
        expected = step(**a, v_first=v_first)
        for actual, wanted in zip(compiled(**twin, v_first=v_first), expected):
            assert torch.equal(actual, wanted)
        for name in ("state", "saved"):
            assert torch.equal(twin[name], a[name])
        assert a["saved"].any()


def test_torch_compile_takes_an_output_and_a_transposed_pool(make_inputs, fresh_compiler):
    def run(q, k, v, decay, pool, offsets, out):
        return lightning_attn_fwd_varlen(q, k, v, decay, offsets, 1.0, pool, out=out)[0] + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    a = make_inputs(1, 30, 1, 2, 4, 8)
    pools = [turned(a["state"]) for _ in range(2)]
    out = torch.full_like(a["v"], math.nan)
    got = compiled(a["q"], a["k"], a["v"], a["decay"], pools[0], int32(0, 30), out)
    tensors = (a["q"], a["k"], a["v"], a["decay"])
    expected, _ = lightning_attn_fwd_varlen(*tensors, int32(0, 30), 1.0, pools[1])
    assert torch.equal(out, expected) and torch.equal(got, expected + 1)
    assert torch.equal(pools[0], pools[1]) and not torch.equal(pools[0], a["state"])


def test_torch_compile_refuses_wrong_arguments(make_inputs, fresh_compiler):
    a = make_inputs(2, 5, 1, 2, 4, 8)
    compiled = torch.compile(lightning_attn_fwd, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="decay: expected float32, got float64"):
        compiled(a["q"], a["k"], a["v"], a["decay"].double())


def test_make_fx_records_the_operators(make_inputs):
    a = step_inputs(make_inputs, 70, False)
    graph = make_fx(lambda *x: step(*x))(*a.values())
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(OP) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each_layout
def test_fake_tensors_of_any_device(device, v_first):
    """Shapes without values, for a GPU that need not exist; nothing may ask for an address or a capability."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        new: dict = {"device": device, "dtype": torch.bfloat16}
        q, k = (torch.empty(1, 130, 2, 64, **new) for _ in range(2))
        v = torch.empty(1, 130, 6, 128, **new)
        matrix = (128, 64) if v_first else (64, 128)
        pool = torch.empty(5, 6, *matrix, device=device)
        decay = torch.empty(6, device=device)
        offsets, slots = (torch.empty(n, device=device, dtype=torch.int32) for n in (4, 3))
        saved = torch.empty(1, 2, 6, *matrix, device=device)
        o, state = lightning_attn_fwd_varlen(
            q, k, v, decay, offsets, None, pool, slots, state_v_first=v_first,
            state_checkpoints=saved, checkpoint_every_n_tokens=64,
        )  # fmt: skip
        assert o.shape == v.shape and o.dtype == torch.bfloat16 and o.is_contiguous()
        assert o.device.type == device and state is pool
        _, state = lightning_attn_fwd_varlen(
            q, k, v, decay, offsets, None, pool, slots, state_v_first=v_first, update_state_pool=False
        )  # fmt: skip
        assert state.shape == (3, 6, *matrix) and state.dtype == torch.float32
        assert chunk_lightning_attn(q, k, v, 0, 1)[0].device.type == device
        with pytest.raises(TypeError, match="^initial_state_indices: expected int32"):
            lightning_attn_fwd_varlen(
                q, k, v, decay, offsets, None, pool, slots.long(), state_v_first=v_first
            )


def test_import_and_cpu_calls_need_neither_cutlass_nor_triton():
    python(
        """
import importlib.abc, sys
import torch
before = set(sys.modules)
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "triton", "tvm_ffi", "cuda", "cula", "fla"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Block())
import cula_lightning_sm90 as c
x = torch.zeros(1, 3, 1, 64)
c.lightning_attn_fwd(x, x, x, torch.zeros(1))
c.lightning_attn_fwd_varlen(x, x, x, torch.zeros(1), torch.tensor([0, 3]), None, torch.zeros(1, 1, 64, 64))
c.chunk_lightning_attn(x, x, x, 0, 2)
c.chunk_simple_gla(x, x, x, torch.zeros(1, 3, 1))
heavy = {m.partition(".")[0] for m in set(sys.modules) - before} & {"cutlass", "triton", "tvm_ffi"}
assert not heavy, heavy
assert "cula_lightning_sm90.launch" not in sys.modules
""",
        cula_lightning_sm90,
    )


def test_import_is_quick():
    """Under 0.2 s beyond torch, the best of three: a busy machine only ever adds."""
    code = """
import time, torch
start = time.perf_counter()
import cula_lightning_sm90
print(time.perf_counter() - start)
"""
    assert min(float(python(code, cula_lightning_sm90)) for _ in range(3)) < 0.2


def test_the_spec_imports_no_dsl():
    code = """
import json, sys
from cula_lightning_sm90 import _spec
print(json.dumps([sorted({"cutlass", "triton", "tvm_ffi"} & set(sys.modules)), _spec.supports()]))
"""
    assert json.loads(python(code, cula_lightning_sm90)) == [[], None]


@pytest.mark.parametrize(
    "problem, reason",
    [
        ({}, None),
        ({"function": "chunk_simple_gla", "varlen": True, "unheard_of": 3}, None),
        ({"dtype": torch.bfloat16, "state_dtype": torch.float32}, None),
        ({"dtype": torch.float16, "state_dtype": None, "gate_dtype": torch.float64}, None),
        ({"head_dim_k": 64, "head_dim_v": 128, "requires_grad": False}, None),
        ({"requires_grad": True}, None),
        ({"requires_grad": True, "decay_requires_grad": True, "gate_dtype": torch.float32}, None),
        ({"requires_grad": True, "function": "chunk_gated_delta_rule"}, None),
        (
            {"requires_grad": True, "function": "chunk_gated_delta_rule", "state_pool": True},
            "no backward with state_pool",
        ),
        ({"dtype": torch.float32}, "activations must be bfloat16 or float16, not torch.float32"),
        (
            {"state_dtype": torch.float64},
            "states must be float32, bfloat16, float16, not torch.float64",
        ),
        ({"gate_dtype": torch.int32}, "g must be float32, bfloat16, float16, float64, not torch."),
        ({"head_dim_k": 96}, "K must be one of (64, 128), not 96"),
        ({"head_dim_v": 256}, "V must be one of (64, 128), not 256"),
    ],
)
def test_the_spec_gives_reasons(problem, reason):
    assert_answer(_spec.supports, problem, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_the_spec_says_what_to_install(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, _spec.supports, missing, "cula-lightning-sm90")


def test_the_spec_loads_every_public_function():
    for name in cula_lightning_sm90.__all__:
        assert _spec.load(name) is getattr(cula_lightning_sm90, name)
