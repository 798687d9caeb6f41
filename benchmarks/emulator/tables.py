"""The tables of the emulator's documents: speed on a CPU, what mutation tests notice, and agreement with a GPU.

`tables.py` fills regions `<!-- bench:emulator:cpu -->`, `<!-- bench:mutants:cpu -->` and
`<!-- bench:emulator_agreement:h200 -->` from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.emulator import mutant_rows
from benchmarks.harness import report


def _commit(provenance: dict[str, Any]) -> str:
    commit = provenance.get("commit")
    return (
        f"commit {commit[:7]}{' with changes' if provenance.get('dirty') else ''}"
        if commit
        else "no commit"
    )


def speed(result: dict[str, Any]) -> str:
    """The table of millions of thread-instructions per second, and the seconds that building takes."""
    before = result["before"]
    header = ["kernel", "million instructions", "million per CPU second"]
    header += [f"at {before}", "gain"] if before else []
    lines = []
    for row in result["rows"]:
        line = [
            row["about"].rstrip("."),
            f"{row['instructions'] / 1e6:.1f}",
            f"{row['minstr_per_s']:.0f}",
        ]
        if before:
            line += [f"{row['minstr_per_s_before']:.0f}", f"{row['gain']:.1f}x"]
        lines.append(line)
    p, build = result["provenance"], result["build"]
    text = f"{report.as_markdown((header, lines))}\n\nOne instruction is one PTX instruction of one thread. "
    text += f"One core of {p['cpu']}, {p['compiler']}, {p['date'][:10]}, {_commit(p)}."
    if build:
        text += (
            f" A generated PTX of {build['lines']:,} lines builds in {build['cold_seconds']:.1f} s of CPU time;"
            f" a new process with a warm cache has it ready in {build['warm_seconds']:.2g} s."
        )
    return text


def agreement(result: dict[str, Any]) -> str:
    """The table of cases per family, of those that agree bit for bit, and of the largest difference of the others."""
    lines = []
    for f in result["families"]:
        gap = []
        if f["max_ulp"]:
            gap.append(f"{f['max_ulp']} ulp")
        if f["max_relative"] and not f["max_ulp"]:
            gap.append(f"{f['max_relative']:.1e} of the operands' size")
        lines.append(
            [
                f["family"],
                str(f["cases"]),
                str(f["identical"]),
                str(f["within"]),
                str(f["disagree"]),
                ", ".join(gap) or "none",
            ]
        )
    total = [
        str(sum(f[key] for f in result["families"]))
        for key in ("cases", "identical", "within", "disagree")
    ]
    lines.append(["all", *total, ""])
    header = ["family", "cases", "identical", "within the limit", "disagree", "largest difference"]
    p = result["provenance"]
    origin = f"{p['gpu']}, driver {p['driver']}, {p['date'][:10]}, {_commit(p)}."
    return f"{report.as_markdown((header, lines))}\n\n{origin}"


def mutants(result: dict[str, Any]) -> str:
    """The table of what mutation tests notice, by package and target."""
    mutant_rows.validate(result)
    p = result["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in p["versions"].items())
    origin = f"{p['compiler']}, {versions}, {p['date'][:10]}, {_commit(p)}."
    return f"{report.as_markdown(mutant_rows.table(result))}\n\n{origin}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "emulator": speed,
    "emulator_agreement": agreement,
    mutant_rows.OP: mutants,
}


def region(op: str, path: Path) -> str:
    """The lines of a region of a document, made from its result file."""
    return f"\n{TABLES[op](json.loads(path.read_text(encoding='utf-8')))}\n\n"
