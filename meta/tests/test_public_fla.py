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
from cula.integrations import fla

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
    assert not arguments.pop("use_graph") and arguments.pop("max_num_seqs") is None
    return reference.chunk_kda(**arguments)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FLA is importable, and this machine claims a Hopper GPU."""
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.ops.simple_gla": {
            "chunk_simple_gla": chunk_simple_gla,
            "fused_recurrent_simple_gla": fused_recurrent_simple_gla,
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "importable", lambda package: True)
    monkeypatch.setattr(fla, "_version", lambda: (0, 6))
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
        assert all(name.startswith("cula-") for name in able[: -len(peers)])


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
    assert SEEN == ["chunk_simple_gla"] * 3


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
    # Without a pool, the final states are returned.
    both(lightning.lightning_attn_fwd_varlen, q, k, v, torch.rand(HV), CU)


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
        ({"function": "lite_attention"}, "has no lite_attention"),
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
