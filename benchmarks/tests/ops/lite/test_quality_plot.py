"""The plot of quality against speed."""

import copy

import pytest

from benchmarks.harness import results
from benchmarks.ops.lite import quality_plot, quality_rows
from benchmarks.ops.lite.quality_study import ALL, FULL

NAMED = [w.name for w in ALL]


@pytest.fixture
def synthetic(studied):
    """Three sizes of every workload, thresholds from -2 to -16, two targets."""
    (like, *_) = studied["rows"]
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
    return {**studied, "rows": rows}


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


def test_nothing_is_drawn_from_nothing(studied, tmp_path, capsys):
    studied["rows"] = [r for r in studied["rows"] if r["threshold"] is None]
    path = tmp_path / "x.json"
    results.save(studied, path)
    assert quality_plot.main([str(path)]) == 2
    assert "no row has a threshold" in capsys.readouterr().err
    assert quality_plot.main([str(tmp_path / "y.json")]) == 2
    assert not path.with_suffix(".png").exists()
