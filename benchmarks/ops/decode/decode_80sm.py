"""Writes benchmarks/results/<gpu>/decode_80sm.md from result files: what was measured, and the projection to an H20.

    python benchmarks/ops/decode/decode_80sm.py [--gpu h200] [--check]

Reads lightning_decode_80sm.json (required), lightning_decode.json (the whole card),
lightning_decode_variants_80sm.json, ncu_decode.json and decode_design_study.json beside it (each optional; its
section says when it is missing).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import report, results
from benchmarks.harness.commands import fail

OURS, CEILING = "cula", "inplace_ceiling"
NAME = "decode_80sm.md"
# At and above this share of the in-place ceiling the kernel is called bandwidth-bound.
SATURATED = 0.95

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """Datasheet figures: memory bandwidth in TB/s and multiprocessors."""

    name: str
    bandwidth_tbs: float
    sms: int


H200 = Card("H200", 4.8, 132)
H20 = Card("H20", 4.0, 78)


@dataclass(frozen=True)
class Projection:
    """The range of a time on another card, from a measured time; `bound` says which end is more likely."""

    low_us: float
    high_us: float
    bound: str


def project(
    measured_us: float, of_ceiling: float | None, sms: int, source: Card, target: Card
) -> Projection:
    """Scales a time by the ratio of multiprocessors and by the ratio of datasheet bandwidths.

    The time of a kernel that memory limits grows with the ratio of bandwidths. The time of a kernel that is limited by
    what its multiprocessors can issue or keep in flight grows with the ratio of multiprocessors. An unclear case lies
    between the two.
    """
    by_memory = measured_us * source.bandwidth_tbs / target.bandwidth_tbs
    by_sms = measured_us * sms / target.sms
    bound = "memory" if of_ceiling is not None and of_ceiling >= SATURATED else "unclear"
    return Projection(min(by_memory, by_sms), max(by_memory, by_sms), bound)


def document(
    green: Result,
    whole: Result | None,
    variants: Result | None,
    counters: Result | None,
    study: Result | None = None,
) -> str:
    """The whole page."""
    sections = [
        "# Lightning decode on 80 multiprocessors\n\nWritten by `benchmarks/ops/decode/decode_80sm.py` from the "
        "result files beside it; change those, not this page.\n\nQuestion: does single-token decode saturate the "
        f"memory of an H20 ({H20.sms} multiprocessors, {H20.bandwidth_tbs} TB/s by its datasheet)? No H20 was at hand. "
        f"The kernel ran on {green['place']['sms_seen']} multiprocessors of a {green['provenance']['gpu']} instead.",
        _measured(green, whole),
        counters_part(counters),
        _variants(variants),
        _structures(study),
        _extrapolated(green),
    ]
    return "\n\n".join(sections) + "\n"


def _measured(green: Result, whole: Result | None) -> str:
    method = results.device_method(green)
    parts = [
        f"## Measured\n\n{report.origin(green)} Medians of {method}, H=64, K=V=128, bf16 activations."
    ]
    header = [
        "setting",
        "cula, us",
        "ceiling, us",
        "of ceiling",
        "cula, TB/s",
        "ceiling, TB/s",
        "whole card, us",
        "80 / whole",
    ]
    lines = []
    for row in results.rows_of(green, provider=OURS, method=method):
        ceiling = _row(green, row["setting"], CEILING)
        full = _row(whole, row["setting"], OURS)
        lines.append(
            [
                row["setting"],
                f"{row['median_us']:.1f}",
                f"{ceiling['median_us']:.1f}" if ceiling else "-",
                _optional(row["ratio_ceiling"]),
                f"{row['gbps'] / 1e3:.2f}",
                f"{ceiling['gbps'] / 1e3:.2f}" if ceiling else "-",
                f"{full['median_us']:.1f}" if full else "-",
                f"{row['median_us'] / full['median_us']:.3f}" if full else "-",
            ]
        )
    parts.append(report.as_markdown((header, lines)))
    parts.append(
        "ceiling: `state.mul_(-1.0)` on the same multiprocessors. resident: the same buffers every call; cold: buffers "
        "rotate beyond three times the L2."
    )
    if whole is not None:
        parts.append(f"Whole card: {report.origin(whole)}")
    return "\n\n".join(parts)


def counters_part(counters: Result | None) -> str:
    title = "## Hardware counters (measured with ncu, clocks not fixed, caches flushed)"
    if counters is None:
        return f"{title}\n\nNot measured."
    header = [
        "B",
        "multiprocessors",
        "us",
        "DRAM throughput",
        "occupancy",
        "L2 hit rate",
        "registers",
        "top stalls",
    ]
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
                    _percent(kernel["dram_throughput_pct"]),
                    _percent(kernel["achieved_occupancy_pct"]),
                    _percent(kernel["l2_hit_rate_pct"]),
                    _optional(kernel["registers_per_thread"], 0),
                    stalls or "-",
                ]
            )
    note = (
        f"{counters['state']} state, layout {counters['layout']}. Throughput is of the whole card's DRAM peak; "
        "occupancy and stalls are of active multiprocessors; a stall's share is of all resident warp cycles."
    )
    return "\n\n".join([title, report.as_markdown((header, lines)), note])


def _variants(variants: Result | None) -> str:
    title = "## Variants (measured)"
    if variants is None:
        return f"{title}\n\nNot measured."
    method = results.device_method(variants)
    times: dict[str, dict[str, float]] = {}
    for row in results.rows_of(variants, method=method):
        times.setdefault(row["provider"], {})[row["setting"]] = row["median_us"]
    settings = list(dict.fromkeys(row["setting"] for row in variants["rows"]))
    lines = [
        [name, *(_optional(found.get(s), 1) for s in settings)] for name, found in times.items()
    ]
    table = report.as_markdown((["us", *settings], lines))
    return f"{title}\n\n{report.origin(variants)} Medians of {method}; cula is the selected tile.\n\n{table}"


ANSWERS = """\
* K splitting: a second pass over partial outputs costs more than any locality brings; V is split instead, with no
  reduction over CTAs.
