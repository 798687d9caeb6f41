"""Writes the tables of result files into markdown documents, or checks that they are up to date.

    python benchmarks/tables.py [--check] [FILE.md ...]

A document marks a region with `<!-- bench:OP:GPU -->` and `<!-- /bench -->`, each on a line of its own; the command
replaces everything between them. `key=value` words may follow the GPU: `settings=PATTERN` (a shell pattern) and
`method=graph` choose rows; `mean=PEER` adds the geometric mean of the ratio to that peer over these settings;
`table=NAME` chooses a table of `ops/lite/tables.py`, `ops/lightning/tables.py`, `ops/delta/tables.py` or
`ops/kda/schedule_tables.py`. An op's name with `_sustained` behind it is the table of its times under a sustained load,
beside those of bursts, `first_call` that of first calls, `models` that of whole models, `several_gpus_x2` that of calls
on two GPUs (`_x4`, `_x8`, each with `_fla`; `several_gpus:predicted` what all should take), `rank_stages` that of what
each of them computes, and `kda_learning` that of losses.
Tables of their own have the emulator (`emulator:cpu`, `mutants:cpu`, `emulator_agreement:h200`), `lite_quality`,
`lite_trajectory` (`ops/lite/trajectory_rows.py`), `lite_end_to_end` (`ops/lite/end_to_end_rows.py`),
`kda_prefill_blackwell:predicted` (`ops/kda/tables.py`),
`kda_h200:published`, `gated_h200:published` and `lite_rtx4090:published` (`published.py` of the family),
`kda_prefill_flashkda` (`ops/kda/flashkda_tables.py`) and `answers:h200` (`answers.py`).
Without files, the command reads every markdown file of the repository. Some it writes as a whole: BENCHMARK_H20.md
(`ops/decode/h20_page.py`, `ops/delta/h20_section.py`), and README.md in the folder of a GPU whose figures stand in no
other document.

With --check it changes nothing, and fails where a document has drifted from its result file, or where an op has no
result of any GPU and is not in `WITHOUT_RESULTS` of `ops/__init__.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import answers, ops
from benchmarks.emulator import tables as emulator_tables
from benchmarks.harness import (
    first_calls,
    loss_rows,
    model_rows,
    rank_rows,
    registry,
    report,
    results,
    stage_rows,
)
from benchmarks.harness.commands import fail
from benchmarks.ops.decode import h20_page
from benchmarks.ops.delta import h20_section
from benchmarks.ops.delta import tables as delta_tables
from benchmarks.ops.kda import flashkda_tables, schedule_tables
from benchmarks.ops.kda import published as kda_published
from benchmarks.ops.kda import tables as kda_tables
from benchmarks.ops.lightning import published as gated_published
from benchmarks.ops.lightning import tables as lightning_tables
from benchmarks.ops.lite import end_to_end_rows, quality_rows, trajectory_rows
from benchmarks.ops.lite import published as lite_published
from benchmarks.ops.lite import tables as lite_tables

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {"node_modules", "build", "dist", "site-packages"}
# Folders of result files that no GPU gave.
NOT_GPUS = {"cpu", "predicted", "published", "suite"}
# GPUs whose results stand in the documents of the packages; those of any other have a page of their own.
DOCUMENTED = {"h200"}
# Tables that `table=NAME` chooses.
TABLES = {
    **lite_tables.TABLES,
    **lightning_tables.TABLES,
    **delta_tables.TABLES,
    **schedule_tables.TABLES,
}
# Modules whose ops have tables of their own.
OF_THEIR_OWN = (
    kda_tables, kda_published, flashkda_tables, gated_published, lite_published, trajectory_rows, end_to_end_rows,
)  # fmt: skip
OPTIONS = {"settings", "method", "mean", "table"}
REGION = re.compile(
    r"^<!-- bench:(?P<op>[\w-]+):(?P<gpu>[\w-]+)(?P<options>(?: \w+=\S+)*) -->\n"
    r"(?P<body>.*?)^<!-- /bench -->$",
    re.MULTILINE | re.DOTALL,
)
OPENING = re.compile(r"^<!-- bench:.*-->$", re.MULTILINE)


def region(op: str, gpu: str, options: str, root: Path) -> str:
    """The lines between the markers of one region."""
    chosen = dict(word.split("=", 1) for word in options.split())
    if unknown := set(chosen) - OPTIONS:
        raise ValueError(
            f"bench:{op}:{gpu}: expected options {sorted(OPTIONS)}, got {sorted(unknown)}"
        )
    name = chosen.get("table")
    path = results.result_path(op, gpu, root)
    if op == answers.OP:
        return answers.region(gpu, root)
    for others in OF_THEIR_OWN:
        if op == others.OP and path.exists():
            return others.region(path, name, root)
    if name is not None and name not in TABLES:
        raise ValueError(f"bench:{op}:{gpu}: expected a table of {sorted(TABLES)}, got {name!r}")
    if not path.exists():
        return f"\nNot measured on {gpu}.\n\n"
    if op in emulator_tables.TABLES:
        return emulator_tables.region(op, path)
    if op in (*rank_rows.OPS, rank_rows.PREDICTED):
        return rank_rows.region(path)
    for whole in (first_calls, loss_rows, model_rows, stage_rows):
        if op == whole.OP:
            return whole.region(path)
    pattern = chosen.get("settings", "*")
    if op.endswith(f"_{results.SUSTAINED}"):
        return _of_loads(path, pattern)
    of_quality = op == quality_rows.OP
    result = (quality_rows if of_quality else results).load(path)
    method = chosen.get("method", results.device_method(result))
    if of_quality:
        table = quality_rows.table(result, pattern)
    else:
        table = TABLES.get(name or "", report.table)(result, method, pattern)
    if not table[1]:
        raise ValueError(
            f"bench:{op}:{gpu}: no row has method {method} and a setting like {pattern}"
        )
    mean = ""
    if peer := chosen.get("mean"):
        value, count = report.geometric_mean(result, method, pattern, peer)
        mean = f"Geometric mean of x {peer} over {count} settings: {value:.2f}.\n\n"
    origin = f"Median (20-80 %) of {method}. {report.origin(result)}"
    return f"\n{report.as_markdown(table)}\n\n{mean}{origin}\n\n"


def _of_loads(path: Path, pattern: str) -> str:
    """Times under a sustained load beside those of bursts, which another run measured, and where both are from."""
    result = results.load(path)
    burst_path = path.with_name(f"{result['op']}.json")
    burst = results.load(burst_path) if burst_path.exists() else None
    lines = report.as_markdown(report.loads(result, burst, pattern))
    text = (
        f"Sustained: median (20-80 %) under {result['method']['load']['measured_s']:g} s of load; power is that of the "
        f"whole card. {report.origin(result)}"
    )
    if burst:
        method = results.device_method(burst)
        text += f" Burst: median (20-80 %) of {method}. {report.origin(burst)}"
    return f"\n{lines}\n\n{text}\n\n"


def rendered(text: str, root: Path = results.RESULTS) -> str:
    """The document with every region up to date; ValueError where a region is not closed or cannot be filled."""

    def fill(match: re.Match[str]) -> str:
        opening = match.group(0).split("\n", 1)[0]
        body = region(match["op"], match["gpu"], match["options"], root)
        return f"{opening}\n{body}<!-- /bench -->"

    regions = [match.group(0) for match in REGION.finditer(text)]
    if len(OPENING.findall(text)) != len(regions) or any(
        len(OPENING.findall(r)) != 1 for r in regions
    ):
        raise ValueError("a bench region is not closed, or its opening marker is malformed")
    return REGION.sub(fill, text)


def documents(root: Path = ROOT) -> Iterable[Path]:
    """Every markdown file outside hidden and generated folders."""
    for path in sorted(root.rglob("*.md")):
        parents = path.relative_to(root).parts[:-1]
        if not any(part.startswith(".") or part in SKIPPED for part in parents):
            yield path


def card_page(gpu: str, root: Path = results.RESULTS) -> str:
    """Every result of a GPU on one page, for GPUs whose figures stand in no other document."""
    named = [name for op in registry.names() for name in (op, f"{op}_{results.SUSTAINED}")]
    ops_here = [
        op
        for op in (
            *named,
            quality_rows.OP,
            trajectory_rows.OP,
            end_to_end_rows.OP,
            first_calls.OP,
            model_rows.OP,
            *rank_rows.OPS,
            stage_rows.OP,
            loss_rows.OP,
        )
        if results.result_path(op, gpu, root).exists()
    ]
    contents = {
        op: json.loads(results.result_path(op, gpu, root).read_text(encoding="utf-8"))
        for op in ops_here
    }
    names = sorted({content["provenance"]["gpu"] for content in contents.values()})
    sections = [
        f"# Measured on {', '.join(names) or gpu}\n\nWritten by `benchmarks/tables.py` from the result files of this "
        "folder; change those, not this page. [What the columns mean](../../README.md)."
    ]
    sections += [
        f"## {content['title']}\n{region(op, gpu, '', root)}".rstrip()
        for op, content in contents.items()
    ]
    return "\n\n".join(sections) + "\n"


def pages(root: Path = results.RESULTS) -> dict[Path, Callable[[], str]]:
    """The documents that are written as a whole, and what writes them."""
    found: dict[Path, Callable[[], str]] = {
        ROOT / h20_page.PAGE: lambda: h20_page.page(root, h20_section.sections(root))
    }
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name not in NOT_GPUS | DOCUMENTED:
            found[folder / "README.md"] = lambda gpu=folder.name: card_page(gpu, root)
    return found


def update(paths: Iterable[Path], check: bool, root: Path = results.RESULTS) -> list[Path]:
    """The documents whose tables have drifted; they are rewritten unless `check` is set."""
    drifted, whole = [], pages(root)
    for path in paths:
        write = whole.get(path.resolve())
        text = path.read_text(encoding="utf-8") if path.exists() or write is None else ""
        try:
            wanted = write() if write else rendered(text, root)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if wanted != text:
            drifted.append(path)
            if not check:
                path.write_text(wanted, encoding="utf-8")
    return drifted


def without_results(
    names: Iterable[str], excused: Mapping[str, str], root: Path = results.RESULTS
) -> list[str]:
    """A sentence for every op that has neither a result of a GPU nor an excuse, and for every excuse without need."""
    names = list(names)
    measured = {p.stem for p in root.glob("*/*.json") if p.parent.name not in NOT_GPUS}
    found = [
        f"{name}: no result of a GPU, and no reason in WITHOUT_RESULTS"
        for name in names
        if name not in measured and not excused.get(name)
    ]
    for name in excused:
        if name not in names:
            found.append(f"{name}: WITHOUT_RESULTS names an op that is not registered")
        elif name in measured:
            found.append(f"{name}: has a result now; remove it from WITHOUT_RESULTS")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes result tables into markdown documents.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit 1 when a document has drifted or an op has no result",
    )
    args = parser.parse_args(argv)
    try:
        drifted = update(args.files or dict.fromkeys((*documents(), *pages())), args.check)
    except (OSError, ValueError) as error:
        return fail(error)
    for path in drifted:
        print(f"{path}: tables {'differ from' if args.check else 'updated from'} the result files")
    unmeasured = without_results(registry.names(), ops.WITHOUT_RESULTS) if args.check else []
    for line in unmeasured:
        print(line)
    return 1 if args.check and (drifted or unmeasured) else 0


if __name__ == "__main__":
    sys.exit(main())
