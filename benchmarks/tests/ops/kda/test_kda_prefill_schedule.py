"""KDA prefill by either schedule: that a forced schedule is that of every run, and what a result file shows."""

import pytest

from benchmarks import tables
from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.kda import internals, kda_prefill, schedule_tables
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.kda_prefill_schedule import APART, BESIDE, OP, SCHEDULES, check, planned
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.providers import CEILING, CULA
from cula_core import shortcuts
from cula_core.delta_rule import launch
from cula_cp_sm90 import chunk_kda
from cula_testing.shortcuts import pretended_gpu

SMALL = setting(128, heads=2)
# The planner cuts the sequence if its kernels run one after the other.
LONG = setting(8192, heads=1)


@pytest.fixture
def seen():
    """What is launched, as if this machine had a Hopper GPU; nothing runs."""
    with pretended_gpu() as launches:
        yield launches.seen


def launched(seen, call):
    """The kernels of a call, and whether each runs beside another."""
    seen.clear()
    call()
    configs = [unit.config for unit, *_ in seen]
    return [(internals.kernel_of(c), getattr(c, "beside", False)) for c in configs]


BOTH = [("prepare", True), ("recurrence", True)]
ALONE = [("prepare", False), ("recurrence", False)]
CUT = [("prepare", False), ("scan", False), ("merge", False), ("recurrence", False)]


def test_settings_are_those_of_kda_prefill():
    assert registry.get("kda_prefill_schedule") is OP
    for quick in (True, False):
        assert OP.settings(quick) == kda_prefill.OP.settings(quick)
    assert [(p.name, p.role) for p in OP.providers] == [
        ("cula", "ours"),
        ("cula_beside", "variant"),
        ("cula_apart", "variant"),
        ("copy_ceiling", "ceiling"),
    ]


def test_every_run_has_the_schedule_of_its_provider(seen):
    """Providers take turns, and cula leaves lists behind by which later calls would be run."""
    for problem, apart in ((SMALL, ALONE), (LONG, CUT)):
        x = kda.make_inputs(problem, "cpu", 0)
        calls = {p: p.bind(problem, x) for p in (CULA, BESIDE, APART)}
        for _ in range(2):
            for _ in range(3):
                assert launched(seen, calls[CULA]) == apart
            assert len(chunk_kda.shortcuts) == 1
            for _ in range(3):
                assert launched(seen, calls[BESIDE]) == BOTH
            for _ in range(3):
                assert launched(seen, calls[APART]) == apart


def test_a_schedule_is_forced_inside_the_context_alone(seen):
    planner, x = launch._planner, kda.make_inputs(LONG, "cpu", 0)
    call = CULA.bind(LONG, x)
    for beside, expected in (("on", BOTH), ("off", CUT), ("auto", CUT)):
        with internals.scheduled(beside) as plans:
            assert launch._planner is not planner
            assert launched(seen, call) == expected
        (plan,) = plans
        assert (plan.beside is not None, plan.split) == (beside == "on", beside != "on")
        assert launch._planner is planner and not any(shortcuts._every)
        assert launched(seen, call) == CUT
    with pytest.raises(KeyError), internals.scheduled("on"):
        raise KeyError
    assert launch._planner is planner and launched(seen, call) == CUT


def test_what_has_no_kernels_beside_each_other_has_them_apart(seen):
    problem = setting(128, heads=2, feature="unbounded")
    x = kda.make_inputs(problem, "cpu", 0)
    assert launched(seen, BESIDE.bind(problem, x)) == ALONE


def test_what_is_left_out_says_why(monkeypatch):
    refused = {s.name: why for s in OP.settings(False) if (why := BESIDE.supports(s))}
    why = "only kernels for bounded gates of 16 bits run beside each other"
    assert refused == {"B1-T4096-H64+fp32gate": why, "B1-T4096-H64+unbounded": why}
    assert not any(APART.supports(s) for s in OP.settings(False))
    monkeypatch.setattr(internals, "multiprocessors", lambda: 1)
    assert "no plan with both" in BESIDE.supports(SMALL)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_cards(card, monkeypatch, capability):
    card(*capability)
    monkeypatch.setattr(internals, "multiprocessors", lambda: 148)
    needed = "our kernels need a compute capability of 9.0, 10.0, 10.3"
    of_blackwell = "cula_kda_sm100 has no plan with both kernels beside each other"
    assert APART.supports(SMALL) == (needed if capability == (8, 9) else None)
    assert BESIDE.supports(SMALL) == (needed if capability == (8, 9) else of_blackwell)


