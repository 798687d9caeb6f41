"""Prints the tables of the page on compatibility, read from the packages themselves: `python tools/site_tables.py`.

The `_spec` module of each kernel package is asked what it serves, one fact at a time. Neither torch nor a kernel
language is needed: `_spec` is imported without the `__init__` of its package.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import DEVELOPMENT_TOOLS, ROOT, packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_NONSENSE = "int8"  # a dtype that nobody serves: who does not refuse it does not look
_HEAD_DIMS = range(8, 521, 8)
_TILES = (32, 64, 96, 128, 192, 256)
_BLOCKS = ("block_m", "block_n")
_NO_PACKAGE = "-"


def specs() -> list[ModuleType]:
    """The `_spec` module of every kernel package."""
    sys.path.insert(0, str(ROOT / "packages/cula-core/src"))
    core = import_module("cula_core.spec")
    core.missing_language = lambda _: None  # what is served where everything is installed
    shared = import_module("cula_core.delta_rule.spec")
    shared.missing_language = core.missing_language
    found = []
    for name, folder in packages().items():
        bare = ModuleType(name)
        bare.__path__ = [str(folder / "src" / name)]
        sys.modules[name] = bare
        found.append(import_module(f"{name}._spec"))
    return found


def operations() -> dict[str, tuple[str, ...]]:
    """Every op and its functions, from `cula._facts`."""
    spec = spec_from_file_location("facts", ROOT / "meta/src/cula/_facts.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OPS


def served(found: list[ModuleType]) -> str:
    """Which package serves an op on which architecture; architectures that agree share a column."""
    ops = operations()
    columns: dict[tuple[str, ...], list[str]] = {}
    for arch in dict.fromkeys(sorted((a for s in found for a in s.ARCHS), key=_number)):
        names = tuple(
            _servers([s for s in found if op in _ops(s) and arch in s.ARCHS]) for op in ops
        )
        columns.setdefault(names, []).append(arch)
    head = ["operation", *(", ".join(archs) for archs in columns.values())]
    return _table(head, ([f"`{op}`", *row] for op, row in zip(ops, zip(*columns))))


def _servers(found: list[ModuleType]) -> str:
    """Who serves: first what it takes, then what the one before refuses."""
    names = [f"`{s.NAME}`" for s in sorted(found, key=lambda s: s.PRIORITY)]
    return ", else ".join(names) or _NO_PACKAGE


def _ops(spec: ModuleType) -> tuple[str, ...]:
    return (spec.OP,) if isinstance(spec.OP, str) else spec.OP


def accepted(found: list[ModuleType]) -> str:
    """What the kernels of a package take."""
    head = ["package", "activations", "K and V", "states", "layouts of states", "gates"]
    head += ["tiles of queries x keys", "gradients"]
    return _table(head, ([f"`{s.NAME}`", *_facts(s.supports)] for s in found))


def versions() -> str:
    """What every distribution needs, from its `pyproject.toml`."""
    rows = []
    for path in (ROOT / "meta/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))):
        project = tomllib.loads(path.read_text())["project"]
        if project["name"] in DEVELOPMENT_TOOLS:
            continue
        optional = project.get("optional-dependencies", {})
        extras = [
            f"`{extra}`: {', '.join(_plain(line) for line in lines)}"
            for extra, lines in optional.items()
            if extra != "test"
        ]
        needs = ", ".join(map(_plain, project["dependencies"]))
        rows.append([f"`{project['name']}`", project["requires-python"], needs, "; ".join(extras)])
    return _table(["distribution", "Python", "needs", "extras"], rows)


def tables() -> dict[str, str]:
    """Every table by the name in its marker `<!-- table:NAME -->`."""
    found = specs()
    return {"served": served(found), "accepted": accepted(found), "versions": versions()}


def _facts(supports: Callable[..., str | None]) -> list[str]:
    dims = [d for d in _HEAD_DIMS if supports(head_dim_k=d, head_dim_v=d) is None]
    rows, columns = ([n for n in _TILES if supports(**{name: n}) is None] for name in _BLOCKS)
    tiles = f"{_listed(rows)} x {_listed(columns)}" if len(rows) < len(_TILES) else "-"
    states = _dtypes(supports, "state_dtype")
    layouts = {False: "`K, V`", True: "`V, K`"}
    orders = [text for flag, text in layouts.items() if supports(state_v_first=flag) is None]
    return [
        _dtypes(supports, "dtype"),
        f"multiples of 8 up to {dims[-1]}" if dims == list(range(8, dims[-1] + 1, 8)) else _listed(dims),
        states,
        "-" if states == "-" else " and ".join(orders),
        _dtypes(supports, "gate_dtype"),
        tiles,
        "yes" if supports(requires_grad=True) is None else "not of its own",
    ]  # fmt: skip


def _dtypes(supports: Callable[..., str | None], fact: str) -> str:
    """The dtypes that are served, or a dash where the fact is not looked at."""
    if supports(**{fact: _NONSENSE}) is None:
        return "-"
    return ", ".join(d for d in _DTYPES if supports(**{fact: d}) is None)


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm"))


def _plain(requirement: str) -> str:
    return re.sub(r"\s+", "", requirement)


def _table(head: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="an object: name of the table -> text")
    found = tables()
    print(json.dumps(found) if parser.parse_args(argv).json else "\n\n".join(found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
