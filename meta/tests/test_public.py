"""The public functions: values against a plain recurrence, argument order, `impl`, autograd and torch.compile."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cula.reference
from cula import _discovery, _implementations, _registry, delta, kda, lightning, lite
from cula._facts import CALLERS_ALONE, FACTS, OPS
from cula._implementations import Implementation

ROOT = Path(__file__).resolve().parents[2]
MODULES = (delta, kda, lightning, lite)
H, HV, K, V = 2, 4, 8, 6
LENGTHS = (5, 0, 1, 70)
T = sum(LENGTHS)
CU = torch.tensor([0, 5, 5, 6, 76], dtype=torch.int32)


pytestmark = pytest.mark.usefixtures("undecided")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs one made-up kernel as the only one there is; `arch` is what this machine then claims to be."""

    def install(
        op: str, run: Callable[..., Any], arch: str = "cpu", supports: Any = lambda **problem: None
    ) -> None:
        made_up = Implementation("made-up", (op,), (arch,), 10, supports, lambda function: run)
        found = (made_up, _implementations.fla(OPS), _implementations.reference(OPS))
        monkeypatch.setattr(
            _registry, "implementations", lambda op: [i for i in found if op in i.ops]
        )
        monkeypatch.setattr(_registry, "broken", lambda: ())
        monkeypatch.setattr(_discovery, "FIRST_PARTY", ())
        monkeypatch.setattr(_registry, "_arch_of", lambda device: arch)
        _registry.refresh()

    return install


def inputs(
    batch: int = 1, tokens: int = T, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(batch, tokens, H, K, dtype=dtype),
        "k": torch.nn.functional.normalize(torch.randn(batch, tokens, H, K, dtype=dtype), dim=-1),
        "v": torch.randn(batch, tokens, HV, V, dtype=dtype),
        "g": -torch.rand(batch, tokens, HV, K, dtype=dtype),
        "beta": torch.rand(batch, tokens, HV, dtype=dtype),
        "decay": torch.rand(HV, dtype=dtype),
        "state": torch.randn(len(LENGTHS), HV, K, V, dtype=dtype),
    }


