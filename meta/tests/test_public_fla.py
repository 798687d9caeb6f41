"""The adapter to flash-linear-attention, with a stand-in for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fla_stand_in import CU, HV, SEEN, K, V, inputs, installed
from torch import Tensor

from cula import _registry, kda, lightning
from cula.integrations import fla


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from installed(monkeypatch)


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
