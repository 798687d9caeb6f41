"""Quality against speed: the workloads' statistics, the study on a CPU, its rows, and the plot."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.harness import report, results
from benchmarks.harness.timers import Timing
from benchmarks.ops.lite import quality, quality_plot, quality_rows, workloads
from benchmarks.ops.lite.quality import ALL, FULL, SMALL, STRUCTURED, HostBackend, Study
from benchmarks.ops.lite.workloads import HEAD_TYPES, Shape
from liteattention_sm89 import LiteAttention, lite_attention
from liteattention_sm89.quality import compare
from liteattention_sm89.replay import replay

TINY = Shape(1, (2, 8, 16), 4, 32)
NAMED = {w.name: w for w in ALL}


def splitmix(state):
    """One number of the published generator, with Python's integers."""
    z = state % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_numbers_are_those_of_the_published_generator(seed):
    """Box and Muller on SplitMix64, whose first number from state 0 is E220A8397B1DCDAF."""
    stride = 0x9E3779B97F4A7C15
    assert splitmix(stride) == 0xE220A8397B1DCDAF
    start, draw = splitmix(seed), workloads._Normal("cpu", seed)
    found = [draw((3,)), draw((2, 2))]
    bits = [splitmix(start + n * stride) for n in range(1, 5)]
    pairs = [((((b >> 40) + 1) / 2**24), (b & 0xFFFFFF) / 2**24 * 2 * math.pi) for b in bits]
    parts = [[math.sqrt(-2 * math.log(u)) * f(a) for u, a in pairs] for f in (math.cos, math.sin)]
    want = [parts[0][0], parts[0][1], parts[1][0]]
    assert found[0].tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)
    want = [*parts[0][2:], *parts[1][2:]]
    assert found[1].flatten().tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert found[0].dtype == torch.float32 and found[1].shape == (2, 2)


def test_numbers_are_normal():
    x = workloads._Normal("cpu", 1)((500_001,)).double()
    moments = [float((x**n).mean()) for n in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.03)
    assert float((x[1:] * x[:-1]).mean()) == pytest.approx(0, abs=0.01)
    half = 250_001
    assert float((x[: half - 1] * x[half:]).mean()) == pytest.approx(0, abs=0.01)
    assert 4.3 < float(x.abs().max()) < 6


# Density, cosine, relative L1 and probability kept, by call, for tiles of 128 keys. At -8 heads differ widely.
PUBLISHED = {
    -1.0: [(1.0, 1.0, 0.0, 1.0), (0.516, 0.99643, None, None), (0.0312, 0.98897, 0.145, 0.872)],
    -5.0: [(1.0, 1.0, 0.0, 1.0), (0.519, 0.99638, None, None), (0.0349, 0.98879, 0.147, 0.871)],
    -8.0: [(1.0, 1.0, 0.0, 1.0), (0.820, 0.99929, None, None), (0.633, 0.99791, 0.047, 0.953)],
}
BOUNDS = {
    -1.0: (0.003, 4e-4, 0.008, 0.008),
    -5.0: (0.005, 4e-4, 0.008, 0.008),
    -8.0: (0.15, 2e-3, 0.02, 0.02),
}


@pytest.mark.parametrize("threshold", PUBLISHED)
def test_the_simulation_gives_the_published_figures(threshold):
    steps = workloads.simulation(Shape(1, (1, 1, 4096), 1, 128), 3, "cpu", 0)
    mask, direction = None, 1
    for (q, k, v), want in zip(steps, PUBLISHED[threshold]):
        out, _, after = lite_attention(
            q, k, v, mask, threshold=threshold, direction=direction, block_n=128
        )
        (found,) = compare(q, k, v, [(out, mask)], block_n=128)
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k, v))
        )
        cosine = torch.cosine_similarity(
            out.float().transpose(1, 2).flatten(), exact.flatten(), dim=0
        )
        values = (found.density, float(cosine), found.l1, 1 - found.dropped)
        for value, expected, bound in zip(values, want, BOUNDS[threshold]):
            assert expected is None or value == pytest.approx(expected, abs=bound)
        mask, direction = after, -direction


