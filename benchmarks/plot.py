"""Draws a result file as a PNG: time over batch of every provider with the floor, and the share of the ceiling.

python benchmarks/plot.py RESULT.json [--out PATH.png] [--x B] [--settings PATTERN]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report, results

MIN_POINTS = 3
COLORS = {"ours": "tab:red", "peer": "tab:blue", "ceiling": "tab:gray"}

Row = Mapping[str, Any]


def panels(result: Mapping[str, Any], x: str, pattern: str = "*") -> dict[str, list[Row]]:
    """Rows of the device method by panel: one panel per combination of all parameters but `x` with enough points."""
    grouped: dict[str, list[Row]] = {}
    for row in results.rows_of(result, method=results.device_method(result)):
        if x in row["params"] and fnmatchcase(row["setting"], pattern):
            grouped.setdefault(_panel_title(row, x), []).append(row)
    return {
        t: rows for t, rows in grouped.items() if len({r["params"][x] for r in rows}) >= MIN_POINTS
    }


def series(rows: Sequence[Row], x: str) -> dict[str, list[Row]]:
    """Rows by provider, ascending in x."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["params"][x]):
        lines.setdefault(row["provider"], []).append(row)
    return lines


def draw(result: Mapping[str, Any], out: Path, x: str = "B", pattern: str = "*") -> None:
    """Writes the PNG; ValueError when no parameter combination has enough points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = panels(result, x, pattern)
    if not found:
        raise ValueError(f"result: no group of settings has {MIN_POINTS} or more values of {x}")
    figure, axes = plt.subplots(
        2,
        len(found),
        figsize=(4.2 * len(found), 6.4),
        squeeze=False,
        sharex="col",
        layout="constrained",
    )
    for column, (title, rows) in enumerate(found.items()):
        _draw_times(axes[0][column], rows, x)
        _draw_rates(axes[1][column], rows, x)
        axes[0][column].set_title(title, fontsize=9)
    origin = textwrap.fill(report.origin(result), 60 * len(found))
    figure.suptitle(f"{result['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _draw_times(axis: Any, rows: Sequence[Row], x: str) -> None:
    for name, line in series(rows, x).items():
        xs = [r["params"][x] for r in line]
        color = COLORS.get(line[0]["role"])
        axis.plot(xs, [r["median_us"] for r in line], "o-", ms=3, label=name, color=color)
        axis.fill_between(
            xs, [r["p20_us"] for r in line], [r["p80_us"] for r in line], alpha=0.2, color=color
        )
    floor = {r["params"][x]: r["floor_us"] for r in rows if r["floor_us"] is not None}
    if floor:
        xs = sorted(floor)
        axis.plot(xs, [floor[v] for v in xs], "k--", lw=1, label="floor")
    axis.set(xscale="log", yscale="log", ylabel="us per call")
    axis.legend(fontsize=7)


def _draw_rates(axis: Any, rows: Sequence[Row], x: str) -> None:
    rate, factor, unit = ("gbps", 1e-3, "TB/s")
    if "tflops" in rows[0]:
        rate, factor, unit = ("tflops", 1.0, "TFLOP/s")
    for name, line in series(rows, x).items():
        rates = [r[rate] * factor for r in line]
        color = COLORS.get(line[0]["role"])
        axis.plot([r["params"][x] for r in line], rates, "o-", ms=3, label=name, color=color)
    axis.set(
        xscale="log", xlabel=x, ylabel=unit, ylim=(0, 1.08 * factor * max(r[rate] for r in rows))
    )
    xs = sorted({r["params"][x] for r in rows})
    axis.set_xticks(xs, [str(v) for v in xs])
    axis.minorticks_off()


def _panel_title(row: Row, x: str) -> str:
    shown = [f"{k}={v}" for k, v in row["params"].items() if k != x and v is not False]
    return f"{', '.join(shown)}, L2 {row['l2']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws a result file as a PNG.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the result file")
    parser.add_argument("--x", default="B", help="parameter on the x axis")
    parser.add_argument(
        "--settings", default="*", metavar="PATTERN", help="shell pattern of setting names"
    )
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".png")
    try:
        draw(results.load(args.result), out, args.x, args.settings)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
