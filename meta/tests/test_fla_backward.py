"""The backward of flash-linear-attention behind kernels that have none, with a stand-in for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fla_stand_in import CU, HV, SEEN, H, K, V, chunk_kda, inputs, installed, marked
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from cula import _implementations, _opaque, _registry, kda, lightning
from cula._facts import OPS
from cula._implementations import Implementation
from cula.integrations import fla, fla_backward


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from installed(monkeypatch)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill kernels without a backward, which compute what the reference does."""

    def supports(*, requires_grad: bool = False, **problem: Any) -> str | None:
        return "no backward" if requires_grad else None

    def load(function: str) -> Any:
        forward = _opaque.load(function)

        def run(*args: Any, **options: Any) -> Any:
            assert not torch.is_grad_enabled()
            SEEN.append(f"kernel {function}")
            return forward(*args, **options)

        def run_kda(*args: Any, return_intra: bool = False, **options: Any) -> Any:
            shape = (args[2] if args else options["v"]).shape[:3]
            dims = {"Aqk": 64, "Akk": 64}
            if options["disable_recompute"]:
                dims |= {"w": K, "u": V, "qg": K, "kg": K}
            intra = [marked(name, *shape, dim) for name, dim in dims.items()]
            return *run(*args, **options), *(intra if return_intra else ())

        return run_kda if function == "chunk_kda" else run

    ops = ("lightning.prefill", "kda.prefill")
    made_up = Implementation("made-up", ops, ("sm90",), 10, supports, load)
    found = (made_up, _implementations.fla(OPS), _implementations.reference(OPS))
    monkeypatch.setattr(_registry, "implementations", lambda op: [i for i in found if op in i.ops])
    _registry.refresh()


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and got.isfinite().all()
    error = (got.double() - want.double()).norm()
    assert error <= 1e-2 * want.double().norm(), error / want.double().norm()


