"""Lightning prefill's oracle, checks, byte counts and settings; on the CPU with four heads of 16."""

import math
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch

from benchmarks import plot, tables
from benchmarks.harness import registry, report, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops import copying, sequences, tuning
from benchmarks.ops.checks import worst_head
from benchmarks.ops.lightning import lightning_prefill
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning import providers as lightning_providers
from benchmarks.ops.lightning.problem import FEATURES, setting
from benchmarks.ops.lightning.providers import CEILING, CULA, FLA
from benchmarks.tests.ops.common import assert_fits_the_h200, token_by_token

ALL = lightning_prefill.settings(False)
BY_NAME = {s.name: s for s in ALL}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(lightning, "DIM", 16)
    monkeypatch.setattr(lightning, "EVERY", 64)
    monkeypatch.setattr(lightning, "ORACLE_CHUNK", 32)


def problem_of(tokens=150, heads=4, **options):
    return setting(tokens, heads=heads, **options)


def naive(problem, x, *, forget=True, **mistake):
    """Token by token in fp64; `forget` and the flags of `token_by_token` plant one mistake each."""
    group = x.v.shape[2] // x.q.shape[2]

    def step(b, t, h, start, s):
        q, k = (y[b, t, h // group].double() for y in (x.q, x.k))
        if sequences.has(problem, "l2norm"):
            q, k = (y / math.sqrt(float(y @ y) + 1e-6) for y in (q, k))
        g = float(x.gate[b, t, h]) if x.gate is not None else -float(x.decay[h])
        s = s * (math.exp(g) if forget else 1.0) + torch.outer(k, x.v[b, t, h].double())
        done = t + 1 - start
        if x.checkpoints is not None and done % lightning.EVERY == 0:
            x.checkpoints[b, start // lightning.EVERY + done // lightning.EVERY - 1, h] = s
        return s, (q @ s) * lightning.DIM**-0.5

    return token_by_token(problem, x, step, **mistake)


CHECKED = [
    problem_of(batch=2),
    problem_of(mode="gate"),
    problem_of(sequences=3, lengths="skewed"),
    problem_of(sequences=3, lengths="random", mode="gate"),
    *(problem_of(batch=2, feature=f) for f in FEATURES if f != "pool"),
    *(problem_of(200, sequences=3, feature=f) for f in FEATURES if f != "state"),
]


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = lightning.check_prefill(naive, problem, "cpu")
    assert errors["output"] < lightning.OUTPUT_LIMIT / 2
    assert errors["state"] < 1e-6
    assert ("checkpoints" in errors) == sequences.has(problem, "checkpoints")


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_cula_and_the_ceiling_pass_their_checks_on_the_cpu(small, problem):
    assert CULA.supports(problem) is None
    errors = lightning_providers.check(CULA, problem, "cpu")
    assert errors["output"] < lightning.OUTPUT_LIMIT
    assert lightning_providers.check(CEILING, problem, "cpu") == {}


@pytest.mark.parametrize(
    "mistake", [{"forget": False}, {"transpose": True}, {"whole": True}, {"carry": False}], ids=str
)
def test_check_refuses_a_wrong_implementation(small, mistake):
    problem = problem_of(sequences=3, feature="pool")
    with pytest.raises(CheckFailed, match="relative RMSE"):
        lightning.check_prefill(lambda p, x: naive(p, x, **mistake), problem, "cpu")


def test_states_of_later_heads_may_be_left_out(small):
    """What the head before the limit holds still counts, and every head's output."""

    def check(head, factor):
        def run(problem, x):
            o, final = naive(problem, x)
            final[:, head] *= factor
            return o, final

        return lightning.check_prefill(run, problem_of(100), "cpu", state_heads=2)

    for head in (2, 3):
        assert check(head, math.nan)["state"] < 1e-6
    for head in (0, 1):
        with pytest.raises(CheckFailed, match="final state"):
            check(head, math.nan)
        with pytest.raises(CheckFailed, match="of the state"):
            check(head, 1.01)


def test_peer_states_that_are_left_out():
    """exp(63 d) of fp32 is finite up to d = 1.408, which head 17 of 64 is beyond; of gates all are looked at."""
    heads = {p: lightning_providers._fla_state_heads(BY_NAME[p]) for p in BY_NAME}
    assert heads["B1-T512-H64"] is None and heads["N10-T4096-uniform-H64-gate"] is None
    assert heads["N10-T4096-uniform-H64"] == heads["N20-T8192-skewed-H64"] == 17
    assert math.exp(63 * float(lightning.decays(64, "cpu")[16])) < 3.4e38
    assert math.exp(63 * float(lightning.decays(64, "cpu")[17])) > 3.5e38


def spoiled(spoil, **options):
    def run(problem, x):
        o, final = naive(problem, x)
        spoil(o, final, x)
        return o, final

    return lambda: lightning.check_prefill(run, problem_of(100, **options), "cpu")


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lambda o, s, x: o[0, 1, 2].fill_(math.nan), {}, "output holds values that are not finite"),
        (lambda o, s, x: s[0, 1, 2].fill_(math.nan), {}, "final state holds values"),
        (lambda o, s, x: o[:, :, 3].mul_(1.01), {}, "of the output"),
        # The head that forgets most has the smallest state of all.
        (lambda o, s, x: s[:, 3].mul_(1.01), {}, "of the state"),
        (lambda o, s, x: s.mul_(1.001), {"feature": "exact"}, "of the state is 1.00e-03"),
        (lambda o, s, x: x.checkpoints.fill_(math.nan), {"feature": "checkpoints"}, "checkpoints"),
        (lambda o, s, x: x.state.add_(1), {"sequences": 2, "feature": "pool"}, "no sequence owns"),
    ],
)  # fmt: skip
def test_check_refuses_a_spoiled_result(small, spoil, options, message):
    with pytest.raises(CheckFailed, match=message):
        spoiled(spoil, **options)()


