"""KDA prefill's oracle, checks, byte counts and settings; on the CPU with four heads of 16."""

import math
import sys
import types
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch

from benchmarks import plot
from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops import sequences
from benchmarks.ops.checks import worst_head
from benchmarks.ops.kda import kda_prefill, kda_prefill_parts
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import FEATURES, setting
from benchmarks.ops.kda.providers import CEILING, CULA, CUT, FLA, SERIAL
from benchmarks.tests.ops.common import assert_fits_the_h200, token_by_token

ALL = kda_prefill.settings(False)
BY_NAME = {s.name: s for s in ALL}


def problem_of(tokens=100, heads=4, **options):
    return setting(tokens, heads=heads, **options)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def naive(problem, x, *, forget=True, erase=True, **mistake):
    """Token by token in fp64; `forget`, `erase` and the flags of `token_by_token` plant one mistake each."""
    group = x.v.shape[2] // x.q.shape[2]

    def step(b, t, h, start, s):
        q, k = (y[b, t, h // group].double() for y in (x.q, x.k))
        q, k = (y / math.sqrt(float(y @ y) + 1e-6) for y in (q, k))
        rate, bias = x.A_log[h].double().exp(), x.dt_bias.view(-1, kda.DIM)[h].double()
        shifted = x.gate[b, t, h].double() + bias
        if sequences.has(problem, "unbounded"):
            g = -rate * torch.log1p(shifted.exp())
        else:
            g = -5 * sigmoid(rate * shifted)
        s = s * (g.exp()[:, None] if forget else 1.0)
        seen = k @ s if erase else 0.0
        s = s + x.beta[b, t, h].double() * torch.outer(k, x.v[b, t, h].double() - seen)
        return s, (q @ s) * kda.DIM**-0.5

    return token_by_token(problem, x, step, **mistake)


CHECKED = [
    problem_of(batch=2),
    problem_of(sequences=3, lengths="skewed"),
    problem_of(sequences=3, lengths="random", feature="pool"),
    *(problem_of(feature=f) for f in FEATURES),
]


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = kda.check_kda(naive, problem, "cpu")
    assert errors["output"] < kda.LIMIT * 0.7
    assert errors["state"] < 1e-6


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_cula_and_the_ceiling_pass_their_checks_on_the_cpu(small, problem):
    assert CULA.supports(problem) is None
    errors = kda_providers.check(CULA, problem, "cpu")
    assert errors["output"] < kda.LIMIT
    assert kda_providers.check(CEILING, problem, "cpu") == {}


def test_both_choices_of_cula_pass_their_checks_on_the_cpu(small):
    problem = problem_of(kda_providers.CUTTABLE, heads=1)
    for provider in (SERIAL, CUT):
        assert provider.supports(problem) is None
        assert kda_providers.check(provider, problem, "cpu")["output"] < kda.LIMIT


@pytest.mark.parametrize(
    "mistake",
    [{"forget": False}, {"transpose": True}, {"whole": True}, {"carry": False}, {"erase": False}],
    ids=str,
)
def test_check_refuses_a_wrong_implementation(small, mistake):
    problem = problem_of(sequences=3, feature="pool")
    with pytest.raises(CheckFailed, match="relative RMSE"):
        kda.check_kda(lambda p, x: naive(p, x, **mistake), problem, "cpu")


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lambda o, s, x: o[0, 1, 2].fill_(math.nan), {}, "output holds values that are not finite"),
        (lambda o, s, x: s[0, 1, 2].fill_(math.nan), {}, "final state holds values"),
        (lambda o, s, x: o[:, :, 3].mul_(1.01), {}, "of the output"),
        # The head that learns least has the smallest state of all.
        (lambda o, s, x: s[:, 3].mul_(1.01), {}, "of the state"),
        (lambda o, s, x: x.state.add_(1), {"sequences": 2, "feature": "pool"}, "no sequence owns"),
    ],
)  # fmt: skip
def test_check_refuses_a_spoiled_result(small, spoil, options, message):
    def run(problem, x):
        o, final = naive(problem, x)
        spoil(o, final, x)
        return o, final

    with pytest.raises(CheckFailed, match=message):
        kda.check_kda(run, problem_of(40, **options), "cpu")


