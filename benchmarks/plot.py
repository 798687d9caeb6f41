"""Draws a result file as a PNG: the time of every provider with the floor, and its rate, over a parameter.

python benchmarks/plot.py RESULT.json [--out PATH.png] [--x B] [--settings PATTERN] [--merge PARAMETER ...]
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

from benchmarks.harness import report, results
from benchmarks.harness.commands import draw_result

MIN_POINTS = 3
TITLE_WIDTH = 48  # characters of 9 points over a panel
COLORS = {
    "ours": ("tab:red",),
    "peer": ("tab:blue", "tab:green", "tab:purple", "tab:cyan"),
    "variant": ("tab:orange", "tab:olive", "tab:brown", "tab:pink", "tab:cyan"),
    "ceiling": ("tab:gray",),
}
# Lines that cover each other, or that a reader sees without colours, differ in these: dashes and markers by role.
LINES = {"ours": "-", "peer": "-", "variant": (0, (4, 3)), "ceiling": (0, (1, 1.5))}
MARKERS = {"ours": "o", "peer": "s^Dh", "variant": "vPX<>", "ceiling": "*"}

Row = Mapping[str, Any]


def panels(
    result: Mapping[str, Any], x: str, pattern: str = "*", merge: Sequence[str] = ()
) -> dict[str, list[Row]]:
    """The rows of the device method by panel: a panel per combination of all parameters but `x` with enough points.

    Problems that differ in the parameters of `merge` share a panel.
    """
    grouped: dict[str, list[Row]] = {}
    for row in results.rows_of(result, method=results.device_method(result)):
        if x in row["params"] and fnmatchcase(row["setting"], pattern):
            grouped.setdefault(_panel_title(row, x, merge), []).append(row)
    return {
        t: rows for t, rows in grouped.items() if len({r["params"][x] for r in rows}) >= MIN_POINTS
    }


def series(rows: Sequence[Row], x: str) -> dict[str, list[Row]]:
    """Rows by provider, ascending in x."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["params"][x]):
        lines.setdefault(row["provider"], []).append(row)
    return lines


def colors(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for every provider, by its role."""
    found: dict[str, str] = {}
    left = {role: iter(shades) for role, shades in COLORS.items()}
    for row in rows:
        if row["provider"] not in found:
            found[row["provider"]] = next(left[row["role"]], "black")
    return found


def styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What matplotlib draws the line of every provider with: colour, dashes and marker, by its role."""
    found: dict[str, dict[str, Any]] = {}
    left = {role: iter(shapes) for role, shapes in MARKERS.items()}
    for name, color in colors(rows).items():
        role = next(row["role"] for row in rows if row["provider"] == name)
        found[name] = {
            "color": color,
            "linestyle": LINES[role],
            "marker": next(left[role], "."),
            # Ours shows on both sides of a variant that covers it.
            "markersize": 5 if role == "ours" else 3.5,
            "linewidth": 2.2 if role == "ours" else 1.3,
            "zorder": 3 if role == "variant" else 2,
        }
    return found


def draw(
    result: Mapping[str, Any],
    out: Path,
    x: str = "B",
    pattern: str = "*",
    merge: Sequence[str] = (),
) -> None:
    """Writes the PNG; ValueError when no parameter combination has enough points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = panels(result, x, pattern, merge)
    looks = styles(result["rows"])
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
        draw_panel(axes[:, column], rows, x, looks)
        axes[0][column].legend(fontsize=7)
        axes[0][column].set_title(textwrap.fill(title, TITLE_WIDTH), fontsize=9)
    origin = textwrap.fill(report.origin(result), 60 * len(found))
    figure.suptitle(f"{result['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def draw_panel(axes: Sequence[Any], rows: Sequence[Row], x: str, looks: Mapping[str, Any]) -> None:
    """Draws the times of a panel's rows on the first of two axes, and their rates on the second."""
    _draw_times(axes[0], rows, x, looks)
    _draw_rates(axes[1], rows, x, looks)


def _draw_times(axis: Any, rows: Sequence[Row], x: str, looks: Mapping[str, Any]) -> None:
    for name, line in series(rows, x).items():
        xs, look = [r["params"][x] for r in line], looks[name]
        axis.plot(xs, [r["median_us"] for r in line], label=name, **look)
        low, high = ([r[end] for r in line] for end in ("p20_us", "p80_us"))
        axis.fill_between(xs, low, high, alpha=0.2, color=look["color"])
    floor = {r["params"][x]: r["floor_us"] for r in rows if r["floor_us"] is not None}
    if floor:
        xs = sorted(floor)
        axis.plot(xs, [floor[v] for v in xs], "k--", lw=1, label="floor")
    axis.set(xscale="log", yscale="log", ylabel="us per call")
    plain_ticks(axis)


def _draw_rates(axis: Any, rows: Sequence[Row], x: str, looks: Mapping[str, Any]) -> None:
    rate, factor, unit = ("gbps", 1e-3, "TB/s")
    if "tflops" in rows[0]:
        rate, factor, unit = ("tflops", 1.0, "TFLOP/s")
    for name, line in series(rows, x).items():
        rates = [r[rate] * factor for r in line]
        xs = [r["params"][x] for r in line]
        axis.plot(xs, rates, label=name, **looks[name])
    axis.set(
        xscale="log", xlabel=x, ylabel=unit, ylim=(0, 1.08 * factor * max(r[rate] for r in rows))
    )
    axis.minorticks_off()
    _ticks_at(axis, sorted({r["params"][x] for r in rows}))


def plain_ticks(axis: Any, xs: Sequence[float] = ()) -> None:
    """Plain numbers at a logarithmic y axis, and ticks at the values `xs` alone of the x axis, if there are any."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    if xs:
        _ticks_at(axis, xs)


def _ticks_at(axis: Any, xs: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xticks(xs, [_short(x) for x in xs])
    axis.xaxis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    """A number as it stands at an axis: multiples of 1024 in K."""
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _panel_title(row: Row, x: str, merge: Sequence[str] = ()) -> str:
    hidden = {x, *merge}
    shown = [f"{k}={v}" for k, v in row["params"].items() if k not in hidden and v is not False]
    return f"{', '.join(shown)}, L2 {row['l2']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws a result file as a PNG.")
    parser.add_argument("--x", default="B", help="parameter on the x axis")
    parser.add_argument(
        "--settings", default="*", metavar="PATTERN", help="shell pattern of setting names"
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        default=[],
        metavar="PARAMETER",
        help="parameters that may differ within a panel",
    )

    def draw_file(args: argparse.Namespace, out: Path) -> None:
        draw(results.load(args.result), out, args.x, args.settings, args.merge)

    return draw_result(parser, draw_file, argv)


if __name__ == "__main__":
    sys.exit(main())
