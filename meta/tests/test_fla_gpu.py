"""FLA's own kernels behind `impl="fla"` against the reference, on a GPU: the adapter's mapping is right for real.

Prefill and its gradients are also asked of `impl="auto"`: where there is a kernel for the GPU, that is the kernel, with
FLA's backward behind it.
"""

from __future__ import annotations

import pytest
import torch

import cula
import cula.kda
import cula.lightning

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

H, HV, K, V = 2, 4, 64, 128
LENGTHS = (70, 0, 1, 129)
BOUND = 1e-2  # two bf16 results, each allowed 5e-3
GRADIENT_BOUND = 2e-2  # bf16 operands and results in a chain of products twice as long
# By function and compute capability.
KERNELS = {
    "chunk_simple_gla": {(9, 0): "cula-lightning-sm90"},
    "chunk_kda": {(9, 0): "cula-cp-sm90", (10, 0): "cula-kda-sm100", (10, 3): "cula-kda-sm100"},
}


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU")
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())


def randn(device, *shape):
    return torch.randn(shape, device=device)


def activations(device, batch, tokens, heads=HV):
    q, k = (
        torch.nn.functional.normalize(randn(device, batch, tokens, heads, K), dim=-1).bfloat16()
        for _ in range(2)
    )
    return q, k, randn(device, batch, tokens, HV, V).bfloat16()


def assert_near(got, want, bound=BOUND):
    assert got.shape == want.shape and torch.isfinite(got).all()
    difference = (got.double() - want.double()).norm() / want.double().norm()
    assert difference <= bound, f"relative RMSE {difference:.2e}"


def both(function, *args, **kwargs):
    """The results of FLA and of the reference."""
    return (function(*args, **kwargs, impl=impl) for impl in ("fla", "reference"))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_lightning_prefill(cuda, state_v_first):
    q, k, v = activations(cuda, 2, 130)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    h0 = randn(cuda, 2, HV, *((V, K) if state_v_first else (K, V)))
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.lightning_attn_fwd,
        q,
        k,
        v,
        decay,
        initial_state=h0,
        output_final_state=True,
        state_v_first=state_v_first,
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_lightning_prefill_on_a_pool(cuda):
    total = sum(LENGTHS)
    q, k, v = activations(cuda, 1, total)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    offsets = torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).to(torch.int32)
    rows = torch.tensor([4, 2, 0, 1], device=cuda, dtype=torch.int32)
    pools = [randn(cuda, 6, HV, K, V)]
    pools.append(pools[0].clone())
    outputs = [
        cula.lightning.lightning_attn_fwd_varlen(
            q, k, v, decay, offsets, state_pool=pool, initial_state_indices=rows, impl=impl
        )[0]
        for impl, pool in zip(("fla", "reference"), pools)
    ]
    assert_near(*outputs)
    assert_near(*pools)


def test_simple_gla(cuda):
    q, k, v = activations(cuda, 2, 100)
    g = torch.nn.functional.logsigmoid(randn(cuda, 2, 100, HV))
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.chunk_simple_gla, q, k, v, g, output_final_state=True
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_gated_delta_rule(cuda):
    q, k, v = activations(cuda, 2, 100)
    g = torch.nn.functional.logsigmoid(randn(cuda, 2, 100, HV))
    beta = torch.rand(2, 100, HV, device=cuda).bfloat16()
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.chunk_gated_delta_rule, q, k, v, g, beta, output_final_state=True
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_kda(cuda):
    q, k, v = activations(cuda, 1, 200)
    raw = randn(cuda, 1, 200, HV, K).bfloat16()
    beta = torch.rand(1, 200, HV, device=cuda).bfloat16()
    offsets = torch.tensor([0, 70, 71, 200], device=cuda, dtype=torch.int32)
    (o, ht), (o_want, ht_want) = both(
        cula.kda.chunk_kda,
        q,
        k,
        v,
        raw,
        beta,
        output_final_state=True,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        cu_seqlens=offsets,
        A_log=torch.zeros(HV, device=cuda),
        dt_bias=torch.zeros(HV * K, device=cuda),
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_decode(cuda, lower_bound):
    q, k, v = activations(cuda, 1, sum(LENGTHS), heads=H)
    offsets = torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).to(torch.int32)
    (o, ht), (o_want, ht_want) = both(
        cula.kda.fused_recurrent_kda,
        q,
        k,
        v,
        randn(cuda, *v.shape[:3], K).bfloat16(),
        randn(cuda, *v.shape[:3]),
        torch.linspace(-1, 1, HV, device=cuda),
        randn(cuda, HV, K),
        initial_state=randn(cuda, len(LENGTHS), HV, V, K),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=offsets,
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


@pytest.mark.parametrize("gates", [("g",), ("gk",), ("gv",), ("g", "gk", "gv")])
def test_gated_delta_rule_decode(cuda, gates):
    q, k, v = activations(cuda, 1, sum(LENGTHS), heads=H)
    offsets = torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).to(torch.int32)
    widths = {"g": (), "gk": (K,), "gv": (V,)}
    decays = {name: -randn(cuda, *v.shape[:3], *widths[name]).abs() / 4 for name in gates}
    (o, ht), (o_want, ht_want) = both(
        cula.lightning.fused_recurrent_gated_delta_rule,
        q,
        k,
        v,
        **decays,
        beta=randn(cuda, *v.shape[:3]),
        initial_state=randn(cuda, len(LENGTHS), HV, K, V),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        cu_seqlens=offsets,
    )
    assert_near(o, o_want)
    assert_near(ht, ht_want)


