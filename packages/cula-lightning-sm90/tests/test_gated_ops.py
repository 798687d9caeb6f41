"""Prefill of the gated delta rule as a function: its operator, what it refuses, and its way to the kernel."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.config import chunk_slots
from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import chunk_gated_delta_rule
from cula_lightning_sm90.gated import launch, ops
from cula_lightning_sm90.gated.call import Call
from cula_lightning_sm90.gated.config import BLOCK
from cula_lightning_sm90.gated.plan import Plan, plan
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import emulated_kernel
from cula_testing.gated.cases import HEADS, Case, arguments
from cula_testing.gated.contract import WRONG, good_arguments
from cula_testing.refusals import assert_refused, cases
from cula_testing.tensors import int32, turned

OP = torch.ops.cula_lightning_sm90.gated_prefill.default
MODES = ("dense", "packed")
MAX_ERROR = 3e-3


def raw(mode: str, **more: Any) -> dict[str, Any]:
    """Good arguments with few channels, whose results are worth comparing."""
    a = good_arguments(mode, dim=more.pop("dim", 16)) | {"use_qk_l2norm_in_kernel": True}
    a["dt_bias"] = torch.linspace(-3, 0, 4)
    return a | more


def expected(a: dict[str, Any]):
    """What the reference makes of a call's arguments."""
    names = ("out", "output_final_state", "use_intracard_cp", "operand_dtype", "cu_seqlens_cpu")
    return gated_delta_rule(**{name: x for name, x in a.items() if name not in names})


# ---- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, mode", cases(WRONG, "cpu"))
def test_refusals(wrong, mode):
    assert_refused(chunk_gated_delta_rule, wrong, good_arguments(mode, dim=16))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"use_intracard_cp": True}, "'auto' or False unless a sequence has at least"),
        ({"operand_dtype": torch.bfloat16, "dtype": torch.float16}, "None or torch.float16 beside"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_do_is_refused(change, says):
    a = raw("dense")
    dtype = change.pop("dtype", None)
    if dtype is not None:
        a |= {name: a[name].to(dtype) for name in ("q", "k", "v", "out")}
    before = a["out"].clone()
    with pytest.raises(ValueError, match=says):
        chunk_gated_delta_rule(**a, **change)
    assert a["out"].equal(before)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_results_are_those_of_the_reference(mode, state_v_first):
    a = raw(mode, state_v_first=state_v_first)
    want = expected(a)
    o, state = chunk_gated_delta_rule(**a)
    assert o is a["out"] and o.equal(want.out.to(o.dtype))
    if mode == "packed":
        assert state is a["state_pool"] and state.equal(want.pool.float())
        assert a["state_checkpoints"].equal(want.checkpoints.float())
    else:
        assert state.equal(want.states.float())


@pytest.mark.parametrize("mode", MODES)
def test_states_that_lie_the_other_way_round(mode):
    """As views, of which nothing is copied; checkpoints have to be contiguous."""
    a = raw(mode)
    name = "state_pool" if mode == "packed" else "initial_state"
    want_o, want = chunk_gated_delta_rule(**a | {"out": None, name: a[name].clone()})
    kept = a.get("state_checkpoints")
    if kept is not None:
        a["state_checkpoints"] = torch.full_like(kept, 9.0)
    o, state = chunk_gated_delta_rule(**a | {"out": None, name: turned(a[name])})
    assert o.equal(want_o) and torch.allclose(state, want, atol=1e-6)
    if kept is not None:
        assert torch.allclose(a["state_checkpoints"], kept, atol=1e-6)


def test_a_pool_that_is_only_read():
    a = raw("packed", update_state_pool=False, output_state_indices=None)
    before = a["state_pool"].clone()
    want = expected(a)
    o, state = chunk_gated_delta_rule(**a)
    assert a["state_pool"].equal(before) and o.equal(want.out.to(o.dtype))
    assert state.equal(want.states.float()) and not state[1].any()


@pytest.mark.parametrize("null_slot", [None, 1])
def test_rows_of_a_pool_without_indices(null_slot):
    a = raw("packed", state_indices=None, output_state_indices=None, null_slot=null_slot)
    want = expected(a)
    o, pool = chunk_gated_delta_rule(**a)
    assert o.equal(want.out.to(o.dtype)) and pool.equal(want.pool.float())


@pytest.mark.parametrize("mode", MODES)
def test_the_operator_is_well_behaved(mode, monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "_prefill_op", lambda *values: seen.append(values))
    chunk_gated_delta_rule(**raw(mode))
    torch.library.opcheck(OP, seen[0])


def test_the_operator_compiles():
    """As one graph, for the tensors of a real model layer."""
    a = raw("packed")
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="eager")
    pool = a["state_pool"].clone()
    o, _ = compiled(**a | {"state_pool": pool, "out": None})
    want, _ = chunk_gated_delta_rule(**a | {"out": None})
    assert o.equal(want) and pool.equal(a["state_pool"])


