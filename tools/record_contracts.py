"""Records signatures of an engine from its sources, without importing it: what adapters and their tests rely on.

    python -m tools.record_contracts SOURCE --engine NAME --version VERSION NAMES... [--callers MODULES...]

SOURCE is a wheel, or the folder that holds the package. A name is dotted and stands for a function, a class, or a
method of a class; imports from one module of SOURCE to another are followed. The standard output gets a JSON object:

    engine, version

    functions   dotted name -> parameters, each [name, kind, default as it is written or null]
    classes     dotted name -> bases, attributes (name -> value as it is written), methods (name -> parameters)
    calls       name of a function -> its calls in the modules of --callers: [module, values by position, keywords]
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Parameters = list[list[str | None]]


def record(
    source: Path, engine: str, version: str, names: list[str], callers: list[str]
) -> dict[str, Any]:
    """What the sources say of every name. A name that they do not define is a LookupError."""
    parsed = functools.cache(lambda module: _parse(_reader(source), module))
    functions, classes = {}, {}
    for name in names:
        found = _find(parsed, name)
        if isinstance(found, ast.ClassDef):
            classes[name] = _class(found)
        else:
            functions[name] = parameters(found)
    wanted = {name.rpartition(".")[2] for name in functions}
    calls: dict[str, list[Any]] = {name: [] for name in sorted(wanted)}
    for module in callers:
        for name, positional, keywords in _calls(parsed(module), wanted):
            calls[name].append([module, positional, keywords])
    return {
        "engine": engine, "version": version, "functions": functions, "classes": classes,
        "calls": {name: found for name, found in calls.items() if found},
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """The record as JSON, with a line for every name."""
    sections = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            sections.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            sections.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(sections) + "\n}"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    """Each parameter as [name, kind as `inspect` names it, default as it is written or None]."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [*[None] * (len(positional) - len(a.defaults)), *a.defaults]
    found: Parameters = []
    for i, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "POSITIONAL_ONLY" if i < len(a.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        found.append([one.arg, kind, _written(default)])
    if a.vararg:
        found.append([a.vararg.arg, "VAR_POSITIONAL", None])
    for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append([one.arg, "KEYWORD_ONLY", _written(default)])
    if a.kwarg:
        found.append([a.kwarg.arg, "VAR_KEYWORD", None])
    return found


def _written(value: ast.expr | None) -> str | None:
    return None if value is None else ast.unparse(value)


def _class(found: ast.ClassDef) -> dict[str, Any]:
    attributes, methods = {}, {}
    for line in found.body:
        if isinstance(line, _FUNCTIONS):
            methods[line.name] = parameters(line)
        elif isinstance(line, ast.Assign):
            attributes |= {ast.unparse(target): ast.unparse(line.value) for target in line.targets}
        elif isinstance(line, ast.AnnAssign) and line.value is not None:
            attributes[ast.unparse(line.target)] = ast.unparse(line.value)
    bases = [ast.unparse(base) for base in found.bases]
    return {"bases": bases, "attributes": attributes, "methods": methods}


def _reader(source: Path) -> Callable[[str], str | None]:
    """Returns what gives the text of a file in a wheel or a folder, or None."""
    if source.is_dir():

        def read(name: str) -> str | None:
            path = source / name
            return path.read_text() if path.is_file() else None

        return read
    wheel = zipfile.ZipFile(source)
    held = set(wheel.namelist())
    return lambda name: wheel.read(name).decode() if name in held else None


def _parse(read: Callable[[str], str | None], module: str) -> ast.Module | None:
    """The tree of a module, with `__package__` of it as an attribute; None: there is no such module."""
    path = module.replace(".", "/")
    for name, package in (
        (f"{path}/__init__.py", module),
        (f"{path}.py", module.rpartition(".")[0]),
    ):
        if (text := read(name)) is not None:
            tree = ast.parse(text)
            tree.package = package  # type: ignore[attr-defined]
            return tree
    return None


def _find(
    parsed: Callable[[str], ast.Module | None], name: str
) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition that a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        tree = parsed(".".join(parts[:cut]))
        if tree is None:
            continue
        first, *rest = parts[cut:]
        for line in _statements(tree):
            if isinstance(line, (*_FUNCTIONS, ast.ClassDef)) and line.name == first:
                found: Any = line
                for attribute in rest:
                    found = next(
                        (x for x in found.body if getattr(x, "name", None) == attribute), None
                    )
                    if found is None:
                        raise LookupError(f"{name}: its class has no {attribute}")
                return found
            if isinstance(line, ast.ImportFrom):
                for alias in line.names:
                    if (alias.asname or alias.name) == first:
                        base = _imported(tree, line)
                        return _find(parsed, ".".join([base, alias.name, *rest]))
        break
    raise LookupError(f"{name}: not defined in this source")


def _imported(tree: ast.Module, line: ast.ImportFrom) -> str:
    """The module that an import names, absolute."""
    if not line.level:
        return line.module or ""
    package = tree.package.split(".")  # type: ignore[attr-defined]
    base = package[: len(package) - line.level + 1]
    return ".".join([*base, line.module] if line.module else base)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements at the top of a module, and those that a condition there guards; the last definition counts."""
    for line in reversed(tree.body):
        if isinstance(line, ast.If | ast.Try):
            yield from (one for one in ast.walk(line) if isinstance(one, ast.stmt))
        else:
            yield line


def _calls(tree: ast.Module | None, wanted: set[str]) -> Iterator[tuple[str, int, list[str]]]:
    for call in ast.walk(tree) if tree else ():
        if isinstance(call, ast.Call):
            name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
            if name in wanted:
                yield name, len(call.args), [str(word.arg) for word in call.keywords]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="record_contracts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, help="a wheel, or the folder that holds the package")
    parser.add_argument("names", nargs="+", help="dotted names of functions, classes and methods")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--callers", nargs="*", default=[], help="modules whose calls are recorded")
    given = parser.parse_args(argv)
    if not given.source.exists():
        parser.error(f"source: {given.source} does not exist")
    try:
        found = record(given.source, given.engine, given.version, given.names, given.callers)
    except LookupError as error:
        parser.error(str(error))
    print(text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
