"""`cula.compat`: each function against a loop over tokens, called as the libraries whose names it has are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from compat_inputs import CU, HV, ROWS, K, N, Raw, T, V, lightning_inputs, loop, rand, unit
from torch import Tensor

from cula.compat import flash_kda, flashinfer, kda, lightning

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- signatures ------------------------------------------------------------------------------------------------------

SIGNATURES = {
    kda.chunk_kda: (
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_gate_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None safe_gate=False lower_bound=None "
        "disable_recompute=False return_intermediate_states=False cp_context=None"
    ),
    kda.kda_prefill_hopper: (
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_gate_in_kernel=False safe_gate=False lower_bound=None cu_seqlens=None chunk_indices=None"
    ),
    kda.kda_decode: (
        "A_log dt_bias q k v a b initial_state_source initial_state_indices cu_seqlens=None scale=None "
        "use_qk_l2norm_in_kernel=True softplus_beta=1.0 softplus_threshold=20.0 out=None state_layout='vk'"
    ),
    kda.fused_sigmoid_gating_delta_rule_update: (
        "A_log a dt_bias softplus_beta softplus_threshold q k v b initial_state_source initial_state_indices "
        "scale=None use_qk_l2norm_in_kernel=False cu_seqlens=None is_kda=False out=None state_layout='vk'"
    ),
    lightning.lightning_attn_fwd: (
        "Q K V decay scale=1.0 initial_state=None output_final_state=False chunk_size=64"
    ),
    lightning.lightning_attn_fwd_varlen: (
        "Q K V decay cu_seqlens scale=1.0 state_pool=None initial_state_indices=None chunk_size=64 persistent=True"
    ),
    lightning.linear_attention_decode: (
        "q k v s out softmax_scale stride_q stride_k stride_v stride_s stride_o s_offsets decay_scales HEAD_DIM "
        "K_SPLIT_DIM V_SPLIT_DIM"
    ),
    flash_kda.fwd: (
        "q k v g beta scale out A_log dt_bias lower_bound initial_state=None final_state=None cu_seqlens=None"
    ),
    flashinfer.chunk_gated_delta_rule: (
        "q k v g=None beta=None scale=None initial_state=None output_final_state=False cu_seqlens=None "
        "use_qk_l2norm_in_kernel=False output=None output_state=None state_checkpoints=None checkpoint_cu_starts=None "
        "checkpoint_every_n_tokens=0 use_cp='auto' state_indices=None"
    ),
}
# Where tests, benchmarks and documents of cuLA import from, below its package.
PLACES = {
    "kda": "chunk_kda kda_decode fused_sigmoid_gating_delta_rule_update kda_prefill_hopper",
    "lightning": "linear_attention_decode lightning_attn_fwd lightning_attn_fwd_varlen",
    "ops": "kda_decode fused_sigmoid_gating_delta_rule_update linear_attention_decode",
    "ops.kda_decode": "kda_decode fused_sigmoid_gating_delta_rule_update",
    "ops.la_decode": "linear_attention_decode",
    "ops.lightning_attn": "lightning_attn_fwd lightning_attn_fwd_varlen",
    "utils": "get_kda_fused_fwd",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_positional_arguments_and_defaults_are_theirs(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert found == SIGNATURES[function].split()
    documented = inspect.getdoc(function) or ""
    assert all(p.name in documented for p in parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        function(head_first=True)


def test_import_paths_are_theirs() -> None:
    for place, names in PLACES.items():
        module = import_module(f"cula.compat.{place}")
        for name in names.split():
            function = getattr(module, name)
            home = import_module(function.__module__)
            assert inspect.isfunction(function) and getattr(home, name) is function


# ---- KDA over whole sequences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_chunk_kda_with_the_gate_inside(transposed: bool) -> None:
    x, states = Raw(), rand(N, HV, K, V)
    beta = x.beta.sigmoid()
    expected = loop(unit(x.q), unit(x.k), x.v, x.bounded(-5.0), beta, states, CU, 0.5)
    given = [a[None] for a in (x.q, x.k, x.v, x.g, beta)]
    layout = {"transpose_state_layout": True} if transposed else {}
    o, final = kda.chunk_kda(
        *given, 0.5, states.mT.contiguous() if transposed else states, True, True, True, CU, CU, True, -5.0, False,
        A_log=x.A_log.view(1, 1, HV, 1), dt_bias=x.dt_bias.flatten(), chunk_indices=None, **layout,
    )  # fmt: skip
    torch.testing.assert_close((o[0], final.mT if transposed else final), expected, **CLOSE)


def test_chunk_kda_ignores_parts_of_a_gate_that_is_outside() -> None:
    x, states = Raw(), torch.zeros(1, HV, K, V, dtype=torch.float64)
    decay, beta, cu = x.bounded(-5.0), x.beta.sigmoid(), torch.tensor([0, T])
    expected, _ = loop(x.q, unit(x.k), x.v, decay, beta, states, cu, K**-0.5)
    o, final = kda.chunk_kda(
        x.q[None], unit(x.k)[None], x.v[None], decay[None], beta[None], A_log=x.A_log, dt_bias=x.dt_bias,
        safe_gate=False, lower_bound=-5.0,
    )  # fmt: skip
    assert final is None
    torch.testing.assert_close(o[0], expected, **CLOSE)


def test_chunk_kda_returns_states_of_chunks_in_bfloat16() -> None:
    x, cu = Raw(), torch.tensor([0, 64])
    decay, beta = x.bounded(-5.0), x.beta.sigmoid()
    zero = torch.zeros(1, HV, K, V, dtype=torch.float64)
    _, after = loop(x.q, unit(x.k), x.v, decay, beta, zero, cu, 1.0)
    given = [a[None].float() for a in (x.q, unit(x.k), x.v, decay, beta)]
    _, final, h = kda.chunk_kda(*given, return_intermediate_states=True, disable_recompute=True)
    assert final is None and h.dtype == torch.bfloat16 and h.shape == (1, 2, HV, K, V)
    assert not h[0, 0].any()
    torch.testing.assert_close(h[0, 1].double(), after[0], rtol=2**-8, atol=1e-4)


def test_chunk_kda_has_gradients() -> None:
    x = Raw(8)
    q = x.q[None].requires_grad_()
    kda.chunk_kda(q, x.k[None], x.v[None], x.bounded(-5.0)[None], x.beta.sigmoid()[None])[
        0
    ].sum().backward()
    assert q.grad is not None and q.grad.isfinite().all() and q.grad.any()


def test_kda_prefill_hopper_has_states_v_first() -> None:
    x, states = Raw(), rand(N, HV, K, V)
    beta, v_first = x.beta.sigmoid(), states.mT.contiguous()
    expected = loop(unit(x.q), unit(x.k), x.v, x.bounded(-5.0), beta, states, CU, K**-0.5)
    given = [a[None] for a in (x.q, x.k, x.v, x.g, beta)]
    gate = {"A_log": x.A_log, "dt_bias": x.dt_bias.flatten(), "cu_seqlens_cpu": CU}
    before = v_first.clone()
    o, final = kda.kda_prefill_hopper(
        *given, None, v_first, True, True, True, True, -5.0, CU, None, **gate
    )
    torch.testing.assert_close((o[0], final.mT), expected, **CLOSE)
    assert torch.equal(v_first, before)
    assert (
        kda.kda_prefill_hopper(
            *given, None, v_first, False, True, True, True, -5.0, CU, None, **gate
        )[1]
        is None
    )


# ---- decode on a pool ------------------------------------------------------------------------------------------------

LIVE, SLOTS, UNTOUCHED = [0, 2], [5, 0], [1, 2, 3, 4, 6]


def paged(matrix: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A pool of seven slots with gaps between them, and the memory that it is a part of."""
    memory = rand(7, HV * K * V + 5)
    return memory[:, : HV * K * V].unflatten(1, (HV, *matrix)), memory