# ---- on the way to the kernel ----------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch) -> list[Call]:
    """Sends CPU calls down the way of CUDA calls, to a launcher that records and computes what it was given."""
    calls: list[Call] = []

    def run(call: Call) -> None:
        calls.append(call)
        ops._run_on_cpu(call)

    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda q: type(q) is Tensor)
    monkeypatch.setattr(ops, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops, "_launch", lambda: run)
    return calls


def test_what_the_kernel_cannot_read_is_converted(launched):
    a = raw("packed", dim=128)
    wide = {name: a[name].double() for name in ("g", "beta", "A_log", "dt_bias")}
    odd = torch.zeros(1, 140, 4, 129, dtype=torch.bfloat16)[..., :128]
    out = torch.empty(1, 140, 4, 130, dtype=torch.bfloat16)[..., :128]
    odd.copy_(a["q"])
    want, _ = chunk_gated_delta_rule(**a | {"out": None, "state_pool": a["state_pool"].clone()})
    o, _ = chunk_gated_delta_rule(**a | wide | {"q": odd, "out": out})
    call = launched[-1]
    assert o is out and same(o, want)
    assert call.q.is_contiguous() and call.out.is_contiguous()
    assert {getattr(call, name).dtype for name in wide} == {torch.float32}


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_a_call_without_tokens_moves_states(launched, heads):
    a = arguments(Case(heads, (0, 0, 0), True, True, None), 128)
    states = max(heads)
    pool = torch.randn(5, states, 128, 128)
    more = {
        "state_pool": pool.clone(), "state_indices": int32(2, 4, 0), "output_state_indices": int32(3, 1, -1),
        "null_slot": 4, "has_initial_state": torch.tensor([True, True, False]),
    }  # fmt: skip
    o, moved = chunk_gated_delta_rule(**a, **more)
    assert o.shape == (1, 0, states, 128) and not launched
    pool[3] = pool[2]
    assert moved is more["state_pool"] and moved.equal(pool)
    del more["output_state_indices"]
    _, final = chunk_gated_delta_rule(**a, **more, update_state_pool=False)
    assert final[0].equal(pool[2]) and not final[1:].any()
    _, final = chunk_gated_delta_rule(**a, initial_state=pool[:3].clone())
    assert final.equal(pool[:3])
    _, final = chunk_gated_delta_rule(**a)
    assert final.shape == (3, states, 128, 128) and not final.any()


@pytest.mark.parametrize("choice, name", [("auto", "auto"), (True, "on"), (False, "off")])
def test_what_is_said_about_cutting_reaches_the_launcher(launched, choice, name):
    q, k, v = torch.zeros(3, 1, 2048, 1, 128, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 2048], dtype=torch.int32)
    chunk_gated_delta_rule(
        q, k, v, cu_seqlens=offsets, cu_seqlens_cpu=offsets, use_intracard_cp=choice
    )
    assert launched[-1].intracard_cp == name and launched[-1].cu_seqlens_cpu is offsets


@pytest.mark.parametrize("offsets", [None, (0, 2048), (0, 1024, 2048)])
@pytest.mark.parametrize("known", [False, True])
def test_a_length_of_segments_reaches_the_planner(launched, offsets, known):
    q, k, v = torch.zeros(3, 1, 2048, 1, 128, dtype=torch.bfloat16)
    given: dict[str, Any] = {"segment_tokens": 1024}
    if offsets is not None:
        given["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        given |= {"cu_seqlens_cpu": given["cu_seqlens"]} if known else {}
    chunk_gated_delta_rule(q, k, v, **given)
    told: list[tuple] = []

    def planner(*facts):
        told.append(facts)
        return plan(*facts)

    launch.run(
        launched[-1], multiprocessors=132, kernels=lambda config: lambda *_: None, planner=planner
    )
    whole = known and offsets == (0, 1024, 2048)
    assert told[0][6:] == ("off", 0 if whole else 16)


@pytest.fixture
def on_emulator(monkeypatch, emulated) -> list[Plan]:
    """Sends CPU calls down the way of CUDA calls, to the compiled kernel; returns how they were spread out."""

    def kernels(config):
        return emulated_kernel(emulated, launch.unit(config))

    plans: list[Plan] = []

    def planner(*shape) -> Plan:
        plans.append(plan(*shape))
        return plans[-1]

    run = partial(launch.run, multiprocessors=3, kernels=kernels, planner=planner)
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda q: type(q) is Tensor)
    monkeypatch.setattr(ops, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops, "_launch", lambda: run)
    return plans


