"""What the launcher is handed for a call on a GPU; here it is one that records and computes on the CPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from delta_rule_targets import HOPPER, PREFILL, chunk_kda, kda_workspace_bytes

from cula_core.delta_rule import launch, prefill
from cula_core.delta_rule.call import Call
from cula_core.delta_rule.plan import Plan, plan
from cula_testing.kda.inputs import flags, inputs
from cula_testing.tensors import int32, misplaced, spaced, turned

RUN = launch.run
EMPTY = {"no token": (2, 0), "no row": (0, 5), "neither": (0, 0)}
each_layout = pytest.mark.parametrize("v_first", [False, True])


@pytest.fixture
def launched(monkeypatch) -> list[Call]:
    """Sends CPU calls down the way of CUDA calls, to a launcher that records and computes what it was given."""
    calls: list[Call] = []

    def run(target: object, call: Call) -> None:
        assert target is HOPPER
        calls.append(call)
        prefill._run_on_cpu(call)

    monkeypatch.setattr(prefill, "is_plain_cuda_call", lambda q: type(q) is torch.Tensor)
    monkeypatch.setattr(prefill, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "run", run)
    return calls


def kernel_inputs(**more: Any) -> dict[str, Any]:
    return inputs(2, 5, 1, 2, **more)


def test_products_and_inverse_have_memory_of_their_own(launched):
    a = kernel_inputs(gate="log")
    _, _, aqk, akk = chunk_kda(**a, return_intra=True)
    (call,) = launched
    assert call.Aqk is aqk and call.Akk is akk and call.w is None
    assert aqk.shape == akk.shape == (*a["v"].shape[:3], 64) and aqk.dtype == a["q"].dtype


def test_a_plain_call_hands_its_tensors_over(launched):
    a = kernel_inputs(initial=True)
    workspace = torch.empty(4 * 59_904, dtype=torch.uint8)
    o, final = chunk_kda(
        **a, use_gate_in_kernel=True, lower_bound=-4, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, output_final_state=True, workspace=workspace,
    )  # fmt: skip
    (call,) = launched
    for name in ("q", "k", "v", "g", "beta", "A_log", "initial_state"):
        assert getattr(call, name) is a[name]
    assert call.out is o and call.final_state is final and call.workspace is workspace
    assert call.state_indices is None and call.cu_seqlens is None
    assert call.dt_bias.shape == (256,) and call.dt_bias.data_ptr() == a["dt_bias"].data_ptr()
    options = {"scale": 128**-0.5, "gate": "safe", "lower_bound": -4.0, "bounded": True}
    options |= {"l2norm": True, "beta_sigmoid": True, "neg_eigval": False, "state_v_first": False}
    options |= {"operand": "float16", "intracard_cp": "auto"}
    assert {name: getattr(call, name) for name in options} == options
    assert type(call.lower_bound) is float
    assert call.state_pool is None and not call.in_place and not call.intra


def test_a_pool_stands_in_place_of_both_states(launched):
    a = inputs(1, 5, 1, 2, gate="log", lengths=(3, 2), states=3, initial=True)
    pool, slots = a.pop("initial_state"), int32(1, -1)
    chunk_kda(**a, scale=2, state_pool=pool, initial_state_indices=slots)
    (call,) = launched
    assert call.state_pool is call.initial is call.final is pool and call.in_place
    assert call.initial_state is None and call.final_state is None
    assert call.cu_seqlens is a["cu_seqlens"] and call.state_indices is slots
    assert type(call.scale) is float and call.scale == 2.0
    assert call.A_log is None and call.dt_bias is None


@pytest.mark.parametrize(
    "options, gate, lower_bound, bounded",
    [
        ({}, "log", 0.0, False),
        ({"safe_gate": True}, "log", 0.0, True),
        ({"safe_gate": True, "lower_bound": -3.0}, "log", 0.0, True),
        ({"use_gate_in_kernel": True}, "softplus", 0.0, False),
        ({"use_gate_in_kernel": True, "lower_bound": -5}, "safe", -5.0, True),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}, "safe", -5.0, True),
        ({"use_gate_in_kernel": True, "lower_bound": -5.1}, "safe", -5.1, False),
    ],
)
def test_the_launcher_is_told_what_g_is(launched, options, gate, lower_bound, bounded):
    a = kernel_inputs(gate="softplus" if "use_gate_in_kernel" in options else "log")
    chunk_kda(**a, **options)
    (call,) = launched
    assert (call.gate, call.lower_bound, call.bounded) == (gate, lower_bound, bounded)


@pytest.mark.parametrize(
    "options, operand",
    [
        ({}, "bfloat16"),
        ({"use_qk_l2norm_in_kernel": True}, "float16"),
        ({"operand_dtype": torch.float16}, "float16"),
        ({"operand_dtype": torch.bfloat16, "use_qk_l2norm_in_kernel": True}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_launcher_is_told_the_dtype_of_operands(launched, dtype, options, operand):
    chunk_kda(**kernel_inputs(gate="log", dtype=dtype), **options)
    assert launched[0].operand == operand


@pytest.mark.parametrize("choice, told", [("auto", "auto"), (True, "on"), (False, "off")])
def test_the_launcher_is_told_whether_to_cut(launched, choice, told):
    a = inputs(1, 2048, 1, 1, gate="log")
    chunk_kda(**a, use_intracard_cp=choice)
    (call,) = launched
    assert call.intracard_cp == told


@pytest.mark.parametrize(
    "lengths, copy, longest",
    [(None, False, 10), ((3, 0, 7), False, None), ((3, 0, 7), True, 7), ((0, 10), True, 10)],
)
def test_the_planner_is_told_the_longest_length_if_it_is_known(launched, lengths, copy, longest):
    a = inputs(1, 10, 1, 1, gate="log", lengths=lengths)
    chunk_kda(**a, cu_seqlens_cpu=a["cu_seqlens"].long() if copy else None)
    told: list[Any] = []

    def planner(*facts: Any) -> Plan:
        told.append(facts)
        return plan(*facts)

    RUN(
        HOPPER,
        launched[0],
        multiprocessors=132,
        kernels=lambda config: lambda *_: None,
        planner=planner,
    )
    ((target, *shape, multiprocessors, workspace, intracard_cp, known, segment, _, _),) = told
    assert target is HOPPER and shape == [1, 10, 1, None if lengths is None else len(lengths)]
    size = kda_workspace_bytes(1, 10, 1, shape[3])
    assert (multiprocessors, workspace, intracard_cp, known) == (132, size, "auto", longest)
    assert segment == 0


@pytest.mark.parametrize("lengths", [None, (65, 0, 5)])
def test_a_workspace_is_allocated(launched, lengths):
    a = inputs(1, 70, 1, 2, gate="log", lengths=lengths)
    chunk_kda(**a)
    handed: list[tuple] = []
    kernels = lambda config: lambda *arguments: handed.append(arguments)  # noqa: E731
    RUN(HOPPER, launched[0], multiprocessors=132, kernels=kernels)
    first, last = (
        {x for x in arguments if torch.is_tensor(x)} for arguments in (handed[0], handed[-1])
    )
    size = kda_workspace_bytes(1, 70, 2, None if lengths is None else 3)
    found = {(x.dtype, x.nbytes) for x in first & last}
    table = {(torch.int32, 4 * 6 * (1 + 3))} if lengths else set()
    assert found == {(torch.bfloat16, size)} | table


@pytest.mark.parametrize("lengths", [None, (1500, 0, 3000)])
def test_a_length_of_segments_reaches_the_table_or_the_recurrence(launched, lengths):
    chunk_kda(**inputs(1, 4500, 1, 2, gate="log", lengths=lengths), segment_tokens=2048)
    assert launched[0].segment_tokens == 2048
    configs: list[Any] = []

    def kernels(config):
        configs.append(config)
        return lambda *arguments: None

    RUN(HOPPER, launched[0], multiprocessors=132, kernels=kernels)
    assert [config.split for config in configs if hasattr(config, "split")] == [True, True]


def test_parameters_reach_the_launcher_in_a_dtype_it_reads(launched):
    both = (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)
    for dtype, read in both:
        a = kernel_inputs(gate_dtype=dtype, beta_dtype=dtype)
        a |= {name: a[name].to(dtype) for name in ("A_log", "dt_bias")}
        chunk_kda(**a, **flags("safe"))
        call = launched.pop()
        for name in ("g", "beta"):
            assert getattr(call, name).dtype == read and torch.equal(
                getattr(call, name), a[name].to(read)
            )
        for name in ("A_log", "dt_bias"):
            assert (
                getattr(call, name).dtype == torch.float32 and getattr(call, name).is_contiguous()
            )
            assert torch.equal(getattr(call, name).flatten(), a[name].float())


@pytest.mark.parametrize("how", [misplaced, spaced])
def test_a_bias_is_copied_where_it_lies_badly(launched, how):
    a = kernel_inputs()
    wanted, _ = chunk_kda(**a, **flags("safe"))
    bias = how(a["dt_bias"].view(2, 128))
    o, _ = chunk_kda(**a | {"dt_bias": bias}, **flags("safe"))
    given = launched[1].dt_bias
    assert (
        given.is_contiguous()
        and not given.data_ptr() % 16
        and torch.equal(given.view(2, 128), bias)
    )
    assert torch.equal(o, wanted)


@pytest.mark.parametrize(
    "how, copied", [(misplaced, True), (partial(spaced, gap=2), True), (spaced, False)]
)
def test_views_that_tma_cannot_address_are_copied(launched, how, copied):
    a = kernel_inputs(gate="log")
    names = ("q", "k", "v", "g")
    views = {name: how(a[name]) for name in names}
    out = how(torch.full_like(a["v"], math.nan))
    o, _ = chunk_kda(**a | views, out=out)
    (call,) = launched
    for name in names:
        assert (getattr(call, name) is not views[name]) == copied and torch.equal(
            getattr(call, name), a[name]
        )
    assert o is out and (call.out is not out) == copied
    for name in (*names, "out"):
        size = getattr(call, name).element_size()
        assert not getattr(call, name).data_ptr() % 16
        assert not any(s * size % 16 for s in getattr(call, name).stride()[:3])
    assert torch.equal(out, chunk_kda(**a)[0])


def test_strengths_are_handed_over_as_they_lie(launched):
    a = kernel_inputs(gate="log")
    a["beta"] = misplaced(a["beta"]).mT.contiguous().mT
    chunk_kda(**a)
    assert launched[0].beta is a["beta"]


@each_layout
def test_a_transposed_view_is_handed_over_as_it_lies(launched, v_first):
    a = kernel_inputs(gate="log", initial=True, state_v_first=v_first)
    a["initial_state"] = state = turned(a["initial_state"])
    _, final = chunk_kda(**a, output_final_state=True, state_v_first=v_first)
    (call,) = launched
    assert call.state_v_first is not v_first
    assert call.initial_state.data_ptr() == state.data_ptr()
    for name in ("initial_state", "final_state"):
        assert getattr(call, name).is_contiguous()
    assert final.shape == state.shape and final.data_ptr() == call.final_state.data_ptr()


@pytest.mark.parametrize("label", EMPTY)
def test_an_empty_batch_launches_nothing(launched, label):
    a = inputs(*EMPTY[label], 1, 2, gate="log", initial=True)
    _, final = chunk_kda(**a, output_final_state=True)
    assert torch.equal(final, a["initial_state"])
    _, final = chunk_kda(**a | {"initial_state": None}, output_final_state=True)
    assert not final.any() and not launched


def test_empty_sequences_launch_nothing(launched):
    a = inputs(1, 0, 1, 2, gate="log", lengths=(0, 0, 0), states=4, initial=True)
    before = a.pop("initial_state")
    before[0] = math.nan
    pool, slots = before.clone(), int32(2, -1, 1)
    _, state = chunk_kda(**a, state_pool=pool, initial_state_indices=slots)
    assert torch.equal(pool[1:], before[1:])
    only_read = {"state_pool": pool, "update_state_pool": False, "output_final_state": True}
    _, state = chunk_kda(**a, **only_read, initial_state_indices=slots)
    assert torch.equal(state[[0, 2]], pool[[2, 1]]) and not state[1].any()
    _, state = chunk_kda(**a, **only_read)
    assert torch.equal(state[1:], pool[1:3]) and state.shape[0] == 3
    assert not launched


def test_nothing_but_padding_launches_nothing(launched):
    a = inputs(1, 5, 1, 2, gate="log", lengths=(3, 2), states=0, initial=True)
    pool = a.pop("initial_state")
    o, state = chunk_kda(
        **a, state_pool=pool, initial_state_indices=int32(-1, -2), update_state_pool=False,
        output_final_state=True, out=torch.full_like(a["v"], math.nan),
    )  # fmt: skip
    assert not o.any() and not state.any() and state.shape == (2, 2, 128, 128) and not launched


def test_an_error_of_the_launcher_is_passed_on(launched, monkeypatch):
    def run(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(RuntimeError, match="^out of memory$"):
        chunk_kda(**kernel_inputs(gate="log"))


def test_a_gpu_is_asked_once(monkeypatch):
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    device = torch.device("cuda", 93)
    PREFILL._require_target(device)
    PREFILL._require_target(device)
    prefill._capability.cache_clear()
    assert asked == [device]


@pytest.mark.parametrize(
    "gate, dtype, intra, told",
    [
        ("safe", torch.bfloat16, False, "auto"),
        ("safe", torch.float16, False, "auto"),
        (
            "safe",
            torch.float32,
            False,
            "off",
        ),  # of fp32 gates only half fits where the next chunk is loaded to
        ("softplus", torch.bfloat16, False, "off"),  # no bound
        ("safe", torch.bfloat16, True, "off"),
    ],
)
def test_the_planner_is_told_which_calls_have_kernels_beside_each_other(
    launched, gate, dtype, intra, told
):
    a = inputs(1, 64, 1, 1, gate=gate, gate_dtype=dtype)
    chunk_kda(**a, **flags(gate), return_intra=intra)
    found: list[Any] = []

    def planner(*facts: Any) -> Plan:
        found.append(facts[-1])
        return plan(*facts)

    RUN(
        HOPPER,
        launched[0],
        multiprocessors=132,
        kernels=lambda config: lambda *_: None,
        planner=planner,
    )
    assert found == [told]
