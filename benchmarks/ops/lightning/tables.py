"""Tables of Lightning prefill for documents: `table=NAME` in a region of `tables.py`.

beside_delta   times beside kernels that solve a gated delta rule, how ours compare, and the geometric mean of that
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.report import Table

# Which of ours is compared with which peer: both get the same decays.
PAIRS = (
    ("cula", "flashinfer_gate"),
    ("cula", "flashinfer_delta"),
    ("cula", "fla_delta"),
    ("cula_decay", "flashinfer_decay"),
)


def beside_delta(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    """A line per setting with the time of every provider and the ratios of PAIRS, and a last line with their means."""
    lines: dict[str, dict[str, Mapping[str, Any]]] = {}
    roles: dict[str, str] = {}
    for row in result["rows"]:
        if row["method"] == method and fnmatchcase(row["setting"], pattern):
            lines.setdefault(row["setting"], {})[row["provider"]] = row
            roles[row["provider"]] = row["role"]
    header = ["setting", *(f"{name}, us" for name in roles)]
    header += [f"{ours} x {peer}" for ours, peer in PAIRS]
    cells: list[list[str]] = []
    ratios: list[list[float]] = [[] for _ in PAIRS]
    for name, line in lines.items():
        found = [line.get(ours, {}).get(f"ratio_{peer}") for ours, peer in PAIRS]
        for known, ratio in zip(ratios, found):
            known += [] if ratio is None else [ratio]
        times = [report.time(line.get(n), spread=role == "ours") for n, role in roles.items()]
        cells.append([name, *times, *("-" if r is None else f"{r:.2f}" for r in found)])
    if cells:
        means = [_mean(known, len(cells)) for known in ratios]
        cells.append([f"geometric mean of {len(cells)}", *[""] * len(roles), *means])
    return header, cells


def _mean(ratios: list[float], count: int) -> str:
    """The geometric mean; "-" where a setting has no ratio, so that no mean is of fewer settings than it says."""
    return f"{statistics.geometric_mean(ratios):.2f}" if len(ratios) == count else "-"


TABLES: dict[str, Callable[[Mapping[str, Any], str, str], Table]] = {"beside_delta": beside_delta}