def test_a_copy_that_differs_is_refused(small, monkeypatch):
    def broken(moved, device):
        source = torch.zeros(8)
        return source, lambda: 1 - source

    monkeypatch.setattr(copying, "copy", broken)
    with pytest.raises(CheckFailed, match="not exact"):
        lightning_providers.check(CEILING, problem_of(), "cpu")


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_what_is_timed_is_the_call_that_was_checked(small, problem):
    x, y = (lightning.make_inputs(problem, "cpu", 3) for _ in range(2))
    want, final = naive(problem, y)
    o, state = CULA.bind(problem, x)()
    state = state if x.indices is None else state[x.indices.long()]
    assert worst_head(o, want.double(), 2) < 5e-3
    assert worst_head(state, final.double(), 1) < 1e-5


def test_buffer_sets_differ_and_repeat_from_their_seed_but_share_offsets(small):
    problem = problem_of(sequences=3, feature="pool", mode="gate")
    first, again, other = (lightning.make_inputs(problem, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(first.state, again.state) and torch.equal(first.gate, again.gate)
    assert not torch.equal(first.q, other.q)
    assert first.offsets.int64 is other.offsets.int64
    assert first.offsets.int32.tolist() == first.offsets.host.tolist() == [0, 50, 100, 150]


def test_gates_and_decays_are_those_of_the_models():
    gate = lightning.make_inputs(setting(64, heads=8, mode="gate"), "cpu", 0).gate
    assert gate.dtype == torch.float32 and gate.max() < 0
    assert float(gate.mean()) == pytest.approx(-0.806 / 16, rel=0.1)
    slopes = lightning.decays(64, "cpu")
    assert slopes[0] == 0 and slopes[63] == pytest.approx(8 / 64 * (1 - 10 / 32) * 63)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: setting(8, mode="none"), "setting: unknown"),
        (lambda: setting(8, lengths="even"), "setting: unknown"),
        (lambda: setting(8, feature="fast"), "setting: unknown"),
    ],
)
def test_unknown_problems_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_main_settings_are_those_28():
    main = [s for s in ALL if fnmatchcase(s.name, lightning_prefill.MAIN)]
    assert len(main) == 28 and all(s.l2 == "cold" for s in main)
    assert all(
        (s.params["H"], s.params["mode"], s.params["feature"]) == (64, "decay", False) for s in main
    )
    assert main == [setting(**size) for size in sequences.main_sizes()]


def test_every_pattern_of_the_readme_selects_what_it_says():
    counts = {
        "*-H64": 28, "B*-H64": 10, "N*-H64": 18, "*-H64-gate": 28, "B1-T*-H8": 2, "B1-T*-H16": 2,
        "B1-T*-H32": 2, "B1-T*-H8-gate": 2, "*+*": 12, "*": 80,
    }  # fmt: skip
    for pattern, count in counts.items():
        assert len(registry.select(ALL, [pattern])) == count, pattern
    assert Counter(s.params["feature"] for s in ALL if s.params["feature"]) == {
        "gva": 2, "fp16": 2, "state": 1, "pool": 1, "l2norm": 2, "exact": 2, "checkpoints": 2,
    }  # fmt: skip
    assert {s.name for s in lightning_prefill.settings(True)} < set(BY_NAME)


