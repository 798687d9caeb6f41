"""The rows that `end_to_end.py` writes: their fields, how they are checked and joined, and their table.

A row is one way to compute the self-attention of one model at one resolution, over all denoising steps. `provider` is
torch_cudnn (torch's attention with cuDNN's kernels; torch_default where there are none), lite_dense (our kernel without
lists) or lite (with lists), and `kernel` says whose kernels ran. `layers` are those of the published model and `blocks`
those that ran. `step_ms` is the time of a whole step, with its 20th and 80th percentile over all steps, `blocks_ms` and
`attention_ms` that of its blocks and of their self-attentions; `total_ms` is all steps together. `ms_by_step`,
`density_by_step` and `l1_by_step` have an entry per step: the share of tiles is the mean over blocks, the relative L1
distance from lite_dense on the same inputs the largest of the blocks. `peak_gib` is the memory of weights and lists and
what a step takes beside them; replayed inputs do not count.
No torch is needed here, because documents are made without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "lite_end_to_end"
# torch's own choice stands in for cuDNN on the CPU.
PROVIDERS = ("torch_cudnn", "torch_default", "lite_dense", "lite")
PEERS = PROVIDERS[:2]
_NUMBER, _OPTIONAL = (int, float), (int, float, type(None))
# Fields in which results that are joined must agree.
OF_BOTH = ("title", "method", "notes")
FIELDS: dict[str, tuple[type, ...]] = {
    "title": (str,),
    "provenance": (dict,),
    "method": (dict,),
    "notes": (list,),
    "skipped": (list,),
    "rows": (list,),
}
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "resolution": (str,),
    "tokens": (int,),
    "heads": (int,),
    "head_dim": (int,),
    "ffn": (int,),
    "layers": (int,),
    "blocks": (int,),
    "steps": (int,),
    "provider": (str,),
    "kernel": (str,),
    "target": _OPTIONAL,
    "threshold": _OPTIONAL,
    "step_ms": _NUMBER,
    "p20_ms": _NUMBER,
    "p80_ms": _NUMBER,
    "total_ms": _NUMBER,
    "blocks_ms": _NUMBER,
    "attention_ms": _NUMBER,
    "ms_by_step": (list,),
    "density_by_step": (list,),
    "l1_by_step": (list, type(None)),
    "peak_gib": _OPTIONAL,
}
BY_STEP = ("ms_by_step", "density_by_step", "l1_by_step")

Row = Mapping[str, Any]


def validate(content: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    results.require_fields(content, FIELDS, "result")
    seen = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, ROW_FIELDS, where)
        if row["provider"] not in PROVIDERS:
            got = row["provider"]
            raise ValueError(f"{where}.provider: expected one of {PROVIDERS}, got {got!r}")
        if not 0 < row["p20_ms"] <= row["step_ms"] <= row["p80_ms"]:
            raise ValueError(f"{where}: expected 0 < p20_ms <= step_ms <= p80_ms")
        if not 0 < row["blocks"] <= row["layers"]:
            got = row["blocks"]
            raise ValueError(f"{where}.blocks: expected 1 to {row['layers']}, got {got}")
        for name in BY_STEP:
            if row[name] is not None and len(row[name]) != row["steps"]:
                got = len(row[name])
                raise ValueError(f"{where}.{name}: expected {row['steps']} steps, got {got}")
        if not all(0 < share <= 1 for share in row["density_by_step"]):
            raise ValueError(f"{where}.density_by_step: expected shares above 0, up to 1")
        if (row["provider"] == "lite") != (row["threshold"] is not None):
            raise ValueError(f"{where}.threshold: expected one where there are lists, only there")
        if (key := key_of(row)) in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)


def load(path: Path) -> dict[str, Any]:
    """The content of a result file, checked."""
    return results.load(path, validate)


def setting_of(row: Row) -> tuple[str, str]:
    """The model and the resolution."""
    return row["model"], row["resolution"]


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a row from every other."""
    return (*setting_of(row), row["provider"], row["kernel"], row["target"])


def joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The later result with the rows that only the earlier one has, those of a setting together."""
    results.refuse_another(earlier, later, OF_BOTH)
    anew = {key_of(row) for row in later["rows"]}
    rows = [row for row in earlier["rows"] if key_of(row) not in anew] + later["rows"]
    settings = list(dict.fromkeys(map(setting_of, rows)))
    result = dict(later)
    result["rows"] = sorted(
        rows,
        key=lambda r: (settings.index(setting_of(r)), PROVIDERS.index(r["provider"]), r["kernel"]),
    )
    tried = {(e["model"], e["resolution"], e["provider"]) for e in later["skipped"]}
    result["skipped"] = [
        e for e in earlier["skipped"] if (e["model"], e["resolution"], e["provider"]) not in tried
    ] + later["skipped"]
    before = earlier["provenance"]["clocks_before"]
    result["provenance"] = {**later["provenance"], "clocks_before": before}
    return result


def by_setting(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of every model and resolution."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault(setting_of(row), []).append(row)
    return found


def baseline(rows: Sequence[Row]) -> Row | None:
    """The row that others of the same setting are compared with: dense attention by torch, if it was measured."""
    return next((row for row in rows if row["provider"] in PEERS), None)


def whole_ms(row: Row) -> float:
    """An extrapolation: all steps of the model with all its layers, each as long as the blocks that ran."""
    outside = row["step_ms"] - row["blocks_ms"]
    per_step = row["total_ms"] / row["steps"] - outside
    return row["steps"] * (outside + per_step * row["layers"] / row["blocks"])


def title_of(row: Row) -> str:
    return f"{row['model']} {row['resolution']}"


def label(row: Row) -> str:
    """What computes the attention."""
    if row["provider"] in PEERS:
        return f"dense, {row['kernel']}"
    if row["target"] is None:
        how = "dense" if row["threshold"] is None else f"lists at {row['threshold']:g}"
    else:
        how = f"lists, {row['target']:.0%}"
    return f"{how}, {row['kernel']}"


def table(content: Mapping[str, Any]) -> report.Table:
    """A line per row, compared with dense attention by torch in the same setting."""
    header = [
        "model", "tokens", "blocks", "self-attention", "threshold", "tiles: mean, last step", "L1, worst step",
        "step, ms", "of it attention, ms", "all steps, s", "times as fast", "peak, GiB",
        "all layers and steps, s (extrapolated)", "times as fast (extrapolated)",
    ]  # fmt: skip
    lines = []
    for rows in by_setting(content["rows"]).values():
        dense = baseline(rows)
        for row in rows:
            shares, errors = row["density_by_step"], row["l1_by_step"]
            listed = row["threshold"] is not None
            lines.append([
                title_of(row), f"{row['tokens']:,}", f"{row['blocks']} of {row['layers']}", label(row),
                f"{row['threshold']:.2f}" if listed else "-",
                f"{sum(shares) / len(shares):.1%}, {shares[-1]:.1%}" if listed else "-",
                f"{max(errors):.2%}" if listed and errors else "-",
                f"{row['step_ms']:.1f} ({row['p20_ms']:.1f}-{row['p80_ms']:.1f})",
                f"{row['attention_ms']:.1f}", f"{row['total_ms'] / 1e3:.2f}",
                f"{dense['total_ms'] / row['total_ms']:.2f}" if dense else "-",
                "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
                f"{whole_ms(row) / 1e3:.1f}",
                f"{whole_ms(dense) / whole_ms(row):.2f}" if dense else "-",
            ])  # fmt: skip
    return header, lines


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document."""
    if name is not None:
        raise ValueError(f"bench:{OP}: expected no table=, got {name!r}")
    content = load(path)
    steps = ", ".join(str(n) for n in sorted({row["steps"] for row in content["rows"]}))
    text = f"Medians over {steps} steps (20-80 %). {report.machine(content['provenance'])}"
    left = [f"Not measured: {line}" for line in left_out(content)]
    return f"\n{report.as_markdown(table(content))}\n\n{' '.join([text, *left])}\n\n"


def left_out(content: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that was skipped."""
    return [
        f"{e['model']} {e['resolution']}, {e['provider']}: {e['reason']}."
        for e in content["skipped"]
    ]
