"""Tables of skip-list attention beside the report of a port to SM89, whose card is another one.

Regions of `tables.py`: `<!-- bench:lite_rtx4090:published -->`, and with `table=` one of PARTS. Times of two cards are
not compared; what a list does to the time of dense attention on the same card is. Ours are of `results/h200`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.harness.report import Table
from benchmarks.ops.lite import trajectory_rows

OP, CARD = "lite_rtx4090", "h200"
# What of our stages their report has as one.
STAGES = {
    "clone": ("clone",),
    "forward": ("forward",),
    "loss": ("loss",),
    "backward": ("row_sums", "transpose", "gradients", "order_dq"),
    "readout": ("readout",),
}

Rows = list[Mapping[str, Any]]
Measured = Mapping[str, Mapping[str, Any]]


def table(rows: Rows, measured: Measured) -> Table:
    """For every published row the time with a list over that of dense attention, theirs and ours.

    Ours is the provider that the row names, with a list and on the dense problem of that size; of rows that name none
    it is `lite` beside `lite_dense`, on the inputs of the list.
    """
    header = ["setting", "what", "theirs: dense, us", "with a list, us", "list / dense"]
    header += ["ours: dense, us", "with a list, us", "list / dense"]
    lines = []
    for row in rows:
        result, setting, provider = measured[row["op"]], row["setting"], row.get("provider")
        if provider:
            dense = _time(result, f"dense-{setting.partition('-')[2]}", provider)
        else:
            dense = _time(result, setting, "lite_dense")
        times = [dense, _time(result, setting, provider or "lite")]
        pairs = [(row["dense_us"], row["listed_us"]), times]
        cells = [
            cell
            for dense, listed in pairs
            for cell in (f"{dense:.0f}", f"{listed:.0f}", f"{listed / dense:.3f}")
        ]
        lines.append([setting, row["what"], *cells])
    return header, lines


def stage_table(rows: Rows, measured: Measured) -> Table:
    """Their stages of a step, and ours of every setting, with their shares of all stages."""
    (result,) = measured.values()
    settings = list(dict.fromkeys(r["setting"] for r in result["rows"]))
    header = ["stage", "theirs, us", "share"]
    columns = [{row["stage"]: row["us"] for row in rows}]
    for setting in settings:
        header += [f"ours, {setting}, us", "share"]
        known = results.rows_of(result, setting=setting, method=results.device_method(result))
        times = {r["provider"]: r["median_us"] for r in known}
        columns.append(
            {name: sum(times.get(part, 0) for part in parts) for name, parts in STAGES.items()}
        )
    lines = []
    for stage in (*STAGES, "all of these"):
        line = [stage]
        for times in columns:
            total = sum(times[name] for name in STAGES)
            us = times.get(stage, total)
            line += [f"{us:.0f}", f"{us / total:.1%}"]
        lines.append(line)
    return header, lines


def trajectory_table(rows: Rows, measured: Measured) -> Table:
    """Their settled step at every threshold beside ours: times, and shares of the tiles."""
    (result,) = measured.values()
    header = ["threshold", "theirs: a settled step, us", "x dense", "tiles computed"]
    header += ["ours: the last step, us", "x dense", "tiles computed"]
    ours = {r["threshold"]: r for r in result["rows"] if r["threshold"] is not None}
    lines = []
    for row in rows:
        found = ours[row["threshold"]]
        cells = [f"{row['us']:.0f}", f"{row['dense_us'] / row['us']:.2f}", row["computed"]]
        cells += [f"{found['median_us']:.0f}", f"{found['speedup_lite_dense']:.2f}"]
        lines.append([f"{row['threshold']:g}", *cells, f"{found['density']:.1%}"])
    return header, lines


def step_table(rows: Rows, measured: Measured) -> Table:
    """Their first steps at one threshold beside ours."""
    (result,) = measured.values()
    header = ["threshold", "step", "theirs, us", "cosine", "ours, us", "cosine", "tiles computed"]
    ours = {r["threshold"]: r for r in result["rows"] if r["threshold"] is not None}
    lines = []
    for row in rows:
        found, step = ours[row["threshold"]], row["step"]
        cells = [f"{row['us']:.0f}", f"{row['cosine']:.6f}", f"{found['us_by_step'][step]:.0f}"]
        cells += [f"{found['cosine_by_step'][step]:.6f}", f"{found['density_by_step'][step]:.1%}"]
        lines.append([f"{row['threshold']:g}", str(step), *cells])
    return header, lines


# The parts of the file: what makes the table, and the ops whose results it needs where rows do not say.
PARTS: dict[str, tuple[Callable[[Rows, Measured], Table], tuple[str, ...]]] = {
    "rows": (table, ()),
    "training": (table, ()),
    "sweeps": (table, ()),
    "stages": (stage_table, ("lite_stages",)),
    "trajectory": (trajectory_table, (trajectory_rows.OP,)),
    "steps": (step_table, (trajectory_rows.OP,)),
}
ABOUT = {
    "rows": "tiles and lists differ, theirs are skipped by masks of their own.",
    "training": "tiles and lists differ, and how their times were taken is not said.",
    "sweeps": "tiles and lists differ.",
    "stages": "ours are device times of the stages one by one; how theirs were taken is not said.",
    "trajectory": "their tiles have 128 keys, ours 64, and random numbers differ. Shares of tiles are as their report "
    "prints them, where 1.0% appears to be all tiles.",
    "steps": "their tiles have 128 keys, ours 64, and random numbers differ. They call step 0 warm-up.",
}


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document; `name` is one of PARTS, and "rows" without one."""
    part = name or "rows"
    if part not in PARTS or name == "rows":
        names = sorted(PARTS.keys() - {"rows"})
        raise ValueError(f"bench:{OP}: expected a table of {names} or none, got {name!r}")
    content = json.loads(path.read_text(encoding="utf-8"))
    make, needed = PARTS[part]
    rows = content[part]
    ops = needed or tuple(dict.fromkeys(row["op"] for row in rows))
    measured = {op: _load(op, root) for op in ops}
    origins = dict.fromkeys(report.origin(result) for result in measured.values())
    caption = (
        f"Theirs: {content['source']} Ours: medians of graph. {' '.join(origins)} Each ratio is of two times on one "
        f"card; {ABOUT[part]}"
    )
    return f"\n{report.as_markdown(make(rows, measured))}\n\n{caption}\n\n"


def _load(op: str, root: Path) -> Mapping[str, Any]:
    check = trajectory_rows.validate if op == trajectory_rows.OP else results.validate
    return results.load(results.result_path(op, CARD, root), check)


def _time(result: Mapping[str, Any], setting: str, provider: str) -> float:
    method = results.device_method(result)
    (row,) = results.rows_of(result, setting=setting, provider=provider, method=method)
    return row["median_us"]