def assert_close(a: dict[str, Any], **more: Any) -> None:
    """A call of the function beside the reference, with NaN in all that it allocates."""
    a = a | more
    want = expected(a)
    with poisoned_memory():
        o, state = chunk_gated_delta_rule(**a)
    errors = [relative_rmse(o, want.out)]
    if a.get("state_pool") is not None and a.get("update_state_pool", True):
        assert state is a["state_pool"]
        errors.append(relative_rmse(state, want.pool))
    elif state is not None:
        errors.append(relative_rmse(state, want.states))
    if want.checkpoints is not None:
        errors.append(relative_rmse(a["state_checkpoints"], want.checkpoints))
    assert max(errors) <= MAX_ERROR, errors


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_serves_every_argument(on_emulator, mode):
    assert_close(raw(mode, dim=128))


@pytest.mark.emulated(schedules="immediate")
def test_the_kernel_serves_groups_of_heads(on_emulator, monkeypatch):
    """Where the chunks of all of them take too much memory at once; one head of k serves two groups."""
    a = arguments(Case((2, 1, 4), (200, 300), True, True, None), 128)
    a |= {
        "use_gate_in_kernel": True, "A_log": torch.tensor([0.0, -1.0, 1.0, -0.5]), "dt_bias": torch.randn(4),
        "state_pool": torch.randn(3, 4, 128, 128), "state_indices": int32(2, 0), "checkpoint_every_n_tokens": 64,
        "state_checkpoints": torch.zeros(1, 7, 4, 128, 128), "out": torch.empty(1, 500, 4, 128, dtype=torch.bfloat16),
    }  # fmt: skip
    monkeypatch.setattr(launch, "MOST_WORDS", chunk_slots(1, 500, 2) * 4 * BLOCK // 2)
    assert_close(a)
    assert len(on_emulator) == 2


@pytest.mark.emulated(schedules="immediate")
def test_the_kernel_serves_what_is_left_out(on_emulator):
    case = Case((1, 1, 1), (70, 1), False, False, 1.0)
    assert_close(arguments(case, 128), output_final_state=False)


@pytest.mark.emulated(schedules="immediate")
def test_the_kernel_serves_a_pool_that_is_only_read(on_emulator):
    a = raw("packed", dim=128, update_state_pool=False, output_state_indices=None, null_slot=0)
    assert_close(a, state_v_first=True, cu_seqlens=a["cu_seqlens"].long())


@pytest.mark.emulated(schedules="immediate")
def test_the_kernel_serves_log_decays_and_the_other_operand(on_emulator):
    case = Case((2, 1, 2), (64, 30), True, True, None)
    a = arguments(case, 128)
    want = expected(a)
    o, state = chunk_gated_delta_rule(**a, operand_dtype=torch.bfloat16)
    errors = relative_rmse(o, want.out), relative_rmse(state, want.states)
    assert max(errors) <= 8e-3 and not math.isnan(max(errors)), errors


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_serves_sequences_that_are_cut(on_emulator, mode):
    """With what every segment needs of its neighbours: states, checkpoints, rows of a pool."""
    lengths = (2048,) if mode == "dense" else (2100, 30)
    a = arguments(Case((1, 1, 1), lengths, True, True, None), 128)
    a["g"] = a["g"] / 100
    more = {"initial_state": torch.randn(len(lengths), 1, 128, 128)}
    if mode == "dense":
        del a["cu_seqlens"]
    else:
        more["cu_seqlens_cpu"] = a["cu_seqlens"]
    assert_close(a, use_intracard_cp=True, **more)
    assert on_emulator[0].segment == {"dense": 16, "packed": 18}[mode]
