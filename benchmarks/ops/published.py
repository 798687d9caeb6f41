"""What the tables of a family share that show our times beside times that others published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import report, results
from benchmarks.harness.report import Table


def milliseconds(measured: Mapping[str, Any], setting: str, provider: str) -> float | None:
    """The measured time of a setting; None where there is none."""
    method = results.device_method(measured)
    found = results.rows_of(measured, setting=setting, provider=provider, method=method)
    return found[0]["median_us"] / 1e3 if found else None


def ms(value: float | None) -> str:
    """A time as a cell of a table; "-" if there is none."""
    return "-" if value is None else f"{value:.3f}"


def body(table: Table, caption: str, measured: Mapping[str, Any]) -> str:
    """The lines of a region: a table, and below it a caption that ends with how and where our times were measured."""
    ours = (
        f"medians of {results.device_method(measured)}, device time alone, caches cold. "
        f"{report.origin(measured)}"
    )
    return f"\n{report.as_markdown(table)}\n\n{caption} Ours: {ours}\n\n"
