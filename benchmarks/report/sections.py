"""What the page says of each result file; a file of a shape that is not known here is an error that names it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.emulator import mutant_rows
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
from benchmarks.harness.provenance import gpu_slug
from benchmarks.ops.decode import h20_page
from benchmarks.ops.kda import tables as kda_tables
from benchmarks.ops.lite import end_to_end_rows, quality_rows, trajectory_rows
from benchmarks.ops.lite import published as lite_published
from benchmarks.report import plots
from benchmarks.report.plots import Plot

Content = Mapping[str, Any]

# Files that are made from result files, and hold nothing else.
DERIVED = {".md", ".png"}
MEASURED, NOT_MEASURED = "measured", "not measured"
METHODS = {
    "graph": "burst, replays of a CUDA graph (graph)",
    "queued-event": "burst, queued calls (queued-event)",
    results.SUSTAINED: "sustained load (sustained)",
    "eager-host": "wall time of a host program (eager-host)",
    "eager-event": "events around every call (eager-event)",
}
# What checks say that is no error: whether a peer cut sequences (kda_prefill_cut, lightning_prefill_delta), whether two
# kernels ran beside each other (kda_prefill_schedule).
FLAGS = {"cut", "beside"}
# Titles of files that have none, or one that is a paragraph.
TITLES = {
    "batch_invariance_study": "Prefill: what the same bits in every batch cost",
    "decode_design_study": "Lightning decode: structures that were tried",
    "delta_design_study": "Decode with the delta rule: structures that were tried",
    "gated_design_study": "Gated delta rule prefill: structures that were tried",
    "kda_backward_study": "KDA backward: structures that were tried",
    "kda_design_study": "KDA prefill: structures that were tried",
    "lite_design_study": "Skip-list attention: steps of its design",
    "ncu_decode": "Lightning decode: hardware counters",
    kda_tables.OP: "KDA prefill on Blackwell, as a model predicts it",
    kda_tables.PUBLISHED: "KDA prefill on Blackwell, as others published it",
}
ENERGY = "energy, J per call"
# More implementations than these become lines of a table, and settings its columns.
MAX_COLUMNS = 8
VERSIONS = {
    "torch": "torch",
    "triton": "triton",
    "nvidia-cutlass-dsl": "CuTe DSL",
    "fla-core": "FLA",
    "flashinfer-python": "FlashInfer",
}


@dataclass(frozen=True)
class Table:
    caption: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    folded: bool = False
    about: str = ""


@dataclass(frozen=True)
class Comparison:
    """How often as fast ours is as another implementation: geometric mean, lowest and highest ratio."""

    ours: str
    other: str
    role: str
    count: int
    mean: float
    low: float
    high: float


@dataclass
class Section:
    """One result file."""

    anchor: str
    title: str
    file: str
    badges: Sequence[str]
    origin: Sequence[tuple[str, str]]
    sentences: Sequence[str] = ()
    comparisons: Sequence[Comparison] = ()
    measured: Sequence[tuple[str, str]] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()

    @property
    def headline(self) -> list[Comparison]:
        """The comparisons with what ran too, which the floor did not."""
        return [c for c in self.comparisons if c.role != "floor"]


def files(root: Path = results.RESULTS) -> list[Path]:
    """All result files, a folder after the other, registered ops in their own order.

    Those of GPUs come first, and of these the ones with most files.
    """
    found = []
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        if path.suffix in DERIVED:
            continue
        if path.suffix != ".json" or path.parent.parent != root:
            raise ValueError(f"{path}: expected <folder>/<name>.json, .md or .png")
        found.append(path)
    ops = [name for op in registry.modules() for name in (op, f"{op}_{results.SUSTAINED}")]
    others = ("predicted", "published", "cpu", "suite")
    sizes = Counter(path.parent.name for path in found)

    def order(path: Path) -> tuple[int, int, str, int, str]:
        folder, op = path.parent.name, path.stem
        late = others.index(folder) + 1 if folder in others else 0
        return late, -sizes[folder], folder, ops.index(op) if op in ops else len(ops), op

    return sorted(found, key=order)


def read(path: Path) -> Section:
    """The section of a result file; ValueError names a file whose shape is not known."""
    reader = READERS.get(path.stem, _study if path.stem.endswith("_study") else _op)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        section = Section(
            anchor=f"{path.parent.name}-{path.stem}",
            title=TITLES.get(path.stem) or content["title"],
            file=f"{path.parent.name}/{path.name}",
            badges=_badges(path, content),
            origin=_origin(content),
        )
        reader(section, content, path)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(path) in message else f"{path}: {message}") from None
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: a shape that the report does not know: {error!r}") from None
    return section


def _badges(path: Path, content: Content) -> list[str]:
    folder = path.parent.name
    fixed = {
        "predicted": "predicted",
        "published": "published by others",
        "cpu": "emulated",
        "suite": "ran on a CPU",
    }
    if folder in fixed:
        return [fixed[folder]]
    gpu = content["provenance"]["gpu"]
    if gpu_slug(gpu) != folder:
        raise ValueError(f"provenance.gpu: expected the GPU of folder {folder!r}, got {gpu!r}")
    emulated = ["emulated"] if path.stem == "emulator_agreement" else []
    return [f"ran on {gpu}", *emulated]


def _origin(content: Content) -> list[tuple[str, str]]:
    """Names and values of the provenance, whichever fields a file has; [] where it has none."""
    p = {**content, **content.get("provenance", {})}
    if "commit" not in p and "package_commit" not in p:
        return []
    versions = p.get("versions", p)
    commit = p.get("commit") or p.get("package_commit") or "unknown"
    clocks = {w: (p.get(f"clocks_{w}") or {}).get("sm_mhz") for w in ("before", "after")}
    found = {
        "device": p.get("gpu") or p.get("cpu"),
        "driver": p.get("driver"),
        "CUDA": p.get("cuda"),
        **{title: versions.get(name) for name, title in VERSIONS.items()},
        "compiler": p.get("compiler"),
        "command": p.get("command"),
        "clocks": ", ".join(f"{mhz} MHz {when}" for when, mhz in clocks.items() if mhz),
        "commit": commit + (" with local changes" if p.get("dirty") else ""),
        "date": p["date"].replace("T", " ").replace("Z", " UTC"),
    }
    place = content.get("place", {})
    if place.get("sms_seen") is not None:
        found["device"] += f", {place['sms_seen']} of {p['sms']} multiprocessors"
    always = {"device", "driver", "torch", "triton", "CuTe DSL"} if "gpu" in p else set()
    return [(k, v or "not recorded") for k, v in found.items() if v or k in always]


def _op(section: Section, content: Content, path: Path) -> None:
    results.validate(content)
    methods = [m for m in METHODS if any(r["method"] == m for r in content["rows"])]
    unknown = {r["method"] for r in content["rows"]} - set(METHODS)
    if unknown or not methods:
        raise ValueError(f"method: expected one of {list(METHODS)}, got {sorted(unknown)}")
    name = results.file_name(content["op"], methods)
    if name != path.stem:
        raise ValueError(f"op: expected {path.stem!r}, as the file is named, got {name!r}")
    section.sentences = [_checks(content)]
    section.notes = [*content["notes"], *_skipped(content)]
    main = results.device_method(content)
    section.comparisons = comparisons(content, main)
    if main == results.SUSTAINED:
        _loads(section, content, path)
        return
    section.measured = _measured(path, methods)
    section.plots = plots.of_op(content, section.anchor)
    section.tables = [_times(content, main, METHODS[main])]
    section.tables += [_times(content, m, METHODS[m], folded=True) for m in methods if m != main]


def comparisons(result: Content, method: str) -> list[Comparison]:
    """Our times against every other provider but variants, and against the floor."""
    rows = [r for r in result["rows"] if r["method"] == method and r["role"] == "ours"]
    roles = {r["provider"]: r["role"] for r in result["rows"]}
    keys = {name: f"ratio_{name}" for name, role in roles.items() if role == "peer"}
    keys |= {name: "ratio_ceiling" for name, role in roles.items() if role == "ceiling"}
    if not any("tflops" in r for r in rows):  # whose limit is arithmetic, not memory
        keys["floor"] = "ratio_floor"
    found = []
    for other, key in keys.items():
        ratios = [r[key] for r in rows if r.get(key) is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            ends = (len(ratios), mean, min(ratios), max(ratios))
            found.append(Comparison(rows[0]["provider"], other, roles.get(other, "floor"), *ends))
    return found


def _loads(section: Section, content: Content, path: Path) -> None:
    """Times under a sustained load, each beside that of a burst, which another file holds."""
    burst_path = path.with_name(f"{content['op']}.json")
    burst = results.load(burst_path) if burst_path.exists() else None
    section.plots = plots.of_loads(content, section.anchor)
    caption = METHODS[results.SUSTAINED]
    if burst:
        method = results.device_method(burst)
        caption += f", beside {METHODS[method]}"
        other = f"The bursts are those of {burst_path.name}: {report.origin(burst)}"
        section.sentences = [*section.sentences, other]
    metered = any("joules_per_call" in r for r in content["rows"])
    section.measured = [
        ("burst", f"measured, in {burst_path.name}" if burst else NOT_MEASURED),
        (results.SUSTAINED, MEASURED),
        (ENERGY, MEASURED if metered else NOT_MEASURED),
    ]
    spread = "medians, 20th to 80th percentile in brackets"
    section.tables = [Table(f"{caption}: {spread}", *report.loads(content, burst))]


def _measured(path: Path, methods: Sequence[str]) -> list[tuple[str, str]]:
    """Which kinds of figures there are of an op, here or in a file beside this one, and which are missing."""
    op, burst = path.stem, {"graph", "queued-event"} & set(methods)
    loads = path.with_name(f"{results.file_name(op, (results.SUSTAINED,))}.json")
    firsts = path.with_name(f"{first_calls.OP}.json")
    rows = json.loads(loads.read_text(encoding="utf-8"))["rows"] if loads.exists() else []
    calls = json.loads(firsts.read_text(encoding="utf-8"))["rows"] if firsts.exists() else []
    found = {
        results.SUSTAINED: loads if rows else None,
        ENERGY: loads if any("joules_per_call" in r for r in rows) else None,
        "first call, s": firsts if any(r["op"] == op for r in calls) else None,
    }
    return [
        ("burst", MEASURED if burst else NOT_MEASURED),
        *((what, f"measured, in {p.name}" if p else NOT_MEASURED) for what, p in found.items()),
    ]


def _times(result: Content, method: str, caption: str, folded: bool = False) -> Table:
    """Medians with their 20th and 80th percentile."""
    header, lines = report.table(result, method, of_all=True)
    providers = {r["provider"] for r in result["rows"]}
    if len(providers) > MAX_COLUMNS and len(lines) < len(header) - 1:
        flipped = list(zip(header, *lines))
        lines = [[line[0].removesuffix(", us"), *line[1:]] for line in flipped[1:]]
        header = ["us", *flipped[0][1:]]
    return Table(f"{caption}: medians, 20th to 80th percentile in brackets", header, lines, folded)


def _first_calls(section: Section, content: Content, path: Path) -> None:
    first_calls.validate(content)
    rows = content["rows"]
    labels = [f"{r['module']}, {r['function']}" for r in rows]
    series = {
        title: [statistics.median(r[name]) for r in rows]
        for name, title in first_calls.LISTS.items()
        if name in ("empty_cache_s", "filled_cache_s")
    }
    section.measured = [("first call, s", MEASURED)]
    section.plots = [plots.bars(labels, series, "seconds", content["title"], section.anchor)]
    caption = "Seconds: medians, lowest and highest in brackets"
    header, lines = first_calls.table(content)
    section.tables = [Table(caption, header, [[n.replace("`", ""), *c] for n, *c in lines])]
    section.notes = [*content["notes"], *_skipped(content)]


def _models(section: Section, content: Content, path: Path) -> None:
    model_rows.validate(content)
    keys = list(dict.fromkeys(model_rows.work_of(row) for row in content["rows"]))
    pairs = [model_rows.of_work(content, key) for key in keys]
    # The first is the one that is ours, as in other plots.
    series = {
        name: [pair[place]["ms"] / pair[0]["ms"] for pair in pairs]
        for name, place in (("with cula", 1), ("without", 0))
    }
    labels = [model_rows.label(key) for key in keys]
    text = "time / time without cula"
    section.measured = [("whole models, eager", MEASURED), ("captured decode", NOT_MEASURED)]
    section.plots = [plots.bars(labels, series, text, content["title"], section.anchor)]
    section.tables = [
        Table("Medians, 20th to 80th percentile in brackets", *model_rows.table(content))
    ]
    left = [f"Not measured: {e['model']}, {e['work']}: {e['reason']}." for e in content["skipped"]]
    section.notes = [*content["notes"], *left]


def _several_gpus(section: Section, content: Content, path: Path) -> None:
    rank_rows.validate(content)
    rows = [row for row in content["rows"] if row["one_ms"] is not None]
    series = {
        "together": [row["ms"] / row["one_ms"] for row in rows],
        "one GPU": [1.0 for _ in rows],
    }
    labels = [rank_rows.label(row) for row in rows]
    text = "time / time on one GPU"
    passes = {row["pass"] for row in content["rows"]}
    section.measured = [
        (f"{name} on several GPUs", MEASURED if name in passes else NOT_MEASURED)
        for name in rank_rows.PASSES
    ]
    section.plots = [plots.bars(labels, series, text, content["title"], section.anchor)]
    section.tables = [
        Table(
            "Medians, 20th to 80th percentile in brackets",
            *rank_rows.table(content, path.parents[1]),
        )
    ]
    section.notes = [*content["notes"], *rank_rows.left_out(content)]


def _stages(section: Section, content: Content, path: Path) -> None:
    stage_rows.validate(content)
    rows = [row for row in content["rows"] if row["one"] is not None]
    series = {
        "all stages": [sum(stage_rows.slowest(row)) / row["one"][0] for row in rows],
        "one GPU": [1.0 for _ in rows],
    }
    labels = [f"{stage_rows.label(row)}, {row['ranks']} GPUs" for row in rows]
    section.measured = [("stages of ranks", MEASURED), ("links between them", NOT_MEASURED)]
    text = "time / time on one GPU"
    section.plots = [plots.bars(labels, series, text, content["title"], section.anchor)]
    section.tables = [Table("Medians", *stage_rows.table(content, path.parents[1]))]
    section.notes = [*content["notes"], *rank_rows.left_out(content)]


def _predicted_ranks(section: Section, content: Content, path: Path) -> None:
    section.sentences = [content["note"]]
    section.tables = [
        Table("Equal slices", *rank_rows.predictions(content)),
        replace(_of_rows("Everything that is predicted", content["rows"]), folded=True),
    ]


def _checks(result: Content) -> str:
    found = [
        (error, check["provider"])
        for check in result["checks"]
        for name, error in check["errors"].items()
        if name not in FLAGS
    ]
    if not found:
        return "The file records no check of the results."
    largest, provider = max(found)
    return (
        f"Before anything was timed, {len(result['checks'])} results of implementations were compared with an "
        f"independent reference; the largest error found was {largest:.2g}, of {provider}."
    )


def _skipped(result: Content) -> Iterator[str]:
    reasons: dict[str, set[str]] = {}
    for entry in result["skipped"]:
        reasons.setdefault(entry["reason"], set()).add(entry["provider"])
    for reason, providers in reasons.items():
        names = ", ".join(sorted(providers)) if len(providers) < MAX_COLUMNS else "several"
        count = sum(e["reason"] == reason for e in result["skipped"])
        yield f"Left out in {count} cases ({names}): {reason}."


def _quality(section: Section, content: Content, path: Path) -> None:
    quality_rows.validate(content)
    section.measured = _measured(path, [r["method"] for r in content["rows"]])
    section.plots = plots.of_quality(content, section.anchor)
    caption = "Errors, density and time of the last step, by workload and threshold"
    section.tables = [Table(caption, *quality_rows.table(content))]
    section.sentences = [_checks(content)]
    section.notes = content["notes"]


def _trajectory(section: Section, content: Content, path: Path) -> None:
    trajectory_rows.validate(content)
    section.measured = _measured(path, [r["method"] for r in content["rows"]])
    section.plots = plots.of_trajectory(content, section.anchor)
    header, lines = trajectory_rows.table(content)
    named = [[row["setting"], *line] for row, line in zip(content["rows"], lines, strict=True)]
    section.tables = [
        Table("The last step and all steps, by threshold", ["setting", *header], named),
        Table("Step by step", *trajectory_rows.step_table(content), folded=True),
    ]
    section.sentences = [_checks(content)]
    section.notes = content["notes"]


def _end_to_end(section: Section, content: Content, path: Path) -> None:
    end_to_end_rows.validate(content)
    section.measured = [("whole steps, eager", MEASURED), ("guidance", NOT_MEASURED)]
    section.plots = plots.of_end_to_end(content, section.anchor)
    caption = "Medians over the steps, 20th to 80th percentile in brackets"
    section.tables = [Table(caption, *end_to_end_rows.table(content))]
    left = [f"Not measured: {line}" for line in end_to_end_rows.left_out(content)]
    section.notes = [*content["notes"], *left]


def _emulator(section: Section, content: Content, path: Path) -> None:
    rows = content["rows"]
    labels = [r["kernel"] for r in rows]
    series = {"this commit": [r["minstr_per_s"] for r in rows]}
    if content["before"]:
        series[f"commit {content['before']}"] = [r["minstr_per_s_before"] for r in rows]
    unit = "million instructions per CPU second"
    section.plots = [plots.bars(labels, series, unit, content["title"], section.anchor)]
    section.tables, section.sentences = _of_markdown(emulator_tables.speed(content), "Speed")


def _mutants(section: Section, content: Content, path: Path) -> None:
    section.sentences = emulator_tables.mutants(content).split("\n\n")[1:]
    section.tables = [
        Table(
            "Instructions of synchronisation, by package and target", *mutant_rows.table(content)
        ),
        Table("What nobody notices", *mutant_rows.reason_table(content)),
        Table("Kernel by kernel", *mutant_rows.kernel_table(content), folded=True),
    ]


def _agreement(section: Section, content: Content, path: Path) -> None:
    section.tables, sentences = _of_markdown(emulator_tables.agreement(content), "Cases by family")
    cases = f"The file holds all {len(content['rows'])} cases one by one."
    section.sentences = [*sentences, cases]


def _of_markdown(text: str, caption: str) -> tuple[list[Table], list[str]]:
    """The table and the paragraphs of a region of a document."""
    table, *paragraphs = text.split("\n\n")
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in table.splitlines()]
    return [Table(caption, cells[0], cells[2:])], paragraphs


def _prediction(section: Section, content: Content, path: Path) -> None:
    published = kda_tables.published(path.parents[1])
    predicted, check = kda_tables.captions(content, published)
    header, lines = kda_tables.prediction_table(content, published)
    section.sentences = [content["note"]]
    section.plots = plots.of_cards(published, content, section.anchor)
    section.tables = [
        Table("Predicted, beside times that others published", header, lines),
        Table("The same model on the H200", *kda_tables.held_out_table(content), folded=True),
        Table("Every setting and card", *kda_tables.limits_table(content), folded=True),
    ]
    section.notes = [predicted, check]


def _published(section: Section, content: Content, path: Path) -> None:
    section.sentences = [f"Source: {content['source']}"]
    section.plots = plots.of_cards(content, None, section.anchor)
    section.tables = [_of_rows("Published times", content["rows"])]


def _published_tables(section: Section, content: Content, path: Path) -> None:
    """Every list of rows in a table of its own, below what the file says about its source."""
    sources = {"source": "rows", "proposal_source": "proposal_rows"}
    parts = [name for name in lite_published.PARTS if name in content and name != "rows"]
    if unknown := content.keys() - {"title", *sources, *sources.values(), *parts}:
        raise ValueError(f"parts that the report does not know: {', '.join(sorted(unknown))}")
    given = [
        (content[source], content[rows]) for source, rows in sources.items() if source in content
    ]
    section.sentences = [f"Source: {source}" for source, _ in given]
    section.tables = [
        _of_rows(source[0].upper() + source[1:].partition(":")[0], rows) for source, rows in given
    ]
    section.tables += [_of_rows(f"The same report: {name}", content[name]) for name in parts]


def _counters(section: Section, content: Content, path: Path) -> None:
    _, table, note = h20_page.counters_part(content).split("\n\n")
    section.tables, _ = _of_markdown(table, "Measured with ncu; clocks not fixed, caches flushed")
    section.notes = [note]


def _study(section: Section, content: Content, path: Path) -> None:
    known = {"title", "provenance", "note"}
    section.sentences = [f"{content['title']}."]
    section.notes = [content["note"]] if "note" in content else []
    section.tables = []
    for key, value in content.items():
        if key in known:
            continue
        caption = key.replace("_", " ")
        if isinstance(value, list):
            section.tables.append(_of_rows(caption, value))
            continue
        about = [value[word] for word in ("what", "date") if word in value]
        lines = list(_leaves({k: v for k, v in value.items() if k not in ("what", "date")}))
        section.tables.append(Table(caption, ["what", "value"], lines, True, ", ".join(about)))


def _suite(section: Section, content: Content, path: Path) -> None:
    rows = content["rows"]
    labels = [f"{r['run']}, {r['commit']}" for r in rows]
    series = {
        "wall": [r["wall_s"] / 60 for r in rows],
        "CPU": [r["cpu_s"] / 60 for r in rows],
    }
    section.plots = [plots.bars(labels, series, "minutes", content["title"], section.anchor)]
    folders = [[k, *map(str, v)] for k, v in content["seconds_by_folder"].items()]
    section.tables = [
        _of_rows("The session tests on two cores, seconds", rows),
        Table("Seconds by folder", ["folder", "empty caches", "second run"], folders),
    ]


def _of_rows(caption: str, rows: Sequence[Content]) -> Table:
    header = list(dict.fromkeys(key for row in rows for key in row))
    return Table(caption, header, [[_text(row.get(key)) for key in header] for row in rows])


def _losses(section: Section, content: Content, path: Path) -> None:
    loss_rows.validate(content)
    section.tables = [Table("Losses", *loss_rows.table(content))]
    left = [f"Not measured: {e['provider']}: {e['reason']}." for e in content["skipped"]]
    section.notes = [*content["notes"], *left]


def _leaves(value: Any, path: str = "") -> Iterator[list[str]]:
    """A line per leaf of nested objects."""
    for key, item in value.items():
        name = f"{path}, {key}" if path else key
        if isinstance(item, Mapping):
            yield from _leaves(item, name)
        else:
            values = item if isinstance(item, list) else [item]
            yield [name, " / ".join(map(_text, values))]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


READERS: dict[str, Callable[[Section, Content, Path], None]] = {
    quality_rows.OP: _quality,
    trajectory_rows.OP: _trajectory,
    end_to_end_rows.OP: _end_to_end,
    "emulator": _emulator,
    "emulator_agreement": _agreement,
    mutant_rows.OP: _mutants,
    kda_tables.OP: _prediction,
    kda_tables.PUBLISHED: _published,
    "gated_h200": _published_tables,
    "kda_h200": _published_tables,
    "lite_rtx4090": _published_tables,
    first_calls.OP: _first_calls,
    model_rows.OP: _models,
    **dict.fromkeys(rank_rows.OPS, _several_gpus),
    rank_rows.PREDICTED: _predicted_ranks,
    stage_rows.OP: _stages,
    loss_rows.OP: _losses,
    "ncu_decode": _counters,
    "time": _suite,
}
