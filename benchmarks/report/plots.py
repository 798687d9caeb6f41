"""Plots of result files as SVG for an HTML page, whose style sheet gives them their colours.

An op of VIEWS gets the panels of `plot.py`, any other a row of marks per setting. A panel is a picture of its own, so
that a narrow screen shows them below each other.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from benchmarks import plot
from benchmarks.harness import results
from benchmarks.ops.kda import tables as kda_tables
from benchmarks.ops.lite import end_to_end_plot, end_to_end_rows, quality_plot

Result = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """The arguments of `plot.panels`."""

    x: str
    pattern: str = "*"
    merge: tuple[str, ...] = ()


VIEWS = {
    "lightning_decode": (View("B", "B*-T1-*-cold"),),
    "lightning_decode_80sm": (View("B", "B*-T1-*-cold"),),
    "delta_decode": (
        View("B", "*-T1-fp32-??"),
        View("B", "*-T1-bf16-vk"),
        View("T", "*-B64-*-fp32-vk"),
        View("T", "*-B64-*-fp32-vk-step"),
    ),
    "delta_decode_80sm": (View("B", "*-T1-fp32-??"),),
    "delta_decode_fused": (View("B"),),
    "lightning_prefill": (View("T", "B*"), View("T", "N*-random-*")),
    "lightning_prefill_delta": (View("T", "B*"), View("T", "N*-random-*")),
    "kda_prefill": (View("T", "B*"), View("T", "N*-random-*")),
    "kda_prefill_flashkda": (View("T", "B*"), View("T", "N*-random-*")),
    "kda_prefill_kernels": (View("T", "B*"),),
    "lite_attention": (
        View("S", "dense-B1-*-D128", ("H",)),
        View("S", "full-B1-*-D128", ("H",)),
        View("density", "list*"),
    ),
    "lite_backward": (View("S", "dense-B1-*-D128", ("H",)), View("density", "list*-S8192-*")),
    "lite_sweeps": (View("S", "dense-*-D128"), View("D", "dense-*-S8192-*")),
}
WIDTH = 4.4  # inches: on a phone, where a picture fills the screen, 10 points are 11 pixels
LEGEND = {"frameon": False, "fontsize": 9, "handlelength": 2.4, "columnspacing": 1.2}
# Colours of matplotlib -> variables of style.css, which have another value in the dark.
VARIABLES = {code: f"--{name.replace(':', '-')}" for name, code in TABLEAU_COLORS.items()}
VARIABLES |= {"#000000": "--ink", "#ffffff": "--paper", "#cccccc": "--line"}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Plot:
    """A picture and what it shows."""

    caption: str
    svg: str


def of_op(result: Result, anchor: str) -> list[Plot]:
    """The plots of a result of `run.py`."""
    looks = plot.styles(result["rows"])
    found = []
    for view in VIEWS.get(result["op"], ()):
        panels = plot.panels(result, view.x, view.pattern, view.merge)
        for title, rows in panels.items():
            figure = _figure(4.9)
            axes = figure.subplots(2, 1, sharex=True, height_ratios=(5, 4))
            plot.draw_panel(axes, rows, view.x, looks)
            found.append(_finish(figure, axes, title, f"{anchor}-{len(found)}"))
    return found or [_relative(result, looks, anchor)]


def of_loads(result: Result, anchor: str) -> list[Plot]:
    """The plot of a result under a sustained load, which has few settings."""
    return [_relative(result, plot.styles(result["rows"]), anchor)]


def _relative(result: Result, looks: Mapping[str, Any], anchor: str) -> Plot:
    """A row of marks per setting: the times of all providers over ours."""
    rows = results.rows_of(result, method=results.device_method(result))
    ours = {r["setting"]: r for r in rows if r["role"] == "ours"}
    name = next(iter(ours.values()))["provider"]
    places = {setting: -number for number, setting in enumerate(ours)}
    variants = {r["provider"] for r in rows if r["role"] == "variant"}
    crowded = len(variants) > len(plot.COLORS["variant"])
    groups: dict[str, list[plot.Row]] = {}
    for row in rows:
        label = row["provider"]
        if crowded and label in variants:
            label = f"{len(variants)} variants"
        groups.setdefault(label, []).append(row)
    figure = _figure(1.2 + 0.2 * len(places))
    axis = figure.subplots()
    for label, members in groups.items():
        look = {**looks[members[0]["provider"]], "linestyle": ""}
        if label not in looks:
            look |= {"marker": "|", "markersize": 7, "color": "tab:orange"}
        elif label == name:
            look |= {"zorder": 4}
        xs = [r["median_us"] / ours[r["setting"]]["median_us"] for r in members]
        axis.plot(xs, [places[r["setting"]] for r in members], label=label, **look)
    floors = [r for r in ours.values() if r["floor_us"] is not None]
    if floors:
        xs = [r["floor_us"] / r["median_us"] for r in floors]
        ys = [places[r["setting"]] for r in floors]
        axis.plot(xs, ys, "kx", ms=5, label="floor")
    axis.set_yticks(list(places.values()), list(places))
    axis.set_ylim(0.3 - len(places), 0.7)
    axis.set_xlabel(f"time / time of {name} (left is faster)")
    caption = f"{results.device_method(result)}: times of all providers over that of {name}"
    return _finish(figure, [axis], caption, anchor, columns=2)


def of_quality(result: Result, anchor: str) -> list[Plot]:
    """The plots of `quality_plot.py`, by size."""
    found = []
    for size in quality_plot.sizes(result):
        if quality_plot.lines(result, size):
            count = 3 if quality_plot.drifts(result, size) else 2
            figure = _figure(2.6 * count + 0.9)
            axes = figure.subplots(count, 1)
            quality_plot.draw_size(axes, result, size, named=False)
            title = quality_plot.TITLE.format(*size)
            found.append(_finish(figure, axes[:1], title, f"{anchor}-{len(found)}", columns=2))
    return found


def of_trajectory(result: Result, anchor: str) -> list[Plot]:
    """Times of the steps of a trajectory and the shares of tiles that they visit, a line per threshold."""
    rows = [r for r in result["rows"] if r["threshold"] is not None]
    figure = _figure(4.9)
    times, shares = figure.subplots(2, 1, sharex=True)
    for row, color in zip(rows, TABLEAU_COLORS):
        look = {"color": color, "marker": ".", "label": f"{row['threshold']:g}"}
        times.plot(row["us_by_step"], **look)
        shares.plot(row["density_by_step"], **look)
    times.set_yscale("log")
    times.set_ylabel("us per call")
    shares.set_ylabel("share of tiles")
    shares.set_xlabel("step")
    caption = "Time and share of tiles of every step, by threshold"
    return [_finish(figure, [times, shares], caption, f"{anchor}-0")]


def of_end_to_end(content: Result, anchor: str) -> list[Plot]:
    """Times of whole steps and the shares of tiles that they visit, a picture per model and resolution."""
    found = []
    for rows in end_to_end_rows.by_setting(content["rows"]).values():
        figure = _figure(4.9)
        axes = figure.subplots(2, 1, sharex=True)
        end_to_end_plot.draw_setting(axes, rows)
        title = end_to_end_plot.caption(rows[0])
        found.append(_finish(figure, axes[:1], title, f"{anchor}-{len(found)}", columns=2))
    return found


def of_cards(published: Result, predicted: Result | None, anchor: str) -> list[Plot]:
    """Published times over the length of one sequence, by card, beside predicted ones if there are any."""
    theirs = {(r["card"], r["setting"]): r for r in published["rows"]}
    ours = {(r["card"], r["setting"]): r for r in (predicted or {"rows": ()})["rows"]}
    names = {int(n.split("-T")[1].split("-")[0]): n for n in kda_tables.MAIN if n[:3] == "B1-"}
    found = []
    for card in kda_tables.CARDS:
        figure = _figure(3.4)
        axis = figure.subplots()
        if predicted:
            low, mid, high = (
                [ours[card, n][f"{case}_us"] / 1e3 for n in names.values()]
                for case in kda_tables.CASES
            )
            axis.plot(list(names), mid, "o-", ms=3.5, color="tab:red", label="ours, predicted")
            axis.fill_between(list(names), low, high, color="tab:red", alpha=0.2)
        for who, mark, color in (("cuLA", "^", "tab:green"), ("FLA", "s", "tab:blue")):
            rows = {t: theirs[card, n] for t, n in names.items() if (card, n) in theirs}
            ys = [row[f"{who.lower()}_ms"] for row in rows.values()]
            style = {"ls": "--", "ms": 3.5, "color": color}
            axis.plot(list(rows), ys, mark, label=f"{who}, published", **style)
        axis.set(xscale="log", yscale="log", xlabel="T", ylabel="ms per call")
        plot.plain_ticks(axis, list(names))
        caption = f"{card}: one sequence of T tokens, 64 heads"
        found.append(_finish(figure, [axis], caption, f"{anchor}-{card}", columns=2))
    return found


def bars(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    caption: str,
    anchor: str,
) -> Plot:
    """Horizontal bars, a group per label."""
    figure = _figure(1.1 + 0.2 * len(labels) * (len(series) + 0.6))
    axis = figure.subplots()
    thick = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        ys = [-n - number * thick for n in range(len(labels))]
        axis.barh(ys, values, thick * 0.9, label=name, color=("tab:red", "tab:gray")[number])
    axis.set_yticks([-n - (len(series) - 1) * thick / 2 for n in range(len(labels))], labels)
    axis.set_xlabel(xlabel)
    return _finish(figure, [axis], caption, anchor)


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _finish(
    figure: Figure, axes: Sequence[Any], caption: str, anchor: str, columns: int = 3
) -> Plot:
    """The picture with a grid, and with the legend of its first axes above."""
    for axis in figure.axes:
        axis.grid(color="black", alpha=0.15, lw=0.5)
        axis.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, **LEGEND)
    return Plot(caption, as_svg(figure, anchor))


def as_svg(figure: Figure, prefix: str) -> str:
    """The figure as an element of a page: text as text, ids with a prefix, colours as variables of the style sheet."""
    picture = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(picture, format="svg", transparent=True, metadata=NO_METADATA)
    text = picture.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'^(<svg\b.*?) width="[^"]*"', r"\1", text, flags=re.DOTALL)
    text = re.sub(r'^(<svg\b.*?) height="[^"]*"', r"\1", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    return re.sub(r"#[0-9a-f]{6}\b", _variable, text)


def _variable(match: re.Match[str]) -> str:
    if match[0] not in VARIABLES:
        raise ValueError(f"plot: colour {match[0]} has no variable in style.css")
    return f"var({VARIABLES[match[0]]})"
