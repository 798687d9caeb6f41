"""The adapter to flash-linear-attention, with a stand-in for it."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from fla_stand_in import CU, HV, SEEN, K, V, inputs, installed
from torch import Tensor

from cula import _registry, kda, lightning
from cula._facts import OPS
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
    for op in OPS:
        rows = _registry.explain(op, arch="sm90", dtype=torch.bfloat16).rows
        able = [row.name for row in rows if row.reason is None]
        alone = op in ("lite.attention", "delta.decode")
        peers = ["reference"] if alone else ["fla", "reference"]
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
    half = torch.randn(3, HV, K, V).half()
    _, final = both(
        kda.fused_recurrent_kda, *inputs(3, 2).values(), initial_state=half, output_final_state=True
    )
    assert final.dtype == torch.float16
    assert SEEN == ["fused_recurrent_kda"] * 3


def test_gated_delta_rule() -> None:
    x = inputs()
    x["g"] = x["g"][..., 0].contiguous()
    state = torch.randn(4, HV, K, V)
    both(
        lightning.chunk_gated_delta_rule, *x.values(), 0.3, state, True, cu_seqlens=CU, use_gate_in_kernel=True,
        A_log=torch.rand(HV), dt_bias=torch.rand(HV), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    # Without gates the adapter makes some that change nothing.
    q, k, v, _, beta = x.values()
    both(lightning.chunk_gated_delta_rule, q, k, v, beta=beta, scale=0.3)
    both(lightning.chunk_gated_delta_rule, q, k, v, x["g"], out=torch.empty_like(v))
    assert SEEN == ["chunk_gated_delta_rule"] * 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"v": torch.randn(1, 3, 1, V)}, "needs as many heads of k as of q, and no fewer of v"),
        ({"k": torch.randn(1, 3, 1, K)}, "needs as many heads of k as of q, and no fewer of v"),
        ({"softplus_beta": 2.0}, "has no softplus_beta and softplus_threshold"),
        ({"softplus_threshold": 9.0}, "has no softplus_beta and softplus_threshold"),
        ({"operand_dtype": torch.float16}, "has no operand_dtype"),
        (
            {"use_intracard_cp": True},
            "splits sequences by settings of its own, not by use_intracard_cp=True",
        ),
        (
            {"segment_tokens": 1024},
            "cuts no sequences after a number of tokens of the caller (segment_tokens)",
        ),
    ],
)
def test_what_the_gated_delta_rule_lacks(options: dict[str, Any], reason: str) -> None:
    """It is refused by name, and left to the reference otherwise; what nothing has is refused in any case."""
    x = {name: torch.randn(1, 3, 2, dim) for name, dim in (("q", K), ("k", K), ("v", V))} | options
    x |= {name: x[name].bfloat16() for name in ("q", "k", "v")}
    run = lightning.chunk_gated_delta_rule
    with pytest.raises(RuntimeError, match=f"^impl='fla' cannot serve .*: {re.escape(reason)}$"):
        run(**x, impl="fla")
    if options.get("use_intracard_cp") is not True:
        assert run(**x)[0].isfinite().all()
    assert not SEEN


@pytest.mark.parametrize("function", [kda.chunk_kda, lightning.chunk_gated_delta_rule])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"state_pool": torch.zeros(1, 2, K, V)}, "updates no state_pool"),
        (
            {
                "initial_state": torch.zeros(1, 2, K, V),
                "has_initial_state": torch.zeros(1, dtype=torch.bool),
            },
            "has no has_initial_state",
        ),
        (
            {
                "state_checkpoints": torch.zeros(1, 0, 2, K, V),
                "checkpoint_every_n_tokens": 64,
            },
            "writes no state_checkpoints",
        ),
    ],
)
def test_states_of_engines_are_left_to_the_reference(
    function: Any, options: dict[str, Any], reason: str
) -> None:
    q, k, v = (torch.randn(1, 3, 2, dim).bfloat16() for dim in (K, K, V))
    gates = (-torch.rand(1, 3, 2, K), torch.rand(1, 3, 2))
    x = (q, k, v, gates[0] if function is kda.chunk_kda else gates[0][..., 0], gates[1])
    with pytest.raises(RuntimeError, match=f"^impl='fla' cannot serve .*: {reason}$"):
        function(*x, **options, impl="fla")
    assert function(*x, **options)[0].isfinite().all() and not SEEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_gated_delta_rule_decode(v_first: bool, dtype: torch.dtype) -> None:
    q, k, v, gk, beta = inputs().values()
    g, gv = gk[..., 0].contiguous(), -torch.rand(v.shape)
    state = torch.randn(4, HV, *((V, K) if v_first else (K, V))).to(dtype)
    out = torch.empty_like(v)
    run = lightning.fused_recurrent_gated_delta_rule
    shared = {"initial_state": state, "output_final_state": True, "state_v_first": v_first}
    o, final = both(
        run, q, k, v, g, beta=beta, use_gate_in_kernel=True, A_log=torch.rand(HV), dt_bias=torch.rand(HV),
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, cu_seqlens=CU, out=out,
        **shared,
    )  # fmt: skip
    assert o is out and final.dtype == dtype
    # Every gate at once, and without beta, for which FLA would make one of too few heads.
    both(run, q, k, v, g, gk, gv, scale=0.3, cu_seqlens=CU, **shared)
    both(run, *(x[:, :2] for x in (q, k, v)), gv=gv[:, :2])
    assert SEEN == ["fused_recurrent_gated_delta_rule"] * 3


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_with_states_of_16_bits(dtype: torch.dtype) -> None:
    """FLA's kernels begin and end with fp32, and what comes back has the dtype of what was given."""
    q, k, v, g, beta = inputs().values()
    gate = g[..., 0].contiguous()
    given: dict[str, Any] = {"initial_state": torch.randn(4, HV, K, V).to(dtype), "cu_seqlens": CU}
    for function, tensors in (
        (kda.chunk_kda, (q, k, v, g, beta)),
        (lightning.chunk_gated_delta_rule, (q, k, v, gate, beta)),
        (lightning.chunk_simple_gla, (q, k, v, gate)),
    ):
        _, final = both(function, *tensors, **given, output_final_state=True)
        assert final.dtype == dtype
        assert both(function, *tensors, **given)[1] is None
    run, decay = lightning.lightning_attn_fwd_varlen, torch.rand(HV)
    pool = torch.randn(6, HV, K, V).to(dtype)
    _, states = both(run, q, k, v, decay, CU, state_pool=pool, update_state_pool=False)
    assert states.dtype == dtype
    assert both(run, q, k, v, decay, CU, state_pool=pool)[1] is pool


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
        (
            {"segment_tokens": 2048},
            "cuts no sequences after a number of tokens of the caller (segment_tokens)",
        ),
        ({"decay_requires_grad": True}, "has no gradient for the constant decay of a head"),
        ({"function": "lite_attention"}, "has no lite_attention"),
        ({"function": "fused_recurrent_kda", "requires_grad": True}, "has no backward of it"),
        (
            {"function": "fused_recurrent_gated_delta_rule", "requires_grad": True},
            "has no backward of it",
        ),
        ({"state_dtype": torch.float64}, "computes states in float32, not float64"),
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