def test_bytes_are_counted_as_the_baselines_have_them():
    """B=1, T=16384, H=64 at 4.3 TB/s: 249.7 us for q, k, v and o alone; one state of 64 heads is 4.2 MB."""
    state, activations = 64 * 128 * 128 * 4, 4 * 16384 * 64 * 128 * 2
    assert activations / 4.3e6 == pytest.approx(249.7, abs=0.1)
    moved = {name: lightning.moved(s) for name, s in BY_NAME.items()}
    plain, packed = "B1-T16384-H64", "N10-T8192-random-H64"
    assert moved[plain] == activations + state + 64 * 4
    assert moved["B2-T16384-H64"] == 2 * (activations + state) + 64 * 4
    assert moved[f"{plain}-gate"] == moved[plain] - 64 * 4 + 16384 * 64 * 4
    assert moved[packed] == activations // 2 + 10 * state + 64 * 4 + 11 * 4
    assert moved[f"{packed}+pool"] == moved[packed] + 10 * state + 10 * 4
    assert moved[f"{plain}+state"] == moved[plain] + state
    assert moved[f"{plain}+gva"] == moved[plain] - 2 * 16384 * 48 * 128 * 2
    assert moved[f"{plain}+fp16"] == moved[f"{plain}+l2norm"] == moved[plain]
    assert moved[f"{plain}+checkpoints"] == moved[plain] + 16 * state
    saved = sum(n // 1024 for n in sequences.lengths_of(10, 8192, "random"))
    assert moved[f"{packed}+checkpoints"] == moved[packed] + saved * state


@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.name)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    # Inputs, results kept by two graphs of two implementations, and the buffers of the copy.
    assert_fits_the_h200(lightning.read(problem), 6 * lightning.moved(problem))
    assert 0 <= lightning.moved(problem) - CEILING.moved(problem) < 8


@pytest.mark.parametrize("feature", ["gva", "pool", "l2norm", "exact", "checkpoints"])
def test_fla_says_what_it_does_not_do(feature):
    packed = feature == "pool"
    problem = problem_of(sequences=2 if packed else None, feature=feature)
    reason = FLA.supports(problem)
    assert reason and "cannot be imported" not in reason


def test_cula_says_which_gpu_it_needs(card):
    card(8, 9)
    assert CULA.supports(problem_of()) == "cula-lightning-sm90 needs compute capability 9.0"
    card(9, 0)
    assert CULA.supports(problem_of()) is None


