"""Functions of vLLM 0.33 by cula: numbers of every call against a loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_cases import (
    BLOCKS,
    HV,
    H,
    K,
    V,
    assert_near,
    columns,
    delta_rule,
    ends,
    gate,
    lightning,
    packed,
    pool,
    split,
    table,
)  # fmt: skip

from cula import kda
from cula.integrations import _vllm_calls as calls

DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = {"impl": "reference"}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


# ---- gated delta rule ------------------------------------------------------------------------------------------------


def gates(rows: int, width: int = HV) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a and b in the same rows, A_log and dt_bias."""
    a, b = columns(rows, width)
    return a, b, torch.rand(HV) - 1, torch.randn(width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_decode_of_gdn(dtype: torch.dtype) -> None:
    slots = [3, 0, 5, 0, 1]
    p, mixed = pool(dtype), packed(5, H, HV)
    a, b, A_log, dt_bias = gates(5)
    layer = torch.full((7, HV, V), 9.0).bfloat16()
    inputs = [x.clone() for x in (mixed, a, b)]
    out, state = calls.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=0.3, initial_state=p.states,
        out=layer[:5].unsqueeze(1), ssm_state_indices=table(slots), use_qk_l2norm_in_kernel=True, **REFERENCE,
    )  # fmt: skip
    assert out.data_ptr() == layer.data_ptr() and state is p.states
    assert bool((layer[5:] == 9).all()) and not layer[[1, 3]].any()
    assert p.others_are_untouched(3, 5, 1)
    for before, after in zip(inputs, (mixed, a, b)):
        assert torch.equal(before, after)
    q, k, v = (x[0] for x in split(mixed, H, HV))
    decay = gate(a, A_log, dt_bias)
    for n in (0, 2, 4):
        one = slice(n, n + 1)
        o, states = delta_rule(
            q[one], k[one], v[one], decay[one], b[one].double().sigmoid(), p.before_of(slots[n]), scale=0.3
        )  # fmt: skip
        assert_near(layer[one], o)
        assert_near(p.states[slots[n]], states[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_gdn_beside_a_prefill(dtype: torch.dtype) -> None:
    """The slots of prefills follow, and rows without a token have slot 0."""
    slots = [4, 2, 0, 6, 7]
    p, mixed = pool(dtype), packed(2, H, HV)
    a, b, A_log, dt_bias = gates(2)
    q, k, v = split(mixed, H, HV)
    o, state = calls.fused_sigmoid_gating_delta_rule_update(
        A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=p.states, inplace_final_state=True,
        cu_seqlens=ends(1, 1, 0), ssm_state_indices=table(slots), use_qk_l2norm_in_kernel=True, **REFERENCE,
    )  # fmt: skip
    assert state is p.states and o.shape == v.shape and p.others_are_untouched(4, 2)
    for n in (0, 1):
        one = slice(n, n + 1)
        expected, states = delta_rule(
            q[0, one], k[0, one], v[0, one], gate(a, A_log, dt_bias)[one], b[one].double().sigmoid(),
            p.before_of(slots[n]),
        )  # fmt: skip
        assert_near(o[0, one], expected)
        assert_near(p.states[slots[n]], states[-1])


SPEC_SLOTS = [[1, 2, 3], [0, 0, 0], [4, 5, 6], [7, 8, 0], [0, 0, 0]]
SPEC_LENGTHS = (3, 0, 2, 1, 0)
ACCEPTED = torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32)


def spec_rows(p: Any) -> list[tuple[slice, Tensor, list[int]]]:
    """Of each row with tokens: where they are, the state it begins with, and the slots it writes."""
    found, start = [], 0
    for slots, length, accepted in zip(SPEC_SLOTS, SPEC_LENGTHS, ACCEPTED.tolist()):
        if length:
            rows = slice(start, start + length)
            found.append((rows, p.before_of(slots[accepted - 1]), slots[:length]))
        start += length
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_tokens_of_gdn(dtype: torch.dtype) -> None:
    p, mixed = pool(dtype), packed(6, H, HV)
    a, b, A_log, dt_bias = gates(6)
    q, k, v = split(mixed, H, HV)
    o, _ = calls.fused_sigmoid_gating_delta_rule_update(
        A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, beta=0.5, threshold=0.4, scale=0.7,
        initial_state=p.states, cu_seqlens=ends(*SPEC_LENGTHS), ssm_state_indices=table([*SPEC_SLOTS, [6, 6, 6]]),
        num_accepted_tokens=torch.cat((ACCEPTED, ACCEPTED[:1])), use_qk_l2norm_in_kernel=True, **REFERENCE,
    )  # fmt: skip
    assert p.others_are_untouched(1, 2, 3, 4, 5, 7)
    decay = gate(a, A_log, dt_bias, beta=0.5, threshold=0.4)
    for rows, begin, slots in spec_rows(p):
        expected, states = delta_rule(
            q[0, rows], k[0, rows], v[0, rows], decay[rows], b[rows].double().sigmoid(), begin, scale=0.7
        )  # fmt: skip
        assert_near(o[0, rows], expected)
        assert_near(p.states[slots], states)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_draft_tokens_of_gdn_and_their_norm(activation: str) -> None:
    p, mixed = pool(torch.bfloat16), packed(6, H, HV)
    a, b, A_log, dt_bias = gates(6)
    z, weight = torch.randn(6, HV, V + 2).bfloat16()[..., :V], torch.randn(V).bfloat16()
    layer = torch.full((8, HV, V), 9.0).bfloat16()
    found = calls.fused_gdn_decode_post_conv_mtp(
        mixed_qkv=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state_indices=table(SPEC_SLOTS),
        cu_seqlens=ends(*SPEC_LENGTHS), num_accepted_tokens=ACCEPTED, state=p.states, output_gate=z,
        norm_weight=weight, out=layer[:6], scale=0.7, norm_eps=0.2, output_gate_activation=activation, **REFERENCE,
    )  # fmt: skip
    assert found.data_ptr() == layer.data_ptr() and bool((layer[6:] == 9).all())
    assert p.others_are_untouched(1, 2, 3, 4, 5, 7)
    (q, k, v), decay = (x[0] for x in split(mixed, H, HV)), gate(a, A_log, dt_bias)
    for rows, begin, slots in spec_rows(p):
        o, states = delta_rule(
            q[rows], k[rows], v[rows], decay[rows], b[rows].double().sigmoid(), begin, scale=0.7
        )  # fmt: skip
        x = z[rows].double()
        o = o * (o.square().mean(-1, keepdim=True) + 0.2).rsqrt() * weight.double()
        assert_near(layer[rows], o * x.sigmoid() * (x if activation == "silu" else 1))
        assert_near(p.states[slots], states)


LENGTHS = (70, 0, 131)


def prefill_of_gdn(dtype: torch.dtype) -> tuple[dict[str, Tensor], list[slice]]:
    """Operands as vLLM prepares them, q and k of norms from 1e-3 to 1e3, and where the sequences are."""
    rows = sum(LENGTHS)
    q, k, v = split(packed(rows, H, HV), H, HV)
    x = {"q": q, "k": k, "v": v, "g": -torch.rand(1, rows, HV), "beta": torch.rand(1, rows, HV)}
    bounds = ends(*LENGTHS)
    x |= {"initial_state": torch.randn(3, HV, V, K).to(dtype), "cu_seqlens": bounds}
    return x, [slice(int(a), int(b)) for a, b in zip(bounds, bounds[1:])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [False, True])
def test_prefill_of_gdn(dtype: torch.dtype, kept: bool) -> None:
    x, sequences = prefill_of_gdn(dtype)
    before = {name: value.clone() for name, value in x.items()}
    checkpoints = torch.full((4, HV, V, K), 9.0)
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if kept:
        options |= {
            "state_checkpoints": checkpoints, "checkpoint_cu_starts": torch.tensor([0, 1, 1, 3]),
            "checkpoint_every_n_tokens": 64, "use_cp": False,
        }  # fmt: skip
        o, final = calls.fi_chunk_gated_delta_rule(**x, **options, **REFERENCE)
    else:
        schedule = {"chunk_indices": torch.zeros(5, 2), "chunk_offsets": torch.zeros(4)}
        o, final = calls.chunk_gated_delta_rule(**x, **options, **schedule, **REFERENCE)
    assert final is not None and final.dtype == (torch.float32 if kept else dtype)
    assert all(torch.equal(x[name], value) for name, value in before.items())
    for n, rows in enumerate(sequences):
        start = x["initial_state"][n]
        if n == 1:
            assert torch.equal(final[n], start.to(final.dtype))
            continue
        expected, states = delta_rule(
            *(x[name][0, rows] for name in ("q", "k", "v", "g", "beta")), start
        )
        assert_near(o[0, rows], expected)
        assert_near(final[n], states[-1])
        if kept and n == 0:
            assert_near(checkpoints[0], states[63])
        elif kept:
            assert_near(checkpoints[1:3], states[[63, 127]])
    assert bool((checkpoints[3 if kept else 0 :] == 9).all())


def test_prefill_of_normalised_q_and_k() -> None:
    x, sequences = prefill_of_gdn(torch.float32)
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    o, final = calls.chunk_gated_delta_rule(
        **x, output_final_state=False, use_qk_l2norm_in_kernel=False, **REFERENCE
    )
    assert final is None
    rows = sequences[2]
    operands = (x[name][0, rows] for name in ("q", "k", "v", "g", "beta"))
    assert_near(o[0, rows], delta_rule(*operands, x["initial_state"][2], norm=False)[0])


# ---- KDA -------------------------------------------------------------------------------------------------------------


def kda_gates(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """raw_g `[1, rows, H, K]` and raw_beta `[1, rows, H]` in wider rows, A_log and dt_bias."""
    g, beta = torch.randn(1, rows, HV * K + 5).bfloat16(), torch.randn(1, rows, HV + 3).bfloat16()
    g = g[..., : HV * K].unflatten(2, (HV, K))
    return g, beta[..., :HV], torch.rand(HV) - 1, torch.randn(HV * K)


@pytest.mark.parametrize(
    "lower_bound, into", [(None, None), (-5.0, None), (-5.0, "out"), (-2.0, "buffers")]
)
def test_prefill_of_kda(lower_bound: Any, into: str | None) -> None:
    rows, bounds = sum(LENGTHS), ends(*LENGTHS)
    q, k, v = split(packed(rows, HV, HV), HV, HV)
    g, beta, A_log, bias = kda_gates(rows)
    initial, inputs = torch.randn(3, HV, V, K), [x.clone() for x in (q, k, v, g, beta)]
    layer, states = torch.full((1, rows + 2, HV, V), 9.0).bfloat16(), torch.full((5, HV, V, K), 9.0)
    out = layer[:, :rows] if into else None
    if into == "buffers":
        o, final = calls._flashkda_prefill(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=bias, lower_bound=lower_bound, initial_state=initial,
            cu_seqlens=bounds, out=out, final_state=states[:3], workspace=torch.empty(0), **REFERENCE,
        )  # fmt: skip
        assert final.data_ptr() == states.data_ptr() and bool((states[3:] == 9).all())
    else:
        o, final = calls.chunk_kda_with_fused_gate(
            q=q, k=k, v=v, raw_g=g, raw_beta=beta, A_log=A_log, g_bias=bias, lower_bound=lower_bound,
            initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, out=out,
            **REFERENCE,
        )  # fmt: skip
    assert bool((layer[:, rows if into else 0 :] == 9).all())
    assert out is None or o.data_ptr() == layer.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(inputs, (q, k, v, g, beta)))
    decay = gate(g[0], A_log, bias, lower_bound)
    for n in (0, 2):
        part = slice(int(bounds[n]), int(bounds[n + 1]))
        expected, after = delta_rule(
            q[0, part], k[0, part], v[0, part], decay[part], beta[0, part].double().sigmoid(), initial[n]
        )  # fmt: skip
        assert_near(o[0, part], expected)
        assert_near(final[n], after[-1])
    assert torch.equal(final[1], initial[1])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_bound_makes_the_gate_of_kda_safe(monkeypatch, lower_bound: float | None) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(kda, "chunk_kda", lambda *_, **named: (asked.update(named), None))
    g, beta, A_log, bias = kda_gates(3)
    x = split(packed(3, HV, HV), HV, HV)
    calls.chunk_kda_with_fused_gate(*x, g, beta, A_log, bias, lower_bound=lower_bound)
    assert asked["safe_gate"] == (lower_bound is not None) and asked["impl"] == "auto"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_packed_decode_of_kda(dtype: torch.dtype, lower_bound: float | None) -> None:
    slots = [3, 0, 0, 1]
    p, mixed = pool(dtype), packed(4, HV, HV)
    g, beta, A_log, bias = kda_gates(4)
    given = {
        "mixed_qkv": mixed, "raw_g": g, "raw_beta": beta, "A_log": A_log, "dt_bias": bias, "lower_bound": lower_bound,
        "state_indices": table(slots),
    }  # fmt: skip
    o, state = calls.fused_recurrent_kda_packed_decode(**given, initial_state=p.states, **REFERENCE)
    assert o.shape == (1, 4, HV, V) and state is p.states
    assert p.others_are_untouched(3, 1) and not o[0, 1:3].any()
    (q, k, v), decay = split(mixed, HV, HV), gate(g[0], A_log, bias, lower_bound)
    for n in (0, 3):
        one = slice(n, n + 1)
        expected, states = delta_rule(
            q[0, one], k[0, one], v[0, one], decay[one], beta[0, one].double().sigmoid(), p.before_of(slots[n])
        )  # fmt: skip
        assert_near(o[0, one], expected)
        assert_near(p.states[slots[n]], states[-1])
    layer = torch.full((1, 6, HV, V), 9.0).bfloat16()
    again, _ = calls.fused_recurrent_kda_packed_decode(
        **given, initial_state=p.fresh(), out=layer[:, :4], **REFERENCE
    )
    assert torch.equal(again, o) and again.data_ptr() == layer.data_ptr()
    assert bool((layer[:, 4:] == 9).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_draft_tokens_of_kda(dtype: torch.dtype, lower_bound: float | None) -> None:
    p, mixed = pool(dtype), packed(6, HV, HV)
    g, beta, A_log, bias = kda_gates(6)
    q, k, v = split(mixed, HV, HV)
    layer = torch.full((1, 8, HV, V), 9.0).bfloat16()
    o, _ = calls.fused_recurrent_kda(
        q=q, k=k, v=v, raw_g=g, raw_beta=beta, A_log=A_log, dt_bias=bias, lower_bound=lower_bound,
        initial_state=p.states, cu_seqlens=ends(*SPEC_LENGTHS), ssm_state_indices=table(SPEC_SLOTS),
        num_accepted_tokens=ACCEPTED, out=layer[:, :6], **REFERENCE,
    )  # fmt: skip
    assert o.data_ptr() == layer.data_ptr() and bool((layer[:, 6:] == 9).all())
    assert p.others_are_untouched(1, 2, 3, 4, 5, 7)
    decay = gate(g[0], A_log, bias, lower_bound)
    for rows, begin, slots in spec_rows(p):
        expected, states = delta_rule(
            q[0, rows], k[0, rows], v[0, rows], decay[rows], beta[0, rows].double().sigmoid(), begin
        )  # fmt: skip
        assert_near(o[0, rows], expected)
        assert_near(p.states[slots], states)


def test_several_slots_without_accepted_tokens_begin_at_the_first() -> None:
    p, mixed = pool(torch.float32), packed(2, HV, HV)
    g, beta, A_log, bias = kda_gates(2)
    q, k, v = split(mixed, HV, HV)
    o, _ = calls.fused_recurrent_kda(
        q, k, v, g, beta, A_log, bias, None, p.states, ends(2), table([[4, 5, 6]]), **REFERENCE
    )
    expected, states = delta_rule(
        q[0], k[0], v[0], gate(g[0], A_log, bias), beta[0].double().sigmoid(), p.before_of(4)
    )
    assert_near(o[0], expected)
    assert_near(p.states[4:6], states)
    assert p.others_are_untouched(4, 5)


# ---- Lightning attention ---------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.02, 0.3]).view(H, 1, 1)


def lightning_operands(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """float32 q, k, v; what a 16-bit pool keeps of them, so that nothing is rounded on the way in."""
    return tuple(torch.randn(3, rows, H, K).to(dtype).float())  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decodes", [0, 2])
@pytest.mark.parametrize("own_slots", [True, False])
def test_prefill_of_lightning(dtype: torch.dtype, decodes: int, own_slots: bool) -> None:
    slots, lengths = [6, 1, 3, 0, 5][2 - decodes :], (1,) * decodes + (70, 0, 9)
    p = pool(dtype, H, K, K)
    p.pages[0] = p.before[0] = 1.0  # block 0 is none of padding here
    q, k, v = lightning_operands(sum(lengths), dtype)
    bounds, indices = ends(*lengths), table(slots)
    metadata = SimpleNamespace(
        num_prefills=3, num_decodes=decodes, num_decode_tokens=decodes, query_start_loc=bounds,
        state_indices_tensor_p=indices[decodes:] if own_slots else None,
    )  # fmt: skip
    seen: list[Any] = []

    def decode(*given: Any) -> Tensor:
        seen.append(given)
        return torch.full((decodes, H * K), 8.0)

    hidden = calls.linear_attention_prefill_and_mix(
        q=q, k=k, v=v, kv_cache=p.states, state_indices_tensor=indices, attn_metadata=metadata, slope_rate=SLOPES,
        block_size=256, decode_fn=decode, prefix_fn=lambda: None, layer_idx=1, **REFERENCE,
    )  # fmt: skip
    assert hidden.shape == (sum(lengths), H * K) and hidden.dtype == torch.float32
    assert bool((hidden[:decodes] == 8).all()) and len(seen) == (decodes > 0)
    assert torch.equal(hidden, hidden.to(dtype).float())
    assert not seen or all(
        a is b for a, b in zip(seen[0], (q, k, v, p.states, indices, metadata), strict=True)
    )
    assert p.others_are_untouched(3, 5)
    for n in (decodes, decodes + 2):
        rows = slice(int(bounds[n]), int(bounds[n + 1]))
        expected, state = lightning(
            q[rows], k[rows], v[rows], SLOPES.flatten(), p.before_of(slots[n])
        )
        assert_near(hidden[rows].to(dtype), expected)
        assert_near(p.states[slots[n]], state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_lightning(dtype: torch.dtype) -> None:
    slots, p = [4, -1, 0, -1, 2, 7], pool(dtype, H, K, K)
    p.pages[0] = p.before[0] = 1.0
    q, k, v = lightning_operands(6, dtype)
    hidden = calls.linear_attention_decode(
        q, k, v, p.states, SLOPES, table(slots), q_start=0, q_end=5, slot_start=0, slot_end=5, block_size=32,
        **REFERENCE,
    )  # fmt: skip
    assert hidden.shape == (5, H * K) and hidden.dtype == torch.float32
    assert p.others_are_untouched(4, 0, 2) and not hidden[[1, 3]].any()
    assert torch.equal(hidden, hidden.to(dtype).float())
    for n in (0, 2, 4):
        one = slice(n, n + 1)
        expected, state = lightning(q[one], k[one], v[one], SLOPES.flatten(), p.before_of(slots[n]))
        assert_near(hidden[one].to(dtype), expected)
        assert_near(p.states[slots[n]], state)


# ---- what is not served ----------------------------------------------------------------------------------------------


def spec_call(**changes: Any) -> None:
    p, mixed = pool(torch.float32), packed(6, H, HV)
    a, b, A_log, dt_bias = gates(6)
    q, k, v = split(mixed, H, HV)
    given = {
        "initial_state": p.states, "cu_seqlens": ends(*SPEC_LENGTHS), "ssm_state_indices": table(SPEC_SLOTS),
        "num_accepted_tokens": ACCEPTED,
    }  # fmt: skip
    try:
        calls.fused_sigmoid_gating_delta_rule_update(
            A_log, a, b, dt_bias, q, k, v, **(given | changes), **REFERENCE
        )
    finally:
        assert p.others_are_untouched()


def packed_call(**changes: Any) -> None:
    p, (a, b, A_log, dt_bias) = pool(torch.float32), gates(2)
    given = {"mixed_qkv": packed(2, H, HV), "ssm_state_indices": table([1, 2])} | changes
    out = torch.empty(2, 1, HV, V).bfloat16()
    try:
        calls.fused_recurrent_gated_delta_rule_packed_decode(
            a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=1.0, initial_state=p.states, out=out, **given, **REFERENCE,
        )  # fmt: skip
    finally:
        assert p.others_are_untouched()


def prefill_call(name: str, **changes: Any) -> None:
    x, _ = prefill_of_gdn(torch.float32)
    getattr(calls, name)(**x, output_final_state=True, **changes, **REFERENCE)


@pytest.mark.parametrize(
    "call, changes, error, text",
    [
        (spec_call, {"is_kda": True}, NotImplementedError, "is_kda is not served"),
        (spec_call, {"inplace_final_state": False}, NotImplementedError, "inplace_final_state"),
        (spec_call, {"initial_state": None}, NotImplementedError, "without pool"),
        (spec_call, {"cu_seqlens": None}, NotImplementedError, "or cu_seqlens"),
        (spec_call, {"ssm_state_indices": None}, NotImplementedError, "slots"),
        (spec_call, {"ssm_state_indices": table([1, 0, 2, 3, 0])}, NotImplementedError, "num_accepted_tokens"),
        (spec_call, {"ssm_state_indices": table(SPEC_SLOTS).long()}, TypeError, "indices"),
        (spec_call, {"ssm_state_indices": torch.zeros(5, 9, dtype=torch.int32)}, ValueError, "max_tokens"),
        (spec_call, {"ssm_state_indices": table([1, 0, 2, 3, 0]), "num_accepted_tokens": None}, ValueError,
         "at most 1 tokens"),
        (packed_call, {"mixed_qkv": packed(2, H, HV)[:, :-1]}, ValueError, "mixed_qkv: expected"),
        (packed_call, {"mixed_qkv": packed(2, H, HV)[0]}, ValueError, "mixed_qkv: expected"),
        (packed_call, {"ssm_state_indices": table([1, BLOCKS])}, ValueError, "state_indices"),
        (prefill_call, {"name": "chunk_gated_delta_rule", "core_attn_out": torch.empty(1)}, NotImplementedError,
         "core_attn_out is not served"),
        (prefill_call, {"name": "chunk_gated_delta_rule", "aiter_prefill_metadata": object()}, NotImplementedError,
         "aiter_prefill_metadata is not served"),
        (prefill_call, {"name": "fi_chunk_gated_delta_rule", "use_cp": "never"}, ValueError, "use_intracard_cp"),
    ],
)  # fmt: skip
def test_what_is_not_served_raises_before_it_changes_anything(
    call: Any, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(**changes)


def test_prefill_of_kda_refuses_what_it_does_not_have() -> None:
    g, beta, A_log, bias = kda_gates(3)
    q, k, v = split(packed(3, HV, HV), HV, HV)
    state, out = torch.randn(1, HV, V, K), torch.empty_like(v)
    buffers = (-5.0, state, ends(3), out, torch.zeros(1, HV, V, K), torch.empty(0))
    with pytest.raises(NotImplementedError, match="checkpoint_state is not served"):
        calls._flashkda_prefill(q, k, v, g, beta, A_log, bias, *buffers, state, **REFERENCE)
    with pytest.raises(ValueError, match="final_state: expected the shape"):
        buffers = (-5.0, state, ends(3), out, torch.zeros(2, HV, V, K), torch.empty(0))
        calls._flashkda_prefill(q, k, v, g, beta, A_log, bias, *buffers, **REFERENCE)
    with pytest.raises(NotImplementedError, match="later is not served"):
        calls.chunk_kda_with_fused_gate(q, k, v, g, beta, A_log, bias, later=1, **REFERENCE)
