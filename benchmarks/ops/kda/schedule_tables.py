"""Tables of KDA prefill by either schedule: `table=NAME` in a region of `tables.py`.

schedules   which schedule cula chooses, its time, those of both schedules, and their ratios to it
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.report import Table

OURS = "cula"
# Providers of one schedule each, as the columns name them.
SCHEDULES = {"cula_beside": "beside", "cula_apart": "apart"}


def schedules(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    """A line per setting, "-" where there are no kernels for a schedule, and a last line with the means of ratios.

    A ratio is the time of a schedule over that of cula; a mean is geometric, over the settings that have the ratio.
    """
    lines: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if row["method"] == method and fnmatchcase(row["setting"], pattern):
            lines.setdefault(row["setting"], {})[row["provider"]] = row
    checks = (c for c in result["checks"] if c["provider"] == OURS)
    chosen = {c["setting"]: "beside" if c["errors"]["beside"] else "apart" for c in checks}
    header = ["setting", f"{OURS} chooses", f"{OURS}, us"]
    header += [f"{title}, us" for title in SCHEDULES.values()]
    header += [f"{title} / {OURS}" for title in SCHEDULES.values()]
    cells: list[list[str]] = []
    known: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for setting, line in lines.items():
        cell = [setting, chosen[setting], report.time(line[OURS], spread=True)]
        cell += [report.time(line.get(name), spread=False) for name in SCHEDULES]
        for name, ratios in known.items():
            if name not in line:
                cell.append("-")
                continue
            ratios.append(line[name]["median_us"] / line[OURS]["median_us"])
            cell.append(f"{ratios[-1]:.2f}")
        cells.append(cell)
    if cells:
        means = [
            f"{statistics.geometric_mean(r):.2f} ({len(r)})" if r else "-" for r in known.values()
        ]
        cells.append(["geometric mean (settings)", "", "", *[""] * len(SCHEDULES), *means])
    return header, cells


TABLES: dict[str, Callable[[Mapping[str, Any], str, str], Table]] = {"schedules": schedules}
