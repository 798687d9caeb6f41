"""Decode of the delta rule: its oracle, checks, byte counts and settings; on the CPU with few heads of 64."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import registry
from benchmarks.harness.registry import CannotRun, CheckFailed
from benchmarks.ops import checks
from benchmarks.ops.delta import delta_decode, delta_decode_80sm, flashinfer_calls, internals
from benchmarks.ops.delta import delta_decode_variants as variants
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta import providers as delta_providers
from benchmarks.ops.delta.problem import setting
from benchmarks.tests.ops.common import assert_fits_the_h200

ALL = [*delta_decode.settings(False), *delta_decode_80sm.settings(False)]
SMALL = {"heads": 2, "heads_v": 4}
WAYS = {"cula_write": "write", "cula_commit": "commit", "cula_slots": "slots"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(delta, "DIM", 16)


def tokens_of(x, n, h, t):
    """The decays of K, the strength, and the normalised q and k of a token, in fp64."""
    head = h // (x.v.shape[2] // x.q.shape[2])
    q, k = (y[n, t, head].double() for y in (x.q, x.k))
    q, k = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, k))
    bias = x.dt_bias.view(x.v.shape[2], -1)[h].double()
    raw = x.g[n, t, h].double() + bias
    decay = torch.exp(-math.exp(float(x.A_log[h])) * torch.log1p(torch.exp(raw)))
    return decay.view(-1, 1), torch.sigmoid(x.beta[n, t, h].double()), q, k


def naive(problem, x, *, count=None, fade=True, transpose=False):
    """Outputs, and the states [K, V] after every token, by row, head and token, in fp64; the flags plant a mistake.

    count: of how many tokens of a row there are, None: all of them.
    """
    first = delta.v_first(problem) != transpose
    out, states = torch.zeros_like(x.v), {}
    for n in range(len(x.q)):
        for h in range(x.v.shape[2]):
            pool, slot = x.state, int(x.slots[n])
            if problem.params["mode"] == "slots":
                pool, slot = x.token_pool, int(x.table[n, int(x.accepted[n]) - 1])
            s = pool[slot, h].double()
            s = s.T if first else s
            for t in range(x.q.shape[1] if count is None else count(n)):
                decay, strength, q, k = tokens_of(x, n, h, t)
                s = s * (decay if fade else 1.0)
                s = s + torch.outer(k, strength * (x.v[n, t, h].double() - s.T @ k))
                out[n, t, h] = (s.T @ q) * x.q.shape[-1] ** -0.5
                states[n, h, t] = s.T if first else s
            states[n, h, None] = s.T if first else s
    return out, states


def by_row(states, x, *steps):
    """The states after some tokens, None the last, by row and step."""
    heads = range(x.v.shape[2])
    found = [torch.stack([states[n, h, t] for h in heads]) for n in range(len(x.q)) for t in steps]
    return torch.stack(found).to(x.state.dtype)


def written(problem, x, **mistakes):
    out, states = naive(problem, x, **mistakes)
    return out, by_row(states, x, None)


CHECKED = [
    setting("gdn", 3, **SMALL),
    setting("gdn", 3, layout="kv", **SMALL),
    setting("kda", 3, 4, heads_v=3),
    setting("kda", 3, 2, "bf16", "kv", heads_v=3),
]


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = delta.check_task("write", written, problem, "cpu")
    assert errors["output"] < delta.OUTPUT_LIMIT / 2
    assert set(errors) == {"output", "state"}


def test_check_accepts_states_of_single_tokens(small):
    problem = setting("kda", 3, 3, mode="slots", heads_v=3)

    def run(p, x):
        out, states = naive(p, x)
        return out, by_row(states, x, 0, 1, 2)

    assert set(delta.check_task("slots", run, problem, "cpu")) == {"output", "state"}


def test_a_commit_advances_the_states_by_the_accepted_tokens(small):
    problem = setting("gdn", 4, 3, mode="step", **SMALL)

    def run(p, x):
        _, states = naive(p, x, count=lambda n: int(x.accepted[n]))
        return naive(p, x)[0], by_row(states, x, None)

    assert set(delta.check_task("commit", run, problem, "cpu")) == {"output", "state"}


@pytest.mark.parametrize("mistake", [{"fade": False}, {"transpose": True}], ids=str)
def test_check_refuses_a_wrong_implementation(small, mistake):
    with pytest.raises(CheckFailed, match="relative RMSE"):
        delta.check_task("write", lambda p, x: written(p, x, **mistake), CHECKED[0], "cpu")


def test_check_refuses_what_is_missing_or_touched(small):
    verify = setting("gdn", 3, 2, mode="verify", **SMALL)

    def changes(p, x):
        x.state[1] += 1
        return naive(p, x)[0], None

    def spoils(p, x):
        x.state[[n for n in range(len(x.state)) if n not in x.slots.tolist()]] += 1
        return written(p, x)

    def unwritten(p, x):
        out, states = written(p, x)
        out[1, 0, 2, 5] = float("nan")
        return out, states

    with pytest.raises(CheckFailed, match="only verifies changed"):
        delta.check_task("verify", changes, verify, "cpu")
    with pytest.raises(CheckFailed, match="that no sequence owns"):
        delta.check_task("write", spoils, CHECKED[0], "cpu")
    with pytest.raises(CheckFailed, match="not finite"):
        delta.check_task("write", unwritten, CHECKED[0], "cpu")
    with pytest.raises(CheckFailed, match="no states came back"):
        delta.check_task("write", lambda p, x: (naive(p, x)[0], None), CHECKED[0], "cpu")


MODES = [
    *CHECKED,
    setting("gdn", 3, 4, mode="verify", **SMALL),
    setting("kda", 3, 4, mode="slots", heads_v=3),
    setting("gdn", 5, 4, mode="step", **SMALL),
    setting("kda", 5, 4, layout="kv", mode="step", heads_v=3, records=8),
    setting("gdn", 5, 1, mode="step", **SMALL),
]


@pytest.mark.parametrize("problem", MODES, ids=lambda p: p.name)
def test_ours_and_the_ceiling_pass_their_checks_on_the_cpu(small, problem):
    found = {
        p.name: delta_providers.check(p, problem, "cpu")
        for p in delta_providers.PROVIDERS
        if p.role != "peer" and p.supports(problem) is None
    }
    assert found["cula"]["output"] < delta.OUTPUT_LIMIT
    mode, several = problem.params["mode"], problem.params["T"] > 1
    ways = {"cula_commit", "cula_slots"} if several else {"cula_write"}
    ceiling = {"inplace_ceiling"} if mode in ("write", "step") else set()
    assert set(found) == {"cula", *ceiling, *(ways if mode == "step" else ())}


def test_a_replay_that_forgets_records_is_refused(small):
    problem = setting("gdn", 6, 4, mode="step", **SMALL)

    def forgets(p, x):
        x.rings.cursor.zero_()
        out = torch.full_like(x.v, float("nan"))
        delta_providers.cula_call("replay", p, x, out)()
        return delta_providers.finished("replay", p, x, out)

    with pytest.raises(CheckFailed, match="relative RMSE"):
        delta.check_task("replay", forgets, problem, "cpu")


def test_what_is_timed_is_the_call_that_was_checked(small):
    problem = setting("kda", 3, 2, heads_v=3)
    x, y = (delta.make_inputs(problem, "cpu", 3) for _ in range(2))
    want, states = written(problem, y)
    got = delta_providers.CULA.bind(problem, x)()
    assert checks.relative_rmse(got, want.double()) < 5e-3
    assert checks.relative_rmse(x.state[x.slots.long()], states.double()) < 1e-5


def test_buffer_sets_differ_and_repeat_from_their_seed(small):
    problem = setting("gdn", 4, 2, mode="step", **SMALL)
    first, again, other = (delta.make_inputs(problem, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(first.state, again.state) and torch.equal(first.rings.u, again.rings.u)
    assert not torch.equal(first.state, other.state)


def test_thousands_of_steps_keep_the_states_in_range(small):
    """Providers take turns on the same states, and the ceiling turns the sign of states whose rings are in use."""
    problem = setting("gdn", 4, 2, mode="step", records=8, **SMALL)
    x = delta.make_inputs(problem, "cpu", 0)
    active = [p for p in delta_providers.PROVIDERS if p.role != "peer" and not p.supports(problem)]
    calls = [p.bind(problem, x) for p in active]
    for _ in range(20):
        for call in calls:
            for _ in range(10):
                call()
    assert x.state.abs().max() < 1e2
    assert (x.state.abs() < torch.finfo(torch.float32).tiny).float().mean() < 1e-3


def test_rings_begin_in_all_phases_and_stay_in_them(small):
    """The share of rows that store and the records that are replayed are the means over time, from the first call."""
    problem = setting("gdn", 400, 4, mode="step", heads=1, heads_v=1)
    x = delta.make_inputs(problem, "cpu", 0)
    half, call = problem.params["L"] // 2, delta_providers.CULA.bind(problem, x)
    stored, replayed = [], []
    for _ in range(12):
        certain = (x.rings.cursor[:, 0, 0] >> 8 & 255)[x.slots.long()] + x.accepted
        replayed.append(certain.double().mean().item())
        stored.append((certain + 4 > half).double().mean().item())
        call()
    share, records = delta.ring_means(4, 32)
    assert sum(stored) / 12 == pytest.approx(share, rel=0.1)
    assert sum(replayed) / 12 == pytest.approx(records, rel=0.1)
    assert max(stored) < 3 * share and min(stored) > share / 3


@pytest.mark.parametrize("tokens, records", [(1, 8), (1, 32), (4, 8), (4, 32), (8, 64)])
def test_ring_means_are_those_of_a_simulation(tokens, records):
    shares, means = [], []
    for accepted in range(1, tokens + 1):
        certain, stores, total = 0, 0, 0
        for _ in range(10_000):
            certain += accepted
            total += certain
            if certain + tokens > records // 2:
                stores, certain = stores + 1, 0
        shares.append(stores / 10_000)
        means.append(total / 10_000)
    share, replayed = delta.ring_means(tokens, records)
    assert share == pytest.approx(sum(shares) / tokens, rel=0.01)
    assert replayed == pytest.approx(sum(means) / tokens, rel=0.01)


def test_bytes_of_a_step_are_counted():
    """B=64 in fp32: 2 x 134 MB of states; a token of GDN has 16.5 KB of activations per row, one of KDA 40.1 KB."""
    problem, kda = setting("gdn", 64), setting("kda", 64)
    states = 64 * 32 * 128 * 128 * 4
    gdn_token = 2 * (16 * 128 * 2 + 32 * 128 * 2 + 32 + 32)
    kda_token = 2 * (32 * 128 * 4 + 32 * 128 + 32)
    assert delta.moved("write", problem) == 2 * states + 64 * gdn_token + 32 * 8 + 64 * 4
    assert delta.moved("write", kda) == 2 * states + 64 * kda_token + 32 * 4 * 129 + 64 * 4
    four = setting("gdn", 64, 4)
    assert delta.moved("verify", four) == delta.moved("write", four) - states
    assert delta.moved("slots", four) == delta.moved("write", four) + 3 * states + 64 * 16
    again = 64 * 4 * 2 * (16 * 128 + 32 * 128 + 32 + 32) + 32 * 8 + 64 * 4
    assert delta.moved("commit", four) == delta.moved("write", four) + states + again
    assert delta_providers.CEILING.moved(problem) == 2 * states
    assert delta.set_bytes(setting("gdn", 64, 4, mode="slots")) == 4 * states
    step = setting(
        "gdn", 64, 4, mode="step", records=8
    )  # stores in every call, and replays 2.5 records in the mean
    record = 64 * (2 * 128 * 16 + 4 * 32 * 129)
    cursors = 2 * 64 * 32 * 16 * 4
    expected = delta.moved("write", four) + round(6.5 * record) + cursors
    assert delta.moved("replay", step) == expected


def test_fla_writes_16_bit_states_back_in_fp32():
    problem = setting("gdn", 64, state="bf16")
    assert delta_providers.FLA.moved(problem) - delta.moved("write", problem) == 64 * 32 * 16384 * 2


@pytest.mark.parametrize("chosen", ALL, ids=lambda s: s.name)
def test_every_setting_fits_the_card(chosen):
    p = chosen.params
    pool = 1 + (p["T"] if p["mode"] in ("slots", "step") else 0)
    kept = 4 * delta.state_bytes(chosen, "fp32") + pool * delta.state_bytes(chosen)
    assert_fits_the_h200(delta.set_bytes(chosen), kept)


def test_settings_cover_what_was_asked_for():
    full = delta_decode.settings(False)
    assert all(count == 1 for count in Counter(s.name for s in full).values())
    single = {tuple(s.params[k] for k in ("gate", "B", "state", "layout")) for s in full
              if s.params["mode"] == "write" and s.params["T"] == 1}  # fmt: skip
    assert single >= {
        (gate, b, state, layout)
        for gate in ("gdn", "kda")
        for b in (1, 8, 64, 256)
        for state in ("fp32", "bf16")
        for layout in ("vk", "kv")
    }
    modes = Counter((s.params["mode"], s.params["T"]) for s in full)
    assert set(modes) == {
        *(("write", t) for t in (1, 2, 4, 8)), *(("verify", t) for t in (2, 4, 8)), ("slots", 4),
        *(("step", t) for t in (1, 4, 8)),
    }  # fmt: skip
    assert [s.params["B"] for s in full[:8]] == [64] * 8
    for op in ("delta_decode", "delta_decode_80sm", "delta_decode_variants"):
        chosen = registry.get(op)
        assert {s.name for s in chosen.settings(True)} < {s.name for s in chosen.settings(False)}


# ---- peers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fla(peers):
    """FLA's three functions, which note their options."""
    notes = []

    def noted(name, state_name="initial_state"):
        def run(q, k, v, *rest, **options):
            notes.append((name, options))
            return v, options[state_name]

        return run

    peers.module("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=noted("gdn"))
    peers.module("fla.ops.kda", fused_recurrent_kda=noted("kda"))
    peers.module("fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=noted("inplace"))
    return notes


def test_fla_is_called_with_raw_gates_and_the_layout(small, fla):
    for problem in (setting("gdn", 2, layout="kv", **SMALL), setting("kda", 2, heads_v=3)):
        x = delta.make_inputs(problem, "cpu", 0)
        delta_providers.FLA.bind(problem, x)()
    (gdn, one), (kda, other) = fla
    assert (gdn, kda) == ("gdn", "kda")
    assert one["state_v_first"] is False and other["state_v_first"] is True
    for options in (one, other):
        flags = [options[f"use_{f}_in_kernel"] for f in ("qk_l2norm", "gate", "beta_sigmoid")]
        assert all(flags) and options["output_final_state"] is True
    verify = setting("gdn", 2, 2, mode="verify", **SMALL)
    delta_providers.FLA.bind(verify, delta.make_inputs(verify, "cpu", 0))()
    assert fla[-1][1]["output_final_state"] is False


def test_fla_takes_slots_below_its_public_function(small, fla):
    one, several = setting("kda", 2, heads_v=3), setting("kda", 2, 3, mode="step", heads_v=3)
    for problem in (one, several):
        x = delta.make_inputs(problem, "cpu", 0)
        delta_providers.FLA_INPLACE.bind(problem, x)()
    (_, first), (_, second) = fla
    assert first["ssm_state_indices"].dim() == 1 and first["num_accepted_tokens"] is None
    assert second["ssm_state_indices"].shape == (2, 3)
    assert len(second["initial_state"]) == 6 and second["num_accepted_tokens"].shape == (2,)


def test_peers_say_what_they_do_not_do():
    fla, inplace, flashinfer = (
        delta_providers.FLA, delta_providers.FLA_INPLACE, delta_providers.FLASHINFER
    )  # fmt: skip
    assert "single tokens" in fla.supports(setting("gdn", 4, 4, mode="slots"))
    assert "single tokens" in fla.supports(setting("gdn", 4, 4, mode="step"))
    assert "KDA only" in inplace.supports(setting("gdn", 4))
    assert "every token" in inplace.supports(setting("kda", 4, 4))
    assert "always writes" in inplace.supports(setting("kda", 4, 4, mode="verify"))
    assert "bf16 states" in flashinfer.supports(setting("kda", 4))
    assert "no fp16" in flashinfer.supports(setting("gdn", 4, state="fp16"))
    assert "one token and fp32" in flashinfer.supports(setting("gdn", 4, 4, layout="kv"))
    assert "for every token" in flashinfer.supports(setting("kda", 4, 4, "bf16"))
    for way in (delta_providers.WRITE, delta_providers.COMMIT, delta_providers.SLOTS):
        assert way.supports(setting("gdn", 4)) == "the setting is no step"
    one, four = (setting("gdn", 4, tokens, mode="step") for tokens in (1, 4))
    assert delta_providers.COMMIT.supports(one) == "a step of one token"
    assert delta_providers.WRITE.supports(four) == "a step of several tokens"


@pytest.fixture
def flashinfer(peers):
    """FlashInfer's functions, which note their options and compute nothing."""
    notes = []

    def noted(name):
        def run(*tokens, output, **options):
            notes.append(SimpleNamespace(name=name, tokens=tokens, output=output, options=options))
            return output, None

        return run

    names = (
        "gated_delta_rule_decode_pretranspose",
        "gated_delta_rule_decode",
        "gated_delta_rule_mtp",
    )
    made = peers.module("flashinfer.gdn_decode", **{n: noted(n) for n in names})
    peers.module("flashinfer", gdn_decode=made)
    peers.module("flashinfer.kda_decode", recurrent_kda=noted("recurrent_kda"))
    return notes


FLASHINFER_CALLS = [
    (setting("gdn", 3, **SMALL), "gated_delta_rule_decode_pretranspose", "initial_state_indices"),
    (
        setting("gdn", 3, 1, "bf16", **SMALL),
        "gated_delta_rule_decode_pretranspose",
        "initial_state",
    ),
    (
        setting("gdn", 3, 4, "bf16", **SMALL),
        "gated_delta_rule_decode_pretranspose",
        "initial_state",
    ),
    (setting("gdn", 3, layout="kv", **SMALL), "gated_delta_rule_decode", "state"),
    (setting("gdn", 3, 4, **SMALL), "gated_delta_rule_mtp", "disable_state_update"),
    (setting("gdn", 3, 4, mode="slots", **SMALL), "gated_delta_rule_mtp", "ssm_state_indices"),
    (setting("kda", 3, 1, "bf16", heads_v=3), "recurrent_kda", "ssm_state_indices"),
    (setting("kda", 3, 4, "bf16", mode="slots", heads_v=3), "recurrent_kda", "num_accepted_tokens"),
]


@pytest.mark.parametrize(
    "problem, name, option", FLASHINFER_CALLS, ids=lambda x: getattr(x, "name", x)
)
def test_flashinfer_gets_the_function_of_a_problem(small, flashinfer, problem, name, option):
    x = delta.make_inputs(problem, "cpu", 0)
    delta_providers.FLASHINFER.bind(problem, x)()
    (call,) = flashinfer
    assert call.name == name and option in call.options
    assert call.output.numel() == x.v.numel()
    if name == "recurrent_kda":
        q = call.tokens[0]
        assert q.shape[:2] == (1, x.q.shape[0] * x.q.shape[1])
        offsets = call.options["cu_seqlens"]
        assert offsets.dtype == torch.int32 and offsets[-1] == q.shape[1]
    if option == "ssm_state_indices" and name == "gated_delta_rule_mtp":
        begins = call.options["initial_state_indices"].tolist()
        assert begins == [int(x.table[n, int(x.accepted[n]) - 1]) for n in range(3)]


def test_flashinfer_is_checked_with_the_states_of_its_rows(small, peers):
    """For [K, V] it takes no slots: row n has state n, so its check puts the states in the order of the rows."""
    problem = setting("gdn", 3, layout="kv", **SMALL)

    def run(q, k, v, state, output, **options):
        y = SimpleNamespace(q=q, k=k, v=v, g=options["a"], beta=options["b"], state=state)
        y.A_log, y.dt_bias, y.slots = options["A_log"], options["dt_bias"], torch.arange(3)
        out, states = written(problem, y)
        output.copy_(out)
        state.copy_(states)

    made = peers.module("flashinfer.gdn_decode", gated_delta_rule_decode=run)
    peers.module("flashinfer", gdn_decode=made)
    errors = delta_providers.check(delta_providers.FLASHINFER, problem, "cpu")
    assert errors["state"] < 1e-5


def test_flashinfer_verifies_without_an_update(small, flashinfer):
    for mode in ("verify", "write"):
        problem = setting("gdn", 3, 4, mode=mode, **SMALL)
        delta_providers.FLASHINFER.bind(problem, delta.make_inputs(problem, "cpu", 0))()
    assert [c.options["disable_state_update"] for c in flashinfer] == [True, False]


def test_flashinfer_that_fails_or_is_wrong_is_left_out_with_the_reason(
    small, flashinfer, monkeypatch
):
    problem = setting("gdn", 3, **SMALL)
    with pytest.raises(CannotRun, match="its result is wrong: gdn-B3.*not finite"):
        delta_providers.check(delta_providers.FLASHINFER, problem, "cpu")

    def fails(*given):
        raise TypeError("no kernel\n  for this card")

    monkeypatch.setattr(flashinfer_calls, "call", fails)
    with pytest.raises(CannotRun, match="fails: TypeError: no kernel for this card"):
        delta_providers.check(delta_providers.FLASHINFER, problem, "cpu")


def test_fla_that_is_wrong_stops_the_run(small, fla):
    with pytest.raises(CheckFailed):
        delta_providers.check(delta_providers.FLA, setting("gdn", 3, **SMALL), "cpu")


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", variants.settings(False), ids=lambda s: s.name)
def test_variants_are_the_candidates(chosen):
    found = variants.configurations(chosen)
    problem = variants.problem_of(chosen)
    assert problem.illegal() is None
    assert all(config.illegal() is None and config.problem == problem for config in found.values())
    assert {*internals.candidates(problem), internals.select(problem, "sm_90a")} <= set(
        found.values()
    )
    assert set(found) <= set(variants.NAMES)
    if chosen.params["layout"] == "kv":
        assert any(c.resident * c.threads == 1536 for c in found.values())


@pytest.mark.parametrize("mode", delta.MODES)
@pytest.mark.parametrize("gate", delta.GATES)
def test_the_problem_of_a_setting_is_that_of_the_kernel_which_a_call_launches(gate, mode):
    chosen = setting(gate, 1, 4, "bf16", "kv", mode=mode, heads=1, heads_v=1)
    x = delta.make_inputs(chosen, "cpu", 0)
    problem, arguments = internals.launched(delta_providers.CULA.bind(chosen, x))
    assert problem == variants.problem_of(chosen)
    assert arguments.state.data_ptr() == (x.token_pool if mode == "slots" else x.state).data_ptr()
    assert arguments.q is x.q and arguments.rows == 1


def test_a_variant_runs_its_own_kernel_on_the_arguments_of_the_call(small, monkeypatch):
    chosen = setting("gdn", 2, **SMALL)
    ran = []

    def compiled(config):
        return lambda *given: ran.append((config, given))

    monkeypatch.setattr(internals, "compiled_here", compiled)
    monkeypatch.setattr(delta, "DIM", 64)
    name, config = next(iter(variants.configurations(chosen).items()))
    x = delta.make_inputs(chosen, "cpu", 0)
    (provider,) = (p for p in variants.OP.providers if p.name == name)
    provider.bind(chosen, x)()
    ((used, given),) = ran
    assert used == config and given[0] is x.q and provider.supports(chosen) is None
    with pytest.raises(CheckFailed, match="not finite"):  # nothing was written
        variants.check(provider, chosen, "cpu")


def test_kernels_are_compiled_ahead_once(monkeypatch):
    made = []
    pool = SimpleNamespace(
        map=lambda act, found: [made.append((act.keywords, c)) or b"o" for c in found]
    )
    monkeypatch.setattr(internals, "_pool", lambda: pool)
    monkeypatch.setattr(internals, "_compiled", {})
    monkeypatch.setattr(internals, "_loaded", lambda host: host)
    monkeypatch.setattr(internals, "arch_here", lambda: "sm_90a")
    configs = list(variants.configurations(setting("gdn", 1)).values())[:3]
    internals.compile_ahead(configs[:2])
    internals.compile_ahead(configs)
    assert [c for _, c in made] == configs and made[0][0] == {"arch": "sm_90a"}
    assert internals.compiled_here(configs[2]) == b"o"
