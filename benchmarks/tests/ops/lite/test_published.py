"""The table beside the report of a port to SM89."""

import json

import pytest

from benchmarks import tables
from benchmarks.harness import registry, results
from benchmarks.ops.lite import published, trajectory_study
from benchmarks.report import sections

REGION = "<!-- bench:lite_rtx4090:published{} -->\n<!-- /bench -->\n"


def test_ratios_are_of_one_card_each():
    timed = {"params": {}, "method": "graph", "setting": "a"}
    rows = [
        timed | {"provider": p, "median_us": us} for p, us in (("lite", 50), ("lite_dense", 40))
    ]
    asked = {"op": "o", "setting": "a", "what": "w", "dense_us": 100, "listed_us": 200}
    _, lines = published.table([asked], {"o": {"rows": rows}})
    assert lines == [["a", "w", "100", "200", "2.000", "40", "50", "1.250"]]


def test_a_row_may_name_its_provider_which_runs_dense_too():
    timed = {"params": {}, "method": "graph", "provider": "lite_backward"}
    rows = [
        timed | {"setting": s, "median_us": us} for s, us in (("list5-B1", 50), ("dense-B1", 400))
    ]
    asked = {"op": "o", "setting": "list5-B1", "provider": "lite_backward", "what": "w"}
    _, (line,) = published.table(
        [asked | {"dense_us": 100, "listed_us": 25}], {"o": {"rows": rows}}
    )
    assert line[2:] == ["100", "25", "0.250", "400", "50", "0.125"]


def test_stages_are_added_up_to_theirs():
    theirs = [{"stage": name, "us": us} for name, us in zip(published.STAGES, (5, 20, 5, 60, 10))]
    ours = {"clone": 4, "forward": 30, "loss": 6, "row_sums": 5, "gradients": 50, "order_dq": 5}
    rows = [
        {"params": {}, "method": "graph", "setting": "dense", "provider": name, "median_us": us}
        for name, us in {**ours, "readout": 0.4, "lite": 1000}.items()
    ]
    header, lines = published.stage_table(theirs, {"lite_stages": {"rows": rows}})
    assert header == ["stage", "theirs, us", "share", "ours, dense, us", "share"]
    assert lines[3] == ["backward", "60", "60.0%", "60", "59.8%"]
    assert lines[-1] == ["all of these", "100", "100.0%", "100", "100.0%"]
    assert [line[0] for line in lines[:-1]] == ["clone", "forward", "loss", "backward", "readout"]


@pytest.fixture
def steps():
    rows = [
        {
            "threshold": threshold, "median_us": 20.0, "speedup_lite_dense": 17.6, "density": 0.03125,
            "us_by_step": [360.0, 190.0], "cosine_by_step": [1.0, 0.9963], "density_by_step": [1.0, 0.516],
        }
        for threshold in (None, -1.0)
    ]  # fmt: skip
    return {"lite_trajectory": {"rows": rows}}


def test_trajectories_are_compared_threshold_by_threshold_and_step_by_step(steps):
    asked = {"threshold": -1.0, "us": 133, "dense_us": 889, "computed": "~0%"}
    _, (line,) = published.trajectory_table([asked], steps)
    assert line == ["-1", "133", "6.68", "~0%", "20", "17.60", "3.1%"]
    asked = {"threshold": -1.0, "step": 1, "us": 871, "cosine": 0.996298}
    _, (line,) = published.step_table([asked], steps)
    assert line == ["-1", "1", "871", "0.996298", "190", "0.996300", "51.6%"]


def test_every_part_names_what_is_measured():
    content = json.loads(results.result_path(published.OP, "published").read_text())
    assert content.keys() == {"title", "source", *published.PARTS}
    settings = {op: {s.name for s in registry.get(op).settings(False)} for op in registry.names()}
    for part in ("rows", "training", "sweeps"):
        for row in content[part]:
            assert row["setting"] in settings[row["op"]]
            if "provider" in row:
                assert f"dense-{row['setting'].partition('-')[2]}" in settings[row["op"]]
    assert {row["stage"] for row in content["stages"]} == published.STAGES.keys()
    wanted = trajectory_study.THRESHOLDS
    assert tuple(row["threshold"] for row in content["trajectory"]) == wanted
    assert {row["threshold"] for row in content["steps"]} < set(wanted)
    # 2.90 and 10.27 times as fast, as the report says.
    backward = {r["setting"]: r["dense_us"] / r["listed_us"] for r in content["training"][:-1]}
    assert backward["list12.5-B1-S4096-H16-D128"] == pytest.approx(2.90, abs=0.01)
    assert backward["list5-B1-S8192-H16-D128"] == pytest.approx(10.27, abs=0.01)


def test_the_report_shows_every_part():
    found = sections.read(results.result_path(published.OP, "published")).tables
    parts = list(published.PARTS)[1:]
    assert [t.caption for t in found[1:]] == [f"The same report: {part}" for part in parts]
    assert found[-1].lines[0] == ["-1", "0", "5788", "1"]


def test_the_region_has_every_row_and_its_source():
    text = tables.rendered(REGION.format(""))
    rows = json.loads(results.result_path(published.OP, "published").read_text())["rows"]
    assert all(f"| {row['setting']} | {row['what']} |" in text for row in rows)
    assert "RTX 4090" in text and "Not measured here" in text and "NVIDIA H200" in text
    for name in ("lists", "rows"):
        with pytest.raises(ValueError, match="expected a table of .* or none"):
            tables.rendered(REGION.format(f" table={name}"))
