"""The benchmark beside the gated delta rule: oracle, checks, what peers are given; on the CPU with stand-ins."""

import dataclasses
import math
import types

import pytest
import torch

from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops import sequences
from benchmarks.ops.checks import relative_rmse, worst_head
from benchmarks.ops.lightning import delta, delta_providers
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning import providers as lightning_providers
from benchmarks.ops.lightning.delta import setting
from benchmarks.ops.lightning.delta_providers import FLA_DELTA, FLASHINFER_DELTA, PROVIDERS
from benchmarks.ops.lightning.lightning_prefill_delta import NOTES, OP
from benchmarks.tests.ops.common import assert_fits_the_h200, token_by_token

BY_NAME = {p.name: p for p in PROVIDERS}
PEERS = [p for p in PROVIDERS if p.role == "peer"]
ALL = OP.settings(False)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(lightning, "DIM", 16)
    monkeypatch.setattr(lightning, "ORACLE_CHUNK", 32)


def naive(problem, x, *, gate=True, beta=None, erase=True, **mistake):
    """The delta rule token by token in fp64; without `erase` it is simple GLA."""
    y = x.gated if gate else x.decayed

    def step(b, t, h, start, s):
        q, k, v = (z[b, t, h].double() for z in (y.q, y.k, y.v))
        s = s * math.exp(float(y.gate[b, t, h]) if gate else -float(y.decay[h]))
        weight = 1.0 if beta is None else float(beta[b, t, h])
        s = s + weight * torch.outer(k, v - s.T @ k if erase else v)
        return s, (q @ s) * v.shape[0] ** -0.5

    return token_by_token(problem, y, step, **mistake)


CHECKED = [
    setting(100, heads=4),
    setting(70, batch=2, heads=4),
    setting(150, heads=4, sequences=3, lengths="skewed"),
]
COMPUTED = {
    "cula": {"erase": False},
    "cula_decay": {"gate": False, "erase": False},
    "flashinfer_decay": {"gate": False},
    "flashinfer_gate": {},
    "flashinfer_delta": {"beta": True},
    "fla_delta": {"beta": True},
}


def computed(name, problem, x, **mistake):
    """What a provider computes, token by token."""
    options = dict(COMPUTED[name])
    if options.pop("beta", False):
        options["beta"] = x.beta
    return naive(problem, x, **options | mistake)


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
@pytest.mark.parametrize("name", COMPUTED)
def test_the_oracle_of_a_provider_is_its_recurrence(small, problem, name):
    x, heads = delta.make_inputs(problem, "cpu", 1), [0, 1, 3]
    output, state = delta_providers._ORACLES[name](problem, x, heads)
    o, final = computed(name, problem, x)
    assert worst_head(o[:, :, heads], output, 2) < 3e-3  # o is rounded to 16 bits
    assert worst_head(final[:, heads], state, 1) < 1e-6


@pytest.fixture
def given():
    """The keyword arguments of every call of a peer."""
    return []


