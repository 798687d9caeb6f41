"""Training through the public function: what autograd gets, what is kept until then, and what is refused."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

# What stands in for a GPU stands in their places.
import cula_core.delta_rule.launch  # noqa: F401
import cula_cp_sm90
import cula_cp_sm90.backward.launch
from cula_core.delta_rule.backward import ops
from cula_core.delta_rule.backward.config import WalkConfig
from cula_core.delta_rule.config import BLOCK_BYTES, PrepareConfig, RecurrenceConfig
from cula_core.reference.kda_backward import Gradients, chunk_kda_backward
from cula_cp_sm90.arch import TARGET
from cula_cp_sm90.backward.call import SCHEMA, BackwardCall
from cula_cp_sm90.backward.config import GradientsConfig
from cula_testing.kda.inputs import LOWER_BOUNDS, flags, inputs
from cula_testing.shortcuts import pretended_gpu
from cula_testing.tensors import spaced, turned

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
RAGGED = (0, 70, 1, 0, 64, 15)
DOUBLE = torch.float64
RULES = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "scale": 0.3}


def problem(
    lengths: tuple[int, ...] | None = RAGGED, gate: str = "safe", **more: Any
) -> dict[str, Any]:
    """Inputs, and what `chunk_kda` is told about them."""
    more = {"dim_k": 4, "dim_v": 6, "dtype": DOUBLE, "logits": True, "initial": True} | more
    batch, tokens = (2, 70) if lengths is None else (1, sum(lengths))
    x = inputs(batch, tokens, 1, 2, "moderate", gate=gate, lengths=lengths, **more)
    return x | flags(gate) | RULES


def attend(
    x: dict[str, Any], wanted: tuple[str, ...] = LEAVES, **options: Any
) -> tuple[dict[str, Tensor], tuple]:
    """The inputs whose gradients are wanted, and the results."""
    leaves = {n: x[n].detach().requires_grad_() for n in wanted if x[n] is not None}
    options = {"output_final_state": True} | options
    return leaves, cula_cp_sm90.chunk_kda(**(x | leaves | options))


def weighed(*results: Tensor | None) -> Tensor:
    """A loss in which every number counts differently."""
    total = torch.zeros((), dtype=DOUBLE)
    for y in results:
        if y is not None:
            total = total + (y.double() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum()
    return total


def expected(
    x: dict[str, Any], do: Tensor | None, dht: Tensor | None, gate: str = "safe", **more: Any
) -> Gradients:
    """The oracle, in fp64."""
    options = {
        "scale": 0.3, "gate": gate, "lower_bound": LOWER_BOUNDS[gate], "l2norm": True, "beta_sigmoid": True,
        "neg_eigval": False, "state_v_first": False,
    }  # fmt: skip
    do = torch.zeros_like(x["v"]) if do is None else do
    tensors = {name: x[name] for name in (*LEAVES, "cu_seqlens")}
    return chunk_kda_backward(**tensors, do=do, dht=dht, dtype=DOUBLE, **options | more)


def trained(
    x: dict[str, Any], **options: Any
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Gradients of a weighed sum of both results by name, and what went into the backward."""
    leaves, results = attend(x, **options)
    found = torch.autograd.grad(
        weighed(*results), [*leaves.values(), *(y for y in results if y is not None)]
    )
    of_results = [*found[len(leaves) :], None]
    return dict(zip(leaves, found)), of_results[0], of_results[1]


def assert_near(found: dict[str, Tensor], wanted: Gradients, bound: float = 1e-9) -> None:
    for name, d in zip(LEAVES, wanted):
        assert (d is None) == (name not in found), name
        if d is not None:
            assert found[name].shape == d.shape, name
            d = d.to(found[name].dtype).double()  # parameters are fp32
            error = (found[name].double() - d).norm() / d.norm().clamp(min=1e-300)
            assert error <= bound, (name, error)


