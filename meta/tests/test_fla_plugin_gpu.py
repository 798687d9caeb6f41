"""FLA's own functions with cula behind them, on a GPU: the numbers stay FLA's, and the kernels that run are ours."""

from __future__ import annotations

import pytest
import torch
from fla_on_gpu import GRADIENT_BOUND, assert_near, launched, ours_among

import cula
from cula.integrations import fla_plugin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

H, HV, D = 2, 4, 128
LENGTHS = (70, 40, 1, 129)  # FLA's simple GLA leaves the state of an empty sequence unwritten


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a kernel for each of these functions")
    torch.manual_seed(0)
    fla_plugin.register()
    yield torch.device("cuda", torch.cuda.current_device())
    fla_plugin.unregister()


def inputs(device, packed, channels):
    """A call of FLA as its layers make it: raw gates, logits of beta, states V first, everything in the kernel."""
    total, batch = sum(LENGTHS), 1 if packed else 2
    x = {
        n: torch.randn(batch, total, h, D, device=device).bfloat16()
        for n, h in (("q", H), ("k", H), ("v", HV))
    }
    x["g"] = torch.randn(batch, total, HV, *((D,) if channels else ()), device=device).bfloat16()
    x["beta"] = torch.randn(batch, total, HV, device=device).bfloat16()
    rows = len(LENGTHS) if packed else batch
    x["initial_state"] = torch.randn(rows, HV, D, D, device=device)
    if packed:
        x["cu_seqlens"] = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    return x | {
        "A_log": torch.linspace(-1, 1, HV, device=device),
        "dt_bias": torch.randn(HV * (D if channels else 1), device=device),
    }


INSIDE = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
    "output_final_state": True,
}


def calls():
    """Name, function of FLA, arguments."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.lightning_attn import chunk_lightning_attn
    from fla.ops.simple_gla import (
        chunk_simple_gla,
        fused_chunk_simple_gla,
        fused_recurrent_simple_gla,
    )

    gate = {"use_gate_in_kernel": True}
    safe = {"safe_gate": True, "lower_bound": -5.0}
    kda = lambda d, packed: inputs(d, packed, True)  # noqa: E731
    gdn = lambda d, packed: inputs(d, packed, False)  # noqa: E731

    def gla(d, packed, gamma=False):
        x = {
            n: t
            for n, t in inputs(d, packed, False).items()
            if n not in ("beta", "A_log", "dt_bias")
        }
        x |= {n: torch.randn_like(x["v"]) for n in ("q", "k")}
        x["g"] = torch.nn.functional.logsigmoid(x["g"].float())
        if gamma:
            del x["g"]
        return x

    def few(d, packed):
        """Up to 64 tokens, which FLA's layers decode one after another."""
        x = {
            n: t[:, :60] if t.dim() > 2 and n != "initial_state" else t
            for n, t in gla(d, packed).items()
        }
        if packed:
            x |= {"cu_seqlens": torch.tensor([0, 7, 8, 33, 60], device=d)}
        return x

    # The last of the layers, which forgets least: FLA's states of packed sequences are NaN where decays are strong.
    return {
        "kda": (chunk_kda, kda, INSIDE | gate | safe),
        "kda decode": (fused_recurrent_kda, kda, INSIDE | gate | {"lower_bound": -5.0}),
        "gdn": (chunk_gated_delta_rule, gdn, INSIDE | gate),
        "gdn decode": (fused_recurrent_gated_delta_rule, gdn, INSIDE | gate),
        "simple gla": (chunk_simple_gla, gla, {"output_final_state": True, "state_v_first": True}),
        "fused simple gla": (fused_chunk_simple_gla, gla, {"output_final_state": True}),
        "simple gla decode": (fused_recurrent_simple_gla, few, {"output_final_state": True, "state_v_first": True}),
        "lightning": (chunk_lightning_attn, lambda d, packed: gla(d, packed, True),
                      {"output_final_state": True, "layer_idx": 7, "num_layers": 8}),
    }  # fmt: skip


