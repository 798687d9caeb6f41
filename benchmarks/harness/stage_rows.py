"""Result files of `rank_stages.py`: their fields, and their table.

A row is one pass of an operator over a sequence that lies in equal slices on `ranks` GPUs, as one GPU computed it for
one rank after the other, by CUDA graphs. `exchange`: how maps travel ("auto": as the operator decides). `stages`: of
the first rank, the second and the last, each stage between collectives in ms, as median, 20th and 80th percentile.
`one`: the same of a call on one GPU that holds all tokens, None where none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import rank_rows, report, results

OP = "rank_stages"
KEY = ("op", "pass", "tokens", "heads", "ranks", "exchange")
FIELDS = rank_rows.FIELDS
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "op": (str,),
    "pass": (str,),
    "tokens": (int,),
    "heads": (int,),
    "ranks": (int,),
    "exchange": (str,),
    "samples": (int,),
    "stages": (dict,),
    "one": (list, type(None)),
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        choices = {"pass": rank_rows.PASSES, "exchange": rank_rows.EXCHANGES}
        results.require_choices(row, choices, where)
        measured = {str(rank) for rank in (0, 1, row["ranks"] - 1)}
        if row["stages"].keys() != measured:
            raise ValueError(f"{where}.stages: expected ranks {sorted(measured)}")
        if len({len(times) for times in row["stages"].values()}) != 1:
            raise ValueError(f"{where}.stages: expected as many of every rank")
        one = [] if row["one"] is None else [row["one"]]
        for times in (*one, *(stage for of_rank in row["stages"].values() for stage in of_rank)):
            if len(times) != 3 or not 0 < times[1] <= times[0] <= times[2]:
                raise ValueError(f"{where}: expected 0 < 20th percentile <= median <= 80th")
        key = tuple(row[name] for name in KEY)
        if key in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def slowest(row: Mapping[str, Any]) -> list[float]:
    """ms of every stage, of the rank that the others wait for."""
    return [max(times[0] for times in stage) for stage in zip(*row["stages"].values(), strict=True)]


def label(row: Mapping[str, Any]) -> str:
    how = "" if row["exchange"] == "auto" else f", {row['exchange']}"
    return f"{rank_rows.size(row)}{how}"


def modelled(row: Mapping[str, Any], model: Sequence[Mapping[str, Any]]) -> str:
    """The time by `rank_model.py` without links, and how much longer the stages are; "-" where there is no model."""
    other = rank_rows.prediction({**row, "provider": "cula", "bounds": "equal"}, model)
    if other is None:
        return "-"
    return rank_rows.beside(sum(slowest(row)), other["ms"] - other["links_ms"])


def table(content: Mapping[str, Any], root: Path = results.RESULTS) -> report.Table:
    """A line per row."""
    header = [
        "call", "one GPU, ms", "GPUs", "stages of the slowest rank, ms", "their sum, ms", "times as fast at the most",
        "modelled, ms",
    ]  # fmt: skip
    lines, times = [], rank_rows.model(root)
    for row in content["rows"]:
        each = slowest(row)
        one = row["one"]
        lines.append([
            label(row), "-" if one is None else f"{one[0]:.2f} ({one[1]:.2f}-{one[2]:.2f})", str(row["ranks"]),
            " + ".join(f"{ms:.2f}" for ms in each), f"{sum(each):.2f}",
            "-" if one is None else f"{one[0] / sum(each):.2f}", modelled(row, times),
        ])  # fmt: skip
    return header, lines


def region(path: Path) -> str:
    """What stands in a document."""
    content = load(path)
    text = f"Medians. {report.machine(content['provenance'])}"
    lines = report.as_markdown(table(content, path.parents[1]))
    return f"\n{lines}\n\n{' '.join([text, *rank_rows.left_out(content)])}\n\n"