def gradients(function: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output, final state and the derivative of a weighted sum of both with respect to every input that wants one."""
    leaves = {n: x.clone().requires_grad_(n not in ("decay", "g_gamma")) for n, x in inputs.items()}
    o, final = function(**leaves, **options)
    weights = torch.Generator().manual_seed(1)
    loss = sum(
        (x.float() * torch.randn(x.shape, generator=weights)).sum()
        for x in (o, final)
        if x is not None
    )
    loss.backward()
    found = [o, *([] if final is None else [final])]
    return found + [x.grad for x in leaves.values() if x.requires_grad]


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("decays", ["g", "both", "g_gamma", "none", "lightning", "pool"])
def test_backward_of_fla_behind_a_kernel(
    kernel: None, decays: str, v_first: bool, normalise: bool, final: bool
) -> None:
    lengths = (70, 0, 1, 129)
    tokens = sum(lengths)
    x = inputs(1, tokens)
    tensors = {"q": 2 * x["q"], "k": x["k"], "v": x["v"]}
    shape = (HV, V, K) if v_first else (HV, K, V)
    options: dict[str, Any] = {
        "state_v_first": v_first, "use_qk_l2norm_in_kernel": normalise, "output_final_state": final,
        "exact_state": True, "num_splits": 2,
    }  # fmt: skip
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    function: Any = lightning.chunk_simple_gla
    if decays == "lightning":
        function = lightning.lightning_attn_fwd
        tensors |= {"decay": torch.rand(HV), "initial_state": torch.randn(1, *shape)}
    elif decays == "pool":
        function = lightning.lightning_attn_fwd_varlen
        tensors |= {"decay": torch.rand(HV), "state_pool": torch.randn(6, *shape)}
        rows = torch.tensor([5, 0, -1, 3], dtype=torch.int32)
        options |= {
            "cu_seqlens": cu,
            "initial_state_indices": rows,
            "update_state_pool": False,
        }
    else:
        tensors |= {"initial_state": torch.randn(len(lengths), *shape)}
        options |= {"cu_seqlens": cu, "cu_seqlens_cpu": cu if v_first else None, "scale": 0.3}
        if decays == "none":
            # As many heads of q and k as of v; the other cases have groups.
            for name in ("q", "k"):
                tensors[name] = tensors[name].repeat_interleave(HV // H, 2)
        if decays in ("g", "both"):
            tensors["g"] = x["g"][..., 0]
        if decays in ("g_gamma", "both"):
            tensors["g_gamma"] = -torch.rand(HV)
    found = gradients(function, tensors, options | {"impl": "auto"})
    assert SEEN == ["kernel chunk_simple_gla", "chunk_simple_gla_bwd"]
    expected = gradients(function, tensors, options | {"impl": "reference"})
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want)


def test_who_serves_gradients(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g, _ = inputs().values()
    q.requires_grad_()
    g = g[..., 0]
    lightning.chunk_simple_gla(q, k, v, g, impl="made-up")[0].sum().backward()
    assert SEEN == ["kernel chunk_simple_gla", "chunk_simple_gla_bwd"]
    SEEN.clear()
    lightning.chunk_simple_gla(q, k, v, g, impl="fla")
    assert SEEN == ["chunk_simple_gla"]
    SEEN.clear()

    # FLA would leave the gradient of a constant decay out without a word: the reference has one.
    decay = torch.rand(HV).requires_grad_()
    lightning.lightning_attn_fwd(q, k, v, decay)[0].sum().backward()
    assert SEEN == [] and decay.grad is not None
    for impl in ("made-up", "fla"):
        with pytest.raises(RuntimeError, match="no gradient for the constant decay of a head"):
            lightning.lightning_attn_fwd(q, k, v, decay, impl=impl)
    # Beside a gate per token the two are one gate, which has one.
    gamma = (-torch.rand(HV)).requires_grad_()
    lightning.chunk_simple_gla(q, k, v, g, gamma, impl="made-up")[0].sum().backward()
    assert gamma.grad is not None and gamma.grad.any()

    with pytest.raises(ValueError, match="^out: expected None when gradients are required"):
        lightning.chunk_simple_gla(q, k, v, g, out=torch.empty_like(v), impl="made-up")
    with pytest.raises(ValueError, match="^num_splits: expected at least 1, got 0"):
        lightning.chunk_simple_gla(q, k, v, g, num_splits=0, impl="made-up")

    monkeypatch.setattr(fla, "importable", lambda package: False)
    _registry.refresh()
    SEEN.clear()
    assert lightning.chunk_simple_gla(q, k, v, g)[0].requires_grad and SEEN == []
    with pytest.raises(RuntimeError, match="no backward; fla: flash-linear-attention is not inst"):
        lightning.chunk_simple_gla(q, k, v, g, impl="made-up")
    with torch.no_grad():
        lightning.chunk_simple_gla(q, k, v, g, impl="made-up")
    assert SEEN == ["kernel chunk_simple_gla"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded", "no rate"])
def test_backward_of_fla_behind_a_kernel_of_kda(
    kernel: None, gate: str, v_first: bool, keep: bool
) -> None:
    lengths = (70, 0, 1, 129)
    packed = not keep
    tensors = inputs(1 if packed else 2, sum(lengths))
    sequences = len(lengths) if packed else 2
    shape = (HV, V, K) if v_first else (HV, K, V)
    tensors["initial_state"] = torch.randn(sequences, *shape)
    options: dict[str, Any] = {"state_v_first": v_first, "disable_recompute": keep}
    options |= {"output_final_state": True, "scale": 0.3 if v_first else None}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if gate == "log":
        options |= {"safe_gate": True, "use_intracard_cp": False}
    else:
        options |= {
            "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": v_first,
        }  # fmt: skip
        # Both shapes that a bias may have; gates that are views; a gate of its own dtype.
        tensors["dt_bias"] = torch.randn((HV, K) if v_first else (HV * K,))
        tensors["g"] = tensors["g"].transpose(1, 2).contiguous().transpose(1, 2).float()
        if gate != "no rate":
            tensors["A_log"] = torch.rand(HV)
        if gate != "softplus":
            options |= {"lower_bound": -5.0, "safe_gate": True}
    found = gradients(kda.chunk_kda, tensors, options | {"impl": "auto"})
    assert SEEN == ["kernel chunk_kda", "chunk_kda_bwd"]
    expected = gradients(kda.chunk_kda, tensors, options | {"impl": "reference"})
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("function", [kda.chunk_kda, lightning.chunk_simple_gla])
def test_gradients_of_states_of_16_bits(kernel: None, function: Any) -> None:
    tensors = inputs(2, 70)
    if function is lightning.chunk_simple_gla:
        del tensors["beta"]
        tensors["g"] = tensors["g"][..., 0].contiguous()
    tensors["initial_state"] = torch.randn(2, HV, K, V).bfloat16()
    options = {"output_final_state": True}
    found = gradients(function, tensors, options | {"impl": "auto"})
    assert SEEN == [f"kernel {function.__name__}", f"{function.__name__}_bwd"]
    expected = gradients(function, tensors, options | {"impl": "reference"})
    assert found[1].dtype == torch.bfloat16
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("used", ["o", "final"])
def test_backward_of_one_result_of_kda(kernel: None, used: str) -> None:
    found, given = [], inputs()
    for impl in ("auto", "reference"):
        x = {name: t.clone().requires_grad_() for name, t in given.items()}
        o, final = kda.chunk_kda(**x, output_final_state=used == "final", impl=impl)
        (o if used == "o" else final).sum().backward()
        found.append([t.grad for t in x.values()])
    assert SEEN == ["kernel chunk_kda", "chunk_kda_bwd"]
    for name, got, want in zip(x, *found, strict=True):
        # No query has a part in a state.
        assert want is not None or (used == "final" and name == "q" and not got.any())
        if want is not None:
            assert_near(got, want)


@pytest.mark.parametrize("bias", [(HV, K), (HV * K,)])
def test_kda_trains_with_all_of_fla(bias: tuple[int, ...]) -> None:
    tensors = inputs() | {"initial_state": torch.randn(4, HV, K, V), "A_log": torch.rand(HV)}
    tensors["dt_bias"] = torch.randn(bias)
    options = {
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True, "lower_bound": -5.0, "cu_seqlens": CU, "output_final_state": True,
    }  # fmt: skip
    found = gradients(kda.chunk_kda, tensors, options | {"impl": "auto"})
    assert SEEN == ["chunk_kda"]
    expected = gradients(kda.chunk_kda, tensors, options | {"impl": "reference"})
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_who_serves_gradients_of_kda(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs()
    x["v"].requires_grad_()
    told = _registry.explain("chunk_kda", arch="sm90", requires_grad=True)
    assert told.chosen == "made-up" and told.rows[0].backward == "fla"
    # A kernel is promised for the forward, and its backward is named like the package's.
    kda.kda_prefill_hopper(*x.values())[0].sum().backward()
    assert SEEN == ["kernel chunk_kda", "chunk_kda_bwd"]
    SEEN.clear()

    # FLA's recurrence would leave the gradients out without a word: the reference has them.
    x["v"].grad = None
    kda.fused_recurrent_kda(*x.values())[0].sum().backward()
    assert SEEN == [] and x["v"].grad.any()
    x["v"].grad = None
    rule = lightning.fused_recurrent_gated_delta_rule
    tokens = {name: x[name] for name in ("q", "k", "v", "beta")} | {"gk": x["g"]}
    rule(**tokens)[0].sum().backward()
    assert SEEN == [] and x["v"].grad.any()
    for call in (
        lambda: kda.fused_recurrent_kda(*x.values(), impl="fla"),
        lambda: rule(**tokens, impl="fla"),
    ):
        with pytest.raises(RuntimeError, match="impl='fla' cannot serve .*: has no backward of it"):
            call()

    monkeypatch.setattr(fla, "importable", lambda package: False)
    _registry.refresh()
    assert kda.chunk_kda(*x.values())[0].requires_grad and SEEN == []
    missing = "made-up.*no backward; fla: flash-linear-attention is not installed"
    with pytest.raises(RuntimeError, match=missing):
        kda.chunk_kda(*x.values(), impl="made-up")
    with pytest.raises(RuntimeError, match=missing):
        kda.kda_prefill_hopper(*x.values())
    with torch.no_grad():
        kda.kda_prefill_hopper(*x.values())
    assert SEEN == ["kernel chunk_kda"]


def test_a_kernel_that_keeps_nothing_for_the_backward_of_kda() -> None:
    with pytest.raises(TypeError, match="^chunk_kda has no return_intra, which the backward of"):
        fla_backward.with_backward("chunk_kda", chunk_kda)


@pytest.mark.parametrize("cu", [[0], [0, 0, 0], None])
def test_backward_through_no_tokens(kernel: None, cu: list[int] | None) -> None:
    q, k, v, g, _ = inputs(1, 0).values()
    state = torch.randn(1 if cu is None else len(cu) - 1, HV, K, V, requires_grad=True)
    packing = None if cu is None else torch.tensor(cu)
    o, final = lightning.chunk_simple_gla(
        q, k, v, g[..., 0], initial_state=state, output_final_state=True, cu_seqlens=packing
    )
    (o.sum() + final.sum()).backward()
    assert torch.equal(state.grad, torch.ones_like(state)) and SEEN == []

    state.grad = None
    o, final = kda.chunk_kda(
        q, k, v, g, g[..., 0], initial_state=state, output_final_state=True, cu_seqlens=packing
    )
    (o.sum() + final.sum()).backward()
    assert torch.equal(state.grad, torch.ones_like(state)) and SEEN == []


@pytest.mark.parametrize("function", [kda.chunk_kda, lightning.chunk_simple_gla])
def test_compiled(kernel: None, function: Any) -> None:
    """One graph for every length, in which the backward of FLA is one operator."""
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, example)

    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for tokens in (5, 9, 7):
        SEEN.clear()
        tensors = inputs(2, tokens) | {"initial_state": torch.randn(2, HV, K, V)}
        if function is lightning.chunk_simple_gla:
            del tensors["beta"]
            tensors["g"] = tensors["g"][..., 0].contiguous()
        found = gradients(compiled, tensors, options)
        assert SEEN[-1] == f"{function.__name__}_bwd"
        expected = gradients(function, tensors, options)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want)
    assert len(graphs) == 2


@pytest.mark.parametrize("function", [kda.chunk_kda, lightning.chunk_simple_gla])
def test_activations_may_be_recomputed(kernel: None, function: Any) -> None:
    """A checkpoint lets what was saved be read once."""
    q, k, v, g, beta = inputs().values()
    rest = (k, v, g, beta) if function is kda.chunk_kda else (k, v, g[..., 0])
    found = []
    for again in (False, True):
        leaf = q.clone().requires_grad_()

        def layer(x: torch.Tensor) -> torch.Tensor:
            return function(x, *rest)[0]

        if again:
            o = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)
        else:
            o = layer(leaf)
        o.float().square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found) and found[0].any()
    assert len([name for name in SEEN if name.startswith("kernel")]) == 3
