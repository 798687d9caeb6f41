"""The adapter to flash-linear-attention, with a stand-in that has FLA 0.6's signatures and the oracles' numbers.

The stand-in takes no `**kwargs`, which the real functions swallow: an argument that FLA does not know must not be sent.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cula import _registry, kda, lightning, reference
from cula._registry import Implementation
from cula.integrations import fla, fla_backward
from cula.reference.gates import log_decay

H, HV, K, V = 2, 4, 8, 6
CU = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
T = 9
SEEN: list[str] = []


def _no_groups(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.shape[2] == k.shape[2] == v.shape[2], "FLA's simple GLA has no grouped heads"


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    SEEN.append("chunk_simple_gla")
    _no_groups(q, k, v)
    return reference.recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    SEEN.append("fused_recurrent_simple_gla")
    assert not reverse and cu_seqlens is None
    assert initial_state.dtype in (torch.float32, torch.float64)
    _no_groups(q, k, v)
    return reference.recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first
    )


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None,
):  # fmt: skip
    SEEN.append("chunk_gated_delta_rule")
    return reference.chunk_gated_delta_rule(**locals())


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None,
    dt_bias=None,
):  # fmt: skip
    arguments = dict(locals())
    SEEN.append("chunk_kda")
    assert dt_bias is None or dt_bias.dim() == 1, "the gradient that FLA gives has this shape"
    assert not arguments.pop("use_graph") and arguments.pop("max_num_seqs") is None
    return reference.chunk_kda(**arguments)


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    arguments = dict(locals())
    SEEN.append("fused_recurrent_kda")
    with torch.no_grad():
        return reference.recurrent_kda(**arguments)


RCP_LN2 = 1.4426950216


def prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    counts = [-(-(b - a) // chunk_size) for a, b in zip(bounds, bounds[1:])]
    return torch.tensor([(n, i) for n, count in enumerate(counts) for i in range(count)])


def _chunks(tokens, chunk_size, cu_seqlens, chunk_indices):
    if cu_seqlens is None:
        return [slice(a, min(a + chunk_size, tokens)) for a in range(0, tokens, chunk_size)]
    starts = [(int(n), int(cu_seqlens[n]) + int(i) * chunk_size) for n, i in chunk_indices]
    return [slice(a, min(a + chunk_size, int(cu_seqlens[n + 1]))) for n, a in starts]


def chunk_local_cumsum(
    g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float, chunk_indices=None,
):  # fmt: skip
    assert g.is_contiguous() and (cu_seqlens is None) == (chunk_indices is None)
    o = torch.full_like(g, float("nan"), dtype=output_dtype)
    for part in _chunks(g.shape[1], chunk_size, cu_seqlens, chunk_indices):
        rows = g[:, part].float()
        o[:, part] = rows.flip(1).cumsum(1).flip(1) if reverse else rows.cumsum(1)
    return o if scale is None else o * scale


def chunk_simple_gla_bwd(
    q, k, v, g, g_gamma, initial_state, do, dht, scale, state_v_first=False, cu_seqlens=None, chunk_size=64,
    chunk_indices=None,
):  # fmt: skip
    """g and its derivative are those of sums over a chunk, g in powers of two and the derivative in natural ones."""
    SEEN.append("chunk_simple_gla_bwd")
    _no_groups(q, k, v)
    assert all(x is None or x.is_contiguous() for x in (q, k, v, g, initial_state, do, dht))
    assert not torch.is_grad_enabled() and (g is None or g_gamma is None)
    sums = None if g is None else g / RCP_LN2
    leaves = [
        None if x is None else x.detach().requires_grad_() for x in (q, k, v, sums, initial_state)
    ]
    q, k, v, sums, h0 = leaves
    with torch.enable_grad():
        if sums is not None:
            parts = _chunks(q.shape[1], chunk_size, cu_seqlens, chunk_indices)
            zero = torch.zeros_like(sums[:, :1])
            g = torch.cat([sums[:, part].diff(dim=1, prepend=zero) for part in parts], 1)
        gamma = None if g_gamma is None else g_gamma / RCP_LN2
        o, ht = reference.recurrent_simple_gla(
            q, k, v, g, gamma, scale, h0, True, state_v_first, cu_seqlens
        )
        outputs, given = ((o, ht), (do, dht)) if dht is not None else ((o,), (do,))
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    return tuple(None if x is None else next(found) for x in leaves)


def l2norm_fwd(x):
    assert x.is_contiguous()
    rstd = (x.float().square().sum(-1) + 1e-6).rsqrt()
    return (x.float() * rstd[..., None]).to(x.dtype), rstd


def l2norm_bwd(y, rstd, dy):
    assert y.shape == dy.shape and dy.is_contiguous()
    y, dy = y.float(), dy.float()
    return (rstd[..., None] * (dy - y * (y * dy).sum(-1, keepdim=True))).bfloat16()


def fused_beta_sigmoid_fwd(x, scale=1.0):
    assert x.is_contiguous()
    return scale * x.float().sigmoid()


def fused_beta_sigmoid_bwd(x, dy, scale=1.0):
    y = x.float().sigmoid()
    return (dy.float() * scale * y * (1 - y)).to(x.dtype)


def kda_gate_chunk_cumsum(
    g, A_log, chunk_size, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float,
    chunk_indices=None, lower_bound=None,
):  # fmt: skip
    decay = log_decay(g.float(), A_log, dt_bias, lower_bound=lower_bound)
    return chunk_local_cumsum(
        decay, chunk_size, False, scale, cu_seqlens, output_dtype, chunk_indices
    )


def chunk_gated_delta_rule_fwd_h(
    k, w, u, g=None, gk=None, initial_state=None, output_final_state=False, chunk_size=64, save_new_value=True,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_offsets=None,
):  # fmt: skip
    """Not the states, but whether what they are made of has arrived; the backward below looks for these results."""
    assert [int(x.flatten()[0]) for x in (w, u, k)] == [MARKS[name] for name in ("w", "u", "kg")]
    assert gk.dtype == torch.float32 and g is None and not output_final_state
    shape = (V, K) if state_v_first else (K, V)
    return marked("h", 1, *shape), marked("v_new", *u.shape), None


def chunk_kda_bwd(
    q, k, v, beta, Aqk, Akk, scale, initial_state, do, dht, g=None, g_org=None, state_v_first=False,
    cu_seqlens=None, chunk_indices=None, chunk_size=64, safe_gate=False, lower_bound=None,
    use_gate_in_kernel=False, A_log=None, dt_bias=None, disable_recompute=False, **kept,
):  # fmt: skip
    """g: sums over a chunk in powers of two, made here of a gate inside if nothing was kept; dg: of each decay."""
    SEEN.append("chunk_kda_bwd")
    tensors = (q, k, v, beta, initial_state, do, dht, g, g_org)
    assert all(x is None or x.is_contiguous() for x in tensors) and not torch.is_grad_enabled()
    assert dt_bias is None or dt_bias.dim() == 1
    names = ("w", "u", "qg", "kg", "v_new", "h")
    assert disable_recompute == (set(kept) == set(names)) == bool(kept)
    for name, x in {"Aqk": Aqk, "Akk": Akk, **kept}.items():
        assert (x == MARKS[name]).all()
    assert (g_org is not None) == use_gate_in_kernel
    assert (g is None) == (use_gate_in_kernel and not kept)
    parts = _chunks(q.shape[1], chunk_size, cu_seqlens, chunk_indices)
    if g is not None:
        zero = torch.zeros_like(g[:, :1])
        decay = torch.cat([g[:, part].diff(dim=1, prepend=zero) for part in parts], 1) / RCP_LN2
        if use_gate_in_kernel:
            wanted = log_decay(g_org.float(), A_log, dt_bias, lower_bound=lower_bound)
            torch.testing.assert_close(decay, wanted, rtol=1e-3, atol=1e-4)
    leaves = [
        None if x is None else x.detach().float().requires_grad_()
        for x in (q, k, v, beta, g_org if use_gate_in_kernel else decay, initial_state, A_log, dt_bias)
    ]  # fmt: skip
    q, k, v, beta, g, h0, A_log, dt_bias = leaves
    with torch.enable_grad():
        o, ht = reference.recurrent_kda(
            q, k, v, g, beta, scale=scale, initial_state=h0, output_final_state=True, lower_bound=lower_bound,
            use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        outputs, given = (o, ht), (do.float(), torch.zeros_like(ht) if dht is None else dht)
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    dq, dk, dv, db, dg, dh0, dA, dbias = (None if x is None else next(found) for x in leaves)
    return dq, dk, dv, db, dg, dh0, dA, dbias


# What tensors that a kernel keeps for the backward are filled with here.
MARKS = {name: mark for mark, name in enumerate(("Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h"))}


def marked(name: str, *shape: int) -> Tensor:
    return torch.full(shape, MARKS[name], dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FLA is importable, and this machine claims a Hopper GPU."""
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": chunk_kda, "fused_recurrent_kda": fused_recurrent_kda},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.ops.simple_gla": {
            "chunk_simple_gla": chunk_simple_gla,
            "fused_recurrent_simple_gla": fused_recurrent_simple_gla,
        },
        "fla.ops.simple_gla.chunk": {"chunk_simple_gla_bwd": chunk_simple_gla_bwd},
        "fla.ops.utils": {
            "chunk_local_cumsum": chunk_local_cumsum,
            "prepare_chunk_indices": prepare_chunk_indices,
        },
        "fla.ops.utils.constant": {"RCP_LN2": RCP_LN2},
        "fla.ops.kda.chunk_bwd": {"chunk_kda_bwd": chunk_kda_bwd},
        "fla.ops.kda.gate": {"kda_gate_chunk_cumsum": kda_gate_chunk_cumsum},
        "fla.ops.common": {},
        "fla.ops.common.chunk_delta_h": {
            "chunk_gated_delta_rule_fwd_h": chunk_gated_delta_rule_fwd_h
        },
        "fla.ops.common.gate": {
            "fused_beta_sigmoid_fwd": fused_beta_sigmoid_fwd,
            "fused_beta_sigmoid_bwd": fused_beta_sigmoid_bwd,
        },
        "fla.modules": {},
        "fla.modules.norm": {},
        "fla.modules.norm.l2norm": {"l2norm_fwd": l2norm_fwd, "l2norm_bwd": l2norm_bwd},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "importable", lambda package: True)
    monkeypatch.setattr(fla, "_version", lambda: (0, 6))
    monkeypatch.setattr(fla, "_triton", lambda: (3, 7, 1))
    monkeypatch.setattr(_registry, "FIRST_PARTY", ())
    monkeypatch.setattr(_registry, "_arch_of", lambda device: "sm90")
    _registry.refresh()
    SEEN.clear()
    yield
    _registry.refresh()


