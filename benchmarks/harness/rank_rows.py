"""Result files of `several_gpus.py`: their fields, and their table.

A row is one call of an operator whose tokens lie on several GPUs, by one provider. `ms` is the time of the slowest rank
from a common begin to its end, medians over all samples with their 20th and 80th percentile; `one_ms` that of the same
call on one GPU that holds all tokens. `method`: CUDA graphs are replayed ("graph"), or calls are made ("eager").
`bounds`: the tokens of the ranks, "equal" or "balanced". `collective_ms`: one all-gather of messages of that size by
itself, each of `message_bytes`. `error`: relative RMSE of outputs to those on one GPU, of the worst rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "several_gpus"
METHODS, BOUNDS = ("graph", "eager"), ("equal", "balanced")
_NUMBER = (int, float)
FIELDS: dict[str, tuple[type, ...]] = {
    "title": (str,),
    "provenance": (dict,),
    "notes": (list,),
    "skipped": (list,),
    "rows": (list,),
}
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "op": (str,),
    "tokens": (int,),
    "heads": (int,),
    "ranks": (int,),
    "bounds": (str,),
    "provider": (str,),
    "method": (str,),
    **{f"{of}{name}": _NUMBER for of in ("", "one_") for name in ("ms", "p20_ms", "p80_ms")},
    "samples": (int,),
    "message_bytes": (int,),
    "collective_ms": _NUMBER,
    "error": _NUMBER,
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        for name, known in (("method", METHODS), ("bounds", BOUNDS)):
            if row[name] not in known:
                raise ValueError(f"{where}.{name}: expected one of {known}, got {row[name]!r}")
        for of in ("", "one_"):
            if not 0 < row[f"{of}p20_ms"] <= row[f"{of}ms"] <= row[f"{of}p80_ms"]:
                raise ValueError(f"{where}: expected 0 < {of}p20_ms <= {of}ms <= {of}p80_ms")
        key = tuple(row[name] for name in ("op", "tokens", "heads", "ranks", "bounds", "provider"))
        if key in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def label(row: Mapping[str, Any]) -> str:
    return f"{row['provider']}, {row['op']} T{row['tokens']} H{row['heads']}, {row['bounds']}"


def gain(row: Mapping[str, Any]) -> float:
    """How many times as fast as one GPU."""
    return float(row["one_ms"] / row["ms"])


def table(content: Mapping[str, Any]) -> report.Table:
    """A line per row. The share of the collective is that of its time by itself."""
    header = [
        "provider and call, tokens of the ranks", "one GPU, ms", "GPUs", "together, ms", "times as fast", "timed by",
        "collective alone, ms (share)", "relative RMSE to one GPU",
    ]  # fmt: skip
    lines = []
    for row in content["rows"]:
        times = (
            f"{row[of + 'ms']:.2f} ({row[of + 'p20_ms']:.2f}-{row[of + 'p80_ms']:.2f})"
            for of in ("one_", "")
        )
        one, together = times
        lines.append([
            label(row), one, str(row["ranks"]), together, f"{gain(row):.2f}", row["method"],
            f"{row['collective_ms']:.3f} ({row['collective_ms'] / row['ms']:.1%})", f"{row['error']:.1e}",
        ])  # fmt: skip
    return header, lines


def region(path: Path) -> str:
    """What stands in a document."""
    content = load(path)
    text = f"Medians, slowest rank (20-80 %). {report.machine(content['provenance'])}"
    left = [f"Not measured: {e['call']}: {e['reason']}." for e in content["skipped"]]
    return f"\n{report.as_markdown(table(content))}\n\n{' '.join([text, *left])}\n\n"
