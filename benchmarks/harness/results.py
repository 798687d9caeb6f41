"""Result files: their fields, reading, writing and checking.

A row is one (setting, provider, method). Ratios compare with another row of the same setting and method; higher is
better. ratio_<peer> = peer time / this time. ratio_ceiling = ceiling time / this time, so 1 is at the ceiling.
ratio_floor = floor time / this time, where the floor is the op's bytes over the card's attainable bandwidth. A ratio is
null, or absent for a peer, where there is nothing to compare with. A resident setting has no floor, because its bytes
do not come from DRAM. tflops, of ops that are limited by arithmetic, is the op's operations over this time. peak_mib,
of ops whose memory matters, is the most that a call takes beside its inputs.

Rows of the method sustained are in a file of their own, `<op>_sustained.json`. Where the driver tells them they have
sm_clock_mhz, the median clock of the multiprocessors under the load, power_w, the mean power of the whole card, idle
power included, and joules_per_call, which is power_w times median_us. Every other method measures bursts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).resolve().parents[1] / "results"

# TB/s, read plus written, that a plain device-to-device copy attains; the floor is computed with it.
ATTAINABLE_TBS = {"h200": 4.3}

SUSTAINED = "sustained"
METHODS = ("graph", "queued-event", "eager-host", "eager-event", SUSTAINED)
DEVICE_METHODS = ("graph", "queued-event", SUSTAINED)

_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "setting": (str,),
    "params": (dict,),
    "l2": (str,),
    "provider": (str,),
    "role": (str,),
    "method": (str,),
    "median_us": _NUMBER,
    "p20_us": _NUMBER,
    "p80_us": _NUMBER,
    "samples": (int,),
    "calls_per_sample": (int,),
    "bytes": (int,),
    "gbps": _NUMBER,
    "floor_us": _OPTIONAL,
    "ratio_ceiling": _OPTIONAL,
    "ratio_floor": _OPTIONAL,
}
# Fields that rows may have besides.
MORE_FIELDS: dict[str, tuple[type, ...]] = {
    "peak_mib": (int,),
    "tflops": _NUMBER,
    "sm_clock_mhz": _NUMBER,
    "power_w": _NUMBER,
    "joules_per_call": _NUMBER,
}
FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "op": (str,),
    "title": (str,),
    "provenance": (dict,),
    "place": (dict,),
    "method": (dict,),
    "notes": (list,),
    "checks": (list,),
    "skipped": (list,),
    "rows": (list,),
}


def add_ratios(rows: Iterable[dict[str, Any]]) -> None:
    """Fills the ratio fields of every row in place."""
    rows = list(rows)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["method"]), []).append(row)
    for group in groups.values():
        ceiling = next((r["median_us"] for r in group if r["role"] == "ceiling"), None)
        peers = {r["provider"]: r["median_us"] for r in group if r["role"] == "peer"}
        for row in group:
            row["ratio_ceiling"] = _ratio(ceiling, row)
            row["ratio_floor"] = _ratio(row["floor_us"], row)
            for peer, time in peers.items():
                row[f"ratio_{peer}"] = _ratio(time, row)


def _ratio(other_us: float | None, row: Mapping[str, Any]) -> float | None:
    return None if other_us is None else round(other_us / row["median_us"], 4)


def validate(result: Any) -> None:
    """Raises ValueError for the first field that is missing, of a wrong type or impossible."""
    require_fields(result, FIELDS, "result")
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {result['schema']}")
    seen = set()
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        require_fields(row, ROW_FIELDS, where)
        require_fields(row, {k: t for k, t in MORE_FIELDS.items() if k in row}, where)
        require_choices(row, {"method": METHODS}, where)
        if not 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]:
            raise ValueError(f"{where}: expected 0 < p20_us <= median_us <= p80_us")
        key = (row["setting"], row["provider"], row["method"])
        if key in seen:
            raise ValueError(f"{where}: {key} appears twice")
        seen.add(key)
    methods = {row["method"] for row in result["rows"]}
    if SUSTAINED in methods and len(methods) > 1:
        raise ValueError(f"rows: expected sustained rows in a file of their own, got {methods}")


def require_fields(value: Any, fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raises ValueError unless `value`, named `where`, is a dict with all `fields`, each of one of its types."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    for name, types in fields.items():
        if name not in value:
            raise ValueError(f"{where}.{name}: missing")
        if not isinstance(value[name], types) or isinstance(value[name], bool):
            raise ValueError(
                f"{where}.{name}: expected {'/'.join(t.__name__ for t in types)}, got {value[name]!r}"
            )


def require_choices(row: Mapping[str, Any], known: Mapping[str, Iterable[str]], where: str) -> None:
    """Raises ValueError for the first field of a row, named `where`, that is none of those which are known of it."""
    for name, choices in known.items():
        if row[name] not in choices:
            raise ValueError(f"{where}.{name}: expected one of {choices}, got {row[name]!r}")


def result_path(op: str, gpu: str, root: Path = RESULTS) -> Path:
    """The path of an op's result on a GPU."""
    return root / gpu / f"{op}.json"