def recurrence(
    x: dict[str, torch.Tensor], g: torch.Tensor, *, delta: bool, scale: float = K**-0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after another, one head after another; g broadcasts to [1, T, HV, K]."""
    g = g.expand(1, T, HV, K)
    o, states = torch.zeros(1, T, HV, V, dtype=torch.float64), x["state"].clone()
    for n in range(len(LENGTHS)):
        for head in range(HV):
            state = states[n, head]
            for t in range(int(CU[n]), int(CU[n + 1])):
                key, value = x["k"][0, t, head // (HV // H)], x["v"][0, t, head]
                state = g[0, t, head].exp()[:, None] * state
                if delta:
                    value = x["beta"][0, t, head] * (value - key @ state)
                state = state + torch.outer(key, value)
                o[0, t, head] = scale * (x["q"][0, t, head // (HV // H)] @ state)
            states[n, head] = state
    return o, states


def test_kda_is_its_recurrence() -> None:
    x = inputs()
    o, states = recurrence(x, x["g"], delta=True)
    found = kda.chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, x["state"], True, cu_seqlens=CU, cu_seqlens_cpu=CU
    )  # fmt: skip
    torch.testing.assert_close(found, (o, states), rtol=1e-10, atol=1e-10)
    v_first = kda.chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"].mT.contiguous(), output_final_state=True,
        state_v_first=True, cu_seqlens=CU,
    )  # fmt: skip
    torch.testing.assert_close(v_first, (o, states.mT), rtol=1e-10, atol=1e-10)
    # The default scale is K ** -0.5, and doubling it doubles the output.
    twice, none = kda.chunk_kda(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        2 * K**-0.5,
        initial_state=x["state"],
        cu_seqlens=CU,
    )
    torch.testing.assert_close(twice, 2 * o, rtol=1e-10, atol=1e-10)
    assert none is None


def test_gated_delta_rule_is_its_recurrence() -> None:
    x = inputs()
    g = x["g"][..., 0].contiguous()
    expected = recurrence(x, g[..., None], delta=True)
    found = lightning.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], g, x["beta"], None, x["state"], True, cu_seqlens=CU
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_simple_gla_is_its_recurrence() -> None:
    x = inputs()
    g = x["g"][..., 0].contiguous()
    found = lightning.chunk_simple_gla(
        x["q"], x["k"], x["v"], g, None, None, x["state"], True, False, CU
    )
    torch.testing.assert_close(
        found, recurrence(x, g[..., None], delta=False), rtol=1e-10, atol=1e-10
    )


def test_lightning_forms_agree_with_the_recurrence() -> None:
    x = inputs()
    q, k, v, decay = (x[name] for name in ("q", "k", "v", "decay"))
    o, states = recurrence(x, -decay[:, None], delta=False)
    gla = lightning.chunk_simple_gla(
        q, k, v, g_gamma=-decay, initial_state=x["state"], output_final_state=True, cu_seqlens=CU
    )
    torch.testing.assert_close(gla, (o, states), rtol=1e-10, atol=1e-10)

    pool = torch.randn(7, HV, K, V, dtype=torch.float64)
    rows = torch.tensor([6, 1, 0, 3], dtype=torch.int32)
    pool[rows.long()] = x["state"]
    untouched = pool[[2, 4, 5]].clone()
    found, same = lightning.lightning_attn_fwd_varlen(q, k, v, decay, CU, None, pool, rows)
    assert same is pool
    torch.testing.assert_close((found, pool[rows.long()]), (o, states), rtol=1e-10, atol=1e-10)
    assert torch.equal(pool[[2, 4, 5]], untouched)

    last = slice(6, 76)
    dense = lightning.lightning_attn_fwd(
        q[:, last], k[:, last], v[:, last], decay, None, x["state"][3:], output_final_state=True
    )
    torch.testing.assert_close(dense, (o[:, last], states[3:]), rtol=1e-10, atol=1e-10)

    pool = x["state"].clone()
    for t in range(6, 76, 7):
        step = lightning.linear_attention_decode(
            *(a[:, t : t + 7] for a in (q, k, v)),
            pool,
            decay.float(),
            state_indices=torch.tensor([3], dtype=torch.int32),
        )
        torch.testing.assert_close(step, o[:, t : t + 7], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pool[3], states[3], rtol=1e-6, atol=1e-6)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def test_arguments_that_lightning_functions_share() -> None:
    """Normalised q and k, checkpoints, and what only kernels look at, through every function."""
    x = inputs()
    q, k, v, decay = (x[name] for name in ("q", "k", "v", "decay"))
    states = torch.full((1, 1, HV, K, V), float("nan"), dtype=torch.float64)
    common = {
        "use_qk_l2norm_in_kernel": True, "exact_state": True, "num_splits": 2, "state_checkpoints": states,
        "checkpoint_every_n_tokens": 64,
    }  # fmt: skip
    q_in, k_in = 3 * q, 0.25 * k
    x |= {"q": normalised(q_in), "k": normalised(k_in)}
    expected = recurrence(x, -decay[:, None], delta=False)
    # The last sequence starts at token 6: its state after 64 tokens goes to row 6 // 64.
    first = slice(6, 70)
    _, due = cula.reference.recurrent_simple_gla(
        x["q"][:, first], x["k"][:, first], v[:, first], g_gamma=-decay, initial_state=x["state"][3:],
        output_final_state=True,
    )  # fmt: skip
    shared = {"initial_state": x["state"], "output_final_state": True, "cu_seqlens": CU, **common}
    found = lightning.chunk_simple_gla(q_in, k_in, v, g_gamma=-decay, **shared)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(states[0], due, rtol=1e-10, atol=1e-10)

    states.fill_(float("nan"))
    pool = x["state"].clone()
    found = lightning.lightning_attn_fwd_varlen(
        q_in, k_in, v, decay, CU, None, pool, update_state_pool=False, **common
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(states[0], due, rtol=1e-10, atol=1e-10)
    assert torch.equal(pool, x["state"])

    last = slice(6, 76)
    dense = (q_in[:, last], k_in[:, last], v[:, last])
    options = {"initial_state": x["state"][3:], "output_final_state": True, **common}
    states.fill_(float("nan"))
    o, final = lightning.lightning_attn_fwd(*dense, decay, **options)
    torch.testing.assert_close((o, final[0]), (expected[0][:, last], expected[1][3]))
    torch.testing.assert_close(states[0], due, rtol=1e-10, atol=1e-10)

    slope = torch.arange(HV, dtype=torch.float64) * (8 / HV) * (1 - 1 / 4)
    expected = lightning.lightning_attn_fwd(*dense, slope, **options)
    due = states.clone()
    states.fill_(float("nan"))
    found = lightning.chunk_lightning_attn(*dense, 1, 4, **options)
    torch.testing.assert_close((*found, states), (*expected, due), rtol=1e-6, atol=1e-6)


def test_both_decays_of_simple_gla_add() -> None:
    x = inputs()
    # A gate with strides of its own, such as one head dimension cut out of a projection.
    g, gamma = x["g"][..., 0], -x["decay"]
    assert g.stride(-1) != 1
    found = lightning.chunk_simple_gla(
        x["q"], x["k"], x["v"], g, gamma, None, x["state"], True, False, CU
    )
    expected = recurrence(x, (g + gamma)[..., None], delta=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cu", [[0], [0, 0, 0], None])
def test_no_tokens_leave_the_state_as_it_was(cu: list[int] | None) -> None:
    x = inputs(1, 0)
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    state = torch.randn(1 if cu is None else len(cu) - 1, HV, K, V, dtype=torch.float64)
    packing = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    head_gate = g[..., 0].contiguous()
    results = [
        kda.chunk_kda(q, k, v, g, beta, None, state, True, **packing),
        kda.fused_recurrent_kda(q, k, v, g, beta, None, None, None, state, True, **packing),
        lightning.chunk_gated_delta_rule(q, k, v, head_gate, beta, None, state, True, **packing),
        lightning.chunk_simple_gla(q, k, v, head_gate, None, None, state, True, **packing),
        lightning.chunk_lightning_attn(q, k, v, 0, 2, None, state, True, **packing),
    ]
    if cu is not None:
        results.append(
            lightning.lightning_attn_fwd_varlen(
                q, k, v, x["decay"], torch.tensor(cu), None, state.clone()
            )
        )
    for o, final in results:
        assert o.shape == (1, 0, HV, V)
        assert torch.equal(final, state)


def test_layer_decay() -> None:
    x = inputs(2, 9)
    found, _ = lightning.chunk_lightning_attn(x["q"], x["k"], x["v"], 3, 12)
    decay = torch.tensor([0.0, 1.5, 3.0, 4.5], dtype=torch.float64)  # (8 / 4) * (1 - 3 / 12) * head
    expected, _ = lightning.lightning_attn_fwd(x["q"], x["k"], x["v"], decay)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_verify_then_commit_is_decode() -> None:
    x = inputs(3, 4)
    tokens = (x["q"], x["k"], x["v"])
    decay = x["decay"].float()
    pool = x["state"].clone()
    drafted = lightning.linear_attention_decode(*tokens, pool, decay, commit=False)
    assert torch.equal(pool, x["state"])
    accepted = torch.tensor([4, 0, 2], dtype=torch.int32)
    assert lightning.linear_attention_commit(*tokens[1:], pool, decay, accepted) is None
    for row, count in enumerate(accepted.tolist()):
        alone = x["state"].clone()
        if count:
            piece = tuple(a[row : row + 1, :count] for a in tokens)
            index = torch.tensor([row], dtype=torch.int32)
            o = lightning.linear_attention_decode(*piece, alone, decay, state_indices=index)
            torch.testing.assert_close(drafted[row : row + 1, :count], o)
        torch.testing.assert_close(pool[row], alone[row])


def test_skip_list_attention_is_attention() -> None:
    q, k = (
        torch.randn(1, 9, 4, K, dtype=torch.float64),
        torch.randn(1, 7, 2, K, dtype=torch.float64),
    )
    v = torch.randn(1, 7, 2, V, dtype=torch.float64)
    every = torch.ones(1, 4, 3, 4, dtype=torch.bool)
    options = {"threshold": float("-inf"), "block_m": 4, "block_n": 2}
    out, lse, mask = lite.lite_attention(q, k, v, every, **options)
    keys, values = (a.transpose(1, 2).repeat_interleave(2, 1) for a in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * K**-0.5
    torch.testing.assert_close(out, (scores.softmax(-1) @ values).transpose(1, 2))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert mask.all() and mask.shape == (1, 4, 3, 4)
    words = lite.lite_attention(q, k, v, **options)[2]
    assert words.dtype == torch.int32 and (words == 15).all() and words.shape == (1, 4, 3, 1)


@pytest.mark.parametrize("limit", [-3.0, 0.0, 4.0, 20, math.inf, -math.inf])
def test_a_threshold_for_all_dropped_keys_together(limit: float) -> None:
    q, k, v = (torch.randn(1, n, 2, K, dtype=torch.float64) for n in (9, 64, 64))
    q[..., 0], k[..., 0] = K**0.5, -torch.arange(64.0)[:, None] % 13
    every, tiles = torch.ones(1, 2, 3, 32, dtype=torch.bool), {"block_m": 4, "block_n": 2}
    for direction in (1, -1):
        found = lite.lite_attention(
            q, k, v, every, threshold=limit, threshold_mode="length", direction=direction, **tiles
        )
        expected = lite.lite_attention(
            q, k, v, every, threshold=min(0.0, limit - 6), direction=direction, **tiles
        )
        for one, other in zip(found, expected):
            assert torch.equal(one, other)
        ratios = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * K**-0.5).double()
        ratios = (ratios - ratios.amax(-1, keepdim=True)).exp()
        kept = found[2].repeat_interleave(4, 2)[:, :, :9].repeat_interleave(2, 3)
        assert ratios.masked_fill(kept, 0).sum(-1).max() <= 2.0**limit
        assert kept.all() == (limit == -math.inf)


def calls() -> dict[str, Callable[..., Any]]:
    """Each function that takes `out`, with everything but `out` filled in."""
    x = inputs(dtype=torch.float32)
    qkv = (x["q"], x["k"], x["v"])
    decode = tuple(a[:, :3] for a in qkv)
    head_gate = x["g"][..., 0].contiguous()
    return {
        "chunk_kda": lambda **o: kda.chunk_kda(*qkv, x["g"], x["beta"], **o)[0],
        "fused_recurrent_kda": lambda **o: kda.fused_recurrent_kda(*qkv, x["g"], x["beta"], **o)[0],
        "chunk_gated_delta_rule": lambda **o: lightning.chunk_gated_delta_rule(
            *qkv, head_gate, x["beta"], **o
        )[0],
        "fused_recurrent_gated_delta_rule": lambda **o: lightning.fused_recurrent_gated_delta_rule(
            *qkv, head_gate, beta=x["beta"], **o
        )[0],
        "chunk_simple_gla": lambda **o: lightning.chunk_simple_gla(*qkv, head_gate, **o)[0],
        "chunk_lightning_attn": lambda **o: lightning.chunk_lightning_attn(*qkv, 0, 2, **o)[0],
        "lightning_attn_fwd": lambda **o: lightning.lightning_attn_fwd(*qkv, x["decay"], **o)[0],
        "lightning_attn_fwd_varlen": lambda **o: lightning.lightning_attn_fwd_varlen(
            *qkv, x["decay"], CU, **o
        )[0],
        "linear_attention_decode": lambda **o: lightning.linear_attention_decode(
            *decode, x["state"], x["decay"], commit=False, **o
        ),
    }


@pytest.mark.parametrize("function", calls())
def test_out_is_written_and_returned(function: str) -> None:
    call = calls()[function]
    expected = call()
    # A view with a gap between rows, poisoned so that whatever is left unwritten shows.
    out = torch.full((*expected.shape[:-1], V + 2), float("nan"))[..., :V]
    assert call(out=out) is out
    assert torch.equal(out, expected)


FLA_ORDER = {
    kda.chunk_kda: (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
        "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs"
    ),
    lightning.fused_recurrent_gated_delta_rule: (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
        "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
    ),
    kda.fused_recurrent_kda: (
        "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens"
    ),
    lightning.chunk_gated_delta_rule: (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    ),
    lightning.chunk_simple_gla: (
        "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"
    ),
    lightning.chunk_lightning_attn: (
        "q k v layer_idx num_layers scale initial_state output_final_state cu_seqlens"
    ),
}


@pytest.mark.parametrize("function", FLA_ORDER, ids=lambda f: f.__name__)
def test_positional_arguments_are_those_of_fla(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == FLA_ORDER[function].split()


def shape_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in own(function)]


def own(function: Callable[..., Any]) -> set[str]:
    """What a public function does not hand to whatever serves."""
    return {"impl", *CALLERS_ALONE.get(function.__name__, ())}


@pytest.mark.parametrize("function", FACTS)
def test_reference_has_the_public_signature(function: str) -> None:
    public = next(getattr(m, function) for m in MODULES if hasattr(m, function))
    assert shape_of(getattr(cula.reference, function)) == shape_of(public)


def test_every_public_function_documents_every_argument() -> None:
    for module in MODULES:
        for name in module.__all__:
            function = getattr(module, name)
            text = inspect.getdoc(function) or ""
            assert "Raises:" in text or inspect.isclass(function), name
            if name != "kda_prefill_hopper":
                missing = [p for p in inspect.signature(function).parameters if p not in text]
                assert not missing, (name, missing)


@pytest.mark.parametrize("document", ["docs/varlen.md", "meta/README.md"])
def test_documented_example_runs(document: str) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE
    )
    exec(compile(example, document, "exec"), {})


def test_facts_reach_the_kernel_by_name(kernel: Callable[..., None]) -> None:
    seen: list[dict[str, Any]] = []

    def supports(**problem: Any) -> None:
        seen.append(problem)

    x = inputs(dtype=torch.bfloat16)
    qkv = (x["q"], x["k"], x["v"])
    state = x["state"].float()
    common = {
        "arch": "cpu",
        "dtype": torch.bfloat16,
        "head_dim_k": K,
        "head_dim_v": V,
        "requires_grad": False,
    }

    kernel("kda.prefill", lambda *a, **o: ("o", None), supports=supports)
    kda.chunk_kda(
        *qkv, x["g"], x["beta"].float(), initial_state=state, output_final_state=True, safe_gate=True, lower_bound=-5.0,
        cu_seqlens=CU, use_gate_in_kernel=True, A_log=torch.zeros(HV),
    )  # fmt: skip
    flags = {
        "state_dtype": torch.float32, "gate_dtype": torch.bfloat16, "beta_dtype": torch.float32, "varlen": True,
        "group": 2, "initial_state": True, "output_final_state": True, "use_qk_l2norm_in_kernel": False,
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
        "state_v_first": False, "safe_gate": True, "lower_bound": True, "return_intermediate_states": False,
        "state_pool": False, "update_state_pool": True, "has_initial_state": False, "checkpoints": False,
        "use_intracard_cp": "auto", "segment_tokens": None,
    }  # fmt: skip
    assert seen.pop() == {"op": "kda.prefill", "function": "chunk_kda", **common, **flags}

    kernel("kda.decode", lambda *a, **o: ("o", None), supports=supports)
    kda.fused_recurrent_kda(
        *qkv, x["g"], x["beta"].float(), torch.zeros(HV), None, None, state, True, use_gate_in_kernel=True,
        lower_bound=-9.0, cu_seqlens=CU,
    )  # fmt: skip
    for name in (
        "safe_gate",
        "return_intermediate_states",
        "state_pool",
        "update_state_pool",
        "has_initial_state",
        "checkpoints",
        "use_intracard_cp",
        "segment_tokens",
    ):
        del flags[name]
    assert seen.pop() == {"op": "kda.decode", "function": "fused_recurrent_kda", **common, **flags}

    kernel("lightning.gated_delta_rule", lambda *a, **o: ("o", None), supports=supports)
    lightning.chunk_gated_delta_rule(
        *qkv, x["g"][..., 0].contiguous(), x["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        state_v_first=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    del flags["lower_bound"]
    flags |= {
        "state_dtype": None, "beta_dtype": torch.bfloat16, "varlen": False, "initial_state": False,
        "output_final_state": False, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": False,
        "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "state_v_first": True,
    }  # fmt: skip
    op, of_rule = "lightning.gated_delta_rule", "chunk_gated_delta_rule"
    more = {
        "grouped_queries": False, "softplus": False, "state_pool": False, "update_state_pool": True,
        "has_initial_state": False, "checkpoints": False, "use_intracard_cp": "auto", "segment_tokens": None,
        "operand_dtype": None,
    }  # fmt: skip
    assert seen.pop() == {"op": op, "function": of_rule, **common, **flags, **more}

    lightning.chunk_gated_delta_rule(
        x["v"][..., :K], x["k"], x["v"][:, :, :1], state_pool=state, update_state_pool=False,
        has_initial_state=torch.ones(1, dtype=torch.bool), softplus_threshold=30.0, use_intracard_cp=False,
        operand_dtype=torch.bfloat16, state_checkpoints=torch.empty(1, 1, HV, K, V), checkpoint_every_n_tokens=64,
    )  # fmt: skip
    facts = seen.pop()
    assert facts.items() >= {
        "grouped_queries": True, "softplus": True, "state_pool": True, "update_state_pool": False,
        "has_initial_state": True, "checkpoints": True, "use_intracard_cp": False, "operand_dtype": torch.bfloat16,
        "group": 1, "gate_dtype": None, "beta_dtype": None, "state_dtype": torch.float32, "initial_state": False,
    }.items()  # fmt: skip

    op = "lightning.gated_delta_decode"
    kernel(op, lambda *a, **o: ("o", None), supports=supports)
    lightning.fused_recurrent_gated_delta_rule(
        *qkv, gk=x["g"], gv=x["v"].float(), beta=x["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        state_v_first=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    gates = {
        "gate_dtype": None, "key_gate_dtype": torch.bfloat16, "value_gate_dtype": torch.float32,
    }  # fmt: skip
    assert seen.pop() == {
        "op": op,
        "function": "fused_recurrent_gated_delta_rule",
        **common,
        **flags,
        **gates,
    }

    op = "lightning.prefill"
    kernel(op, lambda *a, **o: ("o", None), supports=supports)
    plain = {
        "decay_requires_grad": False, "use_qk_l2norm_in_kernel": False, "exact_state": False, "checkpoints": False,
        "num_splits": None, "segment_tokens": None,
    }  # fmt: skip
    lightning.chunk_simple_gla(
        *qkv, x["g"][..., 0].contiguous(), output_final_state=True, cu_seqlens=CU
    )
    assert seen.pop() == {
        "op": op, "function": "chunk_simple_gla", **common, "state_dtype": None, "gate_dtype": torch.bfloat16,
        "head_decay": False, "varlen": True, "group": 2, "initial_state": False,
        "output_final_state": True, "state_v_first": False, **plain,
    }  # fmt: skip
    decay = torch.rand(HV)
    lightning.chunk_simple_gla(
        *qkv, g_gamma=-decay, use_qk_l2norm_in_kernel=True, segment_tokens=1024
    )
    assert seen.pop() == {
        "op": op, "function": "chunk_simple_gla", **common, "state_dtype": None, "gate_dtype": None,
        "head_decay": True, "varlen": False, "group": 2, "initial_state": False,
        "output_final_state": False, "state_v_first": False, **plain, "use_qk_l2norm_in_kernel": True,
        "segment_tokens": 1024,
    }  # fmt: skip
    lightning.lightning_attn_fwd(
        *qkv,
        decay.clone().requires_grad_(),
        initial_state=state[:1],
        state_checkpoints=torch.empty(1, 1, HV, K, V),
        checkpoint_every_n_tokens=64,
    )
    assert seen.pop() == {
        "op": op, "function": "lightning_attn_fwd", **common, "requires_grad": True, "state_dtype": torch.float32,
        "group": 2, "initial_state": True, "output_final_state": False, "state_v_first": False, **plain,
        "decay_requires_grad": True, "checkpoints": True,
    }  # fmt: skip
    lightning.lightning_attn_fwd_varlen(
        *qkv, decay, CU, state_pool=state, update_state_pool=False, exact_state=True
    )
    assert seen.pop() == {
        "op": op, "function": "lightning_attn_fwd_varlen", **common, "state_dtype": torch.float32, "varlen": True,
        "group": 2, "state_pool": True, "output_final_state": True, "state_v_first": False,
        "update_state_pool": False, **plain, "exact_state": True,
    }  # fmt: skip
    lightning.lightning_attn_fwd_varlen(
        *qkv, decay, CU, state_pool=state, checkpoint_rows=CU[1:], checkpoint_offsets=CU[1:]
    )
    assert seen.pop()["checkpoints"] is True

    op = "lightning.decode"
    kernel(op, lambda *a, **o: "o", supports=supports)
    tokens = tuple(a[:, :3] for a in qkv)
    lightning.linear_attention_decode(
        *tokens, state.bfloat16(), decay, commit=False, rounding_seed=1
    )
    assert seen.pop() == {
        "op": op, "function": "linear_attention_decode", **common, "state_dtype": torch.bfloat16, "tokens": 3,
        "state_v_first": False, "commit": False, "stochastic_rounding": True,
    }  # fmt: skip
    lightning.linear_attention_commit(*tokens[1:], state, decay, torch.ones(1, dtype=torch.int32))
    assert seen.pop() == {
        "op": op, "function": "linear_attention_commit", **common, "state_dtype": torch.float32, "tokens": 3,
        "state_v_first": False, "stochastic_rounding": False,
    }  # fmt: skip

    op = "delta.decode"
    kernel(op, lambda *a, **o: "o", supports=supports)
    call = (*tokens, None, None, state.half())
    asked = {"op": op, **common, "state_dtype": torch.float16, "state_v_first": True}
    accepted = torch.ones(1, dtype=torch.int32)
    decode = {
        **asked,
        "function": "delta_rule_decode",
        "commit": True,
        "convolution": False,
        "norm": False,
    }
    delta.delta_rule_decode(*call)
    assert seen.pop() == {**decode, "tokens": 3, "varlen": False, "replay": False}
    delta.delta_rule_decode(*call, cu_seqlens=CU, commit=False)
    assert seen.pop() == {**decode, "tokens": 8, "varlen": True, "commit": False, "replay": False}
    replay = delta.new_replay(state, H, dtype=tokens[1].dtype, state_v_first=False)
    packed = {"cu_seqlens": CU, "max_tokens": 5}
    delta.delta_rule_decode(*call, replay=replay, **packed)
    assert seen.pop() == {**decode, "tokens": 5, "varlen": True, "replay": True}
    delta.delta_rule_commit(*call[1:], accepted, state_v_first=False)
    assert seen.pop() == {
        **asked, "function": "delta_rule_commit", "tokens": 3, "varlen": False, "state_v_first": False,
    }  # fmt: skip
    delta.delta_rule_flush(state.half(), replay, accepted)
    assert seen.pop() == {**asked, "function": "delta_rule_flush"}

    op = "lite.attention"
    kernel(op, lambda *a, **o: "o", supports=supports)
    lite.lite_attention(*(x["v"],) * 3, must_do=torch.ones(1, dtype=torch.bool), block_n=32)
    assert seen.pop() == {
        "op": op, "function": "lite_attention", **common, "head_dim_k": V, "state_dtype": None, "block_m": 128,
        "block_n": 32, "must_do": True,
    }  # fmt: skip
    assert not seen


@pytest.mark.parametrize("function", FACTS)
def test_kernel_is_called_with_the_public_arguments(
    kernel: Callable[..., None], function: str
) -> None:
    """Whatever serves is handed every argument of the public signature but those of the caller alone, as it came."""
    public = next(getattr(m, function) for m in MODULES if hasattr(m, function))
    taken: list[inspect.BoundArguments] = []

    def run(*args: Any, **options: Any) -> Any:
        taken.append(inspect.signature(public).bind(*args, **options))
        return "result"

    op = next(op for op, functions in OPS.items() if function in functions)
    kernel(op, run)
    x = inputs(dtype=torch.float32)
    x |= {
        "g": x["g"] if public.__module__ == kda.__name__ else x["g"][..., 0].contiguous(),
        "cu_seqlens": CU,
        "num_accepted": torch.ones(1, dtype=torch.int32),
    }
    if function == "lite_attention":
        x["q"] = x["k"] = x["v"]
    if function in (*OPS["lightning.decode"], *OPS["delta.decode"]):
        x |= {name: x[name][:, :2] for name in ("q", "k", "v")}
    replay = delta.new_replay(x["state"], H, dtype=torch.float32, state_v_first=False)
    x["replay"] = replay  # type: ignore[assignment]
    parameters = inspect.signature(public).parameters
    required = {n: x[n] for n, p in parameters.items() if p.default is p.empty}
    found = public(**required, impl="made-up")
    silent = ("linear_attention_commit", "delta_rule_commit", "delta_rule_flush")
    assert found == (None if function in silent else "result")
    (bound,) = taken
    given = {n: p for n, p in parameters.items() if n not in own(public)}
    expected = {n: required.get(n, p.default) for n, p in given.items()}
    assert set(bound.arguments) == set(expected)
    for name, value in expected.items():
        assert bound.arguments[name] is value, name


def test_hopper_prefill_never_falls_back(
    kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, whole = (
        dict(inspect.signature(f).parameters) for f in (kda.kda_prefill_hopper, kda.chunk_kda)
    )
    del whole["impl"]
    assert ours == whole
    x = inputs(dtype=torch.bfloat16)
    arguments = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    with pytest.raises(
        RuntimeError, match=r"^kda_prefill_hopper needs tensors on a Hopper GPU \(sm90\), got cpu$"
    ):
        kda.kda_prefill_hopper(*arguments)

    monkeypatch.setattr(_discovery, "FIRST_PARTY", ())
    monkeypatch.setattr(_discovery, "entry_points", lambda group: ())
    with monkeypatch.context() as patch:
        patch.setattr(_registry, "_arch_of", lambda device: "sm90")
        none = "^no kernel serves kda.prefill.chunk_kda on sm90: no kernel package for it is installed$"
        with pytest.raises(RuntimeError, match=none):
            kda.kda_prefill_hopper(*arguments)

    kernel("kda.prefill", lambda *a, **o: (o, None), "sm90")
    options, _ = kda.kda_prefill_hopper(*arguments, 0.5, cu_seqlens=CU, use_intracard_cp=True)
    assert (options["scale"], options["cu_seqlens"], options["use_intracard_cp"]) == (0.5, CU, True)
    kernel("kda.prefill", lambda *a, **o: (o, None), "sm90", lambda **p: "not today")
    with pytest.raises(
        RuntimeError, match="^no kernel serves kda.prefill.chunk_kda on sm90: made-up: not today$"
    ):
        kda.kda_prefill_hopper(*arguments)


def test_lightning_kernels_check_their_own_arguments(kernel: Callable[..., None]) -> None:
    """The kernel sees even what the reference would refuse, and nothing is checked twice."""
    kernel("lightning.prefill", lambda *a, **o: o["scale"])
    x = inputs(dtype=torch.float32)
    qkv = (x["q"], x["k"], x["v"])
    odd = {"scale": float("nan"), "num_splits": 0}
    for found in (
        lightning.lightning_attn_fwd(*qkv, x["decay"], **odd),
        lightning.lightning_attn_fwd_varlen(*qkv, x["decay"], CU, **odd),
        lightning.chunk_simple_gla(*qkv, **odd),
        lightning.chunk_lightning_attn(*qkv, 0, 2, **odd),
    ):
        assert found != found
    with pytest.raises(ValueError, match="^num_splits: expected at least 1, got 0"):
        lightning.chunk_simple_gla(*qkv, num_splits=0, impl="reference")


def test_kda_kernels_check_their_own_arguments(kernel: Callable[..., None]) -> None:
    kernel("kda.prefill", lambda *a, **o: (o["scale"], o["disable_recompute"]))
    x = inputs(dtype=torch.float32)
    call = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    assert kda.chunk_kda(**call, scale="wide", disable_recompute=3) == ("wide", 3)
    with pytest.raises(TypeError, match="^scale: expected a float or None, got str$"):
        kda.chunk_kda(**call, scale="wide", impl="reference")
    # Who serves depends on this one, so that it is checked before.
    with pytest.raises(ValueError, match="^use_intracard_cp: expected 'auto', True or False, got"):
        kda.chunk_kda(**call, use_intracard_cp=1)


def test_skip_list_kernels_check_their_own_arguments(kernel: Callable[..., None]) -> None:
    kernel("lite.attention", lambda *a, **o: o["direction"])
    q = torch.randn(1, 5, 2, 8)
    assert lite.lite_attention(q, q, q, direction=7) == 7
    with pytest.raises(ValueError, match="^direction: expected 1 or -1"):
        lite.lite_attention(q, q, q, direction=7, impl="reference")
    with pytest.raises(ValueError, match="^q: expected 4 dimensions"):
        lite.lite_attention(q[0], q, q)


def test_delta_rule_kernels_check_their_own_arguments(kernel: Callable[..., None]) -> None:
    kernel("delta.decode", lambda *a, **o: o["scale"])
    q, state = torch.randn(2, 1, 2, 8), torch.zeros(2, 2, 8, 8)
    assert delta.delta_rule_decode(q, q, q, None, None, state, scale="wide") == "wide"
    with pytest.raises(TypeError, match="^scale: expected a float or None, got str$"):
        delta.delta_rule_decode(q, q, q, None, None, state, scale="wide", impl="reference")
    # Who serves depends on these, so that they are checked before.
    with pytest.raises(ValueError, match="^state: expected 4 dimensions"):
        delta.delta_rule_decode(q, q, q, None, None, state[0])
    with pytest.raises(ValueError, match="^max_tokens: expected 1 to 8, got 9"):
        delta.delta_rule_commit(q, q, None, None, state, q, cu_seqlens=q, max_tokens=9)
    with pytest.raises(
        TypeError, match="^replay: expected a Replay, which new_replay returns, got list"
    ):
        delta.delta_rule_flush(state, [])


def test_kernel_without_backward_leaves_training_to_the_reference(
    kernel: Callable[..., None],
) -> None:
    def supports(*, requires_grad: bool, **problem: Any) -> str | None:
        return "no backward" if requires_grad else None

    kernel("lightning.prefill", lambda *a, **o: ("kernel", None), supports=supports)
    x = inputs()
    call = (x["q"], x["k"], x["v"], x["decay"])
    assert lightning.lightning_attn_fwd(*call)[0] == "kernel"
    x["k"].requires_grad_()
    o, _ = lightning.lightning_attn_fwd(*call)
    assert o.requires_grad
    with pytest.raises(RuntimeError, match="impl='made-up' cannot serve .*: no backward"):
        lightning.lightning_attn_fwd(*call, impl="made-up")
    with torch.no_grad():
        assert lightning.lightning_attn_fwd(*call)[0] == "kernel"


def test_gradients_reach_every_input() -> None:
    x = inputs(1, 5)
    x["state"] = x["state"][:1]
    tensors = [x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "state")]
    assert torch.autograd.gradcheck(
        lambda q, k, v, g, beta, state: kda.chunk_kda(q, k, v, g, beta, None, state, True),
        tensors,
        fast_mode=True,
    )
    # Without tensors in it, the state of no tokens is the initial one.
    empty = [a[:, :0] for a in tensors[:5]]
    _, final = kda.chunk_kda(*empty, initial_state=tensors[5], output_final_state=True)
    assert torch.equal(final, tensors[5])


def test_modules_of_a_package_that_is_missing(monkeypatch):
    reference = tuple(i for i in _registry.implementations("lite.attention") if not i.kernel)
    monkeypatch.setattr(lite, "implementations", lambda op: reference)
    with pytest.raises(ImportError, match=r"pip install --find-links dist 'cula\[sm89\]'"):
        _ = lite.LiteAttention
    with pytest.raises(AttributeError, match="no attribute 'HeavyAttention'"):
        _ = lite.HeavyAttention
