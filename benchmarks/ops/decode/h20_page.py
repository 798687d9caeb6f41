"""The text of BENCHMARK_H20.md: Lightning decode on an H20, or on the part of an H200 that stands in for one.

`benchmarks/tables.py` writes and checks the page. Once benchmarks/results/h20/lightning_decode.json exists the page is
made from that folder, and nothing is estimated any more. Until then it is made from results/h200:
lightning_decode_80sm.json (required), lightning_decode.json, lightning_decode_variants_80sm.json,
lightning_decode_variants.json, ncu_decode.json and decode_design_study.json. A section says so when its file is
missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.ops.decode import h20_variants
from benchmarks.ops.decode.h20_estimate import H20, H200, SATURATED, project, ratio_range

OURS, PEER, CEILING = "cula", "fla", "inplace_ceiling"
PAGE = "BENCHMARK_H20.md"
CRITERION, CRITERION_FROM = 1.2, 64
SMALL_UP_TO = 16
BATCHES = (1, 4, 16, 32, 64, 128, 256)
LAYOUTS = {
    ("fp32", "kv"): "fp32 `[K, V]`",
    ("fp32", "vk"): "fp32 `[V, K]`",
    ("bf16", "kv"): "bf16 `[K, V]`",
    ("bf16", "vk"): "bf16 `[V, K]`",
}
# The problem of the request: 64 heads whose state is 128 x 128 fp32.
STATE_BYTES = 64 * 128 * 128 * 4

Result = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Files:
    """The results that the page is made of. `whole` is the whole H200 beside its part that stands in for an H20."""

    main: Result
    whole: Result | None = None
    variants: Result | None = None
    small_variants: Result | None = None
    counters: Result | None = None
    study: Result | None = None
    stand_in: bool = True

    @property
    def place(self) -> str:
        """The machine of the main result, in words."""
        gpu, sms = self.main["provenance"]["gpu"], self.main["place"]["sms_seen"]
        return f"{sms} multiprocessors of an {gpu}" if self.stand_in else f"an {gpu}"


def document(files: Files, more: Sequence[str] = ()) -> str:
    """The whole page; `more` are sections about other operations."""
    sections = [
        "# Lightning decode on an H20\n\nWritten by `benchmarks/tables.py` from files in "
        f"`benchmarks/results/`; change those, not this page. H={STATE_BYTES // (128 * 128 * 4)}, K=V=128, one token "
        f"per "
        "call and bf16 activations unless a row says otherwise.",
        _verdict(files),
        _times(files),
        _counters(files),
        h20_variants.section(files.variants, files.study, files.stand_in),
        _small(files),
        *([_estimated(files)] if files.stand_in else []),
        _arithmetic(),
        *more,
        _again(files),
    ]
    return "\n\n".join(sections) + "\n"


@dataclass(frozen=True)
class Ratios:
    """The ratio to FLA at the batches of the success criterion: measured, and beside a stand-in on its whole card and
    as estimated for an H20."""

    measured: list[float]
    whole: list[float]
    estimated: tuple[float, float] | None

    def verdict(self) -> str:
        """Whether the criterion is met where it was measured."""
        return "met" if min(self.measured) >= CRITERION else "missed"

    def expectation(self) -> str:
        """Whether the criterion is met by the estimate."""
        low, high = self.estimated or (0.0, math.inf)
        return "met" if low >= CRITERION else "missed" if high < CRITERION else "open"


def big_batch_ratios(files: Files) -> dict[tuple[str, str], Ratios]:
    """The ratios by state and layout, where FLA was measured."""
    found = {}
    for state, layout in LAYOUTS:
        rows = [r for r in _single(files.main, state, layout) if _batch(r) >= CRITERION_FROM]
        rows = [r for r in rows if r.get(f"ratio_{PEER}")]
        if rows:
            whole = [_row(files.whole, r["setting"], OURS) for r in rows]
            ranges = [_ratio_range(files.main, r) for r in rows] if files.stand_in else []
            lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
            found[state, layout] = Ratios(
                [r[f"ratio_{PEER}"] for r in rows],
                [r[f"ratio_{PEER}"] for r in whole if r and r.get(f"ratio_{PEER}")],
                (min(lows), max(highs)) if ranges else None,
            )
    return found


def _verdict(files: Files) -> str:
    """The success criterion per layout, in the first lines of the page."""
    head = f"criterion: at least {CRITERION} x FLA at B >= {CRITERION_FROM}"
    measured = f"on {files.main['place']['sms_seen']} multiprocessors" if files.stand_in else "here"
    header = ["state", f"x FLA {measured}, B=64, 128, 256", f"{CRITERION} x FLA"]
    if files.stand_in:
        header += ["x FLA on the whole H200", "x FLA on an H20, estimated", f"{CRITERION} x FLA"]
    lines, found = [], big_batch_ratios(files)
    for where, ratios in found.items():
        line = [LAYOUTS[where], _listed(ratios.measured), ratios.verdict()]
        if ratios.estimated:
            low, high = ratios.estimated
            line += [_listed(ratios.whole) or "-", f"{low:.2f} to {high:.2f}", ratios.expectation()]
        lines.append(line)
    met = [ratios.verdict() == "met" for ratios in found.values()]
    small = [r for s, y in LAYOUTS for r in _single(files.main, s, y) if _batch(r) <= SMALL_UP_TO]
    small_ratios = [r[f"ratio_{PEER}"] for r in small if r.get(f"ratio_{PEER}")]
    fp32 = [r["ratio_ceiling"] for y in ("kv", "vk") for r in _single(files.main, "fp32", y)
            if _batch(r) >= CRITERION_FROM and r["ratio_ceiling"]]  # fmt: skip
    told = (
        "in every layout measured"
        if all(met)
        else "in some layouts only"
        if any(met)
        else "in none"
    )
    parts = [
        f"**Verdict ({head}).** "
        + (
            f"No H20 was at hand. On {files.place}, which stand in for one, the criterion is met {told}."
            if files.stand_in
            else f"Measured on {files.place}: the criterion is met {told}."
        ),
        report.as_markdown((header, lines)),
        "`[K, V]` is FLA's default; FLA reads `[V, K]` with `state_v_first=True`. FLA writes a bf16 state in fp32, 6 "
        "bytes "
        "of an element where cula moves 4: up to 1.5 of that ratio is memory that its interface demands."
        + (
            " The estimate takes cula's time to grow with the bandwidth of the memory, which limits it, and FLA's with "
            "the bandwidth or with the number of multiprocessors; its low end is the case to expect if FLA is limited "
            "by its multiprocessors ([how](#estimated-for-an-h20))."
            if files.stand_in
            else ""
        ),
    ]
    facts = []
    if fp32:
        facts.append(
            f"* Bandwidth or kernel efficiency: {'bandwidth' if min(fp32) >= SATURATED else 'both'}. With fp32 "
            f"states the "
            f"kernel runs at {min(fp32):.3f} to {max(fp32):.3f} of the speed of an in-place multiplication of the "
            f"state "
            f"at B >= {CRITERION_FROM}, so a better kernel could gain {100 * (1 - min(fp32)):.1f} % at most."
        )
    if small_ratios:
        facts.append(
            f"* Small batches (B <= {SMALL_UP_TO}, fp32 and bf16): {min(small_ratios):.2f} to {max(small_ratios):.2f} "
            "times FLA's speed, no regression."
            if min(small_ratios) >= 1
            else f"* Small batches (B <= {SMALL_UP_TO}): {min(small_ratios):.2f} times FLA's speed at the least."
        )
    return "\n\n".join([*parts, *(["\n".join(facts)] if facts else [])])


def _times(files: Files) -> str:
    method = results.device_method(files.main)
    note = (
        "x FLA: FLA's time over cula's in the same run, on the same multiprocessors. ceiling: `state.mul_(-1.0)` "
        "there, "
        "which reads and writes the state and does nothing else. resident: the same buffers every call; all others are "
        "cold: buffers rotate beyond three times the L2."
    )
    parts = [f"## Baseline\n\n{report.origin(files.main)} Medians of {method}. {note}"]
    for (state, layout), name in LAYOUTS.items():
        rows = _single(files.main, state, layout)
        absent = sorted(set(BATCHES) - {_batch(r) for r in rows})
        parts.append(f"**{name}**")
        if rows:
            parts.append(_table(files, rows, "B", lambda row: str(_batch(row))))
        if absent:
            parts.append(f"Not measured: B = {', '.join(map(str, absent))}.")
    single = {r["setting"] for s, y in LAYOUTS for r in _single(files.main, s, y)}
    others = [
        r
        for r in results.rows_of(files.main, provider=OURS, method=method)
        if r["setting"] not in single
    ]
    if others:
        parts += [
            "**Other problems**",
            _table(files, others, "setting", lambda row: row["setting"]),
        ]
    if files.whole is not None:
        parts.append(f"Whole card: {report.origin(files.whole)}")
    return "\n\n".join(parts)


def _table(files: Files, rows: Sequence[Row], first: str, name: Any) -> str:
    header = [first, "cula, us", "FLA, us", "x FLA", "ceiling, us", "of ceiling"]
    header += ["cula, TB/s", "FLA, TB/s", "ceiling, TB/s"]
    if files.stand_in:
        header += ["whole card: cula, us", "FLA, us", "x FLA", "part / whole"]
    lines = []
    for row in rows:
        peer, ceiling = (_row(files.main, row["setting"], p) for p in (PEER, CEILING))
        line = [name(row), _us(row), _us(peer), _optional(row.get(f"ratio_{PEER}"), 2)]
        line += [_us(ceiling), _optional(row["ratio_ceiling"]), _tbs(row), _tbs(peer)]
        line += [_tbs(ceiling)]
        if files.stand_in:
            full, other = (_row(files.whole, row["setting"], p) for p in (OURS, PEER))
            share = row["median_us"] / full["median_us"] if full else None
            ratio = full.get(f"ratio_{PEER}") if full else None
            line += [_us(full), _us(other), _optional(ratio, 2), _optional(share)]
        lines.append(line)
    return report.as_markdown((header, lines))


def _counters(files: Files) -> str:
    """What ncu counted, and whether memory or the kernel is the limit."""
    part = counters_part(files.counters)
    return part if files.counters is None else f"{part}\n\n{_limit(files)}"


def counters_part(counters: Result | None) -> str:
    """What ncu counted: a title, a table and a note, with an empty line between them."""
    title = "## Hardware counters: is bandwidth the limit, or the kernel?"
    if counters is None:
        return f"{title}\n\nNot measured."
    header = ["B", "multiprocessors", "us", "TB/s", "DRAM throughput", "occupancy", "L2 hit rate"]
    header += ["registers", "threads per CTA", "waiting for (share of warp cycles)"]
    lines = []
    for entry in counters["entries"]:
        for kernel in entry["kernels"]:
            stalls = ", ".join(
                f"{s['reason']} {s['share_pct']:.0f} %" for s in kernel["top_stalls"][:3]
            )
            lines.append(
                [
                    str(entry["B"]),
                    str(entry["sms"] or "all"),
                    _optional(_scaled(kernel["duration_ns"], 1e-3), 1),
                    _optional(_rate(kernel), 2),
                    _percent(kernel["dram_throughput_pct"]),
                    _percent(kernel["achieved_occupancy_pct"]),
                    _percent(kernel["l2_hit_rate_pct"]),
                    _optional(kernel["registers_per_thread"], 0),
                    _optional(kernel.get("block_size"), 0),
                    stalls or "-",
                ]
            )
    note = (
        f"Measured with ncu on {counters['provenance']['gpu']}, clocks not fixed, caches flushed; "
        f"{counters['state']} state, layout {counters['layout']}. TB/s: bytes read from and written to DRAM over the "
        f"time. "
        "Throughput is of the whole card's DRAM peak; occupancy and stalls are of active multiprocessors; a stall's "
        "share "
        "is of all resident warp cycles."
    )
    return "\n\n".join([title, report.as_markdown((header, lines)), note])


def _limit(files: Files) -> str:
    """The answer in words; every figure is of the files."""
    rows = [r for r in _single(files.main, "fp32", "kv") if _batch(r) >= CRITERION_FROM]
    shares = [r["ratio_ceiling"] for r in rows if r["ratio_ceiling"]]
    entries = [e for e in files.counters["entries"] if e["B"] >= CRITERION_FROM]  # type: ignore[index]
    kernels = [k for entry in entries for k in entry["kernels"]]
    waits = [
        s["share_pct"] for k in kernels for s in k["top_stalls"] if s["reason"] == "long_scoreboard"
    ]
    if not shares or not waits:
        return "Not answered: a row of the ceiling or the counter of memory stalls is missing."
    limited = min(shares) >= SATURATED
    return (
        f"**{'Bandwidth' if limited else 'Not bandwidth alone'}.** Warps spend {min(waits):.0f} to {max(waits):.0f} "
        f"% of "
        "their cycles waiting for memory (`long_scoreboard`), and the kernel takes the time of an in-place "
        "multiplication "
        f"divided by {min(shares):.3f} to {max(shares):.3f}. No state is reused: each sector misses the L2 when it is "
        "read and hits it when it is written, hence a hit rate of one half. The shares that ncu prints are of a peak "
        "that "
        "no kernel reaches; the ceiling's TB/s in the tables above are what can be attained."
    )


def _small(files: Files) -> str:
    """How many CTAs a state should have at small batches."""
    title = "## Small batches and the number of CTAs per state"
    found = h20_variants.by_slices(files.small_variants, SMALL_UP_TO)
    where = (
        "The number of CTAs per state was varied at these batches on the whole H200 only, not on part of it. "
        if files.stand_in
        else ""
    )
    text = (
        f"{where}A CTA has `tile_v` of the 128 columns of V, so a state has 128 / `tile_v` CTAs; the table has the "
        f"best "
        "time of all tiles with that many, in us. In the request's kernel the number is 8 up to B = 32 and 1 above. "
        "Batches without a column were not measured."
    )
    body = report.as_markdown(found) if found else "Not measured."
    if found:
        body += (
            "\n\nThe package takes one tile for all batches; where the table has figures that costs up to "
            f"{100 * h20_variants.slices_cost(found):.0f} % against the best number of CTAs."
        )
    read = [e["B"] for e in files.counters["entries"]] if files.counters else []
    waves = (
        "A grid of 512 CTAs of 128 threads, as the request counts for B = 1, is not seven waves on 78 multiprocessors: "
        "one holds 2048 threads, hence sixteen such CTAs if registers and shared memory allow, and 512 CTAs are fewer "
        "than seven for each."
        + (
            ""
            if min(read, default=BATCHES[-1]) <= SMALL_UP_TO
            else " No hardware counters were read at small batches."
        )
    )
    return "\n\n".join([title, text, body, waves])


def _estimated(files: Files) -> str:
    """The part of the page that is no measurement; it states every assumption beside its figures."""
    header = ["setting", "cula, low, us", "cula, high, us", "limited by", "FLA, low, us"]
    header += ["FLA, high, us", "x FLA"]
    green = files.main
    sms, lines = green["place"]["sms_seen"], []
    for row in _cold(green):
        p, peer = _projected(green, row), _row(green, row["setting"], PEER)
        line = [row["setting"], f"{p.low_us:.1f}", f"{p.high_us:.1f}", p.bound]
        if peer:
            theirs = _projected(green, peer)
            low, high = _ratio_range(green, row)
            line += [f"{theirs.low_us:.1f}", f"{theirs.high_us:.1f}", f"{low:.2f} to {high:.2f}"]
        else:
            line += ["-", "-", "-"]
        lines.append(line)
    assumptions = (
        f"**Nothing in this section was measured.** H20: {H20.sms} multiprocessors, {H20.bandwidth_tbs} TB/s. High: "
        f"the "
        f"measured time x {H200.bandwidth_tbs} / {H20.bandwidth_tbs} (datasheet bandwidths; the same attainable "
        f"share of "
        f"both is assumed). Low: the measured time x {sms} / {H20.sms} (equal clocks and latencies assumed). A "
        f"setting at "
        f"{SATURATED} of the ceiling or more is called limited by memory: expect the high end, which is what x FLA "
        "takes. Elsewhere, and for FLA, the truth lies between; x FLA spans what follows from both ranges."
    )
    return "\n\n".join(
        [
            "## Estimated for an H20",
            assumptions,
            report.as_markdown((header, lines)),
            _demand(green),
        ]
    )


def _demand(green: Result) -> str:
    """Compares the bytes that a multiprocessor moved with those that one of an H20 must move to fill its memory."""
    sms, rows = green["place"]["sms_seen"], _cold(green)
    best = max(rows, key=lambda row: row["gbps"])
    ceiling = max(r["gbps"] for r in _cold(green, CEILING))
    attainable = ceiling * H20.bandwidth_tbs / H200.bandwidth_tbs
    moved, needed = best["gbps"] / sms, attainable / H20.sms
    saturated = ", ".join(r["setting"] for r in rows if (r["ratio_ceiling"] or 0) >= SATURATED)
    return (
        f"The ceiling attains {ceiling / 1e3:.2f} of {H200.bandwidth_tbs} TB/s here; the same share of the H20's is "
        f"{attainable / 1e3:.2f} TB/s, or {needed:.1f} GB/s per multiprocessor. The kernel moved up to {moved:.1f} "
        f"GB/s per multiprocessor ({best['setting']}), which is {'enough' if moved >= needed else 'not enough'} if "
        f"clocks and latencies are alike. Settings at {SATURATED} of the ceiling or more: {saturated or 'none'}."
    )


def _arithmetic() -> str:
    moved = 2 * CRITERION_FROM * STATE_BYTES
    large = 2 * 1024 * STATE_BYTES
    return (
        "## The traffic of a step\n\n"
        f"A state of 128 x 128 fp32 is 64 KB. At B = {CRITERION_FROM}, H = 64 that is {CRITERION_FROM * STATE_BYTES:,} "
        f"bytes of state, read and written {moved / 1e9:.2f} GB, and at {H20.bandwidth_tbs} TB/s "
        f"{moved / H20.bandwidth_tbs / 1e9:.3f} ms. The 8.6 GB and 2.15 ms of the request are sixteen times as much: "
        f"they are those of B = 1024 ({large / 1e9:.1f} GB, {large / H20.bandwidth_tbs / 1e9:.2f} ms)."
    )


def _again(files: Files) -> str:
    said = (
        "On an H20 this page is made from measured rows" if files.stand_in else "To measure again"
    )
    return (
        "## On your own H20\n\n    bash .ci/run evidence -- h20            # with --dry-run it only prints what it "
        f"would do\n\n{said}: the command runs the GPU tests, measures into a folder of its own beside "
        "`benchmarks/results/h200/`, reads the counters with ncu where it is installed, and writes this page anew."
    )


def _batch(row: Row) -> int:
    return row["params"]["B"]


def _cold(result: Result, provider: str = OURS) -> list[dict[str, Any]]:
    method = results.device_method(result)
    return results.rows_of(result, provider=provider, method=method, l2="cold")


def _single(result: Result, state: str, layout: str) -> list[dict[str, Any]]:
    """Our cold rows of a single-token step that updates the state, without pool indices, by batch."""
    wanted = {"T": 1, "state": state, "layout": layout, "commit": True, "indexed": False}
    return sorted((r for r in _cold(result) if wanted.items() <= r["params"].items()), key=_batch)


def _row(result: Result | None, setting: str, provider: str) -> dict[str, Any] | None:
    if result is None:
        return None
    found = results.rows_of(
        result, setting=setting, provider=provider, method=results.device_method(result)
    )
    return found[0] if found else None


def _projected(green: Result, row: Row) -> Any:
    # The share of the ceiling says what limits our kernel; FLA's writes other memory than it reads.
    share = row["ratio_ceiling"] if row["provider"] == OURS else None
    return project(row["median_us"], share, green["place"]["sms_seen"], H200, H20)


def _ratio_range(green: Result, row: Row) -> tuple[float, float]:
    peer = _row(green, row["setting"], PEER)
    assert peer is not None
    return ratio_range(_projected(green, row), _projected(green, peer))


def _rate(kernel: Mapping[str, Any]) -> float | None:
    moved = kernel.get("dram_bytes_read"), kernel.get("dram_bytes_written")
    if None in moved or not kernel["duration_ns"]:
        return None
    return sum(moved) / kernel["duration_ns"] / 1e3  # type: ignore[arg-type]


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{r:.2f}" for r in ratios)


def _us(row: Row | None) -> str:
    return _optional(row["median_us"], 1) if row else "-"


def _tbs(row: Row | None) -> str:
    return f"{row['gbps'] / 1e3:.2f}" if row else "-"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _optional(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def read(root: Path = results.RESULTS) -> Files:
    """The files of an H20 if there is a measurement of one, else those of an H200; OSError where there is neither."""

    def optional(op: str, gpu: str) -> Result | None:
        path = results.result_path(op, gpu, root)
        return results.load(path) if path.exists() else None

    def plain(name: str, gpu: str) -> Result | None:
        path = results.result_path(name, gpu, root)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    study = plain("decode_design_study", "h200")
    if (measured := optional("lightning_decode", "h20")) is not None:
        variants = optional("lightning_decode_variants", "h20")
        counters = plain("ncu_decode", "h20")
        return Files(measured, None, variants, variants, counters, study, stand_in=False)
    return Files(
        results.load(results.result_path("lightning_decode_80sm", "h200", root)),
        optional("lightning_decode", "h200"),
        optional("lightning_decode_variants_80sm", "h200"),
        optional("lightning_decode_variants", "h200"),
        plain("ncu_decode", "h200"),
        study,
    )


def page(root: Path = results.RESULTS, more: Sequence[str] = ()) -> str:
    """The page from the result files; `more` are sections about other operations."""
    return document(read(root), more)