def assert_pool(pool: Tensor, memory: Tensor, before: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(pool[SLOTS], expected, **CLOSE)
    assert torch.equal(memory[UNTOUCHED], before[UNTOUCHED])
    assert torch.equal(memory[:, HV * K * V :], before[:, HV * K * V :])


@pytest.mark.parametrize("layout", ["vk", "KV "])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "gate", [(3, HV, K), (3, HV * K), (3, 1, HV * K), (1, 3, HV, K), (3, 1, HV, K)], ids=str
)
def test_kda_decode(layout: str, packed: bool, gate: tuple[int, ...]) -> None:
    x = Raw(3)
    v_first = layout == "vk"
    pool, memory = paged((V, K) if v_first else (K, V))
    before = memory.clone()
    states = pool[SLOTS].mT if v_first else pool[SLOTS]
    o, states = loop(
        *(a[LIVE] for a in (unit(x.q), unit(x.k), x.v, x.softplus(2.0, 1.5), x.beta.sigmoid())), states,
        torch.arange(3), 0.5,
    )  # fmt: skip
    shape = (1, 3) if packed else (3, 1)
    q, k, v = (a.reshape(*shape, *a.shape[1:]) for a in (x.q, x.k, x.v))
    out, cu = (
        torch.full_like(v, float("nan")),
        torch.arange(4, dtype=torch.int32) if packed else None,
    )
    found = kda.kda_decode(
        x.A_log, x.dt_bias, q, k, v, x.g.reshape(gate), x.beta if packed else x.beta[:, None], pool, ROWS, cu, 0.5,
        True, 2.0, 1.5, out, layout,
    )  # fmt: skip
    assert found is out
    rows = out.reshape(3, HV, V)
    torch.testing.assert_close(rows[LIVE], o, **CLOSE)
    assert not rows[1].any()
    assert_pool(pool, memory, before, states.mT if v_first else states)


