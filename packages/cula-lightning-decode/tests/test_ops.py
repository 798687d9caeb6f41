"""The operators in torch's machinery, and what importing the package costs."""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cula_lightning_decode
from cula_core.reference import lightning_decode as reference
from cula_lightning_decode import _spec, linear_attention_commit, linear_attention_decode
from cula_testing.interpreters import python
from cula_testing.specs import assert_answer, assert_says_what_to_install
from cula_testing.tensors import int32, scattered

CHECKS = ("test_schema", "test_faketensor")
TRACED = "test_aot_dispatch_dynamic"  # a hundred times as slow as the others


OP_DTYPES = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float64),
)
# Dtypes x layouts x indices; whether the arguments are views alternates, so that every pair of facts occurs.
OP_CASES = [
    (OP_DTYPES[d], bool(first), (2, -1, 0) if indexed else None, bool((d + first + indexed) % 2))
    for d, first, indexed in itertools.product(range(3), range(2), range(2))
]


# Dtypes, layout, indices, views, commit: every pair of facts occurs. Tracing does not look into the operators.
TRACED_CASES = [
    (OP_DTYPES[0], False, None, False, False),
    (OP_DTYPES[0], True, (2, -1, 0), True, True),
    (OP_DTYPES[1], False, (2, -1, 0), False, True),
    (OP_DTYPES[1], True, None, True, False),
    (OP_DTYPES[2], False, None, True, True),
    (OP_DTYPES[2], True, (2, -1, 0), False, False),
]


def op_inputs(make_inputs, dtypes, v_first, slots, views) -> dict[str, Any]:
    dtype, state_dtype = dtypes
    inputs = make_inputs(
        3, 2, 1, 2, 64, 64, pool=4, dtype=dtype, state_dtype=state_dtype, state_v_first=v_first
    )
    if views:
        inputs |= {name: scattered(inputs[name]) for name in ("q", "k", "v")}
        inputs["state"] = inputs["state"].repeat(2, 1, 1, 1)[::2]
    inputs["state_indices"] = None if slots is None else int32(*slots)
    inputs["seed"] = torch.tensor([5]) if state_dtype == torch.bfloat16 else None
    return inputs


def check_decode(a: dict[str, Any], v_first: bool, commit: bool, checks) -> None:
    op = torch.ops.cula_lightning_decode.decode.default
    tensors = (a["q"], a["k"], a["v"], a["state"], a["decay"], a["state_indices"], a["seed"])
    arguments = (*tensors, 0.5, v_first, commit, torch.empty_like(a["v"]))
    torch.library.opcheck(op, arguments, test_utils=checks)


def check_commit(a: dict[str, Any], v_first: bool, checks) -> None:
    op = torch.ops.cula_lightning_decode.commit.default
    accepted = int32(2, 1, 0)
    tensors = (a["k"], a["v"], a["state"], a["decay"], accepted, a["state_indices"], a["seed"])
    torch.library.opcheck(op, (*tensors, v_first), test_utils=checks)


@pytest.mark.parametrize("dtypes, v_first, slots, views", OP_CASES)
def test_opcheck_decode(make_inputs, dtypes, v_first, slots, views):
    a = op_inputs(make_inputs, dtypes, v_first, slots, views)
    for commit in (True, False):
        check_decode(a, v_first, commit, CHECKS)


@pytest.mark.parametrize("dtypes, v_first, slots, views", OP_CASES)
def test_opcheck_commit(make_inputs, dtypes, v_first, slots, views):
    check_commit(op_inputs(make_inputs, dtypes, v_first, slots, views), v_first, CHECKS)


@pytest.mark.parametrize("dtypes, v_first, slots, views, commit", TRACED_CASES)
def test_opcheck_traced(make_inputs, dtypes, v_first, slots, views, commit):
    a = op_inputs(make_inputs, dtypes, v_first, slots, views)
    check_decode(a, v_first, commit, TRACED)
    check_commit(a, v_first, TRACED)


def test_opcheck_empty_batch(make_inputs):
    a = make_inputs(0, 2, 1, 2, 64, 64, pool=2) | {"state_indices": int32(), "seed": None}
    check_decode(a, False, True, (*CHECKS, TRACED))
    commit = (a["k"], a["v"], a["state"], a["decay"], int32(), int32(), None, False)
    op = torch.ops.cula_lightning_decode.commit.default
    torch.library.opcheck(op, commit, test_utils=(*CHECKS, TRACED))


def test_the_schema_names_what_is_written():
    def written(op) -> list[str]:
        return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]

    namespace = torch.ops.cula_lightning_decode
    assert written(namespace.decode.default) == ["state", "out"]
    assert written(namespace.commit.default) == ["state"]


