"""Result files of `learning.py`: their fields, and their table.

A row is one training run of the same model on the same batches by one provider. `losses`: the mean loss of every step,
in nats per byte. `backward`: whose gradients the linear attention had. `dtype`: of activations. `ms`: the median wall
time of a step but the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "kda_learning"
EXACT = "torch fp32"
LAST = 20  # steps whose mean loss is compared
_NUMBER, _OPTIONAL = (int, float), (int, float, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "title": (str,),
    "provenance": (dict,),
    "model": (dict,),
    "notes": (list,),
    "skipped": (list,),
    "rows": (list,),
}
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "provider": (str,),
    "backward": (str,),
    "dtype": (str,),
    "ms": _NUMBER,
    "peak_gib": _OPTIONAL,
    "losses": (list,),
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    if not content["rows"]:
        raise ValueError("rows: expected at least one")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        if row["provider"] in seen:
            raise ValueError(f"{where}: {row['provider']} appears twice")
        seen.add(row["provider"])
        if len(row["losses"]) != len(content["rows"][0]["losses"]) or not row["losses"]:
            raise ValueError(f"{where}.losses: expected as many steps of every provider")
        if not all(isinstance(x, float) and math.isfinite(x) for x in row["losses"]):
            raise ValueError(f"{where}.losses: expected finite numbers")


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def last(losses: Sequence[float]) -> float:
    """The mean of the last steps."""
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def apart(row: Mapping[str, Any], exact: Mapping[str, Any] | None) -> float | None:
    """The root mean square of the difference between the losses of two runs, step by step."""
    if exact is None or row is exact:
        return None
    pairs = zip(row["losses"], exact["losses"], strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(row["losses"]))


def table(content: Mapping[str, Any]) -> report.Table:
    """A line per provider; differences are those to the run in fp32, if there is one."""
    exact = next((row for row in content["rows"] if row["provider"] == EXACT), None)
    header = [
        "provider", "backward of", "activations", "first loss", f"mean of the last {LAST}",
        "RMS difference to fp32, nats per byte", "ms per step",
    ]  # fmt: skip
    lines = []
    for row in content["rows"]:
        difference = apart(row, exact)
        lines.append([
            row["provider"], row["backward"], row["dtype"], f"{row['losses'][0]:.4f}", f"{last(row['losses']):.4f}",
            "-" if difference is None else f"{difference:.1e}", f"{row['ms']:.1f}",
        ])  # fmt: skip
    return header, lines


def region(path: Path) -> str:
    """What stands in a document."""
    content = load(path)
    left = [f"Not measured: {e['provider']}: {e['reason']}." for e in content["skipped"]]
    text = " ".join([report.machine(content["provenance"]), *left])
    return f"\n{report.as_markdown(table(content))}\n\n{text}\n\n"