def final(types, threshold, workload=workloads.structured, grid=(4, 16, 16), **options):
    """The last of six steps of 1024 tokens."""
    steps = list(workload(Shape(1, grid, 2, 64), 6, "cpu", 1, types=types))
    track = replay(steps, {"": LiteAttention(threshold=threshold)}, every=6, **options)[""]
    return track.last


def test_head_types_keep_different_shares_of_the_tiles():
    """The order of the types, and what thresholds trade, as for 4096 tokens."""
    found = {name: final((name,), -6.0) for name in HEAD_TYPES}
    spatial, temporal, local, diffuse = (found[name].density for name in HEAD_TYPES)
    assert spatial < 0.3 < local < 0.7 < temporal < 0.85 < diffuse == 1
    assert 0.001 < found["spatial"].l1 < 0.05 and found["diffuse"].l1 < 0.003
    strict, loose = final(("local",), -10.0), final(("local",), -2.0)
    assert strict.density > local > loose.density
    assert strict.l1 < found["local"].l1 < loose.l1 > 0.03


def test_drift_is_followed_after_a_refresh_only():
    """Six steps that move after three: an error of the size of the result, unless lists are reset after the move."""
    options = {"workload": workloads.drift, "grid": (8, 8, 16)}
    lost, reset = (final(("local",), -4.0, refresh=r, **options) for r in (None, 4))
    assert lost.l1 > 0.9 and lost.dropped > 0.9
    assert reset.l1 < 0.03 and lost.density < reset.density < 1
    assert final(("local",), -math.inf, **options).l1 < 0.003


def study_of(backend=None, **options):
    options = {"steps": 3, "tried": 3, "thresholds": (-1.0, -8.0), "targets": (0.05,), **options}
    timing = Timing(rounds=2, block=1, eager_calls=1, warmup=1)
    return Study("cpu", backend or HostBackend(), timing, 0, **options)


@pytest.fixture(scope="module")
def study():
    """Two workloads on the CPU."""
    found = study_of()
    with torch.inference_mode():
        found.run(NAMED["local"], TINY)
        found.run(NAMED["drift-refresh"], TINY)
    return found


@pytest.fixture
def result(study, toy_result):
    origin = {**toy_result["provenance"], "gpu": "cpu"}
    return copy.deepcopy(study.result(origin, toy_result["place"]))


def test_a_study_has_a_row_for_every_threshold(result):
    quality_rows.validate(result)
    names = [r["setting"] for r in result["rows"]]
    local = ["thr-1", "thr-8", "L1-0.05", "L1-0.05-per-step", "dense"]
    assert names == [f"local-B1-S256-H4-D32-{x}" for x in local] + [
        f"drift-refresh-B1-S256-H4-D32-{x}" for x in ("thr-1", "thr-8", "dense")
    ]
    rows = {name.removeprefix("local-B1-S256-H4-D32-"): r for name, r in zip(names, result["rows"])}
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
    assert {r["refresh"] for r in result["rows"]} == {None, 4}


def test_the_fields_of_a_row_fit_each_other(result):
    for row in result["rows"]:
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
        assert row["inexact"] < quality.INEXACT_LIMIT
        assert row["oracle_dropped"] <= row["dropped_mean"] + 1e-6
        assert (row["method"], row["dtype"]) == ("eager-host", "bfloat16")


def test_rows_are_those_of_a_replay(result):
    """The study's quality is what the package measures, with lists of its own for every threshold."""
    steps = list(NAMED["local"].make(TINY, 3, "cpu", quality.SEED))
    track = replay(steps, {"": LiteAttention(threshold=-1.0)}, deep=True)[""]
    row, last = result["rows"][0], track.last
    pairs = {
        "density": last.density, "rel_l1": last.l1, "rel_l2": last.l2, "worst_head_l1": last.worst_l1,
        "dropped_mean": last.dropped, "dropped_p99": last.dropped_p99, "inexact": last.inexact,
        "oracle_l1": last.best_l1, "oracle_l2": last.best_l2, "oracle_dropped": last.best_dropped,
    }  # fmt: skip
    assert {name: row[name] for name in pairs} == pytest.approx(pairs, rel=1e-5)
    given = NAMED["drift-refresh"]
    steps = list(given.make(TINY, 3, "cpu", quality.SEED))
    assert result["rows"][5]["density"] == pytest.approx(
        replay(steps, {"": LiteAttention(threshold=-1.0)}, refresh=4)[""].last.density, rel=1e-5
    )