@pytest.mark.parametrize(
    "make, options, rules",
    [
        ({}, {}, {}),
        ({"lengths": None}, {}, {}),
        ({"gate": "softplus"}, {}, {"gate": "softplus"}),
        ({"gate": "log"}, {}, {"gate": "log"}),
        ({}, {"allow_neg_eigval": True}, {"neg_eigval": True}),
        ({"state_v_first": True}, {"state_v_first": True}, {"state_v_first": True}),
        ({"initial": False}, {}, {}),
        ({"initial": False, "lengths": None}, {"output_final_state": False}, {}),
        ({}, {"disable_recompute": True, "use_intracard_cp": False}, {}),
        ({"logits": False}, {"use_beta_sigmoid_in_kernel": False}, {"beta_sigmoid": False}),
        ({"normalized": True}, {"use_qk_l2norm_in_kernel": False}, {"l2norm": False}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_oracle(make, options, rules):
    x = problem(**make)
    found, do, dht = trained(x, **options)
    assert_near(found, expected(x, do, dht, **rules))


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "states"])
def test_one_result_alone(used):
    x = problem()
    leaves, results = attend(x)
    found = torch.autograd.grad(results[used].sum(), leaves.values())
    ones = [torch.ones_like(y) if n == used else None for n, y in enumerate(results)]
    assert_near(dict(zip(leaves, found)), expected(x, *ones))


@pytest.mark.parametrize("name", LEAVES)
def test_one_input_alone(name):
    x = problem()
    every, _, _ = trained(x)
    leaves, results = attend(x, (name,))
    weighed(*results).backward()
    assert torch.equal(leaves[name].grad, every[name])


def test_gradients_have_the_dtypes_of_their_inputs():
    x = problem(dtype=torch.bfloat16, gate_dtype=torch.float16, beta_dtype=torch.bfloat16)
    x["A_log"], x["initial_state"] = x["A_log"].double(), x["initial_state"].bfloat16()
    x["dt_bias"] = x["dt_bias"].bfloat16().view(2, 4)
    found, do, dht = trained(x)
    assert do.dtype == torch.bfloat16 and dht.dtype == torch.bfloat16
    assert all(d.dtype == x[name].dtype for name, d in found.items())
    assert_near(found, expected(x, do, dht), 1e-2)


@pytest.mark.parametrize(
    "how", [turned, spaced, lambda s: s.double()], ids=["turned", "spaced", "fp64"]
)
def test_states_lie_anywhere(how):
    x = problem()
    found, _, _ = trained(x)
    x["initial_state"] = (
        how(x["initial_state"])
        if how is not spaced
        else torch.cat([x["initial_state"]] * 2)[: len(RAGGED)]
    )
    again, _, _ = trained(x)
    assert torch.equal(again["initial_state"], found["initial_state"])


def test_no_token_at_all():
    for lengths in ((), (0, 0)):
        x = problem(lengths)
        found, _, dht = trained(x)
        assert torch.equal(found["initial_state"], dht)
        assert not any(d.any() for name, d in found.items() if name != "initial_state")


def test_nothing_is_kept_but_the_inputs():
    """Not even a workspace, which the forward alone has."""
    x, kept = problem(), []
    workspace = torch.empty(2 * 59904, dtype=torch.uint8)
    gone = weakref.ref(workspace)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda y: kept.append(y.data_ptr()) or y, lambda y: y
    ):
        leaves, results = attend(x, workspace=workspace)
    del workspace
    given = {y.data_ptr() for y in (x | leaves).values() if isinstance(y, Tensor)}
    assert kept and set(kept) <= given and gone() is None
    weighed(*results).backward()


def test_activations_may_be_recomputed():
    """A checkpoint lets what was saved be read once."""
    x = problem()
    found, _, _ = trained(x)
    leaves = {name: x[name].detach().requires_grad_() for name in LEAVES}

    def layer(q: Tensor) -> Any:
        return cula_cp_sm90.chunk_kda(**(x | leaves | {"q": q, "output_final_state": True}))

    weighed(*checkpoint(layer, leaves["q"], use_reentrant=False)).backward()
    assert all(torch.equal(leaf.grad, found[name]) for name, leaf in leaves.items())


def test_autocast_changes_nothing():
    x = problem(dtype=torch.float32)
    found, _, _ = trained(x)
    with torch.autocast("cpu", torch.bfloat16):
        again, _, _ = trained(x)
    assert all(torch.equal(d, found[name]) for name, d in again.items())