@pytest.fixture
def stand_ins(peers, monkeypatch, given):
    """FlashInfer and FLA, which compute what they are given token by token; FlashInfer cuts one sequence."""

    def rule(q, k, v, gate, beta):
        x = types.SimpleNamespace(q=q, k=k, v=v, gate=gate, state=None, indices=None)
        pair = types.SimpleNamespace(gated=x)
        return lambda problem: naive(problem, pair, beta=beta)

    def problem_of(ends):
        """Packed sequences of these lengths, as the loops of the tests take them."""
        monkeypatch.setattr(
            "benchmarks.tests.ops.common.spans",
            lambda problem: [(0, a, b) for a, b in zip(ends, ends[1:])],
        )

    def flashinfer(q, k, v, *, g, beta, cu_seqlens, output, output_state, **options):
        given.append({"g": g, "beta": beta, "cu_seqlens": cu_seqlens, **options})
        ends = cu_seqlens.tolist()
        problem_of(ends)
        if len(ends) == 2:
            gdn.cp_delta_rule_dsl_sm90()
        batch = [t[None] for t in (q, k, v)]
        o, final = rule(*batch, g.log()[None], None if beta is None else beta[None])(None)
        output.copy_(o[0])
        output_state.copy_(final.mT)
        return output, output_state

    def fla(q, k, v, *, g, beta, output_final_state, **options):
        given.append({"g": g, "beta": beta, **options})
        rows, length = q.shape[:2]
        packed = options.get("cu_seqlens")
        if packed is None:
            monkeypatch.setattr(
                "benchmarks.tests.ops.common.spans",
                lambda problem: [(b, 0, length) for b in range(rows)],
            )
        else:
            problem_of(packed.tolist())
        return rule(q, k, v, g, beta)(None)

    gdn = peers.module(
        "flashinfer.gdn_prefill",
        chunk_gated_delta_rule=flashinfer,
        cp_delta_rule_dsl_sm90=lambda: None,
    )
    peers.module("flashinfer", gdn_prefill=gdn)
    names = ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", "recompute_w_u_fwd_kernel")
    chunk_fwd, wy_fast = (peers.kernels(name) for name in names)
    peers.module(
        "fla.ops.gated_delta_rule",
        chunk_gated_delta_rule=fla,
        chunk_fwd=chunk_fwd,
        wy_fast=wy_fast,
    )
    states = peers.kernels("chunk_gated_delta_rule_fwd_kernel_h_blockdim64")
    outputs = peers.kernels("chunk_fwd_kernel_o")
    peers.module("fla.ops.common", chunk_delta_h=states, chunk_o=outputs)
    peers.module("fla.ops.utils", cumsum=peers.kernels("chunk_local_cumsum_scalar_kernel"))
    for name in ("_flashinfer_missing", "_fla_missing"):
        monkeypatch.setattr(delta_providers, name, lambda: None)
    monkeypatch.setattr(delta_providers, "_cuts", 0)
    return types.SimpleNamespace(gdn=gdn, peers=peers)


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
def test_everyone_passes_the_check_and_is_timed_as_checked(small, stand_ins, problem, provider):
    assert provider.supports(problem) is None
    provider.prepare(problem)
    errors = delta_providers.check(provider, problem, "cpu")
    assert errors["output"] < 4e-3 and errors["state"] < lightning.STATE_LIMIT
    x = delta.make_inputs(problem, "cpu", 3)
    o, state = provider.bind(problem, x)()
    if provider.name.startswith("flashinfer"):
        state = state.mT
        assert errors["cut"] == (sequences.sequences_of(problem) == 1)
    else:
        assert "cut" not in errors
    output, final = delta_providers._ORACLES[provider.name](problem, x, [0, 1, 2, 3])
    assert worst_head(o, output, 2) < 4e-3 and worst_head(state, final, 1) < lightning.STATE_LIMIT


@pytest.mark.parametrize(
    "mistake",
    [{"erase": False}, {"beta": None}, {"gate": False}, {"transpose": True}, {"whole": True}],
    ids=str,
)
def test_the_check_refuses_another_recurrence(small, monkeypatch, mistake):
    monkeypatch.setitem(
        delta_providers._RESULTS,
        "fla_delta",
        lambda problem, x: computed("fla_delta", problem, x, **mistake),
    )
    with pytest.raises(CheckFailed, match="relative RMSE"):
        delta_providers.check(FLA_DELTA, CHECKED[2], "cpu")


@pytest.mark.parametrize("part", [0, 1])
def test_what_flashinfer_does_not_write_is_found(small, stand_ins, part):
    """Its outputs and states are memory that the benchmark makes, and hold NaN before a check."""
    right = stand_ins.gdn.chunk_gated_delta_rule
    unwritten = ("output", "output_state")[part]

    def partly(*args, **options):
        right(*args, **options | {unwritten: torch.empty_like(options[unwritten])})

    stand_ins.gdn.chunk_gated_delta_rule = partly
    with pytest.raises(CheckFailed, match="not finite"):
        delta_providers.check(FLASHINFER_DELTA, CHECKED[0], "cpu")


