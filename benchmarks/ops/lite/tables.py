"""Tables of skip-list attention for documents: `table=NAME` in a region of `tables.py`.

rates     time and TFLOP/s of every provider but int8, and how our time compares
overhead  what it costs to decide about every tile when nothing is skipped
lists     our speedup over our own dense kernel, and the rate per listed tile as a share of the dense rate
int8      8-bit scores beside 16-bit ones
training  a forward and a backward pass beside those without lists, ours and torch's
stages    the stages of a training step, and their shares of it
sweep     dense, nothing skipped and lists in one line, by length and head dimension
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.report import Table

# Keys of a tile: the BLOCK_N of `problem.py`, which cannot be imported here because it needs torch.
TILE = 64
# The provider that has a table of its own.
INT8 = "lite_int8"
# The last lines of the table of stages.
TOGETHER = ("all stages", "the step")

Row = Mapping[str, Any]
Line = Mapping[str, Row]
Cell = Callable[[Line], str]


def rates(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    lines = _lines(result, method, pattern)
    columns: dict[str, Cell] = {}
    for name, row in _providers(lines).items():
        columns[f"{name}, us"] = _time(name, spread=row["role"] == "ours")
        columns[f"{name} TFLOP/s"] = _value(name, "tflops", "{:.0f}")
    peers = [name for name, row in _providers(lines).items() if row["role"] == "peer"]
    columns |= {f"x {name}": _ratio(name, "lite") for name in peers}
    return _table(lines, columns)


def overhead(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    columns = {
        "lite, us": _time("lite", spread=True),
        "TFLOP/s": _value("lite", "tflops", "{:.0f}"),
        "dense, us": _time("lite_dense"),
        "overhead": _overhead("lite", "lite_dense"),
    }
    return _table(_lines(result, method, pattern), columns)


def lists(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    lines = _lines(result, method, pattern)
    columns: dict[str, Cell] = {
        "tiles listed": lambda line: f"{listed_share(line['lite']['params']):.1%}",
        "lite, us": _time("lite", spread=True),
        "dense, us": _time("lite_dense"),
        "speedup": _ratio("lite_dense", "lite"),
        "of dense rate per tile": _per_tile,
    }
    for name, row in _providers(lines).items():
        if row["role"] == "variant":
            columns[f"{name}, us"] = _time(name)
            columns[f"{name} speedup"] = _ratio("lite_dense", name)
    return _table(lines, columns)


def int8(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    columns = {
        "lite_int8, us": _time(INT8, spread=True),
        "TFLOP/s": _value(INT8, "tflops", "{:.0f}"),
        "lite, us": _time("lite"),
        "x lite": _ratio("lite", INT8),
    }
    return _table(_lines(result, method, pattern), columns)


def training(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    """Steps with lists beside those of the dense setting of the same shape."""
    dense = {
        _shape(line): line
        for line in _lines(result, method, "*").values()
        if line["lite"]["params"]["kind"] == "dense"
    }

    def against(other: str, ours: str) -> Cell:
        def cell(line: Line) -> str:
            beside = dense.get(_shape(line), {})
            if other not in beside or ours not in line:
                return "-"
            return f"{beside[other]['median_us'] / line[ours]['median_us']:.2f}"

        return cell

    columns: dict[str, Cell] = {
        "tiles with gradients": lambda line: f"{listed_share(line['lite']['params']):.1%}",
        "lite, us": _time("lite", spread=True),
        "x dense": against("lite", "lite"),
        "x torch_flash": against("torch_flash", "lite"),
        "x torch_cudnn": against("torch_cudnn", "lite"),
        "both passes listed, us": _time("lite_listed"),
        "both, x dense": against("lite", "lite_listed"),
        "backward alone, us": _time("lite_backward"),
        "backward, x dense": against("lite_backward", "lite_backward"),
    }
    return _table(_lines(result, method, pattern), columns)


def stages(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    """A line per stage, and a pair of columns per setting: the time, and its share of the step."""
    lines = _lines(result, method, pattern)
    # Without a list there are fewer stages.
    longest = max(lines.values(), key=len, default={})
    names = [name for name, row in longest.items() if row["role"] == "variant"]
    header, cells = ["stage"], [[name] for name in (*names, *TOGETHER) if lines]
    for setting, line in lines.items():
        header += [f"{setting}, us", "of the step"]
        step = line["lite"]["median_us"]
        times = {name: line[name]["median_us"] for name in names if name in line}
        times |= dict(zip(TOGETHER, (sum(times.values()), step)))
        for cell in cells:
            us = times.get(cell[0])
            cell += ["-", "-"] if us is None else [f"{us:.1f}", f"{us / step:.1%}"]
    return header, cells


def sweep(result: Mapping[str, Any], method: str, pattern: str) -> Table:
    """A line per shape, from its dense, full and list settings; short and narrow ones first."""
    shapes: dict[str, dict[str, Line]] = {}

    def size(line: Line) -> tuple[int, int]:
        params = line["lite"]["params"]
        return params["S"], params["D"]

    lines = _lines(result, method, pattern)
    for setting, line in sorted(lines.items(), key=lambda item: size(item[1])):
        kind = line["lite"]["params"]["kind"]
        shapes.setdefault(setting.partition("-")[2], {})[kind] = line

    def of(kind: str, cell: Cell) -> Callable[[Mapping[str, Line]], str]:
        return lambda kinds: cell(kinds[kind]) if kind in kinds else "-"

    columns = {
        "dense, us": of("dense", _time("lite", spread=True)),
        "TFLOP/s": of("dense", _value("lite", "tflops", "{:.0f}")),
        "torch_flash, us": of("dense", _time("torch_flash")),
        "torch_cudnn, us": of("dense", _time("torch_cudnn")),
        "x torch_flash": of("dense", _ratio("torch_flash", "lite")),
        "x torch_cudnn": of("dense", _ratio("torch_cudnn", "lite")),
        "nothing skipped, us": of("full", _time("lite")),
        "overhead": of("full", _overhead("lite", "lite_dense")),
        "listed, us": of("list", _time("lite")),
        "tiles listed": of("list", lambda line: f"{listed_share(line['lite']['params']):.1%}"),
        "speedup": of("list", _ratio("lite_dense", "lite")),
    }
    cells = [[name, *(cell(kinds) for cell in columns.values())] for name, kinds in shapes.items()]
    return ["shape", *columns], cells


TABLES: dict[str, Callable[[Mapping[str, Any], str, str], Table]] = {
    "rates": rates,
    "overhead": overhead,
    "lists": lists,
    "int8": int8,
    "training": training,
    "stages": stages,
    "sweep": sweep,
}


def listed_share(params: Mapping[str, Any]) -> float:
    """The share of tiles that a problem lists, after rounding to whole ones."""
    tiles = -(-params["S"] // TILE)
    return max(1, round(params["density"] * tiles)) / tiles


def _lines(result: Mapping[str, Any], method: str, pattern: str) -> dict[str, dict[str, Row]]:
    """Rows by setting and provider."""
    lines: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["method"] == method and fnmatchcase(row["setting"], pattern):
            lines.setdefault(row["setting"], {})[row["provider"]] = row
    return lines


def _shape(line: Line) -> tuple[int, ...]:
    """B, S, H and D."""
    return tuple(line["lite"]["params"][name] for name in ("B", "S", "H", "D"))


def _providers(lines: Mapping[str, Line]) -> dict[str, Row]:
    """A row of every provider but int8."""
    return {n: row for line in lines.values() for n, row in line.items() if n != INT8}


def _table(lines: Mapping[str, Line], columns: Mapping[str, Cell]) -> Table:
    cells = [[name, *(cell(line) for cell in columns.values())] for name, line in lines.items()]
    return ["setting", *columns], cells


def _time(provider: str, spread: bool = False) -> Cell:
    return lambda line: report.time(line.get(provider), spread)


def _value(provider: str, field: str, form: str) -> Cell:
    return lambda line: form.format(line[provider][field]) if provider in line else "-"


def _of_both(first: str, second: str, text: Callable[[float, float], str]) -> Cell:
    """A cell with a text made from the times of two providers."""

    def cell(line: Line) -> str:
        if first not in line or second not in line:
            return "-"
        return text(line[first]["median_us"], line[second]["median_us"])

    return cell


def _overhead(ours: str, other: str) -> Cell:
    return _of_both(ours, other, lambda a, b: f"{a / b - 1:+.1%}")


def _ratio(other: str, ours: str) -> Cell:
    return _of_both(other, ours, lambda a, b: f"{a / b:.2f}")


def _per_tile(line: Line) -> str:
    share = listed_share(line["lite"]["params"])
    return _of_both("lite_dense", "lite", lambda a, b: f"{share * a / b:.0%}")(line)