def test_compiled():
    """One graph for every length, in which the backward is one operator."""
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(cula_cp_sm90.chunk_kda, fullgraph=True, backend=count)
    for lengths in ((3, 2), (5, 0, 66), (1, 30, 7, 40)):
        x = problem(lengths)
        leaves, results = attend(x)
        wanted = torch.autograd.grad(weighed(*results), leaves.values())
        leaves = {name: x[name].detach().requires_grad_() for name in LEAVES}
        results = compiled(**(x | leaves | {"output_final_state": True}))
        found = torch.autograd.grad(weighed(*results), leaves.values())
        assert all(map(torch.equal, found, wanted))
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("linear", [False, True])
def test_a_gradient_has_none_itself(linear):
    """Also where it depends on no gradient of the results, but on the inputs alone."""
    leaves, (o, _) = attend(problem())
    value = o.sum() if linear else o.square().sum()
    (dq,) = torch.autograd.grad(value, leaves["q"], create_graph=True)
    with pytest.raises(
        RuntimeError, match="^cula: the derivative of a gradient is not implemented"
    ):
        dq.sum().backward()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, make",
    [
        ("out", lambda x: torch.empty_like(x["v"])),
        ("state_pool", lambda x: torch.zeros(9, 2, 4, 6, dtype=DOUBLE)),
        ("has_initial_state", lambda x: torch.ones(6, dtype=torch.bool)),
        ("return_intra", lambda x: True),
        ("return_intermediate_states", lambda x: True),
        ("null_slot", lambda x: 0),
        ("checkpoint_every_n_tokens", lambda x: 64),
    ],
)
def test_what_inference_alone_has_is_refused(name, make):
    x = problem()
    value = make(x)
    unused = False if value is True else None
    with pytest.raises(ValueError, match=f"^{name}: expected {unused} when gradients are required"):
        attend(x, **{name: value})


def test_negative_strengths_are_refused_where_they_can_be_seen():
    x = problem(logits=False) | {"use_beta_sigmoid_in_kernel": False}
    x["beta"][0, 3] = -1e-3
    with pytest.raises(ValueError, match="^beta: expected values >= 0"):
        attend(x)
    with torch.no_grad():
        attend(x)
    x["beta"][0, 3] = 0.0
    attend(x)


def test_wrong_arguments_are_refused_as_without_gradients():
    x = problem()
    with pytest.raises(ValueError, match=r"^g: expected \[B, T, HV, K\]"):
        attend(x | {"g": x["g"][..., :3]})
    with pytest.raises(TypeError, match="^beta: "):
        attend(x | {"beta": None}, ("q",))
    with pytest.raises(NotImplementedError, match="^cp_context: "):
        attend(x, cp_context=object())


def test_a_target_without_a_backward_refuses(monkeypatch):
    monkeypatch.setitem(TARGET.__dict__, "backward", False)
    with pytest.raises(ValueError, match="^q: expected no gradient"):
        attend(problem())


# ---- the operator ----------------------------------------------------------------------------------------------------


def call(packed: bool, dtype: torch.dtype, initial: bool) -> BackwardCall:
    x = problem((3, 0, 2) if packed else None, dtype=dtype, initial=initial)
    count = 3 if packed else 2
    return BackwardCall(
        *(x[name] for name in (*LEAVES, "cu_seqlens")), None, torch.randn_like(x["v"]),
        torch.randn(count, 2, 4, 6) if initial else None, 0.3, "safe", -5.0, True, True, True, False, False, "float16",
    )  # fmt: skip


def test_the_schema_is_the_call():
    schema = torch._C.parse_schema(f"cula_cp_sm90::backward{SCHEMA}")
    assert torch.ops.cula_cp_sm90.backward.default._schema == schema
    assert tuple(argument.name for argument in schema.arguments) == BackwardCall._fields
    assert len(schema.returns) == len(Gradients._fields)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, DOUBLE])
@pytest.mark.parametrize("initial", [False, True])
def test_opcheck(packed, dtype, initial):
    given = call(packed, dtype, initial)
    torch.library.opcheck(
        torch.ops.cula_cp_sm90.backward.default,
        tuple(given),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BackwardCall, Gradients]]:
    """What a launcher gets that fills every result with its number."""
    calls: list[tuple[BackwardCall, Gradients]] = []

    def run(call: BackwardCall, found: Gradients) -> None:
        calls.append((call, found))
        for n, d in enumerate(found):
            if d is not None:
                d.fill_(n + 1)

    monkeypatch.setitem(sys.modules, "cula_cp_sm90.backward.launch", SimpleNamespace(run=run))
    monkeypatch.setattr(ops, "is_plain_cuda_call", lambda q: type(q) is Tensor)
    return calls