# Function, gate, and whether FLA 0.6.0 refuses the backward on Hopper with Triton 3.4.0 up to 3.7.1.
BACKWARDS = [
    ("chunk_gated_delta_rule", torch.float32, True),
    ("chunk_gated_delta_rule", torch.bfloat16, True),
    ("chunk_simple_gla", torch.float32, True),
    ("chunk_simple_gla", None, False),
    ("lightning_attn_fwd", None, False),
    ("lightning_attn_fwd_varlen", None, False),
    ("chunk_kda", torch.float32, False),
]
TRITONS = [
    ((3, 3, 1), False), ((3, 4, 0), True), ((3, 5, 1), True), ((3, 6, 0), True), ((3, 7, 0), True),
    ((3, 7, 1), False), ((3, 8, 0), False), (None, False),
]  # fmt: skip


@pytest.mark.parametrize(("function", "gate", "guarded"), BACKWARDS)
@pytest.mark.parametrize(("triton", "wrong"), TRITONS)
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_backward_that_triton_compiles_wrongly_is_refused_before_the_forward(
    function: str,
    gate: torch.dtype | None,
    guarded: bool,
    triton: Any,
    wrong: bool,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fla, "_triton", lambda: triton)
    monkeypatch.setattr(fla, "_tilelang", lambda: False)
    problem = {"arch": arch, "function": function, "gate_dtype": gate, "dtype": torch.bfloat16}
    refused = fla.supports(**problem, requires_grad=True)
    assert (refused is not None) == (guarded and wrong and arch == "sm90")
    assert fla.supports(**problem, requires_grad=False) is None


