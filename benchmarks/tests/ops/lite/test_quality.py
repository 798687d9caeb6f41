"""Quality against speed: the study on a CPU, its rows, its table and its command."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import report, results
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import quality, quality_plot, quality_rows, quality_study, trajectory
from benchmarks.ops.lite.quality_study import FULL, SMALL, STRUCTURED
from benchmarks.ops.lite.workloads import HEAD_TYPES
from liteattention_sm89 import LiteAttention
from liteattention_sm89.replay import replay


def test_a_study_has_a_row_for_every_threshold(studied):
    quality_rows.validate(studied)
    names = [r["setting"] for r in studied["rows"]]
    local = ["thr-1", "thr-8", "L1-0.05", "L1-0.05-per-step", "dense"]
    assert names == [f"local-B1-S256-H4-D32-{x}" for x in local] + [
        f"drift-refresh-B1-S256-H4-D32-{x}" for x in ("thr-1", "thr-8", "dense")
    ]
    rows = {
        name.removeprefix("local-B1-S256-H4-D32-"): r for name, r in zip(names, studied["rows"])
    }
    assert [rows[x]["threshold"] for x in local[:2]] == [-1.0, -8.0]
    assert rows["L1-0.05"]["calibration"] == "trajectory" and rows["L1-0.05"]["target"] == 0.05
    assert rows["L1-0.05"]["worst_step_l1"] < 0.058 and -20 <= rows["L1-0.05"]["threshold"] <= 0
    assert rows["L1-0.05-per-step"]["calibration"] == "step"
    assert len(rows["L1-0.05-per-step"]["thresholds"]) == 3
    dense = rows["dense"]
    assert dense["threshold"] is dense["calibration"] is None and dense["density"] == 1
    assert 0 < dense["rel_l1"] < 3e-3 and dense["dropped_mean"] == 0
    assert dense["speedup_lite_dense"] == dense["efficiency_lite_dense"] == 1
    assert rows["thr-1"]["density"] < rows["thr-8"]["density"] <= 1
    assert rows["thr-1"]["rel_l1"] > rows["thr-8"]["rel_l1"]
    assert {r["refresh"] for r in studied["rows"]} == {None, 4}


def test_the_fields_of_a_row_fit_each_other(studied):
    for row in studied["rows"]:
        assert row["params"] == {
            "workload": row["workload"], "label": row["params"]["label"], "B": 1, "S": 256, "H": 4, "D": 32,
        }  # fmt: skip
        times = row["dense_us"]
        assert set(times) == {"lite_dense", "torch_flash"}
        best = times[row["best_dense"]]
        assert best == min(times.values())
        near = {"rel": 1e-4}
        assert row["speedup"] == pytest.approx(best / row["median_us"], **near)
        ours = times["lite_dense"] / row["median_us"]
        assert row["speedup_lite_dense"] == pytest.approx(ours, **near)
        for name in ("", "_lite_dense"):
            want = row["density"] * row["speedup" + name]
            assert row["efficiency" + name] == pytest.approx(want, **near)
        want = best * 3 / row["trajectory_us"]
        assert row["trajectory_speedup"] == pytest.approx(want, **near)
        assert row["mean_density"] == pytest.approx(sum(row["density_by_step"]) / 3, **near)
        assert row["density_by_step"][-1] == pytest.approx(row["density"], **near)
        assert list(row["l1_by_step"]) == ["0", "1", "2"]
        assert row["worst_step_l1"] == max(row["l1_by_step"].values())
        assert row["l1_by_step"]["2"] == row["rel_l1"] <= row["worst_head_l1"]
        assert row["inexact"] < quality_study.INEXACT_LIMIT
        assert row["oracle_dropped"] <= row["dropped_mean"] + 1e-6
        assert (row["method"], row["dtype"]) == ("eager-host", "bfloat16")


def test_rows_are_those_of_a_replay(studied, tiny):
    """The study's quality is what the package measures, with lists of its own for every threshold."""
    workload, shape = tiny["local"]
    steps = list(workload.make(shape, 3, "cpu", SEED))
    track = replay(steps, {"": LiteAttention(threshold=-1.0)}, deep=True)[""]
    row, last = studied["rows"][0], track.last
    pairs = {
        "density": last.density, "rel_l1": last.l1, "rel_l2": last.l2, "worst_head_l1": last.worst_l1,
        "dropped_mean": last.dropped, "dropped_p99": last.dropped_p99, "inexact": last.inexact,
        "oracle_l1": last.best_l1, "oracle_l2": last.best_l2, "oracle_dropped": last.best_dropped,
    }  # fmt: skip
    assert {name: row[name] for name in pairs} == pytest.approx(pairs, rel=1e-5)
    workload, shape = tiny["drift-refresh"]
    steps = list(workload.make(shape, 3, "cpu", SEED))
    assert studied["rows"][5]["density"] == pytest.approx(
        replay(steps, {"": LiteAttention(threshold=-1.0)}, refresh=4)[""].last.density, rel=1e-5
    )