def test_flashinfer_gets_packed_sequences_and_memory_that_a_call_keeps(small, stand_ins, given):
    problem = CHECKED[1]
    x = delta.make_inputs(problem, "cpu", 0)
    calls = {p.name: p.bind(problem, x) for p in PEERS[:3]}
    for call in calls.values():
        (o, state), (again, states) = call(), call()
        assert o is again and state is states and o.shape == x.gated.v.shape
    decay, gate, both = given[::2]
    for call in (decay, gate, both):
        assert call["cu_seqlens"].tolist() == [0, 70, 140]
        assert call["cu_seqlens"].dtype == torch.int64 and call["use_cp"] == "auto"
        assert call["g"].shape == (140, 4) and call["g"].is_contiguous()
        assert call["output_final_state"] is True
    assert decay["beta"] is gate["beta"] is None
    assert torch.equal(both["beta"].view(2, 70, 4), x.beta)
    assert torch.equal(both["g"], gate["g"])
    assert torch.equal(gate["g"].view(2, 70, 4), x.gated.gate.exp())
    assert torch.equal(decay["g"][17], (-x.decayed.decay).exp())


def test_fla_gets_its_plan_from_the_host(small, stand_ins, given):
    dense, packed = (delta.make_inputs(p, "cpu", 0) for p in CHECKED[1:])
    FLA_DELTA.bind(CHECKED[1], dense)()
    FLA_DELTA.bind(CHECKED[2], packed)()
    assert "cu_seqlens" not in given[0]
    assert given[1]["cu_seqlens"] is packed.gated.offsets.int64
    assert given[1]["cu_seqlens_cpu"] is packed.gated.offsets.host
    assert given[0]["g"] is dense.gated.gate and given[0]["beta"] is dense.beta


def test_fla_is_tuned_anew_and_cuts_are_counted_once(small, stand_ins):
    FLA_DELTA.prepare(CHECKED[0])
    assert len(stand_ins.peers.tuners) == 5
    assert all(not tuner.cache and not tuner.cache_results for tuner in stand_ins.peers.tuners)
    FLASHINFER_DELTA.prepare(CHECKED[0])
    counted = stand_ins.gdn.cp_delta_rule_dsl_sm90
    FLASHINFER_DELTA.prepare(CHECKED[0])
    assert stand_ins.gdn.cp_delta_rule_dsl_sm90 is counted
    assert delta_providers.check(FLASHINFER_DELTA, CHECKED[0], "cpu")["cut"] == 1.0
    assert delta_providers.check(FLASHINFER_DELTA, CHECKED[1], "cpu")["cut"] == 0.0
    stand_ins.gdn.cp_delta_rule_dsl_sm90 = None
    FLASHINFER_DELTA.prepare(CHECKED[0])
    assert stand_ins.gdn.cp_delta_rule_dsl_sm90 is None


def test_flashinfer_says_what_it_needs(card, monkeypatch):
    card(8, 9)
    assert "compute capability 9.0" in FLASHINFER_DELTA.supports(CHECKED[0])
    card(9, 0)
    monkeypatch.setattr(delta_providers, "_flashinfer_missing", lambda: "not here")
    assert FLASHINFER_DELTA.supports(CHECKED[0]) == "not here"


def test_inputs_are_those_of_the_models_with_keys_of_norm_one():
    problem = setting(300, heads=8)
    x = delta.make_inputs(problem, "cpu", 5)
    assert x.gated.q is x.decayed.q and x.gated.k is x.decayed.k and x.gated.v is x.decayed.v
    norms = x.gated.k.float().norm(dim=-1)
    assert norms.min() > 0.99 and norms.max() < 1.01
    assert torch.equal(x.decayed.decay, lightning.decays(8, "cpu"))
    assert x.gated.gate.max() < 0 and 0 < x.beta.min() and x.beta.max() < 1
    assert float(x.beta.mean()) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(x.kept_gate.log().sign(), x.gated.gate.sign())
    assert not torch.equal(x.gated.q, delta.make_inputs(problem, "cpu", 6).gated.q)


def rounded_like_flashinfer(x, y, beta):
    """The output and state of head 0 of one sequence, in fp32 with that kernel's roundings to 16 bits."""

    def bf16(t):
        return t.bfloat16().float()

    log_decay = y.gate[0, :, 0] if y.gate is not None else -y.decay[0].expand(y.q.shape[1])
    weight = torch.ones_like(log_decay) if beta is None else beta[0, :, 0]
    tensors = [*(t[0, :, 0].float() for t in (y.q, y.k, y.v)), log_decay, weight]
    state, scale, outputs = torch.zeros(128, 128), 128**-0.5, []
    for q, k, v, g, b in zip(*(t.split(64) for t in tensors)):
        since = g.cumsum(0)
        between = (since[:, None] - since).exp().tril()
        system = torch.eye(len(q)) + (b[:, None] * (k @ k.T) * between).tril(-1).half()
        inverse = bf16(torch.linalg.inv(system).half().float() * b)
        fade = since.exp()[:, None]
        new = bf16(inverse @ bf16(v - bf16(fade * (k @ bf16(state)))))
        scores = bf16(scale * (q @ k.T) * between)
        outputs.append(bf16(scale * fade * (q @ bf16(state)) + scores @ new))
        state = fade[-1] * state + k.T @ bf16((since[-1] - since).exp()[:, None] * new)
    return torch.cat(outputs), state


