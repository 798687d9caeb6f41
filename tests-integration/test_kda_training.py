"""KDA trained through `cula` by the package for Hopper, forward and backward, and who serves what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cula
from cula import _registry, kda
from cula.integrations import fla
from cula_cp_sm90.arch import TARGET
from cula_testing.comparing import relative_rmse
from cula_testing.kda.gradient_cases import NAMES, GradientCase, gradient_case

OURS = TARGET.distribution
FORWARD, BACKWARD = "cula_cp_sm90::prefill", "cula_cp_sm90::backward"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine claims a Hopper GPU, the package a backward; there is no flash-linear-attention."""
    monkeypatch.setitem(TARGET.__dict__, "backward", True)
    monkeypatch.setattr(_registry, "_arch_of", lambda device: "sm90")
    monkeypatch.setattr(fla, "importable", lambda package: False)
    _registry.refresh()
    yield
    _registry.refresh()


class Operators(TorchDispatchMode):
    """Notes which operators of cula are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace.startswith("cula"):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def small(**more: Any) -> GradientCase:
    return gradient_case("moderate", (30, 0, 40), heads=(1, 2), initial=True, dht=True, **more)


def differentiated(
    run: Callable[..., Any], case: GradientCase, **options: Any
) -> dict[str, Tensor]:
    """The results and the gradients of all inputs by name."""
    given = dict(case.given)
    leaves = {n: x.detach().requires_grad_() for n in NAMES if (x := given[n]) is not None}
    flags = {name: x for name, x in case.flags.items() if name != "operand_dtype"}
    o, final = run(**given | leaves, **flags, output_final_state=True, **options)
    grads = (case.do.to(o.dtype), case.dht)
    found = torch.autograd.grad((o, final), list(leaves.values()), grads)
    return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, found))}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype and x.shape == expected[name].shape, name
        assert relative_rmse(x, expected[name]) < 5e-3, name


@pytest.mark.parametrize("gate", ["safe", "log"])
@pytest.mark.parametrize("v_first", [False, True])
def test_both_ways_are_ours(gate: str, v_first: bool) -> None:
    case = small(gate=gate, state_v_first=v_first)
    with Operators() as seen:
        found = differentiated(kda.chunk_kda, case)
    assert seen.names == [FORWARD, BACKWARD]
    assert_near(found, differentiated(kda.chunk_kda, case, impl="reference"))
    promised = differentiated(kda.kda_prefill_hopper, case)
    assert all(torch.equal(x, promised[name]) for name, x in found.items())


def test_who_serves() -> None:
    """`explain` names the implementation, and one whose backward would follow only if that is another one."""
    told = cula.explain("chunk_kda", requires_grad=True, dtype=torch.bfloat16, arch="sm90")
    assert told.chosen == OURS and told.rows[0].backward is None and "fla" not in str(told.rows[0])
    for fact in ("state_pool", "has_initial_state", "checkpoints"):
        told = cula.explain("chunk_kda", requires_grad=True, arch="sm90", **{fact: True})
        (row,) = [row for row in told.rows if row.name == OURS]
        assert told.chosen == "reference" and str(row.reason).startswith(
            f"no backward with {fact}; fla: "
        )
        assert cula.explain("chunk_kda", arch="sm90", **{fact: True}).chosen == OURS


def test_without_a_backward_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGET.__dict__, "backward", False)
    _registry.refresh()
    told = cula.explain("chunk_kda", requires_grad=True, arch="sm90")
    assert told.chosen == "reference" and str(told.rows[0].reason).startswith("no backward; fla: ")
    with Operators() as seen:
        differentiated(kda.chunk_kda, small())
    assert seen.names == []


def test_a_pool_that_is_only_read_goes_on() -> None:
    case = small()
    given = {n: x for n, x in case.given.items() if n != "initial_state"}
    pool = case.given["initial_state"].detach().requires_grad_()
    flags = {name: x for name, x in case.flags.items() if name != "operand_dtype"}
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    run = {"state_pool": pool, "initial_state_indices": rows, "update_state_pool": False}
    with Operators() as seen:
        o, _ = kda.chunk_kda(**given, **flags, **run)
        o.float().sum().backward()
    assert seen.names == [] and pool.grad[2].any() and not pool.grad[1].any()
    with pytest.raises(
        RuntimeError, match=f"impl='{OURS}' cannot serve .*: no backward with state_pool"
    ):
        kda.chunk_kda(**given, **flags, **run, impl=OURS)


def test_memory_of_the_caller_is_refused() -> None:
    case = small()
    with pytest.raises(ValueError, match="^out: expected None when gradients are required"):
        differentiated(kda.chunk_kda, case, out=torch.empty_like(case.do))


def test_compiled() -> None:
    """One graph for every length, with both operators in it."""
    graphs, operators = [], set()

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        parts = [x for x in graph.modules() if isinstance(x, torch.fx.GraphModule)]
        operators.update(str(node.target) for part in parts for node in part.graph.nodes)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(kda.chunk_kda, fullgraph=True, backend=count)
    for lengths in ((3, 2), (5, 0, 66), (1, 30, 7, 40)):
        case = gradient_case("moderate", lengths, heads=(1, 2), initial=True, dht=True)
        found, expected = differentiated(compiled, case), differentiated(kda.chunk_kda, case)
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert len(graphs) == 2
    assert {f"{name.replace('::', '.')}.default" for name in (FORWARD, BACKWARD)} <= operators
    torch._dynamo.reset()


def test_activations_may_be_recomputed() -> None:
    case = small()

    def layer(**given: Any) -> Any:
        return checkpoint(kda.chunk_kda, use_reentrant=False, **given)

    with Operators() as seen:
        found = differentiated(layer, case)
    assert seen.names == [FORWARD, FORWARD, BACKWARD]
    expected = differentiated(kda.chunk_kda, case)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_autocast() -> None:
    """Tokens in float32 are rounded to bfloat16; their gradients are float32 again, with the same numbers."""
    case = small()
    single = dict(case.given) | {name: case.given[name].float() for name in ("q", "k", "v")}
    twin = GradientCase(case.kind, single, case.do, case.dht, case.rules)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiated(kda.chunk_kda, twin)
    expected = differentiated(kda.chunk_kda, case)
    assert found["q"].dtype == torch.float32 and found["o"].dtype == torch.bfloat16
    assert all(torch.equal(x.double(), expected[name].double()) for name, x in found.items())


def test_the_way_back_may_be_walked_again() -> None:
    """As operators over several GPUs do, once for the states in front of a slice and once for all."""
    case = small()
    given = dict(case.given)
    leaves = {n: given[n].detach().requires_grad_() for n in NAMES}
    flags = {name: x for name, x in case.flags.items() if name != "operand_dtype"}
    o, final = kda.chunk_kda(**given | leaves, **flags, output_final_state=True)
    results, grads = (o, final), (case.do, case.dht)
    (first,) = torch.autograd.grad(results, [leaves["initial_state"]], grads, retain_graph=True)
    every = torch.autograd.grad(results, list(leaves.values()), grads)
    assert torch.equal(first, every[-1])