@pytest.mark.parametrize("v_first", [False, True])
def test_public_functions_are_the_reference_on_a_cpu(make_inputs, v_first):
    a = make_inputs(3, 2, 1, 2, 64, 128, pool=4, dtype=torch.bfloat16, state_v_first=v_first)
    layout = {"state_indices": int32(3, -1, 0), "state_v_first": v_first}
    twin = a | {"state": a["state"].clone()}
    out = linear_attention_decode(**a, **layout, scale=0.3)
    assert torch.equal(out, reference.linear_attention_decode(**twin, **layout, scale=0.3))
    assert torch.equal(a["state"], twin["state"])
    assert out.is_contiguous() and out.dtype == torch.bfloat16

    keys, twins = ({n: x[n] for n in ("k", "v", "state", "decay")} for x in (a, twin))
    assert linear_attention_commit(**keys, num_accepted=int32(1, 2, 0), **layout) is None
    reference.linear_attention_commit(**twins, num_accepted=int32(1, 2, 0), **layout)
    assert torch.equal(a["state"], twin["state"])


@pytest.mark.parametrize("v_first", [False, True])
def test_a_transposed_pool_is_updated_in_place(make_inputs, relative_rmse, v_first):
    a = make_inputs(2, 3, 1, 2, 64, 128, state_v_first=v_first)
    turned = a["state"].transpose(2, 3).contiguous().transpose(2, 3)
    address = turned.data_ptr()
    expected = linear_attention_decode(**a, state_v_first=v_first)
    out = linear_attention_decode(**(a | {"state": turned}), state_v_first=v_first)
    # Element by element the same arithmetic; only the sums of the output run in another order.
    assert torch.equal(turned, a["state"]) and turned.data_ptr() == address
    assert relative_rmse(out, expected) < 1e-6


