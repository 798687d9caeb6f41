"""The section of BENCHMARK_H20.md about decode with the gated delta rule and with KDA.

It is made of h20/delta_decode.json where that exists, else of h200/delta_decode_80sm.json, beside which the times on
the whole card stand; there is no section where neither exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OURS, PEER, CEILING = "cula", "fla", "inplace_ceiling"
TITLE = "## Decode with the gated delta rule and with KDA"
NOTE = (
    "`vk` is `[V, K]`, `kv` is `[K, V]`. x FLA: FLA's time over cula's in the same run, on the same multiprocessors; "
    "FLA writes new states, always in fp32, where cula updates them in place. ceiling: an in-place multiplication of "
    "the states; a replay (`step`) does not store every state in every call, so it may be faster than that."
)

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def sections(root: Path = results.RESULTS) -> list[str]:
    """The section, or nothing."""
    own = _load("delta_decode", "h20", root)
    if own is not None:
        return [_section(own, None)]
    part = _load("delta_decode_80sm", "h200", root)
    return [] if part is None else [_section(part, _load("delta_decode", "h200", root))]


def _section(result: Result, whole: Result | None) -> str:
    method = results.device_method(result)
    table = report.as_markdown((_header(whole), [_line(r, result, whole) for r in _ours(result)]))
    origin = f"{report.origin(result)} Medians of {method}. {NOTE}"
    parts = [TITLE, origin, table]
    if whole is not None:
        parts.append(f"Whole card: {report.origin(whole)}")
    return "\n\n".join(parts)


def _header(whole: Result | None) -> list[str]:
    header = ["setting", "cula, us", "FLA, us", "x FLA", "ceiling, us", "of ceiling", "cula, TB/s"]
    return header + ([] if whole is None else ["whole card: cula, us", "x FLA", "part / whole"])


def _line(row: Row, result: Result, whole: Result | None) -> list[str]:
    peer, ceiling = (_row(result, row["setting"], name) for name in (PEER, CEILING))
    line = [row["setting"], _us(row), _us(peer), _number(row.get(f"ratio_{PEER}"), 2), _us(ceiling)]
    line += [_number(row["ratio_ceiling"], 3), f"{row['gbps'] / 1e3:.2f}"]
    if whole is not None:
        full = _row(whole, row["setting"], OURS)
        share = None if full is None else row["median_us"] / full["median_us"]
        ratio = None if full is None else full.get(f"ratio_{PEER}")
        line += [_us(full), _number(ratio, 2), _number(share, 3)]
    return line


def _ours(result: Result) -> list[dict[str, Any]]:
    return results.rows_of(result, provider=OURS, method=results.device_method(result))


def _row(result: Result, setting: str, provider: str) -> Row | None:
    method = results.device_method(result)
    found = results.rows_of(result, setting=setting, provider=provider, method=method)
    return found[0] if found else None


def _us(row: Row | None) -> str:
    return _number(None if row is None else row["median_us"], 1)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _load(op: str, gpu: str, root: Path) -> Result | None:
    path = results.result_path(op, gpu, root)
    return results.load(path) if path.exists() else None