def test_a_gpu_is_timed_by_graphs_and_absent_peers_are_named(
    backend, toy_result, monkeypatch, study_of, tiny
):
    def time_each(calls):
        for call in calls:
            call()
        return [120.0] * len(calls)

    monkeypatch.setattr(backend, "time_each", time_each)
    backend.captured.clear()
    study = study_of(backend, thresholds=(-1.0,), targets=(), steps=2)
    with torch.inference_mode():
        study.run(tiny["local"])
    found = study.result(toy_result["provenance"], toy_result["place"])
    quality_rows.validate(found)
    assert [r["method"] for r in found["rows"]] == ["graph"] * 2
    assert [r["trajectory_us"] for r in found["rows"]] == [120.0] * 2
    (skipped,) = found["skipped"]
    assert skipped["provider"] == "torch_cudnn" and skipped["setting"] == "local-B1-S256-H4-D32"
    # Every provider has a graph, which keeps its results; both trajectories one, which does not.
    assert [keep for _, keep in backend.captured].count(False) == 2
    assert {c["provider"] for c in found["checks"]} == {"lite", "torch_flash"}


def test_a_wrong_result_is_refused(monkeypatch, capsys, tiny):
    monkeypatch.setattr(quality_study, "INEXACT_LIMIT", 1e-9)
    monkeypatch.setattr(quality, "SMALL", (tiny["local"].shape,))
    given = ["--device", "cpu", "--workloads", "random", "--thresholds", "-4"]
    assert quality.main(given) == 1
    assert "random-B1-S256-H4-D32: lite thr-4 has a relative L2 error" in capsys.readouterr().err


def test_what_runs_on_which_size(tiny):
    assert [s.tokens for s in FULL] == [4096, 8192, 16384] and SMALL[0].tokens == 512
    found = [(w.name, s.tokens) for w, s in quality_study.cases(FULL)]
    assert len(found) == len(set(found)) == 9 + 9 + 5
    assert [name for name, tokens in found if tokens == 16384] == [w.name for w in STRUCTURED]
    assert [w.name for w in STRUCTURED] == [*HEAD_TYPES, "mixed"]
    assert tiny["drift-refresh"].workload.refresh == 4 and tiny["drift"].workload.refresh is None
    assert [w.name for w, _ in quality_study.cases(FULL[2:], ["random"])] == ["random"]
    for name, (workload, shape) in tiny.items():
        (q, _, _), *more = workload.make(shape, 2, "cpu", 0)
        assert q.shape == shape.full and len(more) == 1, name


