"""A trajectory step by step: the study on a CPU, its rows, its tables and its command."""

import copy
import json
import re

import pytest
import torch

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.harness.timers import Timing
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import (
    quality,
    quality_rows,
    quality_study,
    trajectory,
    trajectory_rows,
    trajectory_study,
)
from benchmarks.ops.lite.quality_study import HostBackend
from benchmarks.ops.lite.trajectory_study import THRESHOLDS, TrajectoryStudy
from benchmarks.ops.lite.workloads import Shape
from benchmarks.report import sections
from liteattention_sm89 import LiteAttention

SHAPE = Shape(1, (2, 8, 16), 2, 128)
NAMES = [f"thr{t:g}" for t in THRESHOLDS] + ["dense"]


def study_of(backend):
    timing = Timing(rounds=1, block=1, eager_calls=1, warmup=1)
    return TrajectoryStudy("cpu", backend, timing, 0, 4, 1, THRESHOLDS, targets=())


@pytest.fixture(scope="module")
def study():
    found = study_of(HostBackend())
    with torch.inference_mode():
        found.run(trajectory_study.case(SHAPE))
    return found


@pytest.fixture
def studied(study, toy_result):
    """The content of that study's result file; a test may change it."""
    origin = {**toy_result["provenance"], "gpu": "cpu"}
    return copy.deepcopy(study.result(origin, toy_result["place"]))


def exact(step):
    """Dense attention in fp64, [B, H, S, D]."""
    q, k, v = (t.double().transpose(1, 2) for t in step)
    return (q @ k.mT * q.shape[3] ** -0.5).softmax(-1) @ v


def test_a_row_has_every_step(studied):
    trajectory_rows.validate(studied)
    assert studied["op"] == "lite_trajectory" and studied["method"]["steps"] == 4
    rows = {r["params"]["label"]: r for r in studied["rows"]}
    assert list(rows) == NAMES
    for row in rows.values():
        assert len(row["us_by_step"]) == len(row["cosine_by_step"]) == 4
        assert min(row["us_by_step"]) > 0 and row["trajectory_us"] > 0
        assert row["density_by_step"][0] == 1 and row["cosine_by_step"][0] > 0.99999
    dense, loose = rows["dense"], rows["thr-1"]
    assert set(dense["density_by_step"]) == {1.0} and min(dense["cosine_by_step"]) > 0.99999
    assert dense["settled_step"] == 0
    # Four key tiles and two query tiles: what a query tile does not look at goes in two steps.
    assert loose["density_by_step"][-1] == 0.5 and loose["settled_step"] in (1, 2)
    assert 0.5 < loose["cosine_by_step"][-1] < 0.99999


def test_cosines_are_those_of_what_the_module_computed(studied):
    """A module of its own runs the same steps, and its outputs are compared in fp64."""
    workload = trajectory_study.case(SHAPE).workload
    module, found = LiteAttention(threshold=-1.0), []
    for step in workload.make(SHAPE, 4, "cpu", SEED):
        got = module(*step).double().transpose(1, 2).flatten()
        want = exact(step).flatten()
        found.append(float(got @ want / (got.norm() * want.norm())))
    row = next(r for r in studied["rows"] if r["params"]["label"] == "thr-1")
    assert row["cosine_by_step"] == pytest.approx(found, abs=1e-6)


def test_cosine_is_one_for_the_same_and_zero_for_another():
    q, k, v = torch.randn(3, 2, 40, 3, 16, generator=torch.Generator().manual_seed(0))
    same = exact((q, k, v)).transpose(1, 2).float()
    half = same.clone()
    half[1] = 0
    found = trajectory_study.cosines_of((q, k, v), [same, -2 * same, half])
    share = float(same[0].double().norm() / same.double().norm())
    assert found == pytest.approx([1, -1, share], abs=1e-6)


def test_steps_are_timed_by_graphs_on_a_gpu(backend, monkeypatch):
    """Every step has the time of its own calls: those of step n cost 100 + n here."""
    made, steps = [], []

    def time_each(calls):
        for call in calls:
            call()
        return [100.0 + max(len(steps) - 1, 0)] * len(calls)

    replay = trajectory_study.replay

    def noted(given, modules, **options):
        steps.append(len(given))
        made.append(options["every"])
        return replay(given, modules, **options)

    monkeypatch.setattr(backend, "time_each", time_each)
    monkeypatch.setattr(trajectory_study, "replay", noted)
    study = study_of(backend)
    with torch.inference_mode():
        study.run(trajectory_study.case(SHAPE))
    assert steps == made == [1, 2, 3, 4]
    for row in study.rows:
        per_call = [us / row["us_by_step"][0] * 100 for us in row["us_by_step"]]
        assert per_call == pytest.approx([100, 101, 102, 103], rel=1e-4)


def test_a_study_on_a_card_replays_graphs():
    """What the command makes on a GPU; nothing is launched before it runs."""
    size = (20, 1, THRESHOLDS)
    found = quality.study_on("cuda", {"l2_bytes": 77}, *size, TrajectoryStudy, targets=())
    assert isinstance(found, TrajectoryStudy) and found.backend.graphs
    assert (found.l2_bytes, found.steps, found.tried, found.targets) == (77, 20, 1, ())
    assert found.thresholds == THRESHOLDS and found.release is torch.cuda.empty_cache


def test_what_runs_on_the_card():
    assert THRESHOLDS == (-0.5, -1.0, -2.0, -5.0, -8.0, -10.0) and trajectory_study.STEPS == 20
    case = trajectory_study.case(quality_study.FULL[0])
    assert case.name == "simulation-B1-S4096-H16-D128"