def test_the_peer_may_be_less_exact(small, monkeypatch):
    def rough(problem, x):
        o, final = naive(problem, x)
        return o * 1.005, final

    for provider in (CULA, FLA):
        monkeypatch.setitem(kda_providers._RESULTS, provider.name, rough)
    assert 3e-3 < kda_providers.check(FLA, problem_of(40), "cpu")["output"] < 1e-2
    with pytest.raises(CheckFailed, match="limit 3e-03"):
        kda_providers.check(CULA, problem_of(40), "cpu")


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_what_is_timed_is_the_call_that_was_checked(small, problem):
    x, y = (kda.make_inputs(problem, "cpu", 3) for _ in range(2))
    want, final = naive(problem, y)
    o, state = CULA.bind(problem, x)()
    state = state if x.indices is None else x.state[x.indices.long()]
    assert worst_head(o, want.double(), 2) < kda.LIMIT
    assert worst_head(state, final.double(), 1) < 1e-5


def test_a_state_that_the_last_head_was_given_is_seen_to_the_end():
    """Of a wrong initial state the final one shows more than the limit, also behind many tokens."""
    problem = setting(2048, heads=3, feature="state")
    x = kda.make_inputs(problem, "cpu", 0)
    _, given = kda.oracle(problem, x, [2])
    x.state.mul_(0.9)
    assert worst_head(kda.oracle(problem, x, [2])[1], given, 1) > 2 * kda.LIMIT


def test_the_oracle_does_not_depend_on_its_chunks(small, monkeypatch):
    problem = problem_of(sequences=3, lengths="skewed", feature="gva")
    x = kda.make_inputs(problem, "cpu", 1)
    found = []
    for size in (1, 7, 64):
        monkeypatch.setattr(kda, "ORACLE_CHUNK", size)
        found.append(kda.oracle(problem, x, [0, 3]))
    for other in found[1:]:
        for got, want in zip(other, found[0]):
            assert float((got - want).norm() / want.norm()) < 1e-13


def test_buffer_sets_differ_and_repeat_from_their_seed_but_share_offsets_and_workspace(small):
    problem = problem_of(sequences=3, feature="pool")
    first, again, other = (kda.make_inputs(problem, "cpu", seed) for seed in (0, 0, 1))
    for name in ("q", "k", "v", "gate", "beta", "dt_bias", "state"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(other, name)), name
    assert first.offsets.int64 is other.offsets.int64
    workspace = kda_providers.workspace(problem, "cpu")
    assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 128 == 0
    assert kda_providers.workspace(problem, "cpu").data_ptr() == workspace.data_ptr()


def test_gates_spread_over_channels_and_heads():
    problem = setting(2048, heads=3)
    x = kda.make_inputs(problem, "cpu", 0)
    g = kda.log_decays(problem, x, [0, 1, 2])
    assert -5 < float(g.min()) < -4.5 and float(g.max()) < 0
    means = g.mean((0, 1))
    assert float(means[1].min()) == pytest.approx(-3.7, abs=0.3)
    assert float(means[1].max()) == pytest.approx(-1e-3, rel=0.1)
    assert float(means[2].max()) > float(means[1].max()) > float(means[0].max())
    assert not torch.equal(means[0].argsort(), means[1].argsort())
    assert x.beta.double().mean((0, 1)).tolist() == pytest.approx([0.5, 0.07, 0.004], rel=0.2)
    free = setting(256, heads=3, feature="unbounded")
    assert kda.log_decays(free, kda.make_inputs(free, "cpu", 0), [2]).min() < -40


@pytest.mark.parametrize("feature", [None, "fp16", "fp32gate"])
def test_dtypes(small, feature):
    x = kda.make_inputs(problem_of(8, feature=feature), "cpu", 0)
    dtype = torch.float16 if feature == "fp16" else torch.bfloat16
    assert {t.dtype for t in (x.q, x.k, x.v, x.beta)} == {dtype}
    assert x.gate.dtype == (torch.float32 if feature == "fp32gate" else dtype)
    assert {x.A_log.dtype, x.dt_bias.dtype} == {torch.float32}


@pytest.mark.parametrize("options", [{"lengths": "even"}, {"feature": "fast"}])
def test_unknown_problems_are_refused(options):
    with pytest.raises(ValueError, match="setting: unknown"):
        setting(8, **options)


def test_the_main_settings_are_those_28():
    main = [s for s in ALL if fnmatchcase(s.name, kda_prefill.MAIN)]
    assert len(main) == 28 and all(s.l2 == "cold" for s in main)
    assert all((s.params["H"], s.params["feature"]) == (64, False) for s in main)
    assert main == [setting(**size) for size in sequences.main_sizes()]