def inputs(batch: int = 1, tokens: int = T) -> dict[str, Tensor]:
    """bfloat16, which is what FLA takes."""
    x = {
        "q": torch.randn(batch, tokens, H, K),
        "k": torch.nn.functional.normalize(torch.randn(batch, tokens, H, K), dim=-1),
        "v": torch.randn(batch, tokens, HV, V),
        "g": -torch.rand(batch, tokens, HV, K),
        "beta": torch.rand(batch, tokens, HV),
    }
    return {name: value.bfloat16() for name, value in x.items()}


def both(function: Any, *args: Any, **options: Any) -> Any:
    """Runs the stand-in, compares with the reference on copies, and returns what the stand-in gave."""

    def copy(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) else x

    pool = options.get(
        "state_pool", args[3] if len(args) > 3 and "linear" in function.__name__ else None
    )
    if function is lightning.linear_attention_commit:
        pool = args[2]
    copies = [copy(x) for x in args], {name: copy(x) for name, x in options.items()}
    found = function(*args, **options, impl="fla")
    expected = function(*copies[0], **copies[1], impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    if pool is not None:
        other = copies[1].get(
            "state_pool", copies[0][2 if function is lightning.linear_attention_commit else 3]
        )
        torch.testing.assert_close(pool, other, rtol=1e-2, atol=1e-2)
    return found


def test_it_comes_before_the_reference_and_after_kernels() -> None:
    for op in _registry.OPS:
        rows = _registry.explain(op, arch="sm90", dtype=torch.bfloat16).rows
        able = [row.name for row in rows if row.reason is None]
        peers = ["reference"] if op == "lite.attention" else ["fla", "reference"]
        assert able[-len(peers) :] == peers
        kernels = {found.name for found in _registry.implementations(op) if found.kernel}
        assert kernels.issuperset(able[: -len(peers)])


@pytest.mark.parametrize("v_first", [False, True])
def test_kda(v_first: bool) -> None:
    x = inputs()
    state = torch.randn(4, HV, *((V, K) if v_first else (K, V)))
    out = torch.empty_like(x["v"])
    options = {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV * K), "use_gate_in_kernel": True}
    o, _ = both(
        kda.chunk_kda, *x.values(), None, state, True, use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=-5.0,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=v_first, cu_seqlens=CU, cu_seqlens_cpu=CU,
        out=out, **options,
    )  # fmt: skip
    assert o is out and SEEN == ["chunk_kda"]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -7.0])
