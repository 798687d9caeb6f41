"""Draws a result of `quality.py` as a PNG: error against time, speedup against density, and drift step by step.

python benchmarks/ops/lite/quality_plot.py RESULT.json [--out PATH.png]
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import report
from benchmarks.harness.commands import draw_result
from benchmarks.ops.lite import quality_rows

Row = Mapping[str, Any]

COLORS = {
    "spatial": "tab:blue",
    "temporal": "tab:orange",
    "local": "tab:green",
    "diffuse": "tab:purple",
    "mixed": "tab:red",
    "random": "tab:brown",
    "drift": "tab:pink",
    "drift-refresh": "tab:olive",
    "simulation": "tab:gray",
}
LEGEND = {"simulation": "simulation (regression only)"}
# Thresholds that are written beside their points, and the one whose drift is shown step by step.
NAMED = (-2.0, -6.0, -10.0)
DRIFT_THRESHOLD = -6.0
TARGETS = {0.01: "*", 0.05: "D"}
TITLE = "B={}, S={}, H={}, D={}"


def sizes(result: Row) -> list[tuple[int, int, int, int]]:
    """The sizes (B, S, H, D) of the result, sorted by length."""
    found = {tuple(r["params"][name] for name in "BSHD") for r in result["rows"]}
    return sorted(found, key=lambda size: (size[1], size))


def lines(result: Row, size: Sequence[int]) -> dict[str, list[Row]]:
    """The rows of a size whose thresholds were not calibrated, by workload, the highest threshold first."""
    found: dict[str, list[Row]] = {}
    for row in _of(result, size):
        if row["threshold"] is not None and row["calibration"] is None:
            found.setdefault(row["workload"], []).append(row)
    return {w: sorted(rows, key=lambda r: -r["threshold"]) for w, rows in found.items()}


def marks(result: Row, size: Sequence[int]) -> list[Row]:
    """The rows whose one threshold was calibrated for the whole trajectory."""
    return [r for r in _of(result, size) if r["calibration"] == "trajectory"]


def drifts(result: Row, size: Sequence[int]) -> dict[str, dict[int, float]]:
    """The relative L1 by workload and step, at the threshold nearest to DRIFT_THRESHOLD."""
    found = {}
    for workload, rows in lines(result, size).items():
        if workload.startswith("drift"):
            row = min(rows, key=lambda r: abs(r["threshold"] - DRIFT_THRESHOLD))
            found[workload] = {int(step): l1 for step, l1 in row["l1_by_step"].items()}
    return found


def draw(result: Row, out: Path) -> None:
    """Writes the PNG; ValueError if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    columns = [size for size in sizes(result) if lines(result, size)]
    if not columns:
        raise ValueError("result: no row has a threshold")
    height = 3 if any(drifts(result, size) for size in columns) else 2
    figure, axes = plt.subplots(
        height,
        len(columns),
        figsize=(4.4 * len(columns), 3.2 * height),
        squeeze=False,
        layout="constrained",
    )
    for column, size in enumerate(columns):
        draw_size(axes[:, column], result, size)
        axes[0][column].set_title(TITLE.format(*size), fontsize=9)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=7)
    origin = textwrap.fill(report.origin(result), 62 * len(columns))
    figure.suptitle(f"{result['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    plt.close(figure)
    # A palette keeps the file small.
    image = Image.open(picture).convert("RGB")
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE).save(out, optimize=True)


def draw_size(axes: Sequence[Any], result: Row, size: Sequence[int], named: bool = True) -> None:
    """Draws one size on two axes: errors and speedups; or on three, where the last one shows the drift.

    named: whether thresholds stand beside their points, in small print.
    """
    _draw_errors(axes[0], result, size, NAMED if named else ())
    _draw_speedups(axes[1], result, size)
    if len(axes) == 3:
        _draw_drift(axes[2], result, size)
    for axis in axes:
        axis.tick_params(labelsize=7)


def _draw_errors(axis: Any, result: Row, size: Sequence[int], named: Sequence[float]) -> None:
    for workload, rows in lines(result, size).items():
        style = {"color": COLORS.get(workload), "label": LEGEND.get(workload, workload)}
        xs, ys = [1 / r["speedup"] for r in rows], [r["rel_l1"] for r in rows]
        axis.plot(xs, ys, "o--" if workload in LEGEND else "o-", ms=3, lw=1, **style)
        for x, y, row in zip(xs, ys, rows):
            if row["threshold"] in named:
                text = f"{row['threshold']:g}"
                axis.annotate(
                    text,
                    (x, y),
                    (2, 2),
                    textcoords="offset points",
                    fontsize=5,
                    color=style["color"],
                )
    for target, marker in TARGETS.items():
        found = [r for r in marks(result, size) if r["target"] == target]
        axis.scatter(
            [1 / r["speedup"] for r in found],
            [r["rel_l1"] for r in found],
            marker=marker,
            s=26,
            c="none",
            edgecolors=[COLORS.get(r["workload"], "black") for r in found],
            linewidths=0.9,
            label=f"calibrated, worst step {target:.0%}",
            zorder=3,
        )
        axis.axhline(target, color="black", lw=0.5, ls=":")
    axis.axvline(1, color="black", lw=0.5)
    axis.set(yscale="log", xlim=(0, None))
    axis.set_xlabel("time / best dense (last step)", fontsize=8)
    axis.set_ylabel("relative L1 error", fontsize=8)


def _draw_speedups(axis: Any, result: Row, size: Sequence[int]) -> None:
    found = lines(result, size)
    for workload, rows in found.items():
        rows = sorted(rows, key=lambda r: r["density"])
        xs, color = [r["density"] for r in rows], COLORS.get(workload)
        axis.plot(xs, [r["speedup"] for r in rows], "o-", ms=3, lw=1, color=color)
    points = [r for rows in found.values() for r in rows]
    low = min(r["density"] for r in points)
    axis.plot([low, 1], [1 / low, 1], "k--", lw=1, label="ideal: 1 / density")
    ours = statistics.median(r["speedup"] / r["speedup_lite_dense"] for r in points)
    axis.plot([low, 1], [ours / low, ours], "k:", lw=1, label="the same from our dense kernel")
    axis.axhline(1, color="black", lw=0.5)
    axis.set(xscale="log", yscale="log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter("")
    axis.set_xticks(_steps(low, 1))
    axis.set_yticks(_steps(min(r["speedup"] for r in points), 1 / low))
    axis.set_xlabel("density (last step)", fontsize=8)
    axis.set_ylabel("speedup over best dense", fontsize=8)
    axis.legend(fontsize=7)


def _steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, between the limits and just beyond them."""
    digits = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**power for power in digits for digit in (1, 2, 5)]
    return [x for x in every if low / 2 <= x <= high * 2]


def _draw_drift(axis: Any, result: Row, size: Sequence[int]) -> None:
    found = drifts(result, size)
    for workload, errors in found.items():
        steps = sorted(errors)
        axis.plot(steps, [errors[s] for s in steps], "o-", ms=3, lw=1, color=COLORS[workload])
    if not found:
        axis.set_axis_off()
        return
    axis.set(yscale="log")
    axis.set_xlabel(f"step, threshold {DRIFT_THRESHOLD:g}", fontsize=8)
    axis.set_ylabel("relative L1 error", fontsize=8)


def _of(result: Row, size: Sequence[int]) -> list[Row]:
    return [r for r in result["rows"] if [r["params"][name] for name in "BSHD"] == list(size)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws a result of quality.py as a PNG.")
    return draw_result(parser, lambda args, out: draw(quality_rows.load(args.result), out), argv)


if __name__ == "__main__":
    sys.exit(main())