def test_a_gpu_is_timed_by_graphs_and_absent_peers_are_named(backend, toy_result, monkeypatch):
    def time_each(calls):
        for call in calls:
            call()
        return [120.0] * len(calls)

    monkeypatch.setattr(backend, "time_each", time_each)
    backend.captured.clear()
    study = study_of(backend, thresholds=(-1.0,), targets=(), steps=2)
    with torch.inference_mode():
        study.run(NAMED["local"], TINY)
    found = study.result(toy_result["provenance"], toy_result["place"])
    quality_rows.validate(found)
    assert [r["method"] for r in found["rows"]] == ["graph"] * 2
    assert [r["trajectory_us"] for r in found["rows"]] == [120.0] * 2
    (skipped,) = found["skipped"]
    assert skipped["provider"] == "torch_cudnn" and skipped["setting"] == "local-B1-S256-H4-D32"
    # Every provider has a graph, which keeps its results; both trajectories one, which does not.
    assert [keep for _, keep in backend.captured].count(False) == 2
    assert {c["provider"] for c in found["checks"]} == {"lite", "torch_flash"}


def test_a_wrong_result_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(quality, "INEXACT_LIMIT", 1e-9)
    monkeypatch.setattr(quality, "SMALL", (TINY,))
    given = ["--device", "cpu", "--workloads", "random", "--thresholds", "-4"]
    assert quality.main(given) == 1
    assert "random-B1-S256-H4-D32: lite thr-4 has a relative L2 error" in capsys.readouterr().err


def test_what_runs_on_which_size():
    assert [s.tokens for s in FULL] == [4096, 8192, 16384] and SMALL[0].tokens == 512
    found = [(w.name, s.tokens) for w, s in quality.cases(FULL)]
    assert len(found) == len(set(found)) == 9 + 9 + 5
    assert [name for name, tokens in found if tokens == 16384] == [w.name for w in STRUCTURED]
    assert [w.name for w in STRUCTURED] == [*HEAD_TYPES, "mixed"]
    assert NAMED["drift-refresh"].refresh == 4 and NAMED["drift"].refresh is None
    assert [w.name for w, _ in quality.cases(FULL[2:], ["random"])] == ["random"]
    for name, workload in NAMED.items():
        (q, _, _), *more = workload.make(TINY, 2, "cpu", 0)
        assert q.shape == TINY.full and len(more) == 1, name