def test_kda_decode_without_pool_rows_or_buffer() -> None:
    x = Raw(3)
    beta, decay = x.beta.sigmoid(), x.softplus()
    given = (x.A_log, x.dt_bias, x.q[None], x.k[None], x.v[None], x.g, x.beta)
    zero = torch.zeros(3, HV, K, V, dtype=torch.float64)
    expected, _ = loop(unit(x.q), unit(x.k), x.v, decay, beta, zero, torch.arange(4), K**-0.5)
    found = kda.kda_decode(*given, None, None)
    assert found.shape == (1, 3, HV, V)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    states = rand(5, HV, V, K)
    expected, after = loop(
        unit(x.q), unit(x.k), x.v, decay, beta, states[:3].mT, torch.arange(4), K**-0.5
    )
    rest = states[3:].clone()
    torch.testing.assert_close(kda.kda_decode(*given, states, None)[0], expected, **CLOSE)
    torch.testing.assert_close(states[:3], after.mT, **CLOSE)
    assert torch.equal(states[3:], rest)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_fused_sigmoid_gating_delta_rule_update(is_kda: bool, index_dtype: torch.dtype) -> None:
    """As tests of cuLA and SGLang call it; without is_kda there is a gate per head."""
    x = Raw(3)
    if not is_kda:
        x.g, x.dt_bias = x.g[..., :1], x.dt_bias[:, :1].contiguous()
    pool, memory = paged((V, K))
    before = memory.clone()
    o, states = loop(
        *(a[LIVE] for a in (x.q, unit(x.k), x.v, x.softplus(), x.beta.sigmoid())), pool[SLOTS].mT, torch.arange(3),
        0.25,
    )  # fmt: skip
    out = torch.full((3, 1, HV, V), float("nan"), dtype=torch.float64)
    found = kda.fused_sigmoid_gating_delta_rule_update(
        A_log=x.A_log, a=x.g.reshape(3, 1, -1), dt_bias=x.dt_bias if is_kda else x.dt_bias[:, 0], softplus_beta=1.0,
        softplus_threshold=20.0, q=x.q[:, None], k=unit(x.k)[:, None], v=x.v[:, None], b=x.beta[:, None],
        initial_state_source=pool, initial_state_indices=ROWS.to(index_dtype), scale=0.25,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=is_kda, out=out,
    )  # fmt: skip
    assert found is out
    torch.testing.assert_close(out[LIVE, 0], o, **CLOSE)
    assert not out[1].any()
    assert_pool(pool, memory, before, states.mT)


# ---- Lightning attention ---------------------------------------------------------------------------------------------