def test_the_command_writes_a_file_that_can_be_drawn(tmp_path, monkeypatch, capsys, tiny):
    monkeypatch.setattr(quality, "SMALL", (tiny["local"].shape,))
    path = tmp_path / "x" / "lite_quality.json"
    given = ["--device", "cpu", "--workloads", "local", "drift", "--thresholds", "-2", "-6"]
    assert quality.main([*given, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "local-B1-S256-H4-D32-thr-2" in printed and f"wrote {path}" in printed
    studied = quality_rows.load(path)
    assert {r["workload"] for r in studied["rows"]} == {"local", "drift"}
    assert studied["provenance"]["gpu"] == "cpu" and studied["method"]["steps"] == 4
    assert quality_plot.main([str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_started_after_the_limit(capsys):
    assert quality.main(["--device", "cpu", "--limit", "-1", "--workloads", "local"]) == 0
    assert "skipped local-B1-S512-H4-D32, lite: not started after -1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--sizes", "7"], "sizes: there is none of"),
        (["--thresholds", "1"], "thresholds: expected finite log2 units"),
        (["--thresholds", "nan"], "thresholds: expected finite log2 units"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert quality.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [quality, trajectory])
def test_a_kernel_that_is_asked_for_serves_every_call(command, tmp_path, monkeypatch, tiny):
    """On the CPU the reference runs, whatever is asked for; the choice itself is what is looked at."""
    seen = set()

    def of(q):
        seen.add(choice_of_kernels())
        return "reference"

    monkeypatch.setattr(quality_study, "kernel_of", of)
    monkeypatch.setattr(command, "SMALL", (tiny["local"].shape,))
    path = tmp_path / "x.json"
    given = ["--device", "cpu", "--kernel", "sm90", "--json", str(path)]
    more = ["--workloads", "random", "--thresholds", "-4"] if command is quality else []
    assert command.main([*given, *more]) == 0
    assert seen == {"sm90"} and choice_of_kernels() is None
    rows = json.loads(path.read_text())["rows"]
    assert {r["kernel"] for r in rows} == {"reference"}


def choice_of_kernels():
    """What `forced` asks for at present."""
    from liteattention_sm89 import choice

    return choice._asked


def test_a_kernel_that_is_not_there_is_an_error(monkeypatch, capsys):
    def missing(q):
        raise RuntimeError("LITEATTENTION_KERNEL=sm90: no such package is installed")

    for command in (quality, trajectory):
        monkeypatch.setattr(quality, "kernel_of", missing)
        assert command.main(["--device", "cpu", "--kernel", "sm90"]) == 2
        assert "kernel: LITEATTENTION_KERNEL=sm90: no such" in capsys.readouterr().err


def test_older_files_name_no_kernel(studied):
    header, lines = quality_rows.table(studied, "local*")
    assert header[1] == "kernel" and {line[1] for line in lines} == {"reference"}
    for row in studied["rows"]:
        del row["kernel"]
    quality_rows.validate(studied)
    assert quality_rows.table(studied, "local*")[0] == [header[0], *header[2:]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("density", 1.2, r"rows\[0\].density: expected 0 to 1, got 1.2"),
        ("dropped_p99", -0.1, r"dropped_p99: expected 0 to 1"),
        ("rel_l1", None, r"rel_l1: expected int/float, got None"),
        ("calibration", "by hand", "calibration: expected one of"),
        ("best_dense", "cublas", "best_dense: expected one of dense_us"),
        ("method", "guess", "method: expected one of"),
    ],
)
def test_files_with_impossible_rows_are_refused(studied, field, value, message, tmp_path):
    path = tmp_path / "x.json"
    studied["rows"][0][field] = value
    path.write_text(json.dumps(studied))
    with pytest.raises(ValueError, match=message):
        quality_rows.load(path)
    del studied["rows"][0][field]
    with pytest.raises(ValueError, match=f"{field}: missing"):
        quality_rows.validate(studied)


def test_the_table_shows_what_rows_hold(studied):
    header, lines = quality_rows.table(studied, "local*")
    assert len(lines) == 5 and all(len(line) == len(header) for line in lines)
    row, shown = studied["rows"][0], dict(zip(header, lines[0]))
    assert shown["setting"] == row["setting"] and shown["L1"] == f"{row['rel_l1']:.2%}"
    assert shown["x best dense"] == f"{row['speedup']:.2f}"
    assert report.as_markdown((header, lines)).count("\n") == 6


def test_measured_results_are_whole():
    for path in results.RESULTS.glob("*/lite_quality.json"):
        studied = quality_rows.load(path)
        found = {(r["workload"], r["params"]["S"]) for r in studied["rows"]}
        assert found == {(w.name, s.tokens) for w, s in quality_study.cases(FULL)}
        assert Path(path).with_suffix(".png").exists()
