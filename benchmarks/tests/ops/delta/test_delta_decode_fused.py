"""Decode with convolution and norm: its check, its providers beside stand-ins of the peers, bytes and settings."""

from __future__ import annotations

import types

import pytest
import torch

from benchmarks.harness import registry
from benchmarks.harness.registry import CannotRun, CheckFailed
from benchmarks.ops.delta import delta_decode_fused, internals
from benchmarks.ops.delta import fused_problem as fused
from benchmarks.ops.delta import fused_providers as providers
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.fused_problem import Result, setting
from benchmarks.tests.ops.common import assert_fits_the_h200

GDN = {"heads": 2, "heads_v": 4}
PROBLEMS = [
    setting("gdn", 5, **GDN),
    setting("gdn", 1, **GDN),
    setting("gdn", 3, 4, **GDN),
    setting("gdn", 3, conv=False, **GDN),
    setting("gdn", 3, 1, "bf16", **GDN),
    setting("gdn", 3, layout="kv", **GDN),
    setting("kda", 5, heads_v=3),
    setting("kda", 1, heads_v=3),
]
MAIN, KDA = PROBLEMS[0], PROBLEMS[6]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(delta, "DIM", 16)


# ---- the formulas, row by row ----------------------------------------------------------------------------------------


def convolved(before, tokens, weight):
    """silu of the sums over four inputs, [T, C] in fp64, for the three inputs before the tokens."""
    line = torch.cat((before, tokens)).double()
    found = []
    for t in range(len(tokens)):
        total = sum(line[t + j] * weight[:, j].double() for j in range(4))
        found.append(total / (1 + torch.exp(-total)))
    return torch.stack(found)


def step(state, q, k, v, raw, beta, A_log, dt_bias):
    """A token: state [HV,V,K], q and k [HV,K] as given, v [HV,V], raw [HV,1 or K], beta [HV]."""
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rate = A_log.double().exp()[:, None]
    decay = torch.exp(-rate * torch.log1p(torch.exp(raw + dt_bias.double().view(len(v), -1))))
    state = state * decay[:, None, :]
    missing = v - torch.einsum("hvk,hk->hv", state, k)
    state = state + torch.einsum("h,hv,hk->hvk", beta.sigmoid(), missing, k)
    return state, torch.einsum("hvk,hk->hv", state, q) * q.shape[-1] ** -0.5


def gated(o, gate, weight, activation):
    gate = gate.double()
    factor = gate.sigmoid() * (gate if activation in ("silu", "swish") else 1)
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() * factor