CALLS = (
    "kda", "kda decode", "gdn", "gdn decode", "simple gla", "fused simple gla", "simple gla decode", "lightning",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_ours_serve_functions_of_fla(cuda, name, packed):
    function, make, options = calls()[name]
    given = make(cuda, packed) | options
    (o, state), kernels = launched(lambda: function(**given))
    with fla_plugin.bypassed():
        (o_want, state_want), theirs = launched(lambda: function(**given))
    assert ours_among(kernels) and not ours_among(theirs), (kernels, theirs)
    assert_near(o, o_want)
    assert_near(state, state_want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["kda", "simple gla"])
def test_gradients_are_those_of_fla(cuda, name, packed):
    function, make, options = calls()[name]
    given = make(cuda, packed)
    if name == "simple gla":
        # FLA refuses its own backward with gates on some releases of Triton; constant decays have one.
        told = cula.explain(
            "chunk_simple_gla", dtype=torch.bfloat16, requires_grad=True, gate_dtype=torch.float32
        )
        if next(row for row in told.rows if row.name == "fla").reason is not None:
            del given["g"]
            given["g_gamma"] = -torch.linspace(0.01, 0.5, HV, device=cuda)
    found = []
    for bypass in (False, True):
        leaves = {
            n: x.clone().requires_grad_(x.is_floating_point() and n != "g_gamma")
            for n, x in given.items()
        }
        wanted = [x for x in leaves.values() if x.requires_grad]
        if bypass:
            with fla_plugin.bypassed():
                o, state = function(**leaves, **options)
        else:
            o, state = function(**leaves, **options)
        loss = o.float().square().sum() + state.square().sum()
        found.append(torch.autograd.grad(loss, wanted))
    for x, y in zip(*found, strict=True):
        assert_near(x, y, GRADIENT_BOUND)


@torch.inference_mode()
@pytest.mark.parametrize("packed", [False, True])
def test_states_on_the_way_are_those_of_fla(cuda, packed):
    function, make, options = calls()["kda"]
    given = make(cuda, packed) | options | {"return_intermediate_states": True}
    found, kernels = launched(lambda: function(**given))
    with fla_plugin.bypassed():
        expected = function(**given)
    assert ours_among(kernels), kernels
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, accepted", [(1, None), (3, None), (3, (1, 3, 2, 1, 2))])
def test_pools_are_updated_in_place(cuda, tokens, accepted, dtype):
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    rows = 5
    x = {n: t[:, :tokens].repeat(rows, *[1] * (t.dim() - 1)) for n, t in inputs(cuda, True, True).items()
         if n in ("q", "k", "v", "g", "beta")}  # fmt: skip
    x |= {n: torch.randn_like(t) for n, t in x.items()}
    x |= {n: t for n, t in inputs(cuda, True, True).items() if n in ("A_log", "dt_bias")}
    slots = torch.randperm(3 * rows, device=cuda).view(rows, 3).int()
    given = x | {
        "ssm_state_indices": slots[:, 0] if tokens == 1 else slots, "use_gate_in_kernel": True, "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
    }  # fmt: skip
    if accepted is not None:
        given["num_accepted_tokens"] = torch.tensor(accepted, device=cuda, dtype=torch.int32)
    pools = torch.randn(3 * rows + 2, HV, D, D, device=cuda).to(dtype).repeat(3, 1, 1, 1, 1)
    run = lambda pool: fused_recurrent_kda_fwd(**given, initial_state=pool)[0]  # noqa: E731
    found, kernels = launched(lambda: run(pools[0].copy_(pools[2])))
    with fla_plugin.bypassed():
        expected = run(pools[1])
    assert "DeltaDecode" in ours_among(kernels), kernels
    assert_near(found, expected)
    assert_near(pools[0], pools[1])
    changed = (pools[0] != pools[2]).flatten(1).any(1)
    assert changed[slots[:, :tokens].flatten().long()].all() and changed.sum() == rows * tokens


@torch.no_grad()
def test_a_graph_is_replayed_with_other_lengths(cuda):
    function, make, options = calls()["kda"]
    given = make(cuda, True) | options
    other = given["cu_seqlens"].new_tensor([0, 40, 240, 240, 240])
    expected = function(**given | {"cu_seqlens": other})
    given |= {"use_graph": True, "max_num_seqs": len(LENGTHS)}
    for _ in range(2):
        function(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**given)
    given["cu_seqlens"].copy_(other)
    graph.replay()
    for one, two in zip(found, expected, strict=True):
        assert_near(one, two)