def test_the_launcher_gets_what_kernels_read(launched):
    x = problem(dtype=torch.bfloat16, dim_k=128, dim_v=128, gate_dtype=DOUBLE)
    x["initial_state"] = turned(x["initial_state"].bfloat16())
    x["dt_bias"], x["q"] = x["dt_bias"].double().view(2, 128), spaced(x["q"], 3)
    leaves, (o, final) = attend(x)
    (o.float().sum() + final.float().sum()).backward()  # their gradients have no strides
    ((call, found),) = launched
    for name in ("q", "k", "v", "g", "do"):
        y = getattr(call, name)
        assert y.stride(3) == 1 and not any(s * y.element_size() % 16 for s in y.stride()[:-1]), (
            name
        )
    assert call.g.dtype == torch.float32 and call.dt_bias.shape == (256,)
    for name in ("A_log", "dt_bias", "initial_state", "dht"):
        y = getattr(call, name)
        assert y.dtype == torch.float32 and y.is_contiguous(), name
    assert torch.equal(call.initial_state, x["initial_state"].float()) and (call.do == 1).all()
    assert all(d.is_contiguous() for d in found)
    assert [d.dtype for d in found[:5]] == [y.dtype for y in call[:5]]
    for n, name in enumerate(LEAVES):
        grad = leaves[name].grad
        assert grad.dtype == x[name].dtype and grad.shape == x[name].shape and (grad == n + 1).all()


def test_the_launcher_gets_no_memory_for_what_is_not_there(launched):
    x = problem(None, "log", dtype=torch.bfloat16, initial=False)
    leaves, (o, _) = attend(x, output_final_state=False)
    o.float().sum().backward()
    ((call, found),) = launched
    assert found[5:] == (None, None, None) and call.dht is None and call.bounded is True
    assert (call.gate, call.operand, call.scale) == ("log", "float16", 0.3)


def test_the_launcher_is_told_where_to_cut(launched):
    """As the forward is."""
    x = problem(dtype=torch.bfloat16, dim_k=128, dim_v=128)
    for options in ({}, {"use_intracard_cp": False}, {"segment_tokens": 1024}):
        attend(x, **options)[1][0].float().sum().backward()
    told = [(call.intracard_cp, call.segment_tokens) for call, _ in launched]
    assert told == [("auto", 0), ("off", 0), ("auto", 1024)]


def test_no_token_launches_nothing(launched):
    x = problem((0, 0))
    found, _, dht = trained(x)
    assert launched == [] and torch.equal(found["initial_state"], dht) and not found["A_log"].any()


@pytest.mark.parametrize("lengths", [None, RAGGED], ids=["dense", "packed"])
def test_what_the_forward_keeps_is_not_computed_again(lengths):
    """Walks read the very blocks of the forward; of packed sequences the table of segments is made alone."""
    x = problem(lengths, dtype=torch.bfloat16, dim_k=128, dim_v=128)
    told = {}
    with pretended_gpu() as launches:
        for keep in (False, True):
            launches.begin([])
            attend(x, disable_recompute=keep)[1][0].float().sum().backward()
            told[keep] = list(launches.seen)

    def of(kind: type, keep: bool) -> list[tuple]:
        """The configs of a kind and their arguments."""
        return [(unit.config, *rest) for unit, *rest in told[keep] if isinstance(unit.config, kind)]

    assert [config.rooted for config, *_ in of(PrepareConfig, False)] == [False, True]
    forward, *table = of(PrepareConfig, True)
    assert forward[0].rooted and not forward[0].peaks
    assert [(config == forward[0], rest[-1]) for config, *rest in table] == [(True, 0)] * bool(
        lengths
    )
    (chain,) = of(RecurrenceConfig, True)
    assert chain[0].rooted and not of(RecurrenceConfig, False)[0][0].rooted
    walks = of(WalkConfig, True)
    assert len(walks) == 2 and {walk[1] for walk in walks} == {chain[1]}
    assert of(GradientsConfig, True)[0][0] == of(GradientsConfig, False)[0][0]


def test_more_is_kept_only_where_it_is_asked_for():
    x, kept = problem(None, dtype=torch.bfloat16, dim_k=128, dim_v=128), []
    with (
        pretended_gpu(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda y: kept.append(tuple(y.shape)) or y, lambda y: y
        ),
    ):
        attend(x)
        before = len(kept)
        attend(x, disable_recompute=True)
    slots, heads = 4, 2
    assert kept[2 * before :] == [(slots, heads, BLOCK_BYTES // 2), (slots, heads, 4, 64)]