def decoded(state, flat, g, beta, A_log, dt_bias, heads):
    """Outputs [T,HV,V] and the last state of a row of tokens `flat` [T,C], in fp64."""
    heads_v, dim = state.shape[:2]
    outputs = []
    for t in range(len(flat)):
        q, k, v = flat[t].double().view(-1, dim).split((heads, heads, heads_v))
        q, k = (y.repeat_interleave(heads_v // heads, 0) for y in (q, k))
        raw = g[t].double().view(heads_v, -1)
        state, o = step(state, q, k, v, raw, beta[t].double(), A_log, dt_bias)
        outputs.append(o)
    return torch.stack(outputs), state


def naive(problem, x, *, mistake=None):
    """A result of the formulas; `mistake` names what is wrong."""
    s, p = x.step, problem.params
    before = fused.windows(x)
    before = before.flip(1) if mistake == "order" else before
    out, states, activation = torch.zeros_like(x.gate), [], fused.norm(problem, x).activation
    if mistake == "activation":
        activation = "sigmoid" if activation == "silu" else "silu"
    for n in range(p["B"]):
        state = s.state[int(s.slots[n])].double()
        state = state if delta.v_first(problem) else state.mT
        flat = x.mixed[n]
        if fused.has_conv(problem) and mistake != "no convolution":
            flat = convolved(before[n], flat, x.weight).bfloat16()
        o, state = decoded(state, flat, s.g[n], s.beta[n], s.A_log, s.dt_bias, p["H"])
        weight = torch.ones_like(x.norm_weight) if mistake == "weight" else x.norm_weight
        out[n] = gated(o, x.gate[n], weight, activation)
        states.append(state if delta.v_first(problem) else state.mT)
    kept = torch.cat((fused.windows(x), x.mixed), 1)[:, -3:] if fused.has_conv(problem) else None
    if mistake == "kept":
        kept = fused.windows(x)
    return Result(out, torch.stack(states).to(s.state.dtype), kept)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = fused.check_task(naive, problem, "cpu")
    assert set(errors) == {"output", "state"}
    assert errors["state"] < fused.STATE_LIMIT[delta.DTYPES[problem.params["state"]]] / 2


@pytest.mark.parametrize(
    "mistake", ["no convolution", "order", "activation", "weight", "kept", "touched", "nan"]
)
def test_check_refuses_a_mistake(small, mistake):
    def run(problem, x):
        result = naive(problem, x, mistake=mistake)
        if mistake == "touched":
            x.ring[0] += 1
        if mistake == "nan":
            result.out[1, 0, 2, 5] = float("nan")
        return result

    reason = {"kept": "not kept", "touched": "no sequence owns", "nan": "not finite"}
    with pytest.raises(CheckFailed, match=reason.get(mistake, "relative RMSE")):
        fused.check_task(run, MAIN, "cpu")


def test_the_oracle_without_rounding_is_the_reference_with_a_convolution(small):
    from cula_core.reference.decode_fused import ShortConvolution, fused_decode

    x = fused.make_inputs(MAIN, "cpu", 3, spare=1)
    s, state = x.step, x.step.state.double()
    out, states = fused.oracle(MAIN, x, [0, 1, 2, 3, 4], conv=True, rounded=False)
    norm = fused.norm(MAIN, x)
    want = fused_decode(
        s.q.double(), s.k.double(), s.v.double(), s.g.double(), s.beta.double(), state, state_indices=s.slots,
        convolution=ShortConvolution(x.ring.double(), x.positions, x.weight.double()),
        norm=norm._replace(gate=x.gate.double(), weight=x.norm_weight.double()),
        A_log=s.A_log.double(), dt_bias=s.dt_bias.double(), gates=fused.Gates(), state_v_first=True,
    )  # fmt: skip
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-14)
    assert torch.allclose(states, state[s.slots.long()], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_ours_and_the_ceiling_pass_their_checks_on_the_cpu(small, problem):
    assert providers.check(providers.CULA, problem, "cpu")["output"] < fused.OUTPUT_LIMIT
    assert providers.check(providers.CEILING, problem, "cpu") == {}


def test_what_is_timed_is_the_call_that_was_checked(small):
    x, y = (fused.make_inputs(MAIN, "cpu", 3) for _ in range(2))
    got = providers.CULA.bind(MAIN, x)()
    want = naive(MAIN, y)
    assert (got.double() - want.out.double()).norm() < 5e-3 * want.out.double().norm()
    assert torch.equal(fused.windows(x, 1), want.kept)


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("gate", delta.GATES)
def test_a_call_of_ours_is_one_launch_of_a_kernel_with_both(gate, conv):
    chosen = setting(gate, 1, heads=1, heads_v=1, conv=conv)
    x = fused.make_inputs(chosen, "cpu", 0)
    problem, arguments = internals.launched(providers.CULA.bind(chosen, x))
    assert problem.illegal() is None and problem.fused.norm == fused.ACTIVATIONS[gate]
    assert bool(problem.fused.convolution) is conv
    assert arguments.state.data_ptr() == x.step.state.data_ptr()


def test_slots_leave_zero_to_padding_and_views_share_memory(small):
    x = fused.make_inputs(MAIN, "cpu", 0)
    assert sorted(x.step.slots.tolist()) == [1, 2, 3, 4, 5]
    assert len(x.step.state) == len(x.ring) == 6 and x.ring.shape[1:] == (4, (2 + 2 + 4) * 16)
    x.mixed.zero_()
    assert not x.step.q.any() and not x.step.k.any() and not x.step.v.any()
    again, other = (fused.make_inputs(MAIN, "cpu", seed) for seed in (0, 1))
    assert torch.equal(again.gate, x.gate) and not torch.equal(other.gate, x.gate)


# ---- stand-ins for the peers -----------------------------------------------------------------------------------------


@pytest.fixture
def fla(peers, monkeypatch):
    """FLA's functions in fp64, and a record of what they were called with."""
    seen = types.SimpleNamespace(convolutions=[], dense=[], tuned=[])

    def update(x, cache, weight, activation):
        assert activation == "silu" and x.dim() == 3 and x.shape[1] == 1
        assert cache.is_contiguous() and weight.is_contiguous() and cache.shape[1:] == weight.shape
        seen.convolutions.append(x.shape[2])
        new = torch.cat((cache[..., 1:], x[:, 0, :, None]), 2)
        cache.copy_(new)
        rows = [convolved(c[:, :3].T, c[:, 3:].T, weight) for c in new]
        return torch.stack(rows).to(x.dtype), cache

    def norm(o, gate, weight, bias, activation, eps):
        assert bias is None and eps == 1e-5
        return gated(o.double(), gate, weight, activation).to(o.dtype)

    def rows(q, k, v, g, beta, states, options):
        seen.dense.append(all(t.is_contiguous() for t in (q, k, v)))
        flat = torch.cat([t.flatten(2) for t in (q, k, v)], 2)
        out, found = torch.empty_like(v), []
        for n, state in enumerate(states.double()):
            state = state if options["state_v_first"] else state.mT
            given = (g[n], beta[n], options["A_log"], options["dt_bias"], q.shape[2])
            out[n], state = decoded(state, flat[n], *given)
            found.append(state if options["state_v_first"] else state.mT)
        return out, torch.stack(found)

    def gdn(q, k, v, g, *, beta, initial_state, **options):
        out, final = rows(q, k, v, g, beta, initial_state, options)
        return out, final.float()

    def kda(q, k, v, g, beta, *, initial_state, ssm_state_indices, out, **options):
        at = ssm_state_indices.long()
        result, final = rows(q, k, v, g, beta, initial_state[at], options)
        initial_state[at] = final.to(initial_state.dtype)
        return out.copy_(result), None

    ops = types.SimpleNamespace(causal_conv1d_update_kernel="update")
    gate = types.SimpleNamespace(rms_norm_gated=norm, layer_norm_gated_fwd_kernel="norm")
    peers.module("fla.modules.causal_conv1d", causal_conv1d_update=update, ops=ops)
    peers.module("fla.modules.norm", fused_norm_gate=gate)
    peers.module("fla.modules.norm.fused_norm_gate", rms_norm_gated=norm)
    peers.module("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=gdn)
    peers.module("fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=kda)
    monkeypatch.setattr(providers.tuning, "tune_anew", seen.tuned.append)
    monkeypatch.setattr(providers, "_fla_missing", lambda: None)
    providers._tuned.cache_clear()
    return seen


@pytest.fixture
def engines(peers, monkeypatch):
    """The functions of vllm_decode in fp64, as they are documented there."""
    seen = types.SimpleNamespace(mistake=None)

    def gdn(
        mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate,
        norm_weight, out=None, scale=None, norm_eps=None, output_gate_activation=None,
    ):  # fmt: skip
        assert scale == 16**-0.5 and norm_eps == 1e-5
        if seen.mistake == "raises":
            raise RuntimeError("expected\n  CUDA tensors")
        out = torch.empty_like(output_gate) if out is None else out
        ends, dim = cu_seqlens.tolist(), state.shape[2]
        assert ends[0] == 0 and ends[-1] == len(mixed_qkv)
        heads = (mixed_qkv.shape[1] // dim - state.shape[1]) // 2
        for n, slots in enumerate(state_indices.tolist()):
            begin, end = ends[n : n + 2]
            source = slots[int(num_accepted_tokens[n]) - 1]
            assert source > 0
            old = state[source].double()
            for t in range(end - begin):
                at = slice(begin, begin + t + 1)
                o, new = decoded(old, mixed_qkv[at], a[at], b[at], A_log, dt_bias, heads)
                o = o[-1].bfloat16().double()
                out[begin + t] = gated(
                    o, output_gate[begin + t], norm_weight, output_gate_activation
                )
                if slots[t] > 0 and seen.mistake != "stale":
                    state[slots[t]] = new.to(state.dtype)
        return out

    def kda_rows(mixed, a, b, conv, weights, A_log, dt_bias, slots, state, gate, weight, out):
        """conv [slots,3,C], weights [C,4]; all that has a row per token is [B,...]."""
        heads = state.shape[1]
        for n, slot in enumerate(slots.tolist()):
            assert slot > 0
            flat = convolved(conv[slot], mixed[n : n + 1], weights)
            conv[slot] = torch.cat((conv[slot], mixed[n : n + 1]))[1:]
            given = (a[n : n + 1], b[n : n + 1], A_log, dt_bias, heads)
            o, new = decoded(state[slot].double(), flat, *given)
            state[slot] = new.to(state.dtype)
            out[n] = gated(o[0], gate[n], weight, "sigmoid")

    def kda(
        x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out=None, lower_bound=None,
        output_gate=None, norm_weight=None, norm_eps=1e-5,
    ):  # fmt: skip
        channels = x.shape[1]
        assert bias is None and lower_bound is None and norm_eps == 1e-5
        assert weight.dtype == norm_weight.dtype == torch.float32 and weight.is_contiguous()
        assert conv_state.stride()[1:] == (1, channels) and raw_g.is_contiguous()
        assert raw_g.shape[:2] == raw_beta.shape[:2] == (1, len(x)) and raw_beta.is_contiguous()
        out = torch.empty(1, *output_gate.shape, dtype=x.dtype) if out is None else out
        taps = torch.cat([part.T for part in weight])
        kda_rows(
            x, raw_g[0], raw_beta[0], conv_state.mT, taps, A_log, dt_bias, state_indices, state, output_gate,
            norm_weight, out[0],
        )  # fmt: skip
        return out

    def sgl(
        mixed_qkv, a, b, conv_states, w_q_t, w_k_t, w_v_t, conv_bias, A_log, dt_bias, onorm_g, onorm_weight,
        ssm_states, cache_indices, scale, onorm_eps, lower_bound=None, out=None,
    ):  # fmt: skip
        batch, heads, dim = len(mixed_qkv), *ssm_states.shape[1:3]
        assert scale == 16**-0.5 and onorm_eps == 1e-5 and lower_bound is None
        assert a.shape == onorm_g.shape == (batch, heads * dim) and b.shape == (batch, heads)
        assert not conv_bias.any() and conv_bias.shape == (3 * heads * dim,)
        out = torch.empty(batch, heads * dim, dtype=mixed_qkv.dtype) if out is None else out
        assert out.shape == (batch, heads * dim)
        taps = torch.cat([part.T for part in (w_q_t, w_k_t, w_v_t)])
        kda_rows(
            mixed_qkv, a, b, conv_states, taps, A_log, dt_bias, cache_indices, ssm_states,
            onorm_g.unflatten(1, (heads, dim)), onorm_weight, out.view(batch, heads, dim),
        )  # fmt: skip
        return out.view(1, batch, heads, dim)

    peers.module("vllm_decode", gdn_decode_post_conv_mtp=gdn, kda_decode=kda, sgl_kda_decode=sgl)
    monkeypatch.setattr(providers, "_vllm_decode_missing", lambda: None)
    return seen


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_every_peer_passes_its_check_where_it_serves(small, fla, engines, problem):
    found = {
        p.name: providers.check(p, problem, "cpu")
        for p in providers.PROVIDERS
        if p.role in ("peer", "variant") and p.supports(problem) is None
    }
    chains = {"cula_chain", "fla_chain"} if problem.params["T"] == 1 else set()
    kernels = {"vllm", "sglang"} if problem.params["gate"] == "kda" else {"vllm_after_conv"}
    kernels = kernels if problem.params["layout"] == "vk" else set()
    assert set(found) == chains | kernels
    assert all(errors["output"] < 5e-3 for errors in found.values())
    if chains and problem.params["gate"] == "kda":
        assert found["vllm"]["state"] < 1e-5


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_what_is_timed_of_a_peer_gives_the_outputs_too(small, fla, engines, problem):
    """Calls write to memory of their own, and the states of row n are those of slot n + 1 where there are no slots."""
    for p in providers.PROVIDERS:
        if p.role not in ("peer", "variant") or p.supports(problem) is not None:
            continue
        x = fused.make_inputs(problem, "cpu", 7)
        x.step.slots = torch.arange(1, problem.params["B"] + 1, dtype=torch.int32)
        conv = fused.has_conv(problem) and p.name != "vllm_after_conv"
        rows = list(range(problem.params["B"]))
        want, _ = fused.oracle(problem, x, rows, conv, rounded=False)
        got = p.bind(problem, x)()
        got = got[0] if isinstance(got, tuple) else got
        error = (got.double().view(want.shape) - want).norm() / want.norm()
        assert error < 6e-3, p.name


def test_fla_gets_dense_tokens_and_no_more_convolutions_than_that_needs(small, fla, engines):
    for problem, groups in ((PROBLEMS[1], [128]), (MAIN, [32, 32, 64]), (PROBLEMS[3], [])):
        fla.convolutions.clear()
        fla.dense.clear()
        providers.FLA_CHAIN.bind(problem, fused.make_inputs(problem, "cpu", 0))()
        assert fla.convolutions == groups and fla.dense == [True]
    fla.convolutions.clear()
    providers.OURS_IN_CHAIN.bind(MAIN, fused.make_inputs(MAIN, "cpu", 0))()
    assert fla.convolutions == [128]


def test_kernels_of_fla_are_tuned_once_for_a_setting(fla):
    for problem in (MAIN, KDA):
        for provider in (providers.OURS_IN_CHAIN, providers.FLA_CHAIN):
            provider.prepare(problem)
    assert fla.tuned == ["update", "norm"] * 2


def test_an_engine_that_fails_or_is_wrong_is_left_out_with_the_reason(small, engines):
    engines.mistake = "raises"
    with pytest.raises(CannotRun, match="fails: RuntimeError: expected CUDA tensors"):
        providers.check(providers.VLLM_AFTER_CONV, MAIN, "cpu")
    engines.mistake = "stale"
    with pytest.raises(CannotRun, match="its result is wrong: gdn-B5.*of the state"):
        providers.check(providers.VLLM_AFTER_CONV, MAIN, "cpu")


def test_a_chain_that_is_wrong_stops_the_run(small, fla, monkeypatch):
    made = providers._parts

    def swapped(problem, x, one):
        parts = made(problem, x, one)
        return parts._replace(behind=lambda o: o)

    monkeypatch.setattr(providers, "_parts", swapped)
    with pytest.raises(CheckFailed, match="of the output"):
        providers.check(providers.OURS_IN_CHAIN, MAIN, "cpu")


def test_peers_say_what_they_do_not_do(fla, engines):
    assert "KDA" in providers.VLLM.supports(MAIN) and "KDA" in providers.SGLANG.supports(MAIN)
    assert "GDN" in providers.VLLM_AFTER_CONV.supports(KDA)
    assert "[V, K]" in providers.VLLM_AFTER_CONV.supports(PROBLEMS[5])
    alone, four = setting("kda", 3, conv=False), setting("kda", 3, 4)
    assert "has the convolution" in providers.VLLM.supports(alone)
    assert "one token" in providers.SGLANG.supports(four)
    for chain in (providers.OURS_IN_CHAIN, providers.FLA_CHAIN):
        assert "one token" in chain.supports(PROBLEMS[2])


# ---- bytes and settings ----------------------------------------------------------------------------------------------


def test_bytes_of_a_launch_are_counted():
    """B=8 with both: states of 2 MB twice a row, a gate of 8 KB, and 3 inputs read and one written of 8192 channels."""
    problem, alone = setting("gdn", 8), setting("gdn", 8, conv=False)
    norm = 8 * 32 * 128 * 2 + 512
    conv = 8192 * 4 * 2 + 8 * 8192 * 2 * 4 + 8 * 4
    assert fused.moved(alone) == delta.moved("write", alone) + norm
    assert providers.CULA.moved(problem) == fused.moved(alone) + conv
    assert providers.VLLM_AFTER_CONV.moved(problem) == fused.moved(alone)
    between = 2 * 8 * 2 * (8192 + 4096)
    assert providers.OURS_IN_CHAIN.moved(problem) == fused.moved(problem) + between
    assert providers.FLA_CHAIN.moved(alone) == fused.moved(alone) + 2 * 8 * 2 * 4096
    rounded = setting("gdn", 8, state="bf16")
    more = providers.FLA_CHAIN.moved(rounded) - providers.OURS_IN_CHAIN.moved(rounded)
    assert more == 8 * 32 * 128 * 128 * 2
    assert providers.CEILING.moved(problem) == 2 * 8 * 32 * 128 * 128 * 4


def test_settings_are_those_that_were_asked_for():
    chosen = registry.get("delta_decode_fused")
    full = chosen.settings(False)
    assert chosen is delta_decode_fused.OP and len({s.name for s in full}) == len(full) == 22
    by_kind = {}
    for s in full:
        key = tuple(s.params[k] for k in ("gate", "T", "state", "layout", "conv"))
        by_kind.setdefault(key, []).append(s.params["B"])
        assert s.params["mode"] == "write" and s.params["HV"] == 32
        assert s.params["H"] == (16 if s.params["gate"] == "gdn" else 32)
    assert by_kind == {
        ("gdn", 1, "fp32", "vk", True): [1, 4, 8, 16],
        ("kda", 1, "fp32", "vk", True): [1, 4, 8, 16],
        ("gdn", 4, "fp32", "vk", True): [1, 4, 16],
        ("gdn", 1, "fp32", "vk", False): [1, 4, 16],
        ("gdn", 1, "bf16", "vk", True): [1, 4, 8, 16],
        ("gdn", 1, "fp32", "kv", True): [1, 4, 8, 16],
    }
    assert {s.name for s in chosen.settings(True)} < {s.name for s in full}


@pytest.mark.parametrize("chosen", delta_decode_fused.settings(False), ids=lambda s: s.name)
def test_every_setting_fits_the_card(chosen):
    # Another slot, the rings, and the states that FLA returns.
    kept = 4 * delta.state_bytes(chosen, "fp32") + 2 * delta.state_bytes(chosen)
    assert_fits_the_h200(delta.set_bytes(chosen), kept)