def test_the_long_settings_are_those_32():
    long = [s for s in ALL if s.params["H"] < 64]
    dense = {(s.params["H"], s.params["T"]) for s in long if not sequences.is_packed(s)}
    lengths = [1024 * n for n in (4, 8, 16, 32, 64, 128)]
    assert dense == {(h, t) for h in (4, 8, 16) for t in lengths} | {(32, 16384), (32, 65536)}
    packed = Counter(
        (s.params["H"], tuple((end - start) // 1024 for _, start, end in sequences.spans(s)))
        for s in long
        if sequences.is_packed(s)
    )
    layouts = [(16, 16), (32, 1), (64, 1, 1, 1, 1, 1), (4,) * 8]
    assert packed == Counter((h, layout) for h in (4, 8, 16) for layout in layouts)
    assert len(long) == 32 and "B1-T8192-H16" in BY_NAME


def test_every_pattern_of_the_readme_selects_what_it_says():
    counts = {
        "*-H64": 28, "B*-H64": 10, "N*-H64": 18, "B1-T*-H4": 6, "B1-T*-H8": 6, "B1-T*-H16": 6,
        "B1-T*-H32": 2, "N*-H4": 4, "N*-H8": 4, "N*-H16": 4, "*+*": 6, "*": 66,
    }  # fmt: skip
    for pattern, count in counts.items():
        assert len(registry.select(ALL, [pattern])) == count, pattern
    assert Counter(s.params["feature"] for s in ALL if s.params["feature"]) == Counter(FEATURES)
    assert {s.name for s in kda_prefill.settings(True)} < set(BY_NAME)


def test_bytes_are_counted_as_the_baselines_have_them():
    """B=1, T=16384, H=64 at 4.3 TB/s: 312.1 us for q, k, v, g and o alone; one state of 64 heads is 4.2 MB."""
    state, tensor, parameters = 64 * 128 * 128 * 4, 4096 * 64 * 128 * 2, 64 * 129 * 4
    assert 5 * 4 * tensor / 4.3e6 == pytest.approx(312.1, abs=0.1)
    moved = {name: kda.moved(s) for name, s in BY_NAME.items()}
    plain = "B1-T4096-H64"
    beta = 4096 * 64 * 2
    assert moved[plain] == 5 * tensor + beta + parameters + state
    assert moved["B2-T4096-H64"] == 2 * (5 * tensor + beta + state) + parameters
    assert moved["N10-T4096-random-H64"] == moved[plain] + 9 * state + 11 * 4
    assert moved[f"{plain}+state"] == moved[plain] + state
    assert moved[f"{plain}+pool"] == moved[plain] + state + 4
    assert moved[f"{plain}+gva"] == moved[plain] - 2 * tensor * 3 // 4
    assert moved[f"{plain}+fp32gate"] == moved[plain] + tensor
    assert moved[f"{plain}+fp16"] == moved[f"{plain}+unbounded"] == moved[plain]


@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.name)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    # Inputs, results kept by the graphs of four implementations, and the buffers of the copy.
    assert_fits_the_h200(kda.read(problem), 6 * kda.moved(problem))
    assert 0 <= kda.moved(problem) - CEILING.moved(problem) < 8


def test_both_choices_are_timed_where_there_is_one():
    for provider in (SERIAL, CUT):
        timed = {s.name for s in ALL if provider.supports(s) is None}
        assert timed == {
            s.name
            for s in ALL
            if s.params["H"] < 64 or (sequences.is_packed(s) and kda.longest(s) >= 2048)
        }
        assert "N10-T4096-skewed-H64" in timed and "N10-T16384-uniform-H64" not in timed
        assert "long enough" in provider.supports(BY_NAME["B1-T512-H64"])
        assert "few heads" in provider.supports(BY_NAME["B1-T4096-H64"])
        assert "few heads" in provider.supports(BY_NAME["B1-T4096-H64+gva"])


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_cula_says_which_gpu_it_needs(card, capability):
    card(*capability)
    parts = [p for p in kda_prefill_parts.OP.providers if p.role == "variant"]
    for provider in (CULA, SERIAL, CUT, *parts):
        assert provider.supports(setting(4096, heads=8)) == (
            "our kernels need a compute capability of 9.0, 10.0, 10.3"
        )


@pytest.fixture(params=["cula_cp_sm90"])
def ours(monkeypatch, request):
    """A module named as ours that notes what it is called with."""
    calls = []

    def chunk_kda(q, k, v, g, beta, **options):
        calls.append(options)
        return v, None

    made = types.ModuleType(request.param)
    made.chunk_kda = chunk_kda
    made.kda_workspace_bytes = lambda batch, tokens, heads, sequences=None: (
        1000 * batch + tokens + heads + (sequences or 0)
    )
    monkeypatch.setitem(sys.modules, request.param, made)
    return calls


@pytest.mark.parametrize("ours", ["cula_kda_sm100"], indirect=True)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_is_served_by_its_own_package(small, card, ours, monkeypatch, capability):
    """Every way to a call: binding, the result that is checked, the workspace; and nothing else of ours."""
    monkeypatch.setitem(sys.modules, "cula_cp_sm90", None)
    problem = problem_of()
    x = kda.make_inputs(problem, "cpu", 0)
    card(*capability)
    for provider in (CULA, SERIAL, CUT):
        assert provider.supports(setting(4096, heads=8)) is None
        provider.bind(problem, x)()
        kda_providers._RESULTS[provider.name](problem, x)
    assert [c["use_intracard_cp"] for c in ours] == ["auto"] * 2 + [False] * 2 + [True] * 2
    assert {c["workspace"].shape for c in ours} == {(1000 + 100 + 4,)}


def test_a_package_that_is_missing_says_so(card, monkeypatch):
    card(10, 0)
    monkeypatch.setitem(kda_providers._MISSING, "cula_kda_sm100", lambda: "not installed")
    assert CULA.supports(problem_of()) == "not installed"
    card(9, 0)
    assert CULA.supports(problem_of()) is None


def test_cula_is_called_with_its_own_conventions(small, ours):
    dense, packed = problem_of(batch=2, feature="state"), problem_of(sequences=3, feature="pool")
    x, y = (kda.make_inputs(p, "cpu", 0) for p in (dense, packed))
    for provider, problem, inputs in ((CULA, dense, x), (SERIAL, packed, y), (CUT, dense, x)):
        provider.bind(problem, inputs)()
    first, second, third = ours
    assert [c["use_intracard_cp"] for c in ours] == ["auto", False, True]
    assert first["initial_state"] is x.state and first["output_final_state"] is True
    assert first["out"] is None and "cu_seqlens" not in first and "state_pool" not in first
    assert (first["safe_gate"], first["lower_bound"]) == (True, -5.0)
    assert first["use_qk_l2norm_in_kernel"] and first["use_gate_in_kernel"]
    assert first["workspace"].shape == (2000 + 100 + 4,) and first["workspace"].is_contiguous()
    assert second["state_pool"] is y.state and second["initial_state_indices"] is y.indices
    assert (second["cu_seqlens"].dtype, second["cu_seqlens"].tolist()) == (
        torch.int32,
        [0, 33, 66, 100],
    )
    assert second["cu_seqlens_cpu"].tolist() == [0, 33, 66, 100]
    assert second["workspace"].shape == (1000 + 100 + 4 + 3,)


def test_nothing_that_a_call_leaves_unwritten_passes(small, ours):
    """v itself comes back: the prepared output and the workspace are NaN before."""
    problem = problem_of(feature="pool")
    x = kda.make_inputs(problem, "cpu", 0)
    out, _ = kda_providers._cula_result(problem, x)
    assert ours[0]["out"] is out and bool(out.isnan().all())
    assert ours[0]["workspace"].data_ptr() == kda_providers.workspace(problem, "cpu").data_ptr()
    assert bool((ours[0]["workspace"] == 255).all())


def test_fla_says_what_it_does_not_do():
    assert FLA.supports(BY_NAME["B1-T4096-H64+pool"]) == "takes no pool indices"


@pytest.fixture
def peer(peers):
    """FLA's modules."""
    peers.module("fla.modules.norm", l2norm=peers.kernels("l2norm_fwd_kernel"))
    states = peers.kernels("chunk_gated_delta_rule_fwd_kernel_h_blockdim64")
    peers.module("fla.ops.common", chunk_delta_h=states)
    peers.module("fla.ops.gla", chunk=peers.kernels("chunk_gla_fwd_kernel_o"))
    peers.module(
        "fla.ops.kda",
        chunk_kda=peers.call,
        chunk_intra=peers.kernels(
            "chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_inter_solve_fused"
        ),
        chunk_intra_token_parallel=peers.kernels("chunk_kda_fwd_kernel_intra_token_parallel"),
        gate=peers.kernels("kda_gate_chunk_cumsum_vector_kernel"),
        wy_fast=peers.kernels("recompute_w_u_fwd_kda_kernel"),
    )
    return peers


def test_fla_is_called_with_its_own_conventions(small, peer):
    dense, packed = problem_of(feature="unbounded"), problem_of(sequences=3)
    x, y = (kda.make_inputs(p, "cpu", 0) for p in (dense, packed))
    FLA.bind(dense, x)()
    FLA.bind(packed, y)()
    first, second = peer.calls
    assert first["g"] is x.gate and first["beta"] is x.beta and "cu_seqlens" not in first
    assert first["A_log"] is x.A_log and first["dt_bias"] is x.dt_bias
    assert (first["safe_gate"], first["lower_bound"]) == (False, None)
    assert first["initial_state"] is None and first["output_final_state"] is True
    assert (second["safe_gate"], second["lower_bound"]) == (True, -5.0)
    assert second["cu_seqlens"].dtype == second["cu_seqlens_cpu"].dtype == torch.int64
    assert second["cu_seqlens"].tolist() == [0, 33, 66, 100]


def test_every_kernel_of_fla_is_tuned_anew_for_every_setting(peer):
    for _ in range(2):
        for tuner in peer.tuners:
            tuner.cache["key"] = "a"
        FLA.prepare(problem_of())
        assert len(peer.tuners) == 8 and not any(tuner.cache for tuner in peer.tuners)


@pytest.fixture
def result(small, peer, ours, measured, monkeypatch):
    """The op on the fake device, where cula takes 10, FLA 25 and the copy 8 us."""
    costs = {"cula": 10.0, "cula_serial": 12.0, "cula_cp": 11.0, "fla": 25.0, "copy_ceiling": 8.0}
    monkeypatch.setitem(kda_providers._MISSING, "cula_cp_sm90", lambda: None)
    monkeypatch.setattr(kda_providers, "_fla_missing", lambda: None)
    monkeypatch.setattr(kda_providers, "CUTTABLE", 32)
    monkeypatch.setattr(kda_providers, "MANY_HEADS", 4)
    monkeypatch.setattr(kda_providers, "_RESULTS", dict.fromkeys(costs, naive))
    chosen = [problem_of(t, heads=h) for h in (2, 4) for t in (24, 32, 48)]
    chosen += [problem_of(48, sequences=3, lengths="skewed"), problem_of(24, feature="pool")]
    return measured(kda_prefill.OP, lambda name, problem: costs[name], chosen)


def test_a_run_checks_everyone_and_yields_rows(result):
    results.validate(result)
    assert {c["provider"] for c in result["checks"]} == {p.name for p in kda_prefill.OP.providers}
    found = Counter(row["provider"] for row in result["rows"])
    assert found == {"cula": 8, "cula_serial": 2, "cula_cp": 2, "fla": 7, "copy_ceiling": 8}
    ours = results.rows_of(result, setting="B1-T48-H2", provider="cula")[0]
    assert (ours["ratio_fla"], ours["ratio_ceiling"]) == (2.5, 0.8)


def test_time_over_length_is_drawn(result, tmp_path):
    assert list(plot.panels(result, "T", "B*-H4")) == ["B=1, H=4, L2 cold"]
    plot.draw(result, tmp_path / "prefill.png", "T", "B*-H?")
    assert (tmp_path / "prefill.png").stat().st_size > 10_000


def test_measured_results_hold_the_settings_beside_fla():
    for path in results.RESULTS.glob("*/kda_prefill.json"):
        rows = results.load(path)["rows"]
        ours = {r["setting"] for r in rows if r["role"] == "ours" and r.get("ratio_fla")}
        assert ours >= {s.name for s in ALL if not s.params["feature"]}


def test_auto_is_never_far_behind_the_better_of_on_and_off():
    for path in results.RESULTS.glob("*/kda_prefill.json"):
        times: dict[str, dict[str, float]] = {}
        for row in results.load(path)["rows"]:
            times.setdefault(row["setting"], {})[row["provider"]] = row["median_us"]
        both = {name: t for name, t in times.items() if {"cula_serial", "cula_cp"} <= t.keys()}
        assert len(both) >= 32
        for name, t in both.items():
            assert t["cula"] <= 1.03 * min(t["cula_serial"], t["cula_cp"]), name
