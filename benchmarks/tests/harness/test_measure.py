"""From an op to the rows of a result, on the fake device."""

import dataclasses

import pytest

from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed


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


def test_result_is_valid_and_survives_a_round_trip(toy_result, tmp_path):
    path = tmp_path / "toy" / "op.json"
    results.save(toy_result, path)
    assert results.load(path) == toy_result


def test_result_files_hold_one_row_per_line(toy_result, tmp_path):
    results.save(toy_result, tmp_path / "op.json")
    lines = (tmp_path / "op.json").read_text().splitlines()
    assert sum(line.startswith('  {"setting"') for line in lines) == len(toy_result["rows"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r.pop("rows"), "result.rows: missing"),
        (lambda r: r.update(schema=2), "schema: expected 1"),
        (lambda r: r["rows"][0].pop("gbps"), r"rows\[0\].gbps: missing"),
        (lambda r: r["rows"][0].update(median_us="1"), r"rows\[0\].median_us: expected int/float"),
        (lambda r: r["rows"][0].update(samples=True), r"rows\[0\].samples: expected int"),
        (lambda r: r["rows"][0].update(p20_us=1e6), r"rows\[0\]: expected 0 < p20_us"),
        (lambda r: r["rows"][0].update(method="guess"), r"rows\[0\].method"),
        (lambda r: r["rows"].append(r["rows"][0]), "appears twice"),
    ],
)
def test_validation_names_the_field(toy_result, spoil, message):
    spoil(toy_result)
    with pytest.raises(ValueError, match=message):
        results.validate(toy_result)


def test_registry_lists_ops_and_refuses_unknown_ones():
    assert {"lightning_decode", "lightning_decode_80sm"} <= set(registry.names())
    assert not any(name.startswith("_") for name in registry.names())
    with pytest.raises(ValueError, match="lightning_decode"):
        registry.get("nothing")


@pytest.mark.parametrize("name", registry.names())
def test_every_op_declares_unique_settings_and_one_of_ours(name):
    op = registry.get(name)
    assert op.name == name
    for quick in (True, False):
        names = [s.name for s in op.settings(quick)]
        assert len(names) == len(set(names)) > 0
    assert all(op.floor_bytes(s) > 0 and op.set_bytes(s) > 0 for s in op.settings(False))


def test_settings_are_selected_by_pattern_in_their_own_order(toy):
    both = toy.settings(False)
    assert registry.select(both, None) == both
    assert registry.select(both, ["large", "s*"]) == both
    assert [s.name for s in registry.select(both, ["l*"])] == ["large"]
    with pytest.raises(ValueError, match="'x\\*' matches none"):
        registry.select(both, ["l*", "x*"])


def test_peers_are_chosen_by_name(toy):
    assert [p.name for p in registry.choose(toy, None)] == ["ours", "other", "limit"]
    assert [p.name for p in registry.choose(toy, ["none"])] == ["ours", "limit"]
    assert [p.name for p in registry.choose(toy, ["other"])] == ["ours", "other", "limit"]
    with pytest.raises(ValueError, match="no peer named limit"):
        registry.choose(toy, ["limit"])


def test_an_op_has_exactly_one_of_ours(toy):
    with pytest.raises(ValueError, match="exactly one"):
        dataclasses.replace(toy, providers=toy.providers[1:])