@pytest.fixture
def peer(peers):
    """FLA's modules; one of its kernels is a bare autotuner."""
    chunk_h = peers.kernels("chunk_fwd_kernel_h")
    chunk_h.prepare_chunk_offsets = lambda ends, size: torch.cat(
        [ends.new_zeros(1), ((ends.diff() + size - 1) // size).cumsum(0)]
    )
    chunk_o = peers.kernels("chunk_fwd_kernel_o")
    chunk_o.chunk_fwd_kernel_o = chunk_o.chunk_fwd_kernel_o.fn
    peers.module("fla.ops.common", chunk_h=chunk_h, chunk_o=chunk_o)
    peers.module("fla.ops.utils", cumsum=peers.kernels("chunk_local_cumsum_scalar_kernel"))
    peers.module("fla.ops.simple_gla", chunk_simple_gla=peers.call)
    peers.chunk_h, peers.tuner = chunk_h, chunk_o.chunk_fwd_kernel_o
    return peers


def test_fla_is_called_with_its_own_conventions(small, peer):
    dense, packed = problem_of(mode="gate", feature="state"), problem_of(sequences=3)
    x, y = (lightning.make_inputs(p, "cpu", 0) for p in (dense, packed))
    FLA.bind(dense, x)()
    FLA.bind(packed, y)()
    first, second = peer.calls
    assert first["g"] is x.gate and first["g_gamma"] is None and first["cu_seqlens"] is None
    assert first["initial_state"] is x.state and first["output_final_state"] is True
    assert second["g"] is None and torch.equal(second["g_gamma"], -y.decay)
    assert second["cu_seqlens"].dtype == second["cu_seqlens_cpu"].dtype == torch.int64
    assert second["cu_seqlens"].tolist() == [0, 50, 100, 150]


def test_fla_is_tuned_anew_for_every_setting_and_compiles_first(peer):
    problem, tuner = problem_of(), peer.tuner
    for _ in range(2):
        FLA.prepare(problem)
        assert tuner.run("x", grid=1, warmup=False) == tuner.run("y", warmup=False) == "result"
    once = [
        ("compile", ("x",), {"grid": 1}),
        ("run", ("x",), {"grid": 1, "warmup": False}),
        ("run", ("y",), {"warmup": False}),
    ]
    assert tuner.log == once * 2
    assert tuner.cache_results is False
    assert tuner.do_bench(None, quantiles=(0.5,)) == {
        **tuning.TUNING_MS,
        "quantiles": (0.5,),
    }


def test_fla_reads_the_end_of_its_offsets_on_the_host(peer):
    FLA.prepare(problem_of())
    FLA.prepare(problem_of())
    ends = torch.tensor([0, 100, 612])
    offsets = peer.chunk_h.prepare_chunk_offsets(ends, 64)
    assert offsets.tolist() == [0, 2, 10] and offsets[-1].item() == 10
    assert type(offsets[-1]) is torch.Tensor and offsets[1].item() == 2
    assert peer.chunk_h.prepare_chunk_offsets(ends, 64) is offsets


@pytest.fixture
def result(small, peer, measured, monkeypatch):
    """The op on the fake device, where cula takes 10, FLA 25 and the copy 8 us."""
    costs = {"cula": 10.0, "fla": 25.0, "copy_ceiling": 8.0}
    monkeypatch.setattr(lightning_providers, "_fla_missing", lambda: None)
    monkeypatch.setitem(lightning_providers._RESULTS, "fla", naive)
    chosen = [problem_of(t) for t in (64, 128, 192)]
    chosen += [problem_of(64, sequences=3), problem_of(64, feature="gva")]
    return measured(lightning_prefill.OP, lambda name, problem: costs[name], chosen)


def test_a_run_checks_everyone_and_yields_rows(result):
    results.validate(result)
    assert {c["provider"] for c in result["checks"]} == {"cula", "fla", "copy_ceiling"}
    assert len(result["rows"]) == 5 * 3 - 1
    assert result["skipped"] == [
        {"setting": "B1-T64-H4+gva", "provider": "fla", "reason": "takes no grouped value heads"}
    ]
    ours = results.rows_of(result, setting="N3-T64-uniform-H4", provider="cula")[0]
    assert (ours["ratio_fla"], ours["ratio_ceiling"]) == (2.5, 0.8)


def test_a_region_may_end_in_the_geometric_mean(result, tmp_path):
    next(r for r in result["rows"] if r["role"] == "ours")["ratio_fla"] = 10.0
    assert report.geometric_mean(result, "graph", "*-H4", "fla") == (
        pytest.approx((10 * 2.5**3) ** (1 / 4)),
        4,
    )
    results.save(result, results.result_path("lightning_prefill", "toy-100", tmp_path))
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- bench:lightning_prefill:toy-100 settings=*-H4 mean=fla -->\n<!-- /bench -->\n"
    )
    tables.update([page], False, tmp_path)
    assert "\n\nGeometric mean of x fla over 4 settings: 3.54.\n\nMedian" in page.read_text()
    assert tables.update([page], True, tmp_path) == []
    with pytest.raises(ValueError, match=r"mean: fla has no graph time of B1-T64-H4\+gva"):
        tables.rendered(page.read_text().replace("settings=*-H4", "settings=*"), tmp_path)


def test_time_over_length_is_drawn(result, tmp_path):
    assert list(plot.panels(result, "T", "B*-H4")) == ["B=1, H=4, mode=decay, L2 cold"]
    plot.draw(result, tmp_path / "prefill.png", "T", "B*-H4")
    assert (tmp_path / "prefill.png").stat().st_size > 10_000


def test_measured_results_hold_the_main_settings_beside_fla():
    for path in results.RESULTS.glob("*/lightning_prefill.json"):
        result = results.load(path)
        method = results.device_method(result)
        assert report.geometric_mean(result, method, lightning_prefill.MAIN, "fla")[1] == 28
