"""Tables of decode with the delta rule for documents: `table=NAME` in a region of `tables.py`.

delta_beside   our time, and that of every other implementation but the ceiling with its ratio to ours: a line per
               setting; of a step these are the ways to take it, of one launch with convolution and norm the chains
delta_tokens   our time by the number of tokens: a line per kind of problem
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.report import Table

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def delta_beside(result: Result, method: str, pattern: str) -> Table:
    """A line per setting: our time with its percentiles, and the times of others with their ratios to it."""
    lines: dict[str, dict[str, Row]] = {}
    roles: dict[str, str] = {}
    for row in _rows(result, method, pattern):
        lines.setdefault(row["setting"], {})[row["provider"]] = row
        roles[row["provider"]] = row["role"]
    ours = next((name for name, role in roles.items() if role == "ours"), "ours")
    others = [name for name, role in roles.items() if role in ("variant", "peer")]
    header = ["setting", f"{ours}, us"]
    header += [title for name in others for title in (f"{name}, us", f"x {name}")]
    cells = []
    for setting, line in lines.items():
        cell = [setting, report.time(line.get(ours), spread=True)]
        for name in others:
            cell += [report.time(line.get(name), spread=False), _over(line.get(name), line[ours])]
        cells.append(cell)
    return header, cells


def delta_tokens(result: Result, method: str, pattern: str) -> Table:
    """A line per gate, state, layout, mode and number of rows, with our time for every number of tokens."""
    rows = [r for r in _rows(result, method, pattern) if r["role"] == "ours"]
    counts = sorted({r["params"]["T"] for r in rows})
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(_without_tokens(row), {})[row["params"]["T"]] = row
    header = ["setting", *(f"T={count}, us" for count in counts)]
    return header, [
        [name, *(report.time(line.get(count), spread=False) for count in counts)]
        for name, line in lines.items()
    ]


def _rows(result: Result, method: str, pattern: str) -> list[Row]:
    return [
        r for r in result["rows"] if r["method"] == method and fnmatchcase(r["setting"], pattern)
    ]


def _without_tokens(row: Row) -> str:
    """The name of a row's setting without its number of tokens."""
    return row["setting"].replace(f"-T{row['params']['T']}-", "-", 1)


def _over(row: Row | None, ours: Row) -> str:
    return "-" if row is None else f"{row['median_us'] / ours['median_us']:.2f}"


TABLES: dict[str, Callable[[Result, str, str], Table]] = {
    "delta_beside": delta_beside,
    "delta_tokens": delta_tokens,
}
