"""Result files of `models.py`: their fields, and their table.

A row is one part of the work of a model by one provider: `prefill` and `decode` are forward passes without gradients,
`train` is a forward and backward pass. `ms` is the wall time of a call, medians over all samples with their 20th and
80th percentile. `device_ms` is how long kernels ran in one call by the profiler, and `linear_ms` which part of it were
kernels of the linear attention; null where they cannot be told from others by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "models"
OURS = "cula"
WORK = ("prefill", "decode", "train")
_NUMBER, _OPTIONAL = (int, float), (int, float, type(None))
# Fields in which results that are joined must agree.
OF_BOTH = ("title", "notes")
FIELDS: dict[str, tuple[type, ...]] = {
    "title": (str,),
    "provenance": (dict,),
    "notes": (list,),
    "skipped": (list,),
    "rows": (list,),
}
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "parameters": (int,),
    "work": (str,),
    "batch": (int,),
    "tokens": (int,),
    "provider": (str,),
    "ms": _NUMBER,
    "p20_ms": _NUMBER,
    "p80_ms": _NUMBER,
    "samples": (int,),
    "tokens_per_s": _NUMBER,
    "device_ms": _NUMBER,
    "linear_ms": _OPTIONAL,
    "peak_gib": _NUMBER,
    "error": _OPTIONAL,
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        results.require_choices(row, {"work": WORK}, where)
        if not 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]:
            raise ValueError(f"{where}: expected 0 < p20_ms <= ms <= p80_ms")
        if (key := (*work_of(row), row["provider"])) in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)
    for key in {work_of(row) for row in content["rows"]}:
        if len(pair := of_work(content, key)) != 2 or pair[1]["provider"] != OURS:
            raise ValueError(f"rows: expected another provider and {OURS} of {key}")


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def work_of(row: Mapping[str, Any]) -> tuple[str, str, int, int]:
    return row["model"], row["work"], row["batch"], row["tokens"]


def of_work(content: Mapping[str, Any], key: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    """The rows of one part of a model's work, ours last."""
    rows = [row for row in content["rows"] if work_of(row) == key]
    return sorted(rows, key=lambda row: row["provider"] == OURS)


def joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The later result with the models that only the earlier one has."""
    results.refuse_another(earlier, later, OF_BOTH)
    anew = {entry["model"] for name in ("skipped", "rows") for entry in later[name]}
    result = dict(later)
    for name in ("skipped", "rows"):
        result[name] = [e for e in earlier[name] if e["model"] not in anew] + later[name]
    before = earlier["provenance"]["clocks_before"]
    result["provenance"] = {**later["provenance"], "clocks_before": before}
    return result


def label(key: tuple[str, str, int, int]) -> str:
    model, work, batch, tokens = key
    size = f"B{batch}" if work == "decode" else f"B{batch}-T{tokens}"
    return f"{model}, {work} {size}"


def table(content: Mapping[str, Any]) -> report.Table:
    """A line per part of a model's work.

    The last column is how long it would take the other provider if its linear attention took no time at all. Where the
    device works less than half of the time, wall times are the host's, and neither is told.
    """
    header = [
        "model and work", "without cula, ms", "with cula, ms", "times as fast", "tokens/s with cula",
        "linear attention, ms of the device: without, with", "all kernels, ms: without, with",
        "bound: linear attention in no time, ms",
    ]  # fmt: skip
    lines = []
    for key in dict.fromkeys(work_of(row) for row in content["rows"]):
        theirs, ours = of_work(content, key)
        waits = theirs["device_ms"] < theirs["ms"] / 2
        bound = "-"
        if theirs["linear_ms"] is not None and not waits:
            bound = f"{max(theirs['ms'] - theirs['linear_ms'], 0):.1f}"
        lines.append([
            label(key),
            *(f"{r['ms']:.1f} ({r['p20_ms']:.1f}-{r['p80_ms']:.1f})" for r in (theirs, ours)),
            "bound by the host" if waits else f"{theirs['ms'] / ours['ms']:.2f}",
            f"{ours['tokens_per_s']:,.0f}",
            " / ".join(_ms(r["linear_ms"]) for r in (theirs, ours)),
            " / ".join(_ms(r["device_ms"]) for r in (theirs, ours)),
            bound,
        ])  # fmt: skip
    return header, lines


def region(path: Path) -> str:
    """What stands in a document."""
    content = load(path)
    text = f"Medians of wall times (20-80 %). {report.machine(content['provenance'])}"
    left = [f"Not measured: {e['model']}, {e['work']}: {e['reason']}." for e in content["skipped"]]
    return f"\n{report.as_markdown(table(content))}\n\n{' '.join([text, *left])}\n\n"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