def test_gated_delta_rule_decode_without_beta(cuda):
    q, k, v = activations(cuda, 2, 3, heads=H)
    raw = randn(cuda, 2, 3, HV)
    (o, _), (o_want, _) = both(
        cula.lightning.fused_recurrent_gated_delta_rule,
        q,
        k,
        v,
        raw,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=torch.linspace(-1, 1, HV, device=cuda),
        dt_bias=randn(cuda, HV),
    )
    assert_near(o, o_want)


INSIDE = {
    "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
}  # fmt: skip
# Name, dimensions of keys and values, whether packed, options; a gate inside has a rate and a bias unless "lonely".
GRADIENTS_OF_KDA = {
    "all of FLA": (K, False, INSIDE | {"safe_gate": True, "lower_bound": -5.0}),
    "all of FLA, packed": (K, True, INSIDE | {"safe_gate": True, "lower_bound": -5.0}),
    "dense": (V, False, INSIDE | {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True}),
    "packed": (V, True, INSIDE | {"safe_gate": True, "lower_bound": -5.0, "scale": 0.2}),
    "packed, kept": (V, True, INSIDE | {"safe_gate": True, "lower_bound": -5.0, "disable_recompute": True}),
    "V first, any gate": (V, False, INSIDE | {"state_v_first": True}),
    "lonely": (V, False, INSIDE | {"lower_bound": -2.0}),
    "decays": (V, False, {"safe_gate": True}),
    "decays, packed, kept": (V, True, {"safe_gate": True, "disable_recompute": True, "state_v_first": True}),
    "any decays, kept": (V, False, {"disable_recompute": True, "use_intracard_cp": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", GRADIENTS_OF_KDA)
def test_gradients_of_kda(cuda, case):
    """`auto` is the kernel where there is one for the problem, with its own backward on Hopper and FLA's elsewhere, and
    all of FLA where not."""
    dim, packed, options = GRADIENTS_OF_KDA[case]
    problem = {"dim": dim, "requires_grad": True}
    row = assert_auto_is_the_kernel("chunk_kda", **problem) if dim == V else None
    if row is None:
        told = explain("chunk_kda", **problem)
        assert told.chosen == "fla", str(told)
    else:
        hopper = torch.cuda.get_device_capability() == (9, 0)
        assert row.backward == (None if hopper else "fla")

    inside = "use_gate_in_kernel" in options
    tensors, more = prefill_problem(cuda, packed, inside, dim=dim)
    del more["g_gamma"]
    if options.get("state_v_first"):
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    shape = tensors["v"].shape[:3]
    raw, logits = randn(cuda, *shape, dim), randn(cuda, *shape)
    if inside:
        tensors |= {"g": raw.bfloat16(), "beta": logits}
    else:
        tensors |= {"g": torch.nn.functional.logsigmoid(raw), "beta": logits.sigmoid().bfloat16()}
    if inside and case != "lonely":
        tensors["A_log"] = torch.linspace(-1, 1, HV, device=cuda)
        # Either shape that a bias may have.
        tensors["dt_bias"] = randn(cuda, *((HV * dim,) if packed else (HV, dim)))
    more |= options
    function = cula.kda.chunk_kda
    wanted, want = derivatives(tensors, more, "reference", function)
    outputs, found = derivatives(tensors, more, "auto", function)
    for x, y in zip(outputs, wanted, strict=True):
        assert_near(x, y)
    for name, x, y in zip(tensors, found, want, strict=True):
        assert x.dtype == y.dtype == tensors[name].dtype
        assert_near(x, y, GRADIENT_BOUND)


def test_gradients_of_kda_from_a_long_sequence(cuda):
    """One that the forward cuts into segments; nobody asks for its final state's gradient."""
    shapes = {"q": (H, V), "k": (H, V), "v": (HV, V), "g": (HV, V), "beta": (HV,)}
    tensors = {name: randn(cuda, 1, 4200, *shape).bfloat16() for name, shape in shapes.items()}
    options = INSIDE | {"safe_gate": True, "lower_bound": -0.1, "output_final_state": True}
    found = []
    for impl in ("auto", "reference"):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        o, _ = cula.kda.chunk_kda(**leaves, **options, impl=impl)
        found.append(torch.autograd.grad(o.float().square().sum(), list(leaves.values())))
    for x, y in zip(*found, strict=True):
        assert_near(x, y, GRADIENT_BOUND)


def test_decode(cuda):
    q, k, v = activations(cuda, 3, 1, heads=H)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    rows = torch.tensor([2, -1, 0], device=cuda, dtype=torch.int32)
    pools = [randn(cuda, 4, HV, K, V)]
    pools.append(pools[0].clone())
    outputs = [
        cula.lightning.linear_attention_decode(q, k, v, pool, decay, state_indices=rows, impl=impl)
        for impl, pool in zip(("fla", "reference"), pools)
    ]
    assert_near(*outputs)
    assert_near(*pools)
    assert not outputs[0][1].any()


def explain(function, dim=K, **problem):
    return cula.explain(function, dtype=torch.bfloat16, head_dim_k=dim, head_dim_v=V, **problem)


def assert_auto_is_the_kernel(function, **problem):
    """Where the kernel of this architecture exists, `auto` must not have passed it over."""
    kernel = KERNELS[function].get(torch.cuda.get_device_capability())
    if kernel is None:
        return None
    told = explain(function, **problem)
    assert told.chosen == kernel, str(told)
    return next(row for row in told.rows if row.chosen)


def prefill_problem(device, packed, normalise, gate=None, dim=K):
    """Grouped heads; tensors that may want gradients, decays that may not, and options."""
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    batch, tokens = (1, sum(LENGTHS)) if packed else (2, 130)
    q, k = (randn(device, batch, tokens, H, dim).bfloat16() for _ in range(2))
    if not normalise:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    tensors = {"q": q, "k": k, "v": randn(device, batch, tokens, HV, V).bfloat16()}
    tensors["initial_state"] = randn(device, len(LENGTHS) if packed else batch, HV, dim, V)
    if gate is not None:
        tensors["g"] = torch.nn.functional.logsigmoid(randn(device, batch, tokens, HV)).to(gate)
    options = {
        "g_gamma": -torch.linspace(0.01, 0.5, HV, device=device),
        "use_qk_l2norm_in_kernel": normalise,
        "output_final_state": True,
        "cu_seqlens": offsets if packed else None,
    }
    return tensors, options


@pytest.mark.parametrize("gate", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_prefill_of_the_kernel_of_fla_and_of_the_reference(cuda, packed, normalise, gate):
    assert_auto_is_the_kernel("chunk_simple_gla", gate_dtype=gate, head_decay=True, varlen=packed)
    tensors, options = prefill_problem(cuda, packed, normalise, gate)
    want = cula.lightning.chunk_simple_gla(**tensors, **options, impl="reference")
    for impl in ("auto", "fla"):
        found = cula.lightning.chunk_simple_gla(**tensors, **options, impl=impl)
        for x, y in zip(found, want, strict=True):
            assert_near(x, y)


def derivatives(tensors, options, impl, function=cula.lightning.chunk_simple_gla):
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    o, ht = function(**leaves, **options, impl=impl)
    generator = torch.Generator(o.device).manual_seed(1)
    given = [
        torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in (o, ht)
    ]
    return [o, ht], torch.autograd.grad((o, ht), list(leaves.values()), given)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_the_kernel_of_fla_and_of_the_reference(cuda, packed, normalise):
    row = assert_auto_is_the_kernel("chunk_simple_gla", head_decay=True, requires_grad=True)
    assert row is None or row.backward is None
    tensors, options = prefill_problem(cuda, packed, normalise)
    wanted, want = derivatives(tensors, options, "reference")
    for impl in ("auto", "fla"):
        outputs, found = derivatives(tensors, options, impl)
        for x, y in zip(outputs, wanted, strict=True):
            assert_near(x, y)
        for name, x, y in zip(tensors, found, want, strict=True):
            assert x.dtype == y.dtype == tensors[name].dtype
            assert_near(x, y, GRADIENT_BOUND)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_with_a_gate(cuda, packed):
    """By the kernel alone: FLA refuses its gated backward with some releases of Triton."""
    row = assert_auto_is_the_kernel(
        "chunk_simple_gla", gate_dtype=torch.float32, head_decay=True, requires_grad=True
    )
    assert row is None or row.backward is None
    tensors, options = prefill_problem(cuda, packed, True, torch.float32)
    wanted, want = derivatives(tensors, options, "reference")
    outputs, found = derivatives(tensors, options, "auto")
    for x, y in zip((*outputs, *found), (*wanted, *want), strict=True):
        assert_near(x, y, GRADIENT_BOUND)


def test_gradients_through_a_pool_that_is_only_read(cuda):
    q, k, v = activations(cuda, 1, sum(LENGTHS), heads=H)
    decay = torch.linspace(0.01, 0.5, HV, device=cuda)
    offsets = torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).to(torch.int32)
    rows = torch.tensor([4, 2, 0, -1], device=cuda, dtype=torch.int32)
    pool = randn(cuda, 6, HV, K, V)
    weights = randn(cuda, *v.shape)
    results = []
    for impl in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, pool)]
        o, ht = cula.lightning.lightning_attn_fwd_varlen(
            *leaves[:3],
            decay,
            offsets,
            state_pool=leaves[3],
            initial_state_indices=rows,
            update_state_pool=False,
            impl=impl,
        )
        assert not ht[3].any() and not o[:, offsets[3] :].any()
        loss = (o.float() * weights).sum() + ht.square().sum()
        results.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*results, strict=True):
        assert_near(x, y, GRADIENT_BOUND)