def test_kda_decode(lower_bound: float | None, v_first: bool) -> None:
    x = inputs()
    state = torch.randn(4, HV, *((V, K) if v_first else (K, V)))
    out = torch.empty_like(x["v"])
    o, _ = both(
        kda.fused_recurrent_kda, *x.values(), torch.rand(HV), torch.randn(HV, K), None, state, True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, lower_bound=lower_bound, state_v_first=v_first, cu_seqlens=CU, out=out,
    )  # fmt: skip
    assert o is out
    both(kda.fused_recurrent_kda, *inputs(3, 2).values(), scale=0.3)
    assert SEEN == ["fused_recurrent_kda"] * 2


def test_gated_delta_rule() -> None:
    x = inputs()
    x["g"] = x["g"][..., 0].contiguous()
    state = torch.randn(4, HV, K, V)
    both(
        lightning.chunk_gated_delta_rule, *x.values(), 0.3, state, True, cu_seqlens=CU, use_gate_in_kernel=True,
        A_log=torch.rand(HV), dt_bias=torch.rand(HV), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert SEEN == ["chunk_gated_delta_rule"]


@pytest.mark.parametrize("v_first", [False, True])
def test_simple_gla_and_lightning(v_first: bool) -> None:
    q, k, v, g, _ = inputs().values()
    state = torch.randn(4, HV, *((V, K) if v_first else (K, V)))
    shared = {"output_final_state": True, "state_v_first": v_first}
    both(
        lightning.chunk_simple_gla,
        q,
        k,
        v,
        g[..., 0].contiguous(),
        initial_state=state,
        cu_seqlens=CU,
        **shared,
    )
    both(lightning.lightning_attn_fwd, q, k, v, torch.rand(HV), 0.5, state[:1], **shared)
    both(lightning.chunk_lightning_attn, q, k, v, 1, 4, out=torch.empty_like(v), **shared)
    # FLA takes one decay and no normalisation: the adapter adds and normalises. One segment is what FLA has.
    both(
        lightning.chunk_simple_gla, 3 * q, k / 7, v, g[..., 0], -torch.rand(HV), use_qk_l2norm_in_kernel=True,
        num_splits=1, **shared,
    )  # fmt: skip
    assert SEEN == ["chunk_simple_gla"] * 4


@pytest.mark.parametrize("rows", [[5, -1, 0, 2], [-1, -1, -1, -1], [3, 2, 1, 0], None])
@pytest.mark.parametrize("v_first", [False, True])
def test_lightning_on_a_pool(rows: list[int] | None, v_first: bool) -> None:
    q, k, v, *_ = inputs().values()
    pool = torch.randn(6, HV, *((V, K) if v_first else (K, V)))
    before = pool.clone()
    indices = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    o, same = both(
        lightning.lightning_attn_fwd_varlen, q, k, v, torch.rand(HV), CU, state_pool=pool,
        initial_state_indices=indices, state_v_first=v_first,
    )  # fmt: skip
    assert same is pool
    live = set(range(4)) if rows is None else {row for row in rows if row >= 0}
    for row in set(range(6)) - live:
        assert torch.equal(pool[row], before[row])
    if rows is not None:
        for n, row in enumerate(rows):
            if row < 0:
                assert not o[:, CU[n] : CU[n + 1]].any()
    # Without a pool, or with one that is only read, the final states are returned.
    both(lightning.lightning_attn_fwd_varlen, q, k, v, torch.rand(HV), CU)
    after = pool.clone()
    for wanted in (True, False):
        both(
            lightning.lightning_attn_fwd_varlen, q, k, v, torch.rand(HV), CU, state_pool=pool,
            initial_state_indices=indices, state_v_first=v_first, update_state_pool=False,
            output_final_state=wanted,
        )  # fmt: skip
    assert torch.equal(pool, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[5, -1, 2], [-1, -1, -1], None])
