"""The table of the gated delta rule's backward pass on an H200 beside the times that FlashQLA publishes for that card.

The region of `tables.py` is `<!-- bench:gated_h200:published -->`. Ours are of `results/h200/gated_training.json`: the
time of a forward and a backward pass less that of the forward pass alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.report import Table
from benchmarks.ops.published import body, milliseconds, ms

OP, MEASURED, CARD = "gated_h200", "gated_training", "h200"
STEP, FORWARD = "cula", "cula_forward"  # providers

Row = Mapping[str, Any]


def table(rows: list[Row], measured: Mapping[str, Any]) -> Table:
    """A line per setting: what our time of the backward is the difference of, theirs, and theirs over ours."""
    header = ["setting", "ours, forward and backward, ms", "forward, ms", "backward, ms"]
    header += ["FlashQLA, backward, ms", "FlashQLA / ours", "FLA 0.5.1, backward, ms"]
    lines = []
    for row in rows:
        step, forward = (milliseconds(measured, row["setting"], name) for name in (STEP, FORWARD))
        times = [step, forward, backward(row, measured), row["flashqla_ms"]]
        lines.append(
            [row["setting"], *map(ms, times), f"{ratio(row, measured):.2f}", ms(row["fla_ms"])]
        )
    return header, lines


def backward(row: Row, measured: Mapping[str, Any]) -> float:
    """Our milliseconds of the backward pass of a row's setting."""
    step, forward = (milliseconds(measured, row["setting"], name) for name in (STEP, FORWARD))
    if step is None or forward is None:
        raise ValueError(f"{OP}: {row['setting']} was not measured with {STEP} and {FORWARD}")
    return step - forward


def ratio(row: Row, measured: Mapping[str, Any]) -> float:
    """The published time over ours."""
    return row["flashqla_ms"] / backward(row, measured)


def mean(rows: list[Row], measured: Mapping[str, Any]) -> str:
    """The geometric mean of `ratio`, and of how many settings it is."""
    value = statistics.geometric_mean(ratio(row, measured) for row in rows)
    return f"{value:.2f} over {len(rows)} settings"


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of the region of a document, which has one table and so no name."""
    if name is not None:
        raise ValueError(f"bench:{OP}: expected no table, got {name!r}")
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content["rows"]
    measured = results.load(results.result_path(MEASURED, CARD, root))
    alone = [row for row in rows if row["sequences"] == 1]
    caption = (
        f"Geometric mean of FlashQLA's time over ours: {mean(alone, measured)} of one sequence, which have the same "
        f"lengths there and here; {mean(rows, measured)} in all. FlashQLA, and FLA beside it: {content['source']} "
        "Here sequences have equal lengths, no states, decays in every head, and q and k are normalised inside."
    )
    return body(table(rows, measured), caption, measured)
