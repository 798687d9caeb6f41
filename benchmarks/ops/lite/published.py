"""The table of skip-list attention beside the report of a port to SM89, whose card is another one.

Region of `tables.py`: `<!-- bench:lite_rtx4090:published -->`. Times of two cards are not compared; what a list does to
the time of dense attention on the same card is. Ours are of `results/h200`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.harness.report import Table

OP, CARD = "lite_rtx4090", "h200"


def table(rows: list[Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]]) -> Table:
    """For every published row the time with a list over that of dense attention, theirs and ours."""
    header = ["setting", "what", "theirs: dense, us", "with a list, us", "list / dense"]
    header += ["ours: dense, us", "with a list, us", "list / dense"]
    lines = []
    for row in rows:
        result = measured[row["op"]]
        times = [_time(result, row["setting"], name) for name in ("lite_dense", "lite")]
        pairs = [(row["dense_us"], row["listed_us"]), times]
        cells = [
            cell
            for dense, listed in pairs
            for cell in (f"{dense:.0f}", f"{listed:.0f}", f"{listed / dense:.3f}")
        ]
        lines.append([row["setting"], row["what"], *cells])
    return header, lines


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of the region of a document; it has one table, so `name` must be None."""
    if name is not None:
        raise ValueError(f"bench:{OP}: expected no table, got {name!r}")
    content = json.loads(path.read_text(encoding="utf-8"))
    ops = dict.fromkeys(row["op"] for row in content["rows"])
    measured = {op: results.load(results.result_path(op, CARD, root)) for op in ops}
    origins = dict.fromkeys(report.origin(result) for result in measured.values())
    caption = (
        f"Theirs: {content['source']} Ours: medians of graph. {' '.join(origins)} Each ratio is of two times on one "
        f"card; "
        "tiles and lists differ, theirs are skipped by masks of their own."
    )
    return f"\n{report.as_markdown(table(content['rows'], measured))}\n\n{caption}\n\n"


def _time(result: Mapping[str, Any], setting: str, provider: str) -> float:
    method = results.device_method(result)
    (row,) = results.rows_of(result, setting=setting, provider=provider, method=method)
    return row["median_us"]