* Tile height and warps: `[K, V]` states want pieces of at least 256 bytes of every row; `[V, K]` slices are contiguous
  and the height hardly matters. Fewer multiprocessors want more bytes in flight on each, so the package takes other
  tiles below 100 of them; they are `cula` in the tables above.
* Vector stores: no difference, a warp fills whole sectors with 4-byte stores too. The package keeps 16 bytes.
* TMA: bulk copies there and back are slower than plain loads and stores for an update in place."""


def _structures(study: Result | None) -> str:
    """Times of other structures of the kernel, and the conclusions from them."""
    head = "## Splitting, stores, TMA (measured on the whole card)"
    if study is None:
        return f"{head}\n\nNot measured."
    variants = [
        [name, f"{us['B64']:.1f}", f"{us['B256']:.1f}"]
        for name, us in study["decode_variants_us"].items()
    ]
    names = study["traffic_only_kernels"]
    traffic = [
        [f"{names[row['kernel']]}: {row['shape']}", f"{row['B64_us']:.1f}", f"{row['B256_us']:.1f}"]
        for row in study["traffic_only"]
    ]
    columns = ["us", "B=64", "B=256"]
    return "\n\n".join(
        (
            head,
            f"{study['title']}. {study['note']}",
            report.as_markdown((columns, variants)),
            "The traffic alone:",
            report.as_markdown((columns, traffic)),
            ANSWERS,
        )
    )


def _extrapolated(green: Result) -> str:
    """The part of the page that is no measurement; it states every assumption beside its figures."""
    header = ["setting", "H20 low, us", "H20 high, us", "limited by"]
    sms, lines = green["place"]["sms_seen"], []
    for row in results.rows_of(
        green, provider=OURS, method=results.device_method(green), l2="cold"
    ):
        p = project(row["median_us"], row["ratio_ceiling"], sms, H200, H20)
        lines.append([row["setting"], f"{p.low_us:.1f}", f"{p.high_us:.1f}", p.bound])
    assumptions = (
        f"**Nothing in this section was measured.** High: the measured time x {H200.bandwidth_tbs} / "
        f"{H20.bandwidth_tbs} (datasheet bandwidths; the same attainable share of both is assumed). Low: the measured "
        f"time x {sms} / {H20.sms} (equal clocks and latencies assumed). A setting at {SATURATED} of the ceiling or "
        "more is called limited by memory: expect the high end. Elsewhere the truth lies between."
    )
    return "\n\n".join(
        [
            f"## Extrapolated to an H20 ({H20.sms} multiprocessors, {H20.bandwidth_tbs} TB/s)",
            assumptions,
            report.as_markdown((header, lines)),
            _conclusion(green),
        ]
    )


def _conclusion(green: Result) -> str:
    """Compares the bytes that a multiprocessor moved with those that one of an H20 must move to fill its memory."""
    method, sms = results.device_method(green), green["place"]["sms_seen"]
    rows = results.rows_of(green, provider=OURS, method=method, l2="cold")
    best = max(rows, key=lambda row: row["gbps"])
    ceiling = max(
        row["gbps"] for row in results.rows_of(green, provider=CEILING, method=method, l2="cold")
    )
    attainable = ceiling * H20.bandwidth_tbs / H200.bandwidth_tbs
    moved, needed = best["gbps"] / sms, attainable / H20.sms
    saturated = ", ".join(r["setting"] for r in rows if (r["ratio_ceiling"] or 0) >= SATURATED)
    return (
        f"The ceiling attains {ceiling / 1e3:.2f} of {H200.bandwidth_tbs} TB/s here; the same share of the H20's is "
        f"{attainable / 1e3:.2f} TB/s, or {needed:.1f} GB/s per multiprocessor. The kernel moved up to {moved:.1f} "
        f"GB/s per multiprocessor ({best['setting']}), which is {'enough' if moved >= needed else 'not enough'} if "
        f"clocks and latencies are alike. Settings at {SATURATED} of the ceiling or more: {saturated or 'none'}."
    )


def _row(result: Result | None, setting: str, provider: str) -> Mapping[str, Any] | None:
    if result is None:
        return None
    found = results.rows_of(
        result, setting=setting, provider=provider, method=results.device_method(result)
    )
    return found[0] if found else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _optional(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def page(gpu: str, root: Path = results.RESULTS) -> str:
    """The page from the files of one GPU; it raises OSError where the required file is missing."""

    def optional(op: str) -> Result | None:
        path = results.result_path(op, gpu, root)
        return results.load(path) if path.exists() else None

    def plain(name: str) -> Result | None:
        path = results.result_path(name, gpu, root)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    return document(
        results.load(results.result_path("lightning_decode_80sm", gpu, root)),
        optional("lightning_decode"),
        optional("lightning_decode_variants_80sm"),
        plain("ncu_decode"),
        plain("decode_design_study"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes decode_80sm.md from result files.")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when the page has drifted"
    )
    args = parser.parse_args(argv)
    path = results.RESULTS / args.gpu / NAME
    try:
        text = page(args.gpu)
    except (OSError, ValueError) as error:
        return fail(error)
    if args.check:
        drifted = not path.exists() or path.read_text(encoding="utf-8") != text
        print(f"{path}: differs from the result files" if drifted else f"{path}: up to date")
        return int(drifted)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
