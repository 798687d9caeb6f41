"""The operator on the CPU and in torch's machinery, for a target without a package."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from delta_rule_targets import HOPPER, chunk_kda
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cula_core.spec
from cula_core.delta_rule import spec
from cula_core.delta_rule.call import Call
from cula_core.reference import kda as reference
from cula_testing.kda.inputs import LOWER_BOUNDS, expected, flags, inputs
from cula_testing.tensors import int32, scattered, turned

CHECKS = ("test_schema", "test_faketensor")
TRACED = "test_aot_dispatch_dynamic"  # a hundred times as slow as the others
OP = getattr(torch.ops, HOPPER.package).prefill.default
each_layout = pytest.mark.parametrize("v_first", [False, True])
each_place = pytest.mark.parametrize("how", [torch.clone, turned], ids=["as it is", "transposed"])


def given(*sizes: int, **more: Any) -> dict[str, Any]:
    """Small inputs, of log decays and with fp32 activations where nothing else is said."""
    more = {"gate": "log", "dtype": torch.float32, "dim_k": 4, "dim_v": 6} | more
    return inputs(*sizes, **more)


# Where the state is and where it goes, dtypes, packed, what g is; the rest alternates.
OP_CASES = [
    (state, dtype, packed, gate)
    for number, (state, dtype, packed) in enumerate(
        itertools.product(("none", "initial", "pool"), (torch.bfloat16, torch.float64), (False, True))
    )
    for gate in ("log", "softplus", "safe")[number % 2 :]
]  # fmt: skip
# Of the same facts every pair occurs, and raw gates are of two kinds. Tracing does not look into the operator.
TRACED_CASES = [
    ("none", torch.bfloat16, False, "log"),
    ("none", torch.float64, True, "softplus"),
    ("initial", torch.bfloat16, False, "safe"),
    ("initial", torch.float64, True, "log"),
    ("pool", torch.float64, False, "log"),
    ("pool", torch.bfloat16, True, "safe"),
]


def op_call(state: str, dtype: torch.dtype, packed: bool, gate: str) -> Call:
    batch, sequences = (1, 3) if packed else (2, 2)
    raw = gate != "log"
    v_first = raw != packed
    a = given(
        batch, 5, 1, 2, dtype=dtype, gate=gate, lengths=(3, 0, 2) if packed else None, states=5,
        initial=True, state_v_first=v_first,
    )  # fmt: skip
    if raw:
        a |= {name: scattered(a[name]) for name in ("q", "k", "v", "g")}
    indexed = state != "none" and raw
    states = a["initial_state"]
    offsets = a["cu_seqlens"]
    return Call(
        a["q"], a["k"], a["v"], a["g"], a["beta"], a["A_log"], a["dt_bias"],
        states[: None if indexed else sequences] if state == "initial" else None,
        states if state == "pool" else None,
        int32(*(4, -1, 0)[:sequences]) if indexed else None,
        None if state == "pool" else torch.empty(sequences, *states.shape[1:], dtype=states.dtype),
        offsets, offsets.clone() if packed and raw else None,
        torch.empty_like(a["v"], memory_format=torch.contiguous_format),
        torch.zeros(64, dtype=torch.uint8) if packed else None,
        *(a["q"].new_empty(*a["v"].shape[:3], 64) if packed else None for _ in range(2)),
        *(torch.empty_like(a[x], dtype=a["q"].dtype) if packed and raw else None for x in "gvgg"),
        0.5, gate, LOWER_BOUNDS[gate], gate == "safe", raw, packed, packed and raw, v_first,
        "float16", "auto",
    )  # fmt: skip


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_opcheck(case):
    torch.library.opcheck(OP, tuple(op_call(*case)), test_utils=CHECKS)


@pytest.mark.parametrize("case", TRACED_CASES, ids=str)
def test_opcheck_traced(case):
    torch.library.opcheck(OP, tuple(op_call(*case)), test_utils=TRACED)


def test_the_schema_is_the_call():
    """The names, the order and the types, so that a Call is what the operator takes."""
    assert [a.name for a in OP._schema.arguments] == list(Call._fields)
    types = {
        "int": "int",
        "int | None": "Optional[int]",
        "Tensor": "Tensor",
        "Tensor | None": "Optional[Tensor]",
        "float": "float",
        "str": "str",
        "bool": "bool",
    }
    declared = [types[kind.__forward_arg__] for kind in Call.__annotations__.values()]
    assert [str(a.type) for a in OP._schema.arguments] == declared


def test_the_schema_names_what_is_written():
    written = [a.name for a in OP._schema.arguments if a.alias_info and a.alias_info.is_write]
    intra = ["Aqk", "Akk", "w", "u", "qg", "kg"]
    assert written == ["state_pool", "final_state", "out", "workspace", *intra, "checkpoints"]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("lengths", [None, (3, 0, 4), ()])
def test_intermediates_are_returned(lengths, more):
    tokens = 7 if lengths is None else sum(lengths)
    a = given(1, tokens, 1, 2, dtype=torch.bfloat16, lengths=lengths, initial=True)
    options = flags("safe") | {"scale": 0.3, "use_qk_l2norm_in_kernel": True}
    o, final, *found = chunk_kda(
        **a, **options, return_intra=True, disable_recompute=more, output_final_state=True
    )
    alone = chunk_kda(**a, **options, output_final_state=True)
    assert torch.equal(o, alone[0]) and torch.equal(final, alone[1])
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
    expected = reference.intermediates(
        *(a[name] for name in names), scale=0.3, gate="safe", lower_bound=LOWER_BOUNDS["safe"], l2norm=True,
        beta_sigmoid=False, neg_eigval=False,
    )  # fmt: skip
    assert len(found) == (6 if more else 2)
    dim_k, dim_v = a["q"].shape[3], a["v"].shape[3]
    for x, exact, dim in zip(found, expected, (64, 64, dim_k, dim_v, dim_k, dim_k)):
        assert x.shape == (1, tokens, 2, dim) and x.dtype == torch.bfloat16
        assert torch.equal(x, exact.bfloat16())


@each_layout
@pytest.mark.parametrize("known", [False, True], ids=["on_the_device", "on_the_host"])
@pytest.mark.parametrize(
    "lengths",
    [None, 0, (70, 0, 64, 0, 1, 128, 0), (), (0, 0)],
    ids=["dense", "no_token", "packed", "none", "empty"],
)
@pytest.mark.parametrize("initial", ["none", "given", "fresh", "view"])
def test_states_before_chunks(relative_rmse, lengths, known, initial, v_first):
    packed = isinstance(lengths, tuple)
    batch, tokens = (1, sum(lengths)) if packed else (2, 130 if lengths is None else 0)
    sizes = lengths if packed else (tokens,) * batch
    stored = v_first != (initial == "view")
    a = given(
        batch,
        tokens,
        1,
        2,
        lengths=lengths if packed else None,
        initial=initial != "none",
        state_v_first=stored,
    )
    if initial == "view":
        a["initial_state"] = a["initial_state"].mT
    options = {"output_final_state": True, "state_v_first": v_first}
    if packed and known:
        options["cu_seqlens_cpu"] = a["cu_seqlens"]
    if initial == "fresh":
        options["has_initial_state"] = torch.arange(len(sizes)) % 2 == 0
    o, final, h = chunk_kda(**a, **options, return_intermediate_states=True)
    alone = chunk_kda(**a, **options)
    assert torch.equal(o, alone[0]) and torch.equal(final, alone[1])

    wanted, begin = [], 0
    for n, length in enumerate(sizes):
        for place in range(0, length, 64):
            part = slice(begin, begin + place) if packed else slice(0, place)
            row = slice(0, 1) if packed else slice(n, n + 1)
            x = {name: a[name][row, part] for name in ("q", "k", "v", "g", "beta")}
            state = None if initial == "none" else a["initial_state"][n : n + 1].clone()
            if initial == "fresh" and n % 2:
                state = None
            wanted.append(
                chunk_kda(
                    **x,
                    initial_state=state,
                    **options | {"cu_seqlens_cpu": None, "has_initial_state": None},
                )[1]
            )
        begin += length
    rows = tokens // 64 + len(sizes) if packed and not known else len(wanted)
    assert h.shape == (batch, rows // batch, *final.shape[1:]) and h.dtype == final.dtype
    found = h.flatten(0, 1)
    assert not found[len(wanted) :].any()
    if wanted:
        assert relative_rmse(found[: len(wanted)], torch.cat(wanted)) < 1e-6


@each_layout
@pytest.mark.parametrize("gate", LOWER_BOUNDS)
def test_a_dense_call_is_the_reference_on_a_cpu(v_first, gate):
    a = given(2, 7, 1, 2, gate=gate, dtype=torch.bfloat16, initial=True, state_v_first=v_first)
    before = a["initial_state"].clone()
    o, final = chunk_kda(
        **a, **flags(gate), scale=0.3, output_final_state=True, use_qk_l2norm_in_kernel=True,
        state_v_first=v_first,
    )  # fmt: skip
    options = {"scale": 0.3, "state_v_first": v_first, "l2norm": True}
    wanted, finals = expected(a, gate, torch.float32, **options)
    assert torch.equal(o, wanted.bfloat16()) and o.is_contiguous()
    assert torch.equal(final, finals) and final.dtype == torch.float32
    assert torch.equal(a["initial_state"], before)
    assert chunk_kda(**a, **flags(gate), state_v_first=v_first)[1] is None


@pytest.mark.parametrize("doubled", [False, True])
def test_strengths_go_through_a_sigmoid(relative_rmse, doubled):
    a = given(1, 7, 1, 2, logits=True)
    o, final = chunk_kda(
        **a, output_final_state=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=doubled
    )
    wanted, finals = expected(a, "log", beta_sigmoid=True, neg_eigval=doubled)
    assert relative_rmse(o, wanted) < 1e-6 and relative_rmse(final, finals) < 1e-6


@pytest.mark.parametrize("bound", [-0.5, -2, -80.0])
def test_the_bound_is_the_callers(relative_rmse, bound):
    a = given(1, 7, 1, 2, gate="safe")
    o, _ = chunk_kda(**a, use_gate_in_kernel=True, lower_bound=bound)
    wanted, _ = reference.recurrent_prefill(**a, gate="safe", lower_bound=bound)
    assert relative_rmse(o, wanted) < 1e-6


def test_a_promise_and_a_bound_change_no_log_decay():
    a = given(1, 7, 1, 2)
    wanted, _ = chunk_kda(**a)
    assert torch.equal(chunk_kda(**a, safe_gate=True, lower_bound=-1.0)[0], wanted)


@each_layout
@each_place
@pytest.mark.parametrize("lengths", [None, (5, 0, 3, 1)])
def test_a_pool_is_updated_in_place(relative_rmse, v_first, how, lengths):
    batch, tokens = (4, 5) if lengths is None else (1, 9)
    a = given(batch, tokens, 1, 2, lengths=lengths, states=6, initial=True, state_v_first=v_first)
    before, slots = a.pop("initial_state"), int32(5, 0, -1, 2)
    pool = how(before)
    address = pool.data_ptr()
    o, state = chunk_kda(**a, state_pool=pool, initial_state_indices=slots, state_v_first=v_first)
    assert state is pool and pool.data_ptr() == address
    wanted, finals = expected(
        a | {"initial_state": before}, "log", state_indices=slots, state_v_first=v_first
    )
    assert relative_rmse(o, wanted) < 1e-6
    assert not (o[2] if lengths is None else o[:, 5:8]).any()
    assert relative_rmse(pool[[5, 0, 2]], finals[[0, 1, 3]]) < 1e-6
    # Rows that nobody names keep their bits, and so does that of an empty sequence.
    kept = [1, 3, 4] if lengths is None else [0, 1, 3, 4]
    assert torch.equal(pool[kept], before[kept])


@each_layout
@each_place
def test_a_pool_can_be_only_read(relative_rmse, v_first, how):
    a = given(1, 9, 1, 2, lengths=(5, 0, 3, 1), states=6, initial=True, state_v_first=v_first)
    before, slots = a.pop("initial_state"), int32(5, 0, -1, 2)
    pool = how(before)
    options = {"initial_state_indices": slots, "state_v_first": v_first, "update_state_pool": False}
    o, state = chunk_kda(**a, state_pool=pool, output_final_state=True, **options)
    _, finals = expected(
        a | {"initial_state": before}, "log", state_indices=slots, state_v_first=v_first
    )
    assert torch.equal(pool, before) and state.shape == (4, *pool.shape[1:])
    assert relative_rmse(state, finals) < 1e-6
    assert torch.equal(state[1], before[0]) and not state[2].any()
    again = chunk_kda(**a, state_pool=pool, **options)
    assert again[1] is None and torch.equal(again[0], o)


def test_a_pool_without_indices(relative_rmse):
    a = given(1, 9, 1, 2, lengths=(5, 4), states=3, initial=True)
    pool = a.pop("initial_state")
    before = pool.clone()
    chunk_kda(**a, state_pool=pool)
    _, finals = expected(a | {"initial_state": before[:2]}, "log")
    assert relative_rmse(pool[:2], finals) < 1e-6 and torch.equal(pool[2], before[2])


def test_states_start_from_zero():
    a = given(2, 5, 1, 2)
    o, final = chunk_kda(**a, output_final_state=True)
    zero = torch.zeros(2, 2, 4, 6)
    wanted = chunk_kda(**a | {"initial_state": zero}, output_final_state=True)
    assert torch.equal(o, wanted[0]) and torch.equal(final, wanted[1]) and final.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gates_and_strengths_of_any_dtype(relative_rmse, dtype):
    a = given(2, 7, 1, 2, gate="safe", gate_dtype=dtype, beta_dtype=dtype)
    a |= {name: a[name].to(dtype) for name in ("A_log", "dt_bias")}
    wanted, finals = expected(a, "safe")
    a["beta"] = a["beta"].mT.contiguous().mT
    a["dt_bias"] = a["dt_bias"].view(2, 4)
    o, final = chunk_kda(**a, **flags("safe"), output_final_state=True)
    assert relative_rmse(o, wanted) < 1e-6 and relative_rmse(final, finals) < 1e-6
    assert final.dtype == torch.float32


def test_fp64_stays_fp64(relative_rmse):
    a = given(1, 7, 1, 2, dtype=torch.float64, gate="softplus")
    o, final = chunk_kda(**a, **flags("softplus"), output_final_state=True)
    wanted, finals = expected(a, "softplus")
    assert final.dtype == torch.float64
    assert relative_rmse(o, wanted) < 1e-14 and relative_rmse(final, finals) < 1e-14


def test_out_is_honoured():
    a = given(2, 5, 1, 2, dtype=torch.bfloat16, dim_v=8)
    wanted, _ = chunk_kda(**a)
    storage = torch.full((2, 10, 5, 14), 7.0, dtype=torch.bfloat16)
    out = storage[:, ::2, 1:3, 3:11]
    assert chunk_kda(**a, out=out)[0] is out
    assert torch.equal(out, wanted)
    out.fill_(7.0)
    assert (storage == 7).all()


EMPTY = {"no token": (2, 0), "no row": (0, 5), "neither": (0, 0)}


@pytest.mark.parametrize("label", EMPTY)
def test_states_pass_through_an_empty_batch(label):
    batch, tokens = EMPTY[label]
    a = given(batch, tokens, 1, 2, initial=True)
    o, final = chunk_kda(**a, output_final_state=True)
    assert o.shape == (batch, tokens, 2, 6)
    assert torch.equal(final, a["initial_state"]) and final is not a["initial_state"]
    _, final = chunk_kda(**a | {"initial_state": None}, output_final_state=True)
    assert final.shape == (batch, 2, 4, 6) and not final.any()


@pytest.mark.parametrize("slots", [(), (1, -1, 0)])
def test_states_pass_through_empty_sequences(slots):
    a = given(1, 0, 1, 2, lengths=[0] * len(slots), states=3, initial=True)
    before = a.pop("initial_state")
    pool = before.clone()
    options = {"state_pool": pool, "initial_state_indices": int32(*slots)}
    o, state = chunk_kda(**a, **options)
    assert o.shape == (1, 0, 2, 6) and state is pool and torch.equal(pool, before)
    _, state = chunk_kda(**a, **options, update_state_pool=False, output_final_state=True)
    assert state.shape == (len(slots), 2, 4, 6)
    for n, slot in enumerate(slots):
        assert torch.equal(state[n], before[slot] if slot >= 0 else torch.zeros(2, 4, 6))


def step(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, slots, v_first=False):
    """Three calls with plain operators around them; the pool, which came as the initial state, is written."""
    raw = {"A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True, "safe_gate": True}
    options = {"lower_bound": -5.0, "state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    o, final = chunk_kda(q * 2, k, v, g, beta, 0.5, None, True, **raw, **options)
    packed = {"cu_seqlens": cu_seqlens, "state_pool": initial_state}
    first, pool = chunk_kda(
        q, k, v, g, beta, **raw, **options, **packed, initial_state_indices=slots
    )
    more, after = chunk_kda(
        q, k, v + first, -g.abs(), beta, None, pool[:2], True, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens, state_v_first=v_first, workspace=torch.zeros(1 << 20, dtype=torch.uint8),
    )  # fmt: skip
    return o + first + more, final + 1, after


def step_inputs(tokens: int, v_first: bool) -> dict[str, Any]:
    a = given(
        1, tokens, 1, 2, dtype=torch.bfloat16, gate="safe", lengths=(4, tokens - 4), states=4, initial=True,
        state_v_first=v_first, seed=tokens,
    )  # fmt: skip
    return a | {"slots": int32(3, -1)}


@pytest.mark.parametrize("v_first, dynamic", [(False, False), (True, True)])
def test_torch_compile_sees_one_graph(fresh_compiler, v_first, dynamic):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (7, 11):
        a = step_inputs(tokens, v_first)
        twin = a | {"initial_state": a["initial_state"].clone()}
        wanted = step(**a, v_first=v_first)
        for actual, x in zip(compiled(**twin, v_first=v_first), wanted):
            assert torch.equal(actual, x)
        assert torch.equal(twin["initial_state"], a["initial_state"])


def test_torch_compile_takes_an_output_and_a_transposed_pool(fresh_compiler):
    def run(a, pool, out):
        return chunk_kda(**a, scale=1.0, state_pool=pool, out=out)[0] + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    a = given(1, 5, 1, 2, lengths=(5,), initial=True)
    before = a.pop("initial_state")
    pools = [turned(before) for _ in range(2)]
    out = torch.full_like(a["v"], math.nan)
    got = compiled(a, pools[0], out)
    wanted, _ = chunk_kda(**a, scale=1.0, state_pool=pools[1])
    assert torch.equal(out, wanted) and torch.equal(got, wanted + 1)
    assert torch.equal(pools[0], pools[1]) and not torch.equal(pools[0], before)


def test_torch_compile_refuses_wrong_arguments(fresh_compiler):
    a = given(2, 5, 1, 2)
    compiled = torch.compile(chunk_kda, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"beta: expected \[B, T, HV\] = \[2, 5, 2\], got \[2, 5\]"):
        compiled(**a | {"beta": a["beta"][..., 0]})


def test_make_fx_records_the_operators():
    a = step_inputs(7, False)
    graph = make_fx(lambda *x: step(*x))(*a.values())
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(OP) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each_layout
def test_fake_tensors_of_any_device(device, v_first):
    """Shapes without values, for a GPU that need not exist; nothing may ask for an address or a capability."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        new: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        q, k = (torch.empty(1, 130, 2, 128, **new) for _ in range(2))
        v, g = (torch.empty(1, 130, 6, 128, **new) for _ in range(2))
        beta = torch.empty(1, 130, 6, **new)
        pool = torch.empty(5, 6, 128, 128, device=device)
        offsets, slots = (torch.empty(n, device=device, dtype=torch.int32) for n in (4, 3))
        options = {
            "cu_seqlens": offsets, "cu_seqlens_cpu": torch.empty(4, dtype=torch.int64), "state_v_first": v_first,
            "state_pool": pool, "workspace": torch.empty(1 << 20, device=device, dtype=torch.uint8),
        }  # fmt: skip
        o, state = chunk_kda(q, k, v, g, beta, initial_state_indices=slots, **options)
        assert o.shape == v.shape and o.dtype == torch.bfloat16 and o.is_contiguous()
        assert o.device.type == device and state is pool
        only_read = {"update_state_pool": False, "output_final_state": True}
        _, state = chunk_kda(q, k, v, g, beta, **options, **only_read)
        assert state.shape == (3, 6, 128, 128) and state.dtype == torch.float32
        with pytest.raises(TypeError, match="^initial_state_indices: expected int32"):
            chunk_kda(q, k, v, g, beta, initial_state_indices=slots.long(), **options)