def test_the_command_writes_a_file_that_can_be_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "SMALL", (TINY,))
    path = tmp_path / "x" / "lite_quality.json"
    given = ["--device", "cpu", "--workloads", "local", "drift", "--thresholds", "-2", "-6"]
    assert quality.main([*given, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "local-B1-S256-H4-D32-thr-2" in printed and f"wrote {path}" in printed
    result = quality_rows.load(path)
    assert {r["workload"] for r in result["rows"]} == {"local", "drift"}
    assert result["provenance"]["gpu"] == "cpu" and result["method"]["steps"] == 4
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
def test_files_with_impossible_rows_are_refused(result, field, value, message, tmp_path):
    path = tmp_path / "x.json"
    result["rows"][0][field] = value
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message):
        quality_rows.load(path)
    del result["rows"][0][field]
    with pytest.raises(ValueError, match=f"{field}: missing"):
        quality_rows.validate(result)


def test_the_table_shows_what_rows_hold(result):
    header, lines = quality_rows.table(result, "local*")
    assert len(lines) == 5 and all(len(line) == len(header) for line in lines)
    row, shown = result["rows"][0], dict(zip(header, lines[0]))
    assert shown["setting"] == row["setting"] and shown["L1"] == f"{row['rel_l1']:.2%}"
    assert shown["x best dense"] == f"{row['speedup']:.2f}"
    assert report.as_markdown((header, lines)).count("\n") == 6


@pytest.fixture
def synthetic(result):
    """Three sizes of every workload, thresholds from -2 to -16, two targets."""
    (like, *_) = result["rows"]
    rows = []
    for shape in FULL:
        for i, name in enumerate(NAMED):
            for t in (-2.0, -4.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0, 0.01, 0.05):
                row = copy.deepcopy(like)
                given = t < 0
                density = min(1.0, 0.03 * (1 + i) - 0.05 * t) if given else 0.4
                size = {"B": 1, "S": shape.tokens, "H": shape.heads, "D": shape.dim}
                row |= {
                    "setting": f"{name}-{shape.tokens}-{t}",
                    "params": {**row["params"], **size},
                    "workload": name,
                    "threshold": t if given else -5.5,
                    "calibration": None if given else "trajectory",
                    "target": None if given else t,
                    "density": density,
                    "rel_l1": 0.3 * 2 ** (t / 2) / (1 + i) + 1e-3 if given else t,
                    "speedup": 0.55 / (density + 0.02),
                    "speedup_lite_dense": 1 / (density + 0.02),
                }
                rows.append(row)
    return {**result, "rows": rows}


def test_the_plot_is_small_and_shows_every_line(synthetic, tmp_path):
    quality_rows.validate(synthetic)
    path = tmp_path / "new" / "x.png"
    quality_plot.draw(synthetic, path)
    assert 20_000 < path.stat().st_size < 150_000
    from PIL import Image

    colors = {c for _, c in Image.open(path).convert("RGB").getcolors(maxcolors=100_000)}
    from matplotlib.colors import to_rgb

    # Whatever the palette did to them, the colors of the lines are in the picture.
    for name in NAMED:
        want = [round(255 * x) for x in to_rgb(quality_plot.COLORS[name])]
        assert min(max(abs(a - b) for a, b in zip(want, c)) for c in colors) <= 16, name


def test_the_plot_takes_its_lines_from_the_rows(synthetic):
    sizes = quality_plot.sizes(synthetic)
    assert sizes == [(1, 4096, 16, 128), (1, 8192, 16, 128), (1, 16384, 24, 128)]
    found = quality_plot.lines(synthetic, sizes[0])
    assert list(found) == list(NAMED)
    assert [r["threshold"] for r in found["local"]] == [-2.0 * n for n in range(1, 9)]
    assert {r["params"]["S"] for r in found["local"]} == {4096}
    assert [r["target"] for r in quality_plot.marks(synthetic, sizes[1])] == [0.01, 0.05] * 9
    drifts = quality_plot.drifts(synthetic, sizes[0])
    assert list(drifts) == ["drift", "drift-refresh"] and list(drifts["drift"]) == [0, 1, 2]
    assert set(quality_plot.COLORS) == set(NAMED)
    assert "regression only" in quality_plot.LEGEND["simulation"]


def test_nothing_is_drawn_from_nothing(result, tmp_path, capsys):
    result["rows"] = [r for r in result["rows"] if r["threshold"] is None]
    path = tmp_path / "x.json"
    results.save(result, path)
    assert quality_plot.main([str(path)]) == 2
    assert "no row has a threshold" in capsys.readouterr().err
    assert quality_plot.main([str(tmp_path / "y.json")]) == 2
    assert not path.with_suffix(".png").exists()


def test_measured_results_are_whole():
    for path in results.RESULTS.glob("*/lite_quality.json"):
        result = quality_rows.load(path)
        found = {(r["workload"], r["params"]["S"]) for r in result["rows"]}
        assert found == {(w.name, s.tokens) for w, s in quality.cases(FULL)}
        assert Path(path).with_suffix(".png").exists()
