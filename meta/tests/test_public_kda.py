"""KDA decode against a plain recurrence and after prefill, and who serves KDA when gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cula import _discovery, _implementations, _registry, kda, reference
from cula._facts import OPS
from cula._implementations import Implementation

H, HV, K, V = 2, 4, 8, 6
LENGTHS = (5, 0, 1, 14)
BIAS = torch.linspace(-2, 2, HV * K)
TOL = {"rtol": 1e-10, "atol": 1e-10}
GATES: dict[str, dict[str, Any]] = {
    "log": {},
    "softplus": {"A_log": torch.linspace(-1, 1, HV), "dt_bias": BIAS},
    "safe": {
        "A_log": torch.linspace(-1, 1, HV),
        "dt_bias": BIAS.view(HV, K),
        "lower_bound": -7.0,
    },
    "safe without a rate": {"lower_bound": -0.5},
}
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


pytestmark = pytest.mark.usefixtures("undecided")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up KDA prefill kernel for a CPU, without a backward."""

    def supports(*, requires_grad: bool, **problem: Any) -> str | None:
        return "no backward" if requires_grad else None

    made_up = Implementation(
        "made-up", ("kda.prefill",), ("cpu",), 10, supports, lambda f: lambda *a, **o: ("k", None)
    )
    found = (made_up, _implementations.fla(OPS), _implementations.reference(OPS))
    monkeypatch.setattr(_registry, "implementations", lambda op: [i for i in found if op in i.ops])
    monkeypatch.setattr(_registry, "broken", lambda: ())
    monkeypatch.setattr(_discovery, "FIRST_PARTY", ())
    _registry.refresh()


