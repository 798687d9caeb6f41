"""From an op to the rows of a result, on the fake device."""

import dataclasses

import pytest

from benchmarks.harness import results
from benchmarks.harness.registry import CannotRun, CheckFailed


def row(result, **wanted):
    (found,) = results.rows_of(result, **wanted)
    return found


def test_rows_hold_times_bytes_rates_and_ratios(toy_result):
    ours = row(toy_result, setting="large", provider="ours", method="graph")
    assert ours["median_us"] == ours["p20_us"] == ours["p80_us"] == 10.0
    assert ours["bytes"] == 40_000_000
    assert ours["gbps"] == 4000.0
    assert ours["floor_us"] == 10.0
    assert (ours["ratio_other"], ours["ratio_ceiling"], ours["ratio_floor"]) == (1.5, 0.8, 1.0)
    peer = row(toy_result, setting="large", provider="other", method="graph")
    assert (peer["ratio_other"], peer["ratio_ceiling"], peer["ratio_floor"]) == (
        1.0,
        0.5333,
        0.6667,
    )


def test_resident_settings_have_no_floor_and_use_one_set(toy_result, backend):
    ours = row(toy_result, setting="small", provider="ours", method="graph")
    assert ours["floor_us"] is None and ours["ratio_floor"] is None
    assert ours["l2"] == "resident"
    assert (1, False) in backend.captured


def test_cold_settings_rotate_and_keep_results_apart(toy_run, backend):
    toy_run.measure(toy_run.op.settings(True))
    assert {"ours0", "ours1", "ours2", "ours3", "ours4"} <= set(backend.log)
    assert all(keep and count % 5 == 0 for count, keep in backend.captured)


def test_unsupported_providers_are_named_with_the_reason(toy_result):
    assert toy_result["skipped"] == [
        {"setting": "small", "provider": "other", "reason": "too small"}
    ]
    assert not results.rows_of(toy_result, setting="small", provider="other")
    assert "ratio_other" not in row(toy_result, setting="small", provider="ours", method="graph")


def test_a_peer_that_cannot_run_is_left_out_with_the_reason(toy_run):
    def check(provider, setting, device):
        if provider.name == "other":
            raise CannotRun("no kernel for this card")
        return {}

    toy_run.op = dataclasses.replace(toy_run.op, check=check)
    toy_run.measure(toy_run.op.settings(True))
    assert toy_run.skipped == [
        {"setting": "large", "provider": "other", "reason": "no kernel for this card"}
    ]
    assert {r["provider"] for r in toy_run.rows} == {"ours", "limit"}
    assert [c["provider"] for c in toy_run.checks] == ["ours", "limit"]


def test_nothing_is_timed_before_every_check_passed(toy_run, backend):
    def check(provider, setting, device):
        if provider.name == "other":
            raise CheckFailed("wrong")
        return {}

    toy_run.op = dataclasses.replace(toy_run.op, check=check)
    with pytest.raises(CheckFailed, match="wrong"):
        toy_run.measure(toy_run.op.settings(True))
    assert backend.log == [] and toy_run.rows == []


def test_prepare_runs_before_the_check(toy_run):
    order = []
    prepared = dataclasses.replace(toy_run.providers[0], prepare=lambda s: order.append("prepare"))
    toy_run.providers = (prepared,)
    toy_run.op = dataclasses.replace(toy_run.op, check=lambda p, s, d: order.append("check") or {})
    toy_run.measure(toy_run.op.settings(True))
    assert order == ["prepare", "check"]


def test_without_graphs_calls_are_queued_and_say_so(toy_run, backend):
    backend.graphs = False
    toy_run.measure(toy_run.op.settings(True))
    assert {r["method"] for r in toy_run.rows} == {"queued-event", "eager-host", "eager-event"}
    assert backend.captured == []
