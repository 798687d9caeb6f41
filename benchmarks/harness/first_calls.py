"""Result files of `first_call.py`: their fields, and their table.

A row is one function. Every list holds seconds, an entry per process: `import_torch_s` and then `import_s` of all
processes, `empty_cache_s` the first call of processes that found no kernel on disk, `filled_cache_s` that of processes
that found what another had left there, `second_call_s` the call after it in the same process, and `host_s` how long a
later one keeps the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "first_call"
LISTS = {
    "import_torch_s": "import torch",
    "import_s": "import the package",
    "empty_cache_s": "first call, empty cache",
    "filled_cache_s": "first call, filled cache",
    "second_call_s": "second call",
    "host_s": "host, a later call",
}
_UNITS = {"host_s": ("us", 1e6)}
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
    "function": (str,),
    "module": (str,),
    "op": (str,),
    "setting": (str,),
    "provider": (str,),
    **dict.fromkeys(LISTS, (list,)),
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    if not content["rows"]:
        raise ValueError("rows: expected at least one function")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        for name in LISTS:
            if not row[name] or not all(isinstance(s, float) and s > 0 for s in row[name]):
                raise ValueError(f"{where}.{name}: expected seconds, got {row[name]!r}")
        if _key(row) in seen:
            raise ValueError(f"{where}: {_key(row)} appears twice")
        seen.add(_key(row))


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def joined(
    earlier: Mapping[str, Any], later: Mapping[str, Any], order: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The later result with the functions that only the earlier one has; `order` lists modules and names of all."""
    results.refuse_another(earlier, later, OF_BOTH)
    anew = {_key(entry) for name in ("skipped", "rows") for entry in later[name]}
    result = dict(later)
    for name in ("skipped", "rows"):
        entries = [e for e in earlier[name] if _key(e) not in anew] + later[name]
        result[name] = sorted(entries, key=lambda e: order.index(_key(e)))
    before = earlier["provenance"]["clocks_before"]
    result["provenance"] = {**later["provenance"], "clocks_before": before}
    return result


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["module"], entry["function"]


def table(content: Mapping[str, Any]) -> report.Table:
    """A line per function: medians, with the lowest and highest where there are several processes."""
    header = [
        "function",
        *(f"{title}, {_UNITS.get(name, ('s',))[0]}" for name, title in LISTS.items()),
    ]
    lines = [
        [f"`{r['module']}`: {r['function']}", *(_cell(name, r[name]) for name in LISTS)]
        for r in content["rows"]
    ]
    return header, lines


def region(path: Path) -> str:
    """What stands in a document."""
    content = load(path)
    count = len(content["rows"][0]["filled_cache_s"])
    caption = f"Medians, lowest and highest in brackets, of {count} processes with a filled cache."
    text = f"{caption} {report.machine(content['provenance'])}"
    return f"\n{report.as_markdown(table(content))}\n\n{text}\n\n"


def _cell(name: str, values: Sequence[float]) -> str:
    if name in _UNITS:
        values = [value * _UNITS[name][1] for value in values]
    middle = _number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