def test_a_check_tells_the_schedule_and_refuses_another(seen, monkeypatch):
    def result(problem, x):
        CULA.bind(problem, x)()
        return kda.oracle(problem, x, [0, 1])

    monkeypatch.setitem(kda_providers._RESULTS, "cula", result)
    found = {p.name: check(p, SMALL, "cpu") for p in (CULA, BESIDE, APART)}
    assert {name: errors["beside"] for name, errors in found.items()} == {
        "cula": 0.0,
        "cula_beside": 1.0,
        "cula_apart": 0.0,
    }
    assert all(errors["output"] < kda.LIMIT for errors in found.values())
    assert check(CEILING, SMALL, "cpu") == {}
    unbounded = setting(128, heads=2, feature="unbounded")
    with pytest.raises(CheckFailed, match=r"one schedule, on, of cula_beside, got \['off'\]"):
        check(BESIDE, unbounded, "cpu")
    monkeypatch.setitem(kda_providers._RESULTS, "cula", lambda p, x: kda.oracle(p, x, [0, 1]))
    for provider in (CULA, BESIDE, APART):
        with pytest.raises(CheckFailed, match=r"got \[\]"):
            check(provider, SMALL, "cpu")


@pytest.fixture
def result(measured):
    """The op on the fake device: cula has both kernels beside each other with 64 heads, and one setting cannot."""
    costs = {"cula": 10.0, "cula_beside": 10.0, "cula_apart": 15.0, "copy_ceiling": 8.0}
    few = {**costs, "cula_beside": 20.0, "cula_apart": 10.0}
    chosen = [setting(64), setting(64, heads=4), setting(64, feature="unbounded")]

    def found(provider, problem, device):
        return {"output": 1e-3, "beside": float("64" == problem.name[-2:])}

    return measured(
        OP, lambda name, p: (costs if p.params["H"] == 64 else few)[name], chosen, check=found
    )


def test_a_table_has_both_schedules_over_cula(result, tmp_path):
    header, lines = schedule_tables.schedules(result, "graph", "*")
    assert header == [
        "setting", "cula chooses", "cula, us", "beside, us", "apart, us", "beside / cula", "apart / cula",
    ]  # fmt: skip
    assert lines == [
        ["B1-T64-H64", "beside", "10.00 (10.00-10.00)", "10.00", "15.00", "1.00", "1.50"],
        ["B1-T64-H4", "apart", "10.00 (10.00-10.00)", "20.00", "10.00", "2.00", "1.00"],
        ["B1-T64-H64+unbounded", "apart", "10.00 (10.00-10.00)", "-", "15.00", "-", "1.50"],
        ["geometric mean (settings)", "", "", "", "", "1.41 (2)", "1.31 (3)"],
    ]
    assert schedule_tables.schedules(result, "graph", "N*")[1] == []
    results.save(result, results.result_path(OP.name, "h200", tmp_path))
    text = (
        "<!-- bench:kda_prefill_schedule:h200 settings=*-H4 table=schedules -->\n<!-- /bench -->\n"
    )
    assert "| B1-T64-H4 | apart |" in tables.rendered(text, tmp_path)


@pytest.fixture(scope="module")
def measured_file():
    return results.load(results.result_path(OP.name, "h200"))


def test_every_schedule_was_checked_and_timed(measured_file):
    every = [s.name for s in OP.settings(False)]
    method = results.device_method(measured_file)
    for provider in (CULA, BESIDE, APART):
        wanted = [s.name for s in OP.settings(False) if not provider.supports(s)]
        rows = results.rows_of(measured_file, provider=provider.name, method=method)
        assert [row["setting"] for row in rows] == wanted
        flags = {
            c["setting"]: c["errors"]["beside"]
            for c in measured_file["checks"]
            if c["provider"] == provider.name
        }
        assert list(flags) == wanted
        expected = {"auto": {0.0, 1.0}, "on": {1.0}, "off": {0.0}}[SCHEDULES[provider.name]]
        assert set(flags.values()) == expected
    assert len(every) == len(schedule_tables.schedules(measured_file, method, "*")[1]) - 1


def test_the_planner_is_never_far_behind_the_better_schedule(measured_file):
    """What the planner chooses now, by the times of either schedule."""
    times: dict[str, dict[str, float]] = {}
    for row in results.rows_of(measured_file, method=results.device_method(measured_file)):
        times.setdefault(row["setting"], {})[row["provider"]] = row["median_us"]
    assert times.keys() == {s.name for s in OP.settings(False)}
    for problem in OP.settings(False):
        t = times[problem.name]
        if BESIDE.supports(problem) is None:
            chosen = BESIDE if planned(problem, "auto").beside else APART
            best = min(t[p.name] for p in (BESIDE, APART))
            assert t[chosen.name] <= 1.03 * best, f"{problem.name}: {chosen.name}, {t}"