@pytest.mark.parametrize("v_first", [False, True])
def test_decode_and_commit(rows: list[int] | None, v_first: bool, dtype: torch.dtype) -> None:
    q, k, v, *_ = inputs(3, 4).values()
    pool = torch.randn(6, HV, *((V, K) if v_first else (K, V))).to(dtype)
    before = pool.clone()
    decay = torch.rand(HV)
    shared = {
        "state_indices": None if rows is None else torch.tensor(rows, dtype=torch.int32),
        "state_v_first": v_first,
    }
    drafted = both(
        lightning.linear_attention_decode, q, k, v, pool, decay, commit=False, scale=0.7, **shared
    )
    assert torch.equal(pool, before)
    both(
        lightning.linear_attention_commit,
        k,
        v,
        pool,
        decay,
        torch.tensor([4, 2, 0], dtype=torch.int32),
        **shared,
    )
    out = torch.full_like(v, float("nan"))
    assert both(lightning.linear_attention_decode, q, k, v, pool, decay, out=out, **shared) is out
    if rows is not None:
        for n, row in enumerate(rows):
            assert row >= 0 or not (drafted[n].any() or out[n].any())
        for row in set(range(6)) - set(rows):
            assert torch.equal(pool[row], before[row])
    assert SEEN == ["fused_recurrent_simple_gla"] * 3


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"arch": "cpu"}, "needs a CUDA device, the device here is cpu"),
        ({"dtype": torch.float32}, "activations must be bfloat16 or float16, not torch.float32"),
        ({"head_dim_k": 512}, "K must be at most 256, not 512"),
        ({"stochastic_rounding": True}, "has no stochastic rounding"),
        (
            {"return_intermediate_states": True},
            "returns intermediate states in its own layout and precision",
        ),
        (
            {"use_intracard_cp": True},
            "splits sequences by settings of its own, not by use_intracard_cp=True",
        ),
        ({"exact_state": True}, "has no exact_state"),
        ({"checkpoints": True}, "writes no state_checkpoints"),
        ({"num_splits": 2}, "does not split sequences (num_splits=2)"),
        ({"decay_requires_grad": True}, "has no gradient for the constant decay of a head"),
        ({"function": "lite_attention"}, "has no lite_attention"),
        ({"function": "fused_recurrent_kda", "requires_grad": True}, "has no backward of it"),
    ],
)
def test_refusals(problem: dict[str, Any], reason: str) -> None:
    accepted: dict[str, Any] = {
        "arch": "sm90",
        "function": "chunk_kda",
        "dtype": torch.bfloat16,
        "head_dim_k": 128,
    }
    assert fla.supports(**accepted) is None
    assert fla.supports(**{**accepted, **problem}) == reason


