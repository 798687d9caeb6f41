"""The variants of the decode kernel that the H20 page answers for: each with its figure, or "not measured"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import report, results

OURS = "cula"
TILE = re.compile(r"tile_v=(?P<tile_v>\d+),threads=(?P<threads>\d+),direct=(?P<direct>\w+)")
BATCHES = (64, 256)
COLUMNS = 128

Result = Mapping[str, Any]
Tile = Mapping[str, str]

# What the request asks for -> which of our tiles have it.
TILES: dict[str, Callable[[Tile], bool]] = {
    "4 warps, TILE_V = 8 (the request's starting point)": lambda t: (
        (t["threads"], t["tile_v"]) == ("128", "8")
    ),
    "8 warps": lambda t: t["threads"] == "256",
    "TILE_V = 16": lambda t: t["tile_v"] == "16",
    "TILE_V = 32": lambda t: t["tile_v"] == "32",
}
# What the request asks for -> the entries of the design study that have it, and the one without, by layout.
STRUCTURES = (
    ("K split in two, partial outputs added", "k_split_in_2_plus_sum_{}", "package_{}"),
    (
        "4-byte instead of vectorised (16-byte) write-back",
        "scalar_stores_{}",
        "package_{}",
    ),
)
# The kernels of the study that only move the traffic: bulk copies by TMA, and ordinary loads and stores.
TMA = {
    "TMA: one bulk copy per CTA, there and back (traffic alone)": "B",
    "TMA: a ring of bulk copies (traffic alone)": "C",
}
PLAIN = "A"

NOTES = """\
* K splitting: a second pass over partial outputs costs more than any locality brings; V is split instead, with no
  reduction over CTAs.
* Warps and tile height: in this kernel a CTA loads its whole slice of `tile_v` columns at once and loops over nothing,
  so `tile_v` is the size of a slice and not of a step. `[K, V]` states want pieces of at least 256 bytes of every row;
  `[V, K]` slices are contiguous and the height hardly matters. Fewer multiprocessors want more bytes in flight on each,
  so the package takes other tiles below 100 of them; they are `cula` in these tables.