def test_lightning_attn_fwd_has_a_scale_of_1_and_states_v_first() -> None:
    q, k, v, decay = lightning_inputs()
    states, cu = rand(1, HV, K, V), torch.tensor([0, T])
    g = -decay[:, None].expand(T, HV, 1)
    expected = loop(q, k, v, g, None, states, cu, 1.0)
    given = (q[None], k[None], v[None], decay)
    o, final = lightning.lightning_attn_fwd(
        *given, initial_state=states.mT.contiguous(), output_final_state=True
    )
    torch.testing.assert_close((o[0], final.mT), expected, **CLOSE)
    o, final = lightning.lightning_attn_fwd(*given, 0.5, None, False, 32)
    assert final is None
    torch.testing.assert_close(o[0], loop(q, k, v, g, None, 0 * states, cu, 0.5)[0], **CLOSE)


def test_lightning_attn_fwd_varlen_updates_its_pool() -> None:
    q, k, v, decay = lightning_inputs()
    g = -decay[:, None].expand(T, HV, 1)
    pool, memory = paged((V, K))
    before = memory.clone()
    rows = torch.tensor(
        [5, 1, -1, 0], dtype=torch.int32
    )  # the second sequence is empty, the third is padding
    o, states = loop(q, k, v, g, None, pool[[5, 1, 2, 0]].mT, CU, 1.0)
    given = (q[None], k[None], v[None], decay, CU)
    found, same = lightning.lightning_attn_fwd_varlen(
        *given, state_pool=pool, initial_state_indices=rows
    )
    assert same is pool
    o[5] = 0
    torch.testing.assert_close(found[0], o, **CLOSE)
    assert_pool(pool, memory, before, states[[0, 3]].mT)

    o, states = loop(q, k, v, g, None, torch.zeros(N, HV, K, V, dtype=torch.float64), CU, 0.5)
    found, pool = lightning.lightning_attn_fwd_varlen(*given, 0.5, None, None, 64, False)
    assert pool.shape == (N, HV, V, K) and pool.dtype == torch.float32
    torch.testing.assert_close(found[0], o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool.double().mT, states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["[pool, H, D, D]", "[pool * H, D, D]", "[pool, H, D * D]"])
@pytest.mark.parametrize("token", [False, True])
def test_linear_attention_decode_writes_out_and_pool(form: str, token: bool) -> None:
    """As the test of cuLA calls it, with strides of 0."""
    dim, heads = 8, 3
    q, k, v = rand(3, 3, heads, dim)
    memory, decay = rand(7, heads, dim, dim), torch.rand(heads, dtype=torch.float64)
    before = memory.clone()
    pool = {
        "[pool, H, D, D]": memory,
        "[pool * H, D, D]": memory.view(7 * heads, dim, dim),
        "[pool, H, D * D]": memory.view(7, heads, dim * dim),
    }[form]
    g = -decay[:, None].expand(2, heads, 1)
    expected, states = loop(
        q[LIVE], k[LIVE], v[LIVE], g, None, memory[SLOTS].mT, torch.arange(3), 0.5
    )
    out = torch.full_like(q, float("nan"))
    q_in, k_in, v_in, out_in = (x[:, None] if token else x for x in (q, k, v, out))
    found = lightning.linear_attention_decode(
        q_in, k_in, v_in, pool, out_in, softmax_scale=0.5, stride_q=0, stride_k=0, stride_v=0, stride_s=0, stride_o=0,
        s_offsets=ROWS, decay_scales=decay, HEAD_DIM=dim, K_SPLIT_DIM=dim, V_SPLIT_DIM=dim,
    )  # fmt: skip
    assert found is None
    torch.testing.assert_close(out[LIVE], expected, **CLOSE)
    assert not out[1].any()
    torch.testing.assert_close(memory[SLOTS], states.mT, **CLOSE)
    assert torch.equal(memory[UNTOUCHED], before[UNTOUCHED])