@pytest.mark.parametrize(
    ("density", "step"),
    [
        ([1.0, 1.0, 1.0], 0),
        ([1.0, 0.516, 0.0312, 0.0313], 2),
        ([1.0, 0.8, 0.7, 0.65, 0.645], 3),
        ([1.0, 0.5], 1),
    ],
)
def test_lists_settle_when_their_length_stays(density, step):
    assert trajectory_rows.settled(density) == step


def test_the_command_writes_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trajectory, "SMALL", (SHAPE,))
    monkeypatch.setattr(trajectory, "SMALL_STEPS", 3)
    path = tmp_path / "x" / "lite_trajectory.json"
    assert trajectory.main(["--device", "cpu", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "settled at step" in printed and f"wrote {path}" in printed
    found = trajectory_rows.load(path)
    assert [r["params"]["label"] for r in found["rows"]] == NAMES
    assert found["provenance"]["gpu"] == "cpu" and found["method"]["steps"] == 3


def test_a_wrong_result_and_a_missing_card(monkeypatch, capsys):
    monkeypatch.setattr(quality_study, "INEXACT_LIMIT", 1e-9)
    monkeypatch.setattr(trajectory, "SMALL", (SHAPE,))
    assert trajectory.main(["--device", "cpu"]) == 1
    assert "simulation-B1-S256-H2-D128: lite thr-0.5 has a relative L2" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert trajectory.main(["--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("us_by_step", [1.0], r"rows\[0\].us_by_step: expected 4 steps, got 1"),
        ("cosine_by_step", None, "cosine_by_step: expected list, got None"),
        ("settled_step", 4, "settled_step: expected 0 to 3, got 4"),
        ("density", 1.2, "density: expected 0 to 1"),
    ],
)
def test_files_with_impossible_rows_are_refused(studied, field, value, message, tmp_path):
    path = tmp_path / "x.json"
    studied["rows"][0][field] = value
    path.write_text(json.dumps(studied))
    with pytest.raises(ValueError, match=message):
        trajectory_rows.load(path)


def region(root, words=""):
    text = f"<!-- bench:lite_trajectory:toy-100{words} -->\n<!-- /bench -->\n"
    return tables.rendered(text, root)


def test_tables_show_what_rows_hold(studied, tmp_path):
    for row in studied["rows"]:
        row |= {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0, "density": 0.03125}
        row |= {"speedup_lite_dense": 18.0, "speedup": 10.6, "rel_l1": 0.145}
        row |= {"dense_us": {"lite_dense": 360.0}, "best_dense": "lite_dense"}
        row |= {"trajectory_us": 720.0, "trajectory_speedup": 1.18, "settled_step": 2}
        row |= {
            "us_by_step": [350.0, 190.04, 20.0, 20.0],
            "density_by_step": [1, 0.516, 0.031, 0.03],
        }
        row["cosine_by_step"] = [1.0, 0.996298, 0.988814, 0.9888012]
    results.save(studied, results.result_path("lite_trajectory", "toy-100", tmp_path))
    lines = region(tmp_path).splitlines()
    assert (
        lines[4]
        == "| -0.5 | 3.1% | 20.0 | 18.00 | 10.60 | 0.988801 | 14.50% | 2 | 720 | 2.00 | 1.18 |"
    )
    assert lines[10].startswith("| dense | ") and lines[12].startswith(
        "Medians of eager-host, kernels of reference. cpu"
    )
    text = region(tmp_path, " table=steps")
    assert "| -0.5: us | -0.5: tiles | -0.5: cosine | -1: us |" in text and "dense" not in text
    assert "\n| 1 | 190.0 | 51.6% | 0.9963 | 190.0 |" in text
    with pytest.raises(ValueError, match="expected table=steps or none, got 'lists'"):
        region(tmp_path, " table=lists")
    assert "Not measured on h200" in tables.rendered(
        "<!-- bench:lite_trajectory:h200 -->\n<!-- /bench -->\n", tmp_path
    )


def test_a_card_without_documents_shows_it_too(studied, tmp_path):
    results.save(studied, results.result_path("lite_trajectory", "toy-100", tmp_path))
    page = tables.card_page("toy-100", tmp_path)
    assert "## Skip-list attention: a simulated trajectory step by step" in page


def test_the_report_has_both_tables(studied, toy_result, tmp_path):
    origin = {**studied["provenance"], "gpu": toy_result["provenance"]["gpu"]}
    path = results.result_path("lite_trajectory", "toy-100", tmp_path)
    results.save({**studied, "provenance": origin}, path)
    section = sections.read(path)
    last, steps = section.tables
    assert last.header[:2] == ["setting", "threshold"] and last.lines[-1][1] == "dense"
    assert last.lines[0][0] == "simulation-B1-S256-H2-D128-thr-0.5"
    assert steps.folded and len(steps.lines) == 4
    (plot,) = section.plots
    words = set(re.findall(r">([^<>]+)</text>", plot.svg))
    assert {f"{t:g}" for t in THRESHOLDS} <= words
    assert {"step", "us per call", "share of tiles"} <= words


def test_measured_results_are_whole():
    paths = list(results.RESULTS.glob("*/lite_trajectory.json"))
    assert paths
    for path in paths:
        found = trajectory_rows.load(path)
        assert [r["setting"] for r in found["rows"]] == [
            f"simulation-B1-S4096-H16-D128-{name}" for name in NAMES
        ]
        assert found["op"] != quality_rows.OP and found["method"]["steps"] == 20