* Vectorised write-back: no difference, a warp fills whole sectors with 4-byte stores too. The package keeps 16 bytes.
* TMA: bulk copies there and back are slower than plain loads and stores for an update in place."""


def section(variants: Result | None, study: Result | None, stand_in: bool) -> str:
    """What was asked for in a table, the conclusions, and every variant that was measured."""
    asked = [*_tiles(variants), *_structures(study)]
    header = ["asked for", "state", "measured as", "on", *(f"B={b}, us" for b in BATCHES)]
    parts = [
        "## Variants for big batches",
        "In brackets: the time over that of the package's own choice in the same run, and for TMA over that of plain "
        "loads and stores which move the same bytes. Above 1 is slower. Of several tiles that fit, the best one at "
        f"B = {BATCHES[-1]} is shown. fp32 states.",
        report.as_markdown((header, asked)),
        NOTES,
        _every_tile(variants, stand_in),
        _every_structure(study),
    ]
    return "\n\n".join(parts)


def _tiles(variants: Result | None) -> list[list[str]]:
    """A line for each kind of tile that was asked for, and layout."""
    lines = []
    for asked, fits in TILES.items():
        for layout in ("kv", "vk"):
            found = _best_tile(variants, layout, fits)
            lines.append([asked, _layout(layout), *(found or ["-", "-", *_unmeasured()])])
    return lines


def _best_tile(
    variants: Result | None, layout: str, fits: Callable[[Tile], bool]
) -> list[str] | None:
    if variants is None:
        return None
    times = _times(variants, "fp32", layout)
    ours = times.get(OURS, {})
    names = [n for n, at in times.items() if _fits(n, fits) and set(BATCHES) <= set(at)]
    if not names or not set(BATCHES) <= set(ours):
        return None
    best = min(names, key=lambda name: times[name][BATCHES[-1]])
    cells = [f"{times[best][b]:.1f} ({times[best][b] / ours[b]:.2f})" for b in BATCHES]
    return [f"`{best}`", _where(variants), *cells]


def _structures(study: Result | None) -> list[list[str]]:
    lines = []
    for asked, name, base in STRUCTURES:
        for layout in ("kv", "vk"):
            found = study["decode_variants_us"] if study else {}
            this, package = found.get(name.format(layout)), found.get(base.format(layout))
            cells = (
                [f"`{name.format(layout)}`", "whole H200", *_against(this, package)]
                if this and package
                else ["-", "-", *_unmeasured()]
            )
            lines.append([asked, _layout(layout), *cells])
    for asked, kernel in TMA.items():
        rows = [r for r in (study["traffic_only"] if study else []) if r["kernel"] == kernel]
        plain = [r for r in (study["traffic_only"] if study else []) if r["kernel"] == PLAIN]
        cells = ["-", "-", *_unmeasured()]
        if rows and plain:
            this, that = (min(of, key=lambda r: r["B256_us"]) for of in (rows, plain))
            cells = [this["shape"], "whole H200", *_against(_by_batch(this), _by_batch(that))]
        lines.append([asked, "any", *cells])
    return lines


def _every_tile(variants: Result | None, stand_in: bool) -> str:
    title = "### Every tile"
    if variants is None:
        return f"{title}\n\nNot measured."
    method = results.device_method(variants)
    times: dict[str, dict[str, float]] = {}
    for row in results.rows_of(variants, method=method):
        if row["params"]["B"] in BATCHES:
            times.setdefault(row["provider"], {})[row["setting"]] = row["median_us"]
    settings = list(dict.fromkeys(s for found in times.values() for s in found))
    lines = [
        [name, *(f"{found[s]:.1f}" if s in found else "-" for s in settings)]
        for name, found in times.items()
    ]
    table = report.as_markdown((["us", *settings], lines))
    note = (
        f"{report.origin(variants)} Medians of {method}; cula is the selected tile. `threads` are those of a CTA; "
        f"`direct` "
        "is whether each reads its part of q, k, v from global memory, instead of from shared memory."
    )
    return f"{title}\n\n{note}\n\n{table}"


def _every_structure(study: Result | None) -> str:
    head = "### Splitting, stores and TMA, on the whole H200"
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
        )
    )


def by_slices(variants: Result | None, up_to: int) -> report.Table | None:
    """The best time by the number of CTAs that share a state, at batches up to `up_to`; None where there is none."""
    if variants is None:
        return None
    header, cells = ["CTAs per state"], {}
    chosen: dict[str, str] = {}
    for state in ("fp32", "bf16"):
        for layout in ("kv", "vk"):
            times = _times(variants, state, layout)
            for batch in sorted({b for at in times.values() for b in at if b <= up_to}):
                column = f"B={batch}, {state} {_layout(layout)}"
                header.append(column)
                if batch in times.get(OURS, {}):
                    chosen[column] = f"{times[OURS][batch]:.2f}"
                for name, at in times.items():
                    if (tile := TILE.fullmatch(name)) and batch in at:
                        count = COLUMNS // int(tile["tile_v"])
                        line = cells.setdefault(count, {})
                        line[column] = min(at[batch], line.get(column, at[batch]))
    lines = [
        [str(count), *(f"{line[c]:.2f}" if c in line else "-" for c in header[1:])]
        for count, line in sorted(cells.items())
    ]
    ours = ["the package's choice", *(chosen.get(c, "-") for c in header[1:])]
    return (header, [*lines, ours]) if lines else None


def slices_cost(table: report.Table) -> float:
    """By how much the package's choice is slower than the best line of `by_slices`, in the worst column."""
    header, (*lines, ours) = table
    costs = [0.0]
    for column in range(1, len(header)):
        times = [float(line[column]) for line in lines if line[column] != "-"]
        if times and ours[column] != "-":
            costs.append(float(ours[column]) / min(times) - 1)
    return max(costs)


def _times(variants: Result, state: str, layout: str) -> dict[str, dict[int, float]]:
    """Microseconds by provider and batch."""
    found: dict[str, dict[int, float]] = {}
    method = results.device_method(variants)
    for row in results.rows_of(variants, method=method, state=state, layout=layout):
        found.setdefault(row["provider"], {})[row["params"]["B"]] = row["median_us"]
    return found


def _fits(name: str, fits: Callable[[Tile], bool]) -> bool:
    tile = TILE.fullmatch(name)
    return tile is not None and fits(tile.groupdict())


def _against(this: Mapping[str, float], base: Mapping[str, float]) -> list[str]:
    return [f"{this[f'B{b}']:.1f} ({this[f'B{b}'] / base[f'B{b}']:.2f})" for b in BATCHES]


def _by_batch(row: Mapping[str, Any]) -> dict[str, float]:
    return {f"B{b}": row[f"B{b}_us"] for b in BATCHES}


def _unmeasured() -> list[str]:
    return ["not measured"] * len(BATCHES)


def _layout(layout: str) -> str:
    return "`[K, V]`" if layout == "kv" else "`[V, K]`"


def _where(result: Result) -> str:
    seen = result["place"]["sms_seen"]
    return f"{seen} multiprocessors" if seen else result["provenance"]["gpu"]