def test_a_prefill_hands_its_states_to_decode() -> None:
    dim, heads = 8, 2
    q, k, v = rand(3, 12, heads, dim)
    decay, cu = torch.rand(heads, dtype=torch.float64), torch.tensor([0, 12])
    zero = torch.zeros(1, heads, dim, dim, dtype=torch.float64)
    expected, _ = loop(q, k, v, -decay[:, None].expand(12, heads, 1), None, zero, cu, 1.0)
    most, last = (lambda x: x[None, :11]), (lambda x: x[None, 11])
    _, states = lightning.lightning_attn_fwd(most(q), most(k), most(v), decay, 1.0, zero, True)
    out = torch.empty(1, heads, dim, dtype=torch.float64)
    lightning.linear_attention_decode(
        last(q), last(k), last(v), states, out, 1.0, 0, 0, 0, 0, 0, torch.zeros(1, dtype=torch.int32), decay, dim, dim,
        dim,
    )  # fmt: skip
    torch.testing.assert_close(out[0], expected[11], **CLOSE)


# ---- FlashKDA and FlashInfer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_flash_kda_writes_outputs_and_final_states(in_place: bool) -> None:
    x, states = Raw(), rand(N, HV, K, V)
    expected = loop(unit(x.q), unit(x.k), x.v, x.bounded(-4.0), x.beta.sigmoid(), states, CU, 0.5)
    initial = states.mT.contiguous()
    final = initial if in_place else torch.full_like(initial, float("nan"))
    given = [a[None] for a in (x.q, x.k, x.v, x.g, x.beta)]
    out = torch.full((1, T, HV, V), float("nan"), dtype=torch.float64)
    gate = {"A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": -4.0}
    options = {"initial_state": initial, "final_state": final, "cu_seqlens": CU.long()}
    assert flash_kda.fwd(*given, 0.5, out, **gate, **options) is None
    torch.testing.assert_close((out[0], final.mT), expected, **CLOSE)
    if not in_place:
        assert torch.equal(initial, states.mT)


def test_flash_kda_rounds_final_states_to_their_buffer() -> None:
    x = Raw(20)
    zero, cu = torch.zeros(2, HV, K, V, dtype=torch.float64), torch.tensor([0, 10, 20])
    expected = loop(unit(x.q), unit(x.k), x.v, x.bounded(-5.0), x.beta.sigmoid(), zero, cu, 0.5)
    final, out = torch.empty(2, HV, V, K, dtype=torch.bfloat16), torch.empty(2, 10, HV, V)
    given = [a.unflatten(0, (2, 10)).float() for a in (x.q, x.k, x.v, x.g, x.beta)]
    flash_kda.fwd(*given, 0.5, out, x.A_log.float(), x.dt_bias.float(), -5.0, None, final)
    torch.testing.assert_close(out.flatten(0, 1).double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double().mT, expected[1], rtol=2**-8, atol=1e-4)
    first = out.clone()
    flash_kda.fwd(*given, 0.5, out.zero_(), x.A_log.float(), x.dt_bias.float(), -5.0)
    assert torch.equal(out, first)


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 2, 2)], ids=["grouped values", "grouped queries"])
@pytest.mark.parametrize("buffers", ["none", "apart", "in place"])
def test_flashinfer_takes_factors(heads: tuple[int, int, int], buffers: str) -> None:
    heads_q, heads_k, heads_v = heads
    q, k, v = rand(T, heads_q, K), unit(rand(T, heads_k, K)), rand(T, heads_v, V)
    factor, beta, states = torch.rand(T, 4).double(), torch.rand(T, 4).double(), rand(N, 4, K, V)
    factor[3] = 0.0  # a state may be forgotten
    expected = loop(q, k, v, factor.log()[..., None], beta, states, CU, K**-0.5)
    initial = states.mT.contiguous()
    out = None if buffers == "none" else torch.full((T, 4, V), float("nan"), dtype=torch.float64)
    final = {"none": None, "apart": torch.zeros_like(initial), "in place": initial}[buffers]
    o, found = flashinfer.chunk_gated_delta_rule(
        q, k, v, factor, beta, None, initial, True, CU.long(), False, out, final
    )
    torch.testing.assert_close((o, found.mT), expected, **CLOSE)
    assert out is None or o is out and found is final
    if buffers != "in place":
        assert torch.equal(initial, states.mT)