def test_gated_backward_that_triton_compiles_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"function": "chunk_simple_gla", "gate_dtype": torch.float32, "requires_grad": True}
    reason = "its backward with g needs Triton 3.7.1 or newer on sm90, 3.6.0 is installed"
    for version, refused in (
        ((3, 3, 1), False), ((3, 4, 0), True), ((3, 6, 0), True), ((3, 7, 0), True), ((3, 7, 1), False), (None, False),
    ):  # fmt: skip
        monkeypatch.setattr(fla, "_triton", lambda version=version: version)
        found = fla.supports(arch="sm90", **problem)
        assert (found is not None) == refused
        assert version != (3, 6, 0) or found == reason
        assert fla.supports(arch="sm80", **problem) is None
        for changes in ({"gate_dtype": None}, {"requires_grad": False}):
            assert fla.supports(arch="sm90", **{**problem, **changes}) is None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill kernels without a backward, which compute what the reference does."""

    def supports(*, requires_grad: bool = False, **problem: Any) -> str | None:
        return "no backward" if requires_grad else None

    def load(function: str) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            assert not torch.is_grad_enabled()
            SEEN.append(f"kernel {function}")
            return getattr(reference, function)(*args, **options)

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
    found = (made_up, _registry._fla(), _registry._reference())
    monkeypatch.setattr(_registry, "implementations", lambda op: [i for i in found if op in i.ops])
    _registry.refresh()


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
        assert got.dtype == want.dtype and got.shape == want.shape and got.isfinite().all()
        error = (got.double() - want.double()).norm()
        assert error <= 1e-2 * want.double().norm(), error / want.double().norm()


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
    with pytest.raises(ValueError, match="^num_splits: expected an int >= 1"):
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
        assert got.dtype == want.dtype and got.shape == want.shape and got.isfinite().all()
        error = (got.double() - want.double()).norm()
        assert error <= 1e-2 * want.double().norm(), error / want.double().norm()


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
            assert (got - want).norm() <= 1e-2 * want.norm()


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
    with pytest.raises(RuntimeError, match="impl='fla' cannot serve .*: has no backward of it"):
        kda.fused_recurrent_kda(*x.values(), impl="fla")

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


def test_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"arch": "sm90", "function": "chunk_kda"}
    monkeypatch.setattr(fla, "_version", lambda: (0, 5))
    assert fla.supports(**problem) == "needs fla-core 0.6 or newer, 0.5 is installed"
    monkeypatch.setattr(fla, "_version", lambda: None)
    assert fla.supports(**problem) is None
    monkeypatch.setattr(fla, "importable", lambda package: False)
    assert (
        fla.supports(**problem)
        == "flash-linear-attention is not installed: pip install 'cula[fla]'"
    )


def test_it_offers_what_it_claims() -> None:
    offered = {
        f
        for i in _registry.implementations("lightning.decode")
        if i.name == "fla"
        for op in i.ops
        for f in _registry.OPS[op]
    }
    for function in offered:
        assert callable(fla.load(function))
    assert set(fla._FUNCTIONS) == offered
    assert inspect.signature(fla.load("chunk_kda")).parameters.keys() >= {
        "q",
        "k",
        "v",
        "g",
        "beta",
        "out",
    }