@pytest.mark.parametrize(
    "problem, reason",
    [
        ({}, None),
        ({"function": "chunk_kda", "varlen": True, "unheard_of": 3}, None),
        ({"dtype": torch.bfloat16, "state_dtype": torch.float32}, None),
        ({"dtype": torch.float16, "state_dtype": None, "gate_dtype": torch.float64}, None),
        ({"head_dim_k": 128, "head_dim_v": 128, "requires_grad": False}, None),
        ({"use_intracard_cp": True, "safe_gate": False, "return_intermediate_states": True}, None),
        ({"requires_grad": True}, "no backward"),
        ({"dtype": torch.float32}, "activations must be bfloat16 or float16, not torch.float32"),
        (
            {"state_dtype": torch.float64},
            "states must be float32, bfloat16, float16, not torch.float64",
        ),
        ({"gate_dtype": torch.int32}, "g must be float32, bfloat16, float16, float64, not torch."),
        ({"beta_dtype": torch.int8}, "beta must be float32, bfloat16, float16, float64, not torch"),
        ({"head_dim_k": 64}, "K must be 128, not 64"),
        ({"head_dim_v": 256}, "V must be 128, not 256"),
    ],
)
def test_problems_are_refused_for_a_reason(problem, reason):
    answer = spec.supports(HOPPER, **problem)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("name", ["state_pool", "has_initial_state", "checkpoints"])
def test_a_target_with_a_backward_has_it_for_training_alone(name):
    target = replace(HOPPER, backward=True)
    assert spec.supports(target, requires_grad=True) is None
    assert spec.supports(target, **{name: True}) is None
    answer = spec.supports(target, requires_grad=True, **{name: True})
    assert answer == f"no backward with {name}"


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_a_missing_language_comes_with_what_to_install(monkeypatch, missing):
    found = cula_core.spec.find_spec
    monkeypatch.setattr(
        cula_core.spec, "find_spec", lambda name: None if name == missing else found(name)
    )
    answer = spec.supports(HOPPER)
    assert answer is not None and missing in answer
    assert f"--find-links dist {HOPPER.distribution}" in answer
