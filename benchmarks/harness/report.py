"""Tables of a result: plain text for the terminal, markdown for documents."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.harness.provenance import gpu_slug
from benchmarks.harness.results import device_method

Table = tuple[list[str], list[list[str]]]


def table(
    result: Mapping[str, Any],
    method: str,
    pattern: str = "*",
    spread: bool = True,
    of_all: bool = False,
) -> Table:
    """A line per setting that matches a shell pattern, with the time of every provider and our ratios.

    spread: whether our times have their percentiles; of_all: whether those of other providers have them too.
    """
    rows = [
        r for r in result["rows"] if r["method"] == method and fnmatchcase(r["setting"], pattern)
    ]
    ours = next((r["provider"] for r in rows if r["role"] == "ours"), None)
    providers = list(dict.fromkeys(r["provider"] for r in rows))
    columns = [("setting", lambda line: line["setting"])]
    columns += [
        (f"{name}, us", _time_of(name, spread and (of_all or name == ours))) for name in providers
    ]
    columns += [("floor, us", lambda line: _number(line["floor_us"]))]
    rate, unit = ("tflops", "TFLOP/s") if any("tflops" in r for r in rows) else ("gbps", "GB/s")
    columns += (
        [(f"{ours} {unit}", lambda line: _number(line.get(ours, {}).get(rate), 0))] if ours else []
    )
    columns += [(title, _ratio_of(ours, key)) for key, title in _ratio_titles(rows)] if ours else []
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(
            row["setting"], {"setting": row["setting"], "floor_us": row["floor_us"]}
        )
        line[row["provider"]] = row
    return [title for title, _ in columns], [
        [cell(line) for _, cell in columns] for line in lines.values()
    ]


def loads(
    result: Mapping[str, Any], burst: Mapping[str, Any] | None = None, pattern: str = "*"
) -> Table:
    """A line per setting and provider of a sustained result, beside the times of bursts if there are any.

    The share of the burst is its time over the sustained one.
    """
    rows = [r for r in result["rows"] if fnmatchcase(r["setting"], pattern)]
    ours = {r["setting"]: r for r in rows if r["role"] == "ours"}
    name = next((r["provider"] for r in ours.values()), "ours")
    short = {} if burst is None else _bursts(burst)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "setting": lambda r: r["setting"],
        "implementation": lambda r: r["provider"],
        "burst, us": lambda r: time(short.get((r["setting"], r["provider"])), True),
        "sustained, us": lambda r: time(r, True),
        "share of burst": lambda r: _quotient(short.get((r["setting"], r["provider"])), r),
        f"time over {name}": lambda r: _quotient(r, ours.get(r["setting"])),
        "SM clock, MHz": lambda r: _number(r.get("sm_clock_mhz"), 0),
        "power, W": lambda r: _number(r.get("power_w"), 0),
        "mJ per call": lambda r: (
            _number(r["joules_per_call"] * 1e3, 2) if "joules_per_call" in r else "-"
        ),
    }
    if burst is None:
        del columns["burst, us"], columns["share of burst"]
    return list(columns), [[cell(row) for cell in columns.values()] for row in rows]


def _quotient(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """The time of a row over that of another, "-" if one of them is missing."""
    return (
        "-" if one is None or other is None else _number(one["median_us"] / other["median_us"], 2)
    )


def _bursts(result: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The rows of the method that times the device alone, by setting and provider."""
    rows = (r for r in result["rows"] if r["method"] == device_method(result))
    return {(r["setting"], r["provider"]): r for r in rows}


def ratios(result: Mapping[str, Any], method: str, pattern: str, peer: str) -> dict[str, float]:
    """Our ratio to a peer by setting; ValueError unless all settings that match have one."""
    found = {
        r["setting"]: r.get(f"ratio_{peer}")
        for r in result["rows"]
        if r["method"] == method and r["role"] == "ours" and fnmatchcase(r["setting"], pattern)
    }
    if missing := [name for name, ratio in found.items() if ratio is None]:
        raise ValueError(f"mean: {peer} has no {method} time of {', '.join(missing)}")
    return found


def geometric_mean(
    result: Mapping[str, Any], method: str, pattern: str, peer: str
) -> tuple[float, int]:
    """The mean of our ratio to a peer and the number of settings; ValueError unless all of them have that ratio."""
    found = ratios(result, method, pattern, peer)
    return statistics.geometric_mean(found.values()), len(found)


def _ratio_titles(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    peers = dict.fromkeys(r["provider"] for r in rows if r["role"] == "peer")
    titles = [(f"ratio_{peer}", f"x {peer}") for peer in peers]
    return titles + [("ratio_ceiling", "of ceiling"), ("ratio_floor", "of floor")]


def time(row: Mapping[str, Any] | None, spread: bool) -> str:
    """The time of a row, with its percentiles if `spread`; "-" if there is no row."""
    if row is None:
        return "-"
    text = _number(row["median_us"])
    return f"{text} ({_number(row['p20_us'])}-{_number(row['p80_us'])})" if spread else text


def _time_of(provider: str, spread: bool) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: time(line.get(provider), spread)


def _ratio_of(provider: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: _number(line.get(provider, {}).get(key), 3 if key != "ratio_fla" else 2)


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    if digits is None:
        digits = 2 if value < 100 else 1
    return f"{value:.{digits}f}"


def as_text(table: Table) -> str:
    """The table as text, whose columns are aligned with spaces, numbers to the right."""
    header, lines = table
    widths = [max(len(row[i]) for row in [header, *lines]) for i in range(len(header))]

    def render(row: Sequence[str]) -> str:
        first, *rest = (
            f"{row[0]:<{widths[0]}}",
            *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True)),
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join(render(row) for row in [header, *lines])


def as_markdown(table: Table) -> str:
    """The table in markdown, numbers to the right."""
    header, lines = table
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *lines])


def origin(result: Mapping[str, Any]) -> str:
    """A line that says where, when and with which versions a result was measured."""
    p, place = result["provenance"], result["place"]
    if place["sms_seen"] is None:
        return machine(p)
    return machine(p, f", {place['sms_seen']} of {p['sms']} multiprocessors")


def machine(provenance: Mapping[str, Any], part: str = "") -> str:
    """The line of a provenance; `part` says which part of the GPU was used."""
    p = provenance
    versions = ", ".join(
        f"{k} {v}" for k, v in p["versions"].items() if v and not k.startswith("cula")
    )
    commit = (p["commit"] or "unknown")[:12] + (" with local changes" if p["dirty"] else "")
    return f"{p['gpu']}{part}, driver {p['driver']}, CUDA {p['cuda']}, {versions}; commit {commit}; {p['date'][:10]}."


def gpu_of(result: Mapping[str, Any]) -> str:
    return gpu_slug(result["provenance"]["gpu"])
