"""Tables of KDA prefill beside FlashKDA: both times, their ratio, and the errors of both.

Regions of `tables.py`: `<!-- bench:kda_prefill_flashkda:h200 -->` has every setting, with `table=main` those of 64
heads, with `table=long` those of few heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.harness.report import Table
from benchmarks.ops.kda import FIRST

OP, OURS, PEER = "kda_prefill_flashkda", "cula", "flash_kda"
PATTERNS = {None: "*", "main": "*-H64", "long": "*-H[!6]*"}
# Errors that the table shows, by the name of its column.
ERRORS = {"error, first head": FIRST["output"], "error, worst head": "output"}


def table(result: Mapping[str, Any], pattern: str = "*") -> Table:
    """A line per setting that matches a shell pattern; "-" where FlashKDA did not run."""
    header = ["setting", "ours, us", "FlashKDA, us", "FlashKDA / ours"]
    header += [f"{title}: {name}" for title in ERRORS for name in ("ours", "FlashKDA")]
    times = {(r["setting"], r["provider"]): r for r in _rows(result)}
    errors = {(c["setting"], c["provider"]): c["errors"] for c in result["checks"]}
    lines = []
    for (name, provider), row in times.items():
        if provider != OURS or not fnmatchcase(name, pattern):
            continue
        line = [name, report.time(row, True), report.time(times.get((name, PEER)), True)]
        ratio = row.get(f"ratio_{PEER}")
        line.append("-" if ratio is None else f"{ratio:.2f}")
        for kind in ERRORS.values():
            line += [_error(errors.get((name, who)), kind) for who in (OURS, PEER)]
        lines.append(line)
    return header, lines


def caption(result: Mapping[str, Any], pattern: str = "*") -> str:
    """The mean of the ratio where FlashKDA ran, what an error is, and where the figures come from."""
    method, mean = results.device_method(result), ""
    if any(r["provider"] == PEER for r in result["rows"]):
        value, count = report.geometric_mean(result, method, pattern, PEER)
        least = min(report.ratios(result, method, pattern, PEER).values())
        mean = f"Geometric mean of FlashKDA's time over ours, {count} settings: {value:.2f}; the lowest: {least:.2f}. "
    return (
        f"{mean}Errors: relative RMSE of the output against fp64, in the first head and in the worst of the first, the "
        f"middle and the last one. Median (20-80 %) of {method}. {report.origin(result)}"
    )


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document; `name` is the table that it asks for."""
    if name not in PATTERNS:
        raise ValueError(f"bench:{OP}: expected table=main, table=long or none, got {name!r}")
    result, pattern = results.load(path), PATTERNS[name]
    body = report.as_markdown(table(result, pattern))
    return f"\n{body}\n\n{caption(result, pattern)}\n\n"


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return results.rows_of(result, method=results.device_method(result))


def _error(errors: Mapping[str, float] | None, kind: str) -> str:
    return "-" if errors is None else f"{errors[kind]:.1e}"
