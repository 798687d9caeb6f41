"""FLA's own functions with cula behind them, on a GPU: the numbers stay FLA's, and the kernels that run are ours."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.integrations import fla_plugin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

H, HV, D = 2, 4, 128
LENGTHS = (70, 40, 1, 129)  # FLA's simple GLA leaves the state of an empty sequence unwritten
BOUND = 1e-2  # two bf16 results, each allowed 5e-3
GRADIENT_BOUND = 2e-2
# What FLA's functions are served by on Hopper.
NAMES = ("KdaPrepare", "LightningPrefill", "Prepare", "Recurrence", "DeltaDecode")


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
    from fla.ops.simple_gla import chunk_simple_gla, fused_chunk_simple_gla

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

    # The last of the layers, which forgets least: FLA's states of packed sequences are NaN where decays are strong.
    return {
        "kda": (chunk_kda, kda, INSIDE | gate | safe),
        "kda decode": (fused_recurrent_kda, kda, INSIDE | gate | {"lower_bound": -5.0}),
        "gdn": (chunk_gated_delta_rule, gdn, INSIDE | gate),
        "gdn decode": (fused_recurrent_gated_delta_rule, gdn, INSIDE | gate),
        "simple gla": (chunk_simple_gla, gla, {"output_final_state": True, "state_v_first": True}),
        "fused simple gla": (fused_chunk_simple_gla, gla, {"output_final_state": True}),
        "lightning": (chunk_lightning_attn, lambda d, packed: gla(d, packed, True),
                      {"output_final_state": True, "layer_idx": 7, "num_layers": 8}),
    }  # fmt: skip


CALLS = ("kda", "kda decode", "gdn", "gdn decode", "simple gla", "fused simple gla", "lightning")


def launched(function):
    """What a call returns, and the names of the kernels that it launches."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as told:
        found = function()
        torch.cuda.synchronize()
    return found, [event.key for event in told.key_averages()]


def assert_near(got, want, bound=BOUND):
    assert got.shape == want.shape and got.dtype == want.dtype and torch.isfinite(got).all()
    difference = (got.double() - want.double()).norm() / want.double().norm()
    assert difference <= bound, f"relative RMSE {difference:.2e}"


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_ours_serve_functions_of_fla(cuda, name, packed):
    function, make, options = calls()[name]
    given = make(cuda, packed) | options
    (o, state), kernels = launched(lambda: function(**given))
    with fla_plugin.bypassed():
        (o_want, state_want), theirs = launched(lambda: function(**given))
    ours = [kernel for kernel in kernels if any(part in kernel for part in NAMES)]
    assert ours and not any(part in kernel for part in NAMES for kernel in theirs), (
        kernels,
        theirs,
    )
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