def test_out_is_honoured(make_inputs):
    a = make_inputs(2, 3, 1, 2, 64, 64, dtype=torch.bfloat16)
    expected = linear_attention_decode(**a, commit=False)
    storage = torch.full((2, 6, 5, 70), 7.0, dtype=torch.bfloat16)
    out = storage[:, ::2, 1:3, 3:67]
    assert linear_attention_decode(**a, commit=False, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert (storage == 7).all()


def test_verification_needs_no_seed_and_leaves_the_pool(make_inputs):
    a = make_inputs(2, 3, 1, 2, 64, 64, state_dtype=torch.bfloat16)
    before = a["state"].clone()
    first = linear_attention_decode(**a, commit=False)
    assert torch.equal(first, linear_attention_decode(**a, commit=False, rounding_seed=8))
    assert torch.equal(a["state"], before)


@pytest.mark.parametrize("name", ["q", "k", "v", "state", "decay"])
def test_gradients_are_refused_but_not_under_no_grad(make_inputs, name):
    a = make_inputs(1, 1, 1, 1, 64, 64)
    leaf = {n: x.clone() for n, x in a.items()}
    leaf[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected no gradient"):
        linear_attention_decode(**leaf)
    with torch.no_grad():
        out = linear_attention_decode(**leaf)
    assert torch.equal(out, linear_attention_decode(**a)) and not out.requires_grad
    assert torch.equal(leaf["state"], a["state"])
    with torch.inference_mode():
        assert torch.equal(linear_attention_decode(**leaf), linear_attention_decode(**a))


def step(q, k, v, state, decay, rows, accepted, seed, v_first=False):
    """A draft, its verification and the commit, with plain operators around them."""
    layout = {"state_indices": rows, "state_v_first": v_first}
    drafted = linear_attention_decode(q * 2, k, v, state, decay, **layout, commit=False, scale=0.25)
    linear_attention_commit(k, v, state, decay, accepted, **layout, rounding_seed=seed)
    return drafted + linear_attention_decode(q, k, v, state, decay, **layout, rounding_seed=seed)


@pytest.mark.parametrize("v_first, dynamic", [(False, False), (True, True)])
def test_torch_compile_sees_one_graph(make_inputs, fresh_compiler, v_first, dynamic):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3):
        a = make_inputs(
            batch, 2, 1, 2, 64, 128, pool=4, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
            state_v_first=v_first, seed=batch,
        )  # fmt: skip
        rows, accepted = int32(3, -1, 0)[:batch], int32(1, 2, 0)[:batch]
        twin = a | {"state": a["state"].clone()}
        expected = step(**a, rows=rows, accepted=accepted, seed=torch.tensor([9]), v_first=v_first)
        out = compiled(
            **twin, rows=rows, accepted=accepted, seed=torch.tensor([9]), v_first=v_first
        )
        assert torch.equal(out, expected) and torch.equal(twin["state"], a["state"])


def test_torch_compile_takes_integer_seeds_and_an_output(make_inputs, fresh_compiler):
    def run(a, out, seed):
        return linear_attention_decode(**a, out=out, rounding_seed=seed) + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    a = make_inputs(2, 1, 1, 1, 64, 64, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    for seed in (3, 4, -(1 << 40)):
        twin, out = a | {"state": a["state"].clone()}, torch.empty_like(a["v"])
        got = compiled(twin, out, seed)
        again = a | {"state": a["state"].clone()}
        expected = linear_attention_decode(**again, rounding_seed=seed)
        assert torch.equal(got, expected + 1) and torch.equal(out, expected)
        assert torch.equal(twin["state"], again["state"])


def test_torch_compile_refuses_wrong_arguments(make_inputs, fresh_compiler):
    a = make_inputs(2, 1, 1, 2, 64, 64, dtype=torch.bfloat16)
    compiled = torch.compile(linear_attention_decode, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="decay: expected float32, got float64"):
        compiled(**(a | {"decay": a["decay"].double()}))


def test_make_fx_records_the_operators(make_inputs):
    a = make_inputs(2, 2, 1, 2, 64, 64, dtype=torch.bfloat16)
    graph = make_fx(lambda *x: step(*x, int32(1, 0), int32(2, 1), None))(*a.values())
    namespace = torch.ops.cula_lightning_decode
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(namespace.decode.default) == 2
    assert called.count(namespace.commit.default) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("v_first", [False, True])
def test_fake_tensors_of_any_device(device, v_first):
    """Shapes without values, for a GPU that need not exist; nothing may ask for an address."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        new = {"device": device, "dtype": torch.bfloat16}
        q, k = (torch.empty(3, 4, 2, 64, **new) for _ in range(2))
        matrix = (128, 64) if v_first else (64, 128)
        v, state = torch.empty(3, 4, 6, 128, **new), torch.empty(5, 6, *matrix, **new)
        decay, rows = (
            torch.empty(6, device=device),
            torch.empty(3, device=device, dtype=torch.int32),
        )
        layout = {"state_indices": rows, "state_v_first": v_first, "rounding_seed": 3}
        out = linear_attention_decode(q, k, v, state, decay, **layout)
        assert out.shape == (3, 4, 6, 128) and out.dtype == torch.bfloat16
        assert out.device.type == device and out.is_contiguous()
        into = torch.empty_like(v)
        assert linear_attention_decode(q, k, v, state, decay, **layout, out=into) is into
        linear_attention_commit(k, v, state, decay, rows, **layout)
        with pytest.raises(TypeError, match="^state_indices: expected int32"):
            linear_attention_decode(
                q, k, v, state, decay, state_indices=decay, state_v_first=v_first
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
import cula_lightning_decode as c
x = torch.zeros(1, 1, 1, 64)
c.linear_attention_decode(x, x, x, torch.zeros(1, 1, 64, 64), torch.zeros(1))
c.linear_attention_commit(
    x, x, torch.zeros(1, 1, 64, 64), torch.zeros(1), torch.ones(1, dtype=torch.int32))
heavy = {m.partition(".")[0] for m in set(sys.modules) - before} & {"cutlass", "triton", "tvm_ffi"}
assert not heavy, heavy
assert "cula_lightning_decode.launch" not in sys.modules
""",
        cula_lightning_decode,
    )


def test_import_is_quick():
    """Under 0.2 s beyond torch, the best of three: a busy machine only ever adds."""
    code = """
import time, torch
start = time.perf_counter()
import cula_lightning_decode
print(time.perf_counter() - start)
"""
    assert min(float(python(code, cula_lightning_decode)) for _ in range(3)) < 0.2


def test_the_spec_imports_no_dsl():
    code = """
import json, sys
from cula_lightning_decode import _spec
print(json.dumps([sorted({"cutlass", "triton", "tvm_ffi"} & set(sys.modules)), _spec.supports()]))
"""
    assert json.loads(python(code, cula_lightning_decode)) == [[], None]


@pytest.mark.parametrize(
    "problem, reason",
    [
        ({}, None),
        ({"function": "linear_attention_decode", "varlen": False, "unheard_of": 3}, None),
        ({"dtype": torch.bfloat16, "state_dtype": torch.float32}, None),
        ({"dtype": torch.float16, "state_dtype": torch.float16, "tokens": 8}, None),
        ({"head_dim_k": 64, "head_dim_v": 256, "tokens": 1, "requires_grad": False}, None),
        ({"requires_grad": True}, "no backward"),
        ({"dtype": torch.float32}, "activations must be bfloat16 or float16, not torch.float32"),
        (
            {"state_dtype": torch.float64},
            "state must be float32, bfloat16, float16, not torch.float64",
        ),
        ({"head_dim_k": 96}, "K must be one of (64, 128, 256), not 96"),
        ({"head_dim_v": 32}, "V must be one of (64, 128, 256), not 32"),
        ({"tokens": 0}, "1 to 8 tokens per call, not 0"),
        ({"tokens": 9}, "1 to 8 tokens per call, not 9"),
    ],
)
def test_the_spec_gives_reasons(problem, reason):
    assert_answer(_spec.supports, problem, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_the_spec_says_what_to_install(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, _spec.supports, missing, "cula-lightning-decode")


def test_the_spec_describes_this_package():
    assert (_spec.NAME, _spec.OP) == ("cula-lightning-decode", "lightning.decode")
    assert {"sm80", "sm89", "sm90", "sm100", "sm120"} <= set(_spec.ARCHS)
    for name in cula_lightning_decode.__all__:
        assert _spec.load(name) is getattr(cula_lightning_decode, name)
    with pytest.raises(AttributeError):
        _spec.load("linear_attention_prefill")
