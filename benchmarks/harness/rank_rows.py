"""Result files of `several_gpus.py`, for every number of GPUs: their fields, and their table.

A row is one pass of an operator whose tokens lie on several GPUs, by one provider: forward, or a step, which is forward
and backward with gradients of all inputs. `exchange`: how maps travel ("auto": as the provider decides). `ms` is the
time of the slowest rank from a common begin to its end, medians over all samples with their 20th and 80th percentile;
`one_ms` that of the same call on one GPU that holds all tokens, None where none does. `method`: CUDA graphs are
replayed ("graph"), or calls are made ("eager"). `bounds`: the tokens of the ranks, "equal" or "balanced".
`collective_ms`: one collective of messages of that size by itself, each of `message_bytes`. `error`: relative RMSE of
outputs to those on one GPU, of the worst rank; where no GPU holds all tokens, to those of ranks that hand states on one
after the other. `gradient_error`: the same of the worst gradient, None in a forward and where no GPU holds all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

RANKS = (2, 4, 8)
# Calls beside flash-linear-attention's have files of their own, because it takes minutes to tune itself.
OF_FLA = "_fla"
OPS = tuple(f"several_gpus_x{ranks}{of}" for ranks in RANKS for of in ("", OF_FLA))
PREDICTED = "several_gpus"  # of the file in results/predicted/
METHODS, BOUNDS = ("graph", "eager"), ("equal", "balanced")
PASSES, EXCHANGES = ("forward", "step"), ("auto", "gather", "transpose")
_NUMBER = (int, float)
TIMES = ("ms", "p20_ms", "p80_ms")
MODEL_KEY = ("tokens", "heads", "ranks", "bounds", "exchange")
KEY = ("op", *MODEL_KEY, "provider", "pass", "method")
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
    "exchange": (str,),
    "provider": (str,),
    "pass": (str,),
    "method": (str,),
    **dict.fromkeys(TIMES, _NUMBER),
    **{f"one_{name}": (*_NUMBER, type(None)) for name in TIMES},
    "samples": (int,),
    "message_bytes": (int,),
    "collective_ms": _NUMBER,
    "error": _NUMBER,
    "gradient_error": (*_NUMBER, type(None)),
}


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        choices = {"method": METHODS, "bounds": BOUNDS, "pass": PASSES, "exchange": EXCHANGES}
        results.require_choices(row, choices, where)
        alone = [row[f"one_{name}"] for name in TIMES]
        if None in alone and any(alone):
            raise ValueError(f"{where}: expected all times of one GPU, or none")
        for of in ("", "one_"):
            if (
                row[f"{of}ms"] is not None
                and not 0 < row[f"{of}p20_ms"] <= row[f"{of}ms"] <= row[f"{of}p80_ms"]
            ):
                raise ValueError(f"{where}: expected 0 < {of}p20_ms <= {of}ms <= {of}p80_ms")
        key = tuple(row[name] for name in KEY)
        if key in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)


def load(path: Path) -> dict[str, Any]:
    """The content of a result file."""
    return results.load(path, validate)


def size(row: Mapping[str, Any]) -> str:
    return f"{row['op']} T{row['tokens']} H{row['heads']} {row['pass']}"


def label(row: Mapping[str, Any]) -> str:
    how = [row["bounds"], *([] if row["exchange"] == "auto" else [row["exchange"]])]
    if (row["pass"], row["method"]) == ("step", "graph"):
        how.append("graph")
    return f"{row['provider']}, {size(row)}, {', '.join(how)}"


def prediction(
    row: Mapping[str, Any], model: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """What `rank_model.py` says of a row; None where it says nothing."""
    if (row["provider"], row["op"], row["pass"]) != ("cula", "kda", "forward"):
        return None
    same = (other for other in model if all(row[name] == other[name] for name in MODEL_KEY))
    return next(same, None)


def beside(ms: float, expected: float) -> str:
    """A modelled time, and how much longer was measured."""
    return f"{expected:.2f} ({ms / expected - 1:+.0%})"


def modelled(row: Mapping[str, Any], model: Sequence[Mapping[str, Any]]) -> str:
    """The time by `rank_model.py`, and how much longer the call took; "-" where there is no model."""
    other = prediction(row, model)
    return "-" if other is None else beside(row["ms"], other["ms"])


def model(root: Path = results.RESULTS) -> list[dict[str, Any]]:
    """The rows of the file that `rank_model.py` writes; none where there is no such file."""
    path = results.result_path(PREDICTED, "predicted", root)
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def predictions(content: Mapping[str, Any]) -> report.Table:
    """What KDA's forward should take, a line per size: on one GPU, and on every number of them in equal slices."""
    rows = [r for r in content["rows"] if (r["bounds"], r["exchange"]) == ("equal", "auto")]
    counts = sorted({r["ranks"] for r in rows})
    sizes: dict[str, list[str]] = {}
    for r in rows:
        cells = sizes.setdefault(f"T{r['tokens']} H{r['heads']}", [f"{r['one_ms']:.2f}"])
        cells.append(f"{r['ms']:.2f} ({r['one_ms'] / r['ms']:.1f})")
    header = ["KDA forward", "one GPU, ms", *(f"{n} GPUs, ms (times as fast)" for n in counts)]
    return header, [[size, *cells] for size, cells in sizes.items()]


def gain(row: Mapping[str, Any]) -> str:
    """How many times as fast as one GPU; "-" where none holds the tokens."""
    return "-" if row["one_ms"] is None else f"{row['one_ms'] / row['ms']:.2f}"


def table(content: Mapping[str, Any], root: Path = results.RESULTS) -> report.Table:
    """A line per row. The share of the collective is that of its time by itself; behind a modelled time stands how much
    longer was measured."""
    header = [
        "provider and call, tokens of the ranks", "one GPU, ms", "GPUs", "together, ms", "times as fast",
        "modelled, ms", "timed by", "collective alone, ms (share)", "relative RMSE of outputs, of gradients",
    ]  # fmt: skip
    lines, times = [], model(root)
    for row in content["rows"]:
        one, together = (
            "-" if row[of + "ms"] is None
            else f"{row[of + 'ms']:.2f} ({row[of + 'p20_ms']:.2f}-{row[of + 'p80_ms']:.2f})"
            for of in ("one_", "")
        )  # fmt: skip
        errors = [row["error"], *([] if row["gradient_error"] is None else [row["gradient_error"]])]
        lines.append([
            label(row), one, str(row["ranks"]), together, gain(row), modelled(row, times), row["method"],
            f"{row['collective_ms']:.3f} ({row['collective_ms'] / row['ms']:.1%})",
            ", ".join(f"{error:.1e}" for error in errors),
        ])  # fmt: skip
    return header, lines


def left_out(content: Mapping[str, Any]) -> list[str]:
    """A sentence for every reason why calls were skipped."""
    calls: dict[str, list[str]] = {}
    for entry in content["skipped"]:
        calls.setdefault(entry["reason"], []).append(entry["call"])
    return [f"Not measured: {'; '.join(of)}: {reason}." for reason, of in calls.items()]


def region(path: Path) -> str:
    """What stands in a document."""
    if path.stem == PREDICTED:
        content = json.loads(path.read_text(encoding="utf-8"))
        return f"\n{report.as_markdown(predictions(content))}\n\n{content['note']}\n\n"
    content = load(path)
    text = f"Medians, slowest rank (20-80 %). {report.machine(content['provenance'])}"
    lines = report.as_markdown(table(content, path.parents[1]))
    return f"\n{lines}\n\n{' '.join([text, *left_out(content)])}\n\n"