@pytest.mark.parametrize("pools", ["one", "two", "from zero", "read"])
def test_flashinfer_on_pools(pools: str) -> None:
    """Rows of a page-strided pool; the third sequence is padding, and no row but theirs changes."""
    q, k, v = rand(T, 2, K), unit(rand(T, 2, K)), rand(T, 2, V)
    factor, beta = torch.rand(T, 2).double(), torch.rand(T, 2).double()
    rows, live = torch.tensor([4, 0, -1, 2]), torch.tensor([True, True, False, True])
    pages = rand(6, 3, 2, V, K)
    before, initial = pages.clone(), pages[:, 1]
    output = rand(6, 2, V, K) if pools == "two" else initial
    expected_pool = output.clone()
    states = torch.zeros(N, 2, K, V).double() if pools == "from zero" else initial[rows].mT
    expected, finals = loop(q, k, v, factor.log()[..., None], beta, states, CU, K**-0.5)
    start, end = CU[2:4].tolist()
    expected[start:end] = 0
    found = flashinfer.chunk_gated_delta_rule(
        q, k, v, factor, beta, None, None if pools == "from zero" else initial, pools != "read", CU.long(),
        output_state=output, use_cp=False, state_indices=rows,
    )  # fmt: skip
    if pools != "read":
        expected_pool[rows[live]] = finals[live].mT
    o = found if pools == "read" else found[0]
    assert pools == "read" or found[1] is output
    torch.testing.assert_close((o, output), (expected, expected_pool), **CLOSE)
    others = torch.tensor([1, 3, 5])
    assert torch.equal(output[others], expected_pool[others])
    assert torch.equal(pages[:, [0, 2]], before[:, [0, 2]])
    if pools in ("two", "read"):
        assert torch.equal(pages, before)


def test_flashinfer_refuses_before_anything_changes() -> None:
    q, k, v = rand(T, 2, K), unit(rand(T, 2, K)), rand(T, 2, V)
    pool, rows = rand(6, 2, V, K), torch.tensor([4, 0, -1, 2])
    before = pool.clone()
    run = partial(
        flashinfer.chunk_gated_delta_rule, q, k, v, cu_seqlens=CU.long(), output_final_state=True, state_indices=rows
    )  # fmt: skip
    with pytest.raises(ValueError, match="^output_state: expected a pool beside state_indices"):
        run(initial_state=pool)
    with pytest.raises(ValueError, match="^output_state: expected a pool .*, as initial_state"):
        run(initial_state=pool, output_state=pool[:5])
    with pytest.raises(ValueError, match="^use_intracard_cp: "):
        run(initial_state=pool, output_state=pool, use_cp="never")
    with pytest.raises(ValueError, match="^state_indices: "):
        run(initial_state=pool, output_state=pool, state_indices=torch.tensor([4, 0, 0, 2]))
    assert torch.equal(pool, before)


def test_flashinfer_without_gates_and_with_checkpoints() -> None:
    lengths = (130, 64, 3)
    cu = torch.tensor([0, 130, 194, 197])
    tokens = sum(lengths)
    q, k, v = rand(tokens, 2, K), rand(tokens, 2, K), rand(tokens, 2, V)
    one, zero = torch.ones(tokens, 2).double(), torch.zeros(3, 2, K, V).double()
    g = torch.zeros(tokens, 2, 1).double()
    expected, _ = loop(q, unit(k), v, g, one, zero, cu, K**-0.5)
    rows = [loop(q[a:b], unit(k)[a:b], v[a:b], g[a:b], one[a:b], zero[:1], torch.tensor([0, b - a]), 1.0)[1][0]
            for a, b in ((0, 64), (0, 128), (130, 194))]  # fmt: skip
    checkpoints = torch.full((4, 2, V, K), 9.0).double()
    o = flashinfer.chunk_gated_delta_rule(
        q, unit(k), v, scale=0.0, cu_seqlens=cu, state_checkpoints=checkpoints,
        checkpoint_cu_starts=torch.tensor([0, 2, 3, 3]), checkpoint_every_n_tokens=64,
    )  # fmt: skip
    torch.testing.assert_close(o, expected, **CLOSE)
    torch.testing.assert_close(checkpoints[:3].mT, torch.stack(rows), **CLOSE)
    assert (checkpoints[3] == 9).all()