def file_name(op: str, methods: Iterable[str]) -> str:
    """The name, without its ending, of the file that holds an op's results of some methods."""
    return f"{op}_{SUSTAINED}" if SUSTAINED in methods else op


def load(path: Path, check: Callable[[Any], None] = validate) -> dict[str, Any]:
    """The content of a result file that passes `check`."""
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        check(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return result


def save(result: Mapping[str, Any], path: Path) -> None:
    """Checks a result and writes it."""
    validate(result)
    write(result, path)


def write(content: Mapping[str, Any], path: Path) -> None:
    """Writes JSON with the entries of `rows` at its end, one per line, so that diff can compare two files."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(content), encoding="utf-8")


def as_json(content: Mapping[str, Any]) -> str:
    """The text that `write` writes."""
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


class Mismatch(ValueError):
    """Two results are not parts of one measurement."""


# Facts of the provenance in which two runs of one measurement may differ.
OF_THE_RUN = ("date", "clocks_before", "clocks_after")
# Fields of a result in which they may not.
OF_BOTH = ("schema", "op", "place", "method", "notes")


def refuse_another(
    earlier: Mapping[str, Any], later: Mapping[str, Any], fields: Iterable[str] = OF_BOTH
) -> None:
    """Raises Mismatch unless both measured the same op in the same way, at the same commit, on the same machine."""
    fields = tuple(fields)
    one, other = (
        {k: v for k, v in result["provenance"].items() if k not in OF_THE_RUN}
        | {k: result[k] for k in fields}
        for result in (earlier, later)
    )
    for name in other:
        if one.get(name) != other[name]:
            raise Mismatch(
                f"{name}: the results to join have {one.get(name)!r} and {other[name]!r}"
            )


def joined(
    earlier: Mapping[str, Any], later: Mapping[str, Any], order: Iterable[str]
) -> dict[str, Any]:
    """The later result with the settings that only the earlier one has; `order` lists the names of all settings."""
    refuse_another(earlier, later)
    number = {name: n for n, name in enumerate(order)}
    measured = {entry["setting"] for field in ("skipped", "rows") for entry in later[field]}
    result = dict(later)
    for field in ("checks", "skipped", "rows"):
        entries = [e for e in earlier[field] if e["setting"] not in measured] + later[field]
        result[field] = sorted(entries, key=lambda e: number[e["setting"]])
    before = earlier["provenance"]["clocks_before"]
    result["provenance"] = {**later["provenance"], "clocks_before": before}
    return result


def rows_of(result: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows whose fields, or parameters, have the wanted values."""
    return [
        r
        for r in result["rows"]
        if all(r.get(k, r["params"].get(k)) == v for k, v in wanted.items())
    ]


def device_method(result: Mapping[str, Any]) -> str:
    """The method of this result that times the device alone."""
    present = {row["method"] for row in result["rows"]}
    return next((m for m in DEVICE_METHODS if m in present), "eager-event")