def inputs(
    batch: int = 1, tokens: int = sum(LENGTHS), dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    x = {
        "q": torch.randn(batch, tokens, H, K, dtype=torch.float64),
        "k": torch.nn.functional.normalize(torch.randn(batch, tokens, H, K).double(), dim=-1),
        "v": torch.randn(batch, tokens, HV, V, dtype=torch.float64),
        "g": -torch.rand(batch, tokens, HV, K, dtype=torch.float64),
        "beta": torch.rand(batch, tokens, HV, dtype=torch.float64),
    }
    return {name: value.to(dtype) for name, value in x.items()}


def cu_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def raw(gate: str) -> dict[str, Any]:
    """The options of a gate that is computed inside."""
    return {"use_gate_in_kernel": gate != "log", **GATES[gate]}


def recurrence(
    x: dict[str, Tensor], state: Tensor, gate: str, scale: float, plain: bool
) -> tuple[Tensor, Tensor]:
    """One sequence `[T, ...]` from `state` `[HV, K, V]`: one token after another, one head after another."""
    tokens = x["q"].shape[0]
    o, state = torch.zeros(tokens, HV, V, dtype=torch.float64), state.clone()
    rate = GATES[gate].get("A_log", torch.zeros(HV)).double().exp()
    bias = GATES[gate].get("dt_bias", torch.zeros(HV, K)).double().view(HV, K)
    for head in range(HV):
        for t in range(tokens):
            query, key = x["q"][t, head // (HV // H)], x["k"][t, head // (HV // H)]
            g, beta = x["g"][t, head], x["beta"][t, head]
            if not plain:
                query = query / (query @ query + 1e-6) ** 0.5
                key = key / (key @ key + 1e-6) ** 0.5
                beta = 2 / (1 + (-beta).exp())
            if gate == "softplus":
                g = -rate[head] * (1 + (g + bias[head]).exp()).log()
            elif gate != "log":
                g = GATES[gate]["lower_bound"] / (1 + (-rate[head] * (g + bias[head])).exp())
            moved = g.exp()[:, None] * state[head]
            state[head] = moved + beta * torch.outer(key, x["v"][t, head] - key @ moved)
            o[t, head] = scale * (query @ state[head])
    return o, state


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_decode_is_its_recurrence(gate: str, v_first: bool, plain: bool) -> None:
    x, states = inputs(), torch.randn(len(LENGTHS), HV, K, V, dtype=torch.float64)
    before = states.clone()
    cu = cu_of(*LENGTHS)
    scale = None if plain else 0.3
    factor = K**-0.5 if scale is None else scale
    parts = [
        recurrence({n: a[0, cu[i] : cu[i + 1]] for n, a in x.items()}, state, gate, factor, plain)
        for i, state in enumerate(states)
    ]
    expected = torch.cat([o for o, _ in parts])[None], torch.stack([state for _, state in parts])
    options = {"scale": scale, "output_final_state": True, "state_v_first": v_first, **raw(gate)}
    options |= {} if plain else FLAGS

    def stored(state: Tensor) -> Tensor:
        return state.mT.contiguous() if v_first else state

    found = kda.fused_recurrent_kda(**x, initial_state=stored(states), cu_seqlens=cu, **options)
    torch.testing.assert_close(found, (expected[0], stored(expected[1])), **TOL)
    last = {name: a[:, cu[3] :] for name, a in x.items()}
    found = kda.fused_recurrent_kda(**last, initial_state=stored(states)[3:], **options)
    expected = expected[0][:, cu[3] :], stored(expected[1][3:])
    torch.testing.assert_close(found, expected, **TOL)
    assert torch.equal(states, before)


def test_no_state_is_a_state_of_zeros() -> None:
    x = inputs(2, 3)
    zeros = torch.zeros(2, HV, K, V, dtype=torch.float64)
    o, none = kda.fused_recurrent_kda(**x)
    expected, _ = kda.fused_recurrent_kda(**x, initial_state=zeros, output_final_state=True)
    assert none is None and torch.equal(o, expected)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("steps", [[1] * 6, [3, 0, 2, 1]])
@pytest.mark.parametrize("gate", GATES)
def test_decode_after_prefill_is_one_prefill(
    gate: str, steps: list[int], dtype: torch.dtype, bound: float
) -> None:
    x = inputs(2, 76, dtype)
    options = {"output_final_state": True, **FLAGS, **raw(gate)}
    expected = kda.chunk_kda(**x, **options)
    start = 76 - sum(steps)
    o, state = kda.chunk_kda(**{name: a[:, :start] for name, a in x.items()}, **options)
    outputs = [o]
    for step in steps:
        part = {name: a[:, start : start + step] for name, a in x.items()}
        o, state = kda.fused_recurrent_kda(**part, initial_state=state, **options)
        outputs.append(o)
        start += step
    for found, want in zip((torch.cat(outputs, 1), state), expected, strict=True):
        assert found.dtype == want.dtype
        error = (found.double() - want.double()).norm() / want.double().norm()
        assert error <= bound


def test_packed_decode_after_packed_prefill() -> None:
    """One more token for every sequence but one, as packed input and as a batch."""
    lengths = (5, 0, 1, 70)
    grown = (6, 1, 1, 71)
    x, new = inputs(1, sum(lengths)), inputs(1, 3)
    cu, more = cu_of(*lengths), cu_of(1, 1, 0, 1)
    _, states = kda.chunk_kda(**x, output_final_state=True, cu_seqlens=cu)
    o, found = kda.fused_recurrent_kda(
        **new, initial_state=states, output_final_state=True, cu_seqlens=more
    )
    whole = {
        name: torch.cat(
            [
                piece[:, offsets[i] : offsets[i + 1]]
                for i in range(len(lengths))
                for piece, offsets in ((x[name], cu), (new[name], more))
            ],
            1,
        )
        for name in x
    }
    want, expected = kda.chunk_kda(**whole, output_final_state=True, cu_seqlens=cu_of(*grown))
    ends = cu_of(*grown)[1:] - 1
    torch.testing.assert_close((o[0], found), (want[0, ends[[0, 1, 3]]], expected), **TOL)

    rows = {name: a.transpose(0, 1) for name, a in new.items()}
    o_rows, state_rows = kda.fused_recurrent_kda(
        **rows, initial_state=states[[0, 1, 3]], output_final_state=True
    )
    torch.testing.assert_close((o_rows[:, 0], state_rows), (o[0], found[[0, 1, 3]]), **TOL)


@pytest.mark.parametrize("cu", [None, [0, 2, 2, 5]])
def test_gradients_of_decode_reach_every_input(cu: list[int] | None) -> None:
    x = inputs(1, 5)
    tensors = [*x.values(), torch.randn(1 if cu is None else 3, HV, K, V, dtype=torch.float64)]
    tensors += [torch.rand(HV, dtype=torch.float64), torch.rand(HV * K, dtype=torch.float64)]
    packing = None if cu is None else torch.tensor(cu)

    def run(*args: Tensor) -> Any:
        *activations, state, rate, bias = args
        return kda.fused_recurrent_kda(
            *activations, rate, bias, None, state, True, True, True, cu_seqlens=packing
        )

    tensors = [a.requires_grad_() for a in tensors]
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_kernel_without_backward_leaves_training_to_the_reference(kernel: None) -> None:
    """On a CPU FLA does not serve, installed or not."""
    x = inputs(1, 5)
    assert kda.chunk_kda(**x)[0] == "k"
    x["beta"].requires_grad_()
    o, _ = kda.chunk_kda(**x)
    o.sum().backward()
    assert x["beta"].grad.any()
    told = _registry.explain("chunk_kda", arch="cpu", requires_grad=True)
    assert told.chosen == "reference"
    assert told.rows[0].reason == "no backward; fla: needs a CUDA device, the device here is cpu"
    with pytest.raises(
        RuntimeError, match="^impl='made-up' cannot serve .*: no backward; fla: needs a CUDA device"
    ):
        kda.chunk_kda(**x, impl="made-up")
    with torch.no_grad():
        assert kda.chunk_kda(**x)[0] == "k"


def test_hopper_prefill_with_gradients_says_who_has_them(
    kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(1, 5)
    x["q"].requires_grad_()
    monkeypatch.setattr(kda, "arch_of", lambda device: "sm90")
    with pytest.raises(RuntimeError) as caught:
        kda.kda_prefill_hopper(**x)
    assert str(caught.value) == (
        "no kernel serves kda.prefill.chunk_kda on cpu: made-up: no backward; fla: needs a CUDA device, the device "
        "here is cpu; an input requires gradients, which chunk_kda gets from fla or the reference"
    )
    with torch.no_grad():
        assert kda.kda_prefill_hopper(**x)[0] == "k"


def test_decode_is_served_by_the_reference_on_a_cpu() -> None:
    told = _registry.explain("kda.decode", arch="cpu")
    assert told.chosen == "reference" and told.function == "fused_recurrent_kda"
    with pytest.raises(
        RuntimeError, match="impl='fla' cannot serve kda.decode.fused_recurrent_kda"
    ):
        kda.fused_recurrent_kda(**inputs(1, 1), impl="fla")
    x = inputs(1, 2)
    oracle: Callable[..., Any] = reference.recurrent_kda
    torch.testing.assert_close(kda.fused_recurrent_kda(**x), oracle(**x), **TOL)