@pytest.mark.parametrize("name", ["flashinfer_decay", "flashinfer_gate", "flashinfer_delta"])
def test_limits_are_what_the_roundings_lose_and_half_as_much_again(name):
    problem = setting(2048, heads=1)
    x = delta.make_inputs(problem, "cpu", 0)
    y = x.decayed if name == "flashinfer_decay" else x.gated
    beta = x.beta if name == "flashinfer_delta" else None
    output, state = delta.delta_oracle(problem, y, beta, [0])
    o, final = rounded_like_flashinfer(x, y, beta)
    errors = {
        "output": relative_rmse(o, output[0, :, 0]),
        "state": relative_rmse(final, state[0, 0]),
    }
    for part, limit in delta_providers.limits(BY_NAME[name]).items():
        assert limit / 2 < errors[part] < limit / 1.25


def test_the_settings_are_the_28():
    assert len(ALL) == len({s.name for s in ALL}) == 28
    assert [s.name for s in ALL] == [lightning.setting(**z).name for z in sequences.main_sizes()]
    assert {s.name for s in OP.settings(True)} < {s.name for s in ALL}
    assert [p.name for p in OP.providers if p.role == "ours"] == ["cula"]


def test_bytes_are_counted_for_what_a_provider_takes():
    problem = registry.select(ALL, ["N10-T8192-random-H64"])[0]
    gates, plain = 4 * 8192 * 64, lightning.setting(8192, sequences=10, lengths="random")
    moved = {p.name: p.moved(problem) for p in PROVIDERS}
    assert moved["cula_decay"] == lightning.moved(plain)
    assert moved["cula"] == moved["flashinfer_gate"] == moved["flashinfer_decay"]
    assert moved["cula"] == moved["cula_decay"] - 4 * 64 + gates
    assert moved["flashinfer_delta"] == moved["fla_delta"] == moved["cula"] + gates
    assert OP.floor_bytes(problem) == moved["cula"]


@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.name)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    # Inputs with gates, three outputs that FlashInfer is given, and results kept by two graphs of three others.
    assert_fits_the_h200(delta.read(problem), 6 * BY_NAME["fla_delta"].moved(problem))


def test_notes_say_what_the_peers_do_more():
    text = " ".join(NOTES)
    assert "strictly more arithmetic" in text
    assert "gated_prefill has cula's gated delta rule" in text
    assert "use_cp='auto'" in text


def test_a_run_checks_everyone_and_yields_rows(small, stand_ins, measured):
    costs = {p.name: 10.0 * (n + 1) for n, p in enumerate(PROVIDERS)}
    result = measured(OP, lambda name, problem: costs[name], CHECKED[:2])
    results.validate(result)
    assert len(result["rows"]) == 2 * 6 and not result["skipped"]
    ours = results.rows_of(result, provider="cula", setting=CHECKED[0].name)[0]
    assert (ours["ratio_flashinfer_gate"], ours["ratio_fla_delta"]) == (4.0, 6.0)
    cuts = {c["setting"]: c["errors"]["cut"] for c in result["checks"] if "cut" in c["errors"]}
    assert cuts == {CHECKED[0].name: 1.0, CHECKED[1].name: 0.0}


def test_dropped_gates_do_not_pass_for_ours(small, monkeypatch):
    def forgetful(problem, x):
        ungated = dataclasses.replace(x.gated, gate=torch.zeros_like(x.gated.gate))
        return lightning_providers.result(problem, ungated)

    monkeypatch.setitem(delta_providers._RESULTS, "cula", forgetful)
    with pytest.raises(CheckFailed, match="of the output"):
        delta_providers.check(BY_NAME["cula"], CHECKED[0], "cpu")