def test_what_is_said_of_a_backward_that_triton_compiles_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fla, "_triton", lambda: (3, 6, 0))
    monkeypatch.setattr(fla, "_tilelang", lambda: False)
    problem = {"arch": "sm90", "gate_dtype": torch.float32, "requires_grad": True}
    delta = {"function": "chunk_gated_delta_rule", **problem}
    assert fla.supports(**delta) == (
        "its backward needs Triton 3.7.1 or newer or TileLang on sm90, 3.6.0 is installed"
    )
    gla = "its backward with g needs Triton 3.7.1 or newer on sm90, 3.6.0 is installed"
    assert fla.supports(function="chunk_simple_gla", **problem) == gla
    # TileLang's kernel takes the place of that of the delta rule, and not of simple GLA's.
    monkeypatch.setattr(fla, "_tilelang", lambda: True)
    assert fla.supports(**delta) is None
    assert fla.supports(function="chunk_simple_gla", **problem) == gla


@pytest.mark.parametrize("function", fla._FUNCTIONS)
@pytest.mark.parametrize("dims", [(63, 64), (64, 63)])
def test_backward_of_odd_head_dimensions(function: str, dims: tuple[int, int]) -> None:
    problem = {"arch": "sm80", "function": function, "head_dim_k": dims[0], "head_dim_v": dims[1]}
    name = "K" if dims[0] % 2 else "V"
    expected = {
        **dict.fromkeys(
            ("chunk_simple_gla", "lightning_attn_fwd", "lightning_attn_fwd_varlen"),
            f"its backward needs an even {name}, not 63",
        ),
        **dict.fromkeys(fla.INFERENCE_ONLY, "has no backward of it"),
    }
    assert fla.supports(**problem, requires_grad=True) == expected.get(function)
    assert fla.supports(**problem) is None


def test_the_backward_of_every_function_is_known() -> None:
    guarded = {function for guard in fla.GUARDS for function in guard.functions}
    assert {*guarded, *fla.UNGUARDED, *fla.INFERENCE_ONLY} == set(fla._FUNCTIONS)
    assert guarded.isdisjoint((*fla.UNGUARDED, *fla.INFERENCE_ONLY))


def test_training_never_starts_what_fla_will_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a Triton the reference serves both passes, and FLA by name raises before it runs."""
    monkeypatch.setattr(fla, "_triton", lambda: (3, 6, 0))
    monkeypatch.setattr(fla, "_tilelang", lambda: False)
    x = inputs()
    x["g"] = x["g"][..., 0].contiguous()
    x["v"].requires_grad_()
    lightning.chunk_gated_delta_rule(*x.values())[0].sum().backward()
    assert SEEN == [] and x["v"].grad.any()
    with pytest.raises(RuntimeError, match="impl='fla' cannot serve .*: its backward needs Triton"):
        lightning.chunk_gated_delta_rule(*x.values(), impl="fla")
    with torch.no_grad():
        lightning.chunk_gated_delta_rule(*x.values())
    assert SEEN == ["chunk_gated_delta_rule"]


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("disabled", [True, False])
def test_fla_is_asked_whether_it_calls_tilelang(
    usable: bool, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "fla.backends": {"_DISPATCH_DISABLED": disabled},
        "fla.ops.common.backends": {},
        "fla.ops.common.backends.tilelang": {
            "CommonTileLangBackend": types.SimpleNamespace(can_use=lambda: usable)
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    assert fla._tilelang() == (usable and not disabled)
    monkeypatch.setattr(fla, "importable", lambda package: package != "tilelang")
    assert not fla._tilelang()


def test_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": "3.6.0+git1234"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.undo()
    monkeypatch.setattr(fla, "version", version)
    assert fla._triton() == (3, 6, 0)
    installed = {"pytorch-triton": "3.7.1"}
    assert fla._triton() == (3, 7, 1)
    installed = {}
    assert fla._triton() is None


def test_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"arch": "sm90", "function": "chunk_kda"}
    monkeypatch.setattr(fla, "_version", lambda: (0, 5))
    assert fla.supports(**problem) == "needs fla-core 0.6 or newer, 0.5 is installed"
    monkeypatch.setattr(fla, "_version", lambda: None)
    assert fla.supports(**problem) is None
    monkeypatch.setattr(fla, "importable", lambda package: False)
    missing = "flash-linear-attention is not installed: pip install fla-core"
    assert fla.supports(**problem) == missing
    # What it would refuse installed is said first: an installation would not help.
    assert fla.supports(**problem, exact_state=True) == "has no exact_state"


def test_it_offers_what_it_claims() -> None:
    offered = {
        f
        for i in _registry.implementations("lightning.decode")
        if i.name == "fla"
        for op in i.ops
        for f in OPS[op]
    }
    # It has these, but not on a pool of states with gates and normalisation of their own.
    offered -= set(OPS["delta.decode"])
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
