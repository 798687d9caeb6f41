"""The gated delta rule token by token: values against a plain recurrence, states of every dtype, gradients, and traces.

test_public_kda.py is about its sibling with a decay per channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cula import _registry, kda, lightning
from cula.lightning import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

H, HV, K, V = 2, 4, 8, 6
LENGTHS = (5, 0, 1, 6)
TOL = {"rtol": 1e-10, "atol": 1e-10}
GATES = ("g", "gk", "gv")
SETS = [names for n in range(4) for names in itertools.combinations(GATES, n)]


pytestmark = pytest.mark.usefixtures("undecided")


def inputs(batch: int = 1, tokens: int = sum(LENGTHS)) -> dict[str, Tensor]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return {
        "q": randn(batch, tokens, H, K),
        "k": torch.nn.functional.normalize(randn(batch, tokens, H, K), dim=-1),
        "v": randn(batch, tokens, HV, V),
        "beta": torch.rand(batch, tokens, HV, dtype=torch.float64),
    }


def decays(names: tuple[str, ...], batch: int = 1, tokens: int = sum(LENGTHS)) -> dict[str, Tensor]:
    widths: dict[str, tuple[int, ...]] = {"g": (), "gk": (K,), "gv": (V,)}
    return {n: -torch.rand(batch, tokens, HV, *widths[n], dtype=torch.float64) for n in names}


def recurrence(
    x: dict[str, Tensor], gates: dict[str, Tensor], states: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """LENGTHS packed sequences, one after another, head by head and token by token."""
    o, states, start = torch.zeros_like(x["v"]), states.clone(), 0
    for n, length in enumerate(LENGTHS):
        for t, head in itertools.product(range(start, start + length), range(HV)):
            query, key = (x[name][0, t, head // (HV // H)] for name in "qk")
            state = states[n, head]
            for name, g in gates.items():
                factor = g[0, t, head].exp()
                state = state * (factor[:, None] if name == "gk" else factor)
            u = x["beta"][0, t, head] * (x["v"][0, t, head] - state.T @ key)
            states[n, head] = state + torch.outer(key, u)
            o[0, t, head] = scale * (states[n, head].T @ query)
        start += length
    return o, states


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_it_is_its_recurrence(names: tuple[str, ...], v_first: bool) -> None:
    x, gates = inputs(), decays(names)
    states = torch.randn(len(LENGTHS), HV, K, V, dtype=torch.float64)
    expected_o, expected = recurrence(x, gates, states, 0.3)
    given = states.mT.contiguous() if v_first else states
    before = given.clone()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    options = {"scale": 0.3, "output_final_state": True, "state_v_first": v_first}
    o, final = fused_recurrent_gated_delta_rule(
        **x, **gates, initial_state=given, cu_seqlens=cu, **options
    )
    assert final is not None and torch.equal(given, before)
    torch.testing.assert_close((o, final.mT if v_first else final), (expected_o, expected), **TOL)

    last = {name: a[:, cu[3] :] for name, a in (x | gates).items()}
    o, final = fused_recurrent_gated_delta_rule(**last, initial_state=given[3:], **options)
    assert final is not None
    wanted = expected_o[:, cu[3] :], expected[3:]
    torch.testing.assert_close((o, final.mT if v_first else final), wanted, **TOL)


def test_without_beta_or_a_state() -> None:
    x, gates = inputs(2, 3), decays(("g",), 2, 3)
    del x["beta"]
    o, none = fused_recurrent_gated_delta_rule(**x, **gates)
    ones, zeros = torch.ones(2, 3, HV).double(), torch.zeros(2, HV, K, V).double()
    expected, _ = fused_recurrent_gated_delta_rule(
        **x, **gates, beta=ones, initial_state=zeros, output_final_state=True
    )
    assert none is None and torch.equal(o, expected)


@pytest.mark.parametrize("steps", [[1] * 4, [3, 0, 1]])
def test_it_continues_what_the_prefill_began(steps: list[int]) -> None:
    x, g = inputs(2, 70), torch.randn(2, 70, HV, dtype=torch.float64)
    options: dict[str, Any] = {
        "use_gate_in_kernel": True, "A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-2, 2, HV),
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
        "output_final_state": True,
    }  # fmt: skip
    expected = chunk_gated_delta_rule(**x, g=g, **options)
    start = 70 - sum(steps)
    o, state = chunk_gated_delta_rule(
        **{n: a[:, :start] for n, a in x.items()}, g=g[:, :start], **options
    )
    outputs = [o]
    for step in steps:
        part = {n: a[:, start : start + step] for n, a in (x | {"g": g}).items()}
        o, state = fused_recurrent_gated_delta_rule(**part, initial_state=state, **options)
        outputs.append(o)
        start += step
    torch.testing.assert_close((torch.cat(outputs, 1), state), expected, **TOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("function", ["kda", "gated delta rule"])
def test_final_states_have_the_dtype_of_the_initial_ones(function: str, dtype: torch.dtype) -> None:
    x = {n: a.bfloat16() for n, a in inputs(2, 3).items()}
    run: Callable[..., Any] = fused_recurrent_gated_delta_rule
    if function == "kda":
        run, x["g"] = kda.fused_recurrent_kda, -torch.rand(2, 3, HV, K)
    state = torch.randn(2, HV, K, V).to(dtype)
    o, final = run(**x, initial_state=state, output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.bfloat16, dtype)
    wide, exact = run(
        **{n: a.double() for n, a in x.items()},
        initial_state=state.double(),
        output_final_state=True,
    )
    bound = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-6)
    assert (final.double() - exact).norm() <= bound * exact.norm()
    assert (o.double() - wide).norm() <= 4e-3 * wide.norm()
    if dtype == torch.float64:
        torch.testing.assert_close(final, exact, **TOL)


@pytest.mark.parametrize("cu", [None, [0, 2, 2, 5]])
def test_gradients_reach_every_input(cu: list[int] | None) -> None:
    x, gates = inputs(1, 5), decays(GATES, 1, 5)
    states = torch.randn(1 if cu is None else 3, HV, K, V, dtype=torch.float64)
    rate, bias = torch.rand(2, HV, dtype=torch.float64)
    named = {**x, **gates, "initial_state": states, "A_log": rate, "dt_bias": bias}
    packing = None if cu is None else torch.tensor(cu)

    def run(*tensors: Tensor) -> Any:
        return fused_recurrent_gated_delta_rule(
            **dict(zip(named, tensors, strict=True)), output_final_state=True, use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=packing,
        )  # fmt: skip

    tensors = [a.detach().requires_grad_() for a in named.values()]
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_the_reference_serves_a_cpu_and_a_demand_is_not_replaced() -> None:
    told = _registry.explain("fused_recurrent_gated_delta_rule", arch="cpu")
    assert (told.op, told.chosen) == ("lightning.gated_delta_decode", "reference")
    with pytest.raises(RuntimeError, match="^impl='fla' cannot serve lightning.gated_delta_decode"):
        fused_recurrent_gated_delta_rule(**inputs(1, 1), impl="fla")


def test_a_trace_is_one_graph() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return lightning.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        x = inputs(batch, 2)
        beta = x.pop("beta")
        rest = (-beta, beta, torch.randn(batch, HV, K, V, dtype=torch.float64))
        torch.testing.assert_close(compiled(*x.values(), *rest), step(*x.values(), *rest))
    torch._dynamo.reset()
