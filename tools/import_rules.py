"""Who may import whom, read from the syntax trees: `python tools/import_rules.py`.

A kernel package imports torch, one kernel language and its tensor exchange, and of ours `cula_core` alone; one that
serves another's host side (`HOSTS` of `layout`) imports that too. `cula_core` imports torch, and the DSL in device
files and `build`. `cula` imports torch and what `cula_core` has without the DSL; it knows the kernel packages only by
name, in `_discovery`. Inside a package the host modules run without a kernel language,
`build` is imported lazily, and kernels know neither torch nor what calls them. The emulator and
`cula_testing` are for tests: nothing that runs a kernel imports them, and the emulator imports torch alone until its
DSL front end or its pytest plugin is used. Nowhere do modules of ours import each other in a circle while they are
loaded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import (
    DEVICE_FOLDERS,
    HOSTS,
    KERNEL_LANGUAGES,
    ROOT,
    base,
    development_tools,
    is_host,
    is_kernel,
    packages,
    sources,
)

PACKAGE_MAY = frozenset({"torch", "cutlass", "triton", "tvm_ffi", "torch_c_dlpack_ext", "cuda"})
CORE, TESTING = "cula_core", "cula_testing"
CORE_MAY = frozenset({"torch", "tvm_ffi"})
META_MAY = frozenset({"torch", CORE})
# Folders of `cula` that an extra or a host program equips with more.
META_PART_MAY = {
    "demo": frozenset({"rich", "matplotlib", "numpy"}),
    "integrations": frozenset({"fla", "einops", "sglang"}),
}
KERNEL_MAY_NOT = ("torch", "ops", "launch", "build", "reference")
# What of `cula_core` imports the DSL, and what stands above kernels.
NEEDS_DSL = frozenset({"build", *DEVICE_FOLDERS})
CORE_CALLERS = frozenset(
    {"build", "call", "contract", "delta_decode", "launch", "prefill", "reference", "tensors"}
)
EMULATOR = "cula_emulator"
EMULATOR_MAY = frozenset({"torch", CORE})
# Outside tests: measurements of the emulator itself, and the covering arrays of the comparison of PTX.
EMULATOR_USERS = ("benchmarks/emulator/", "tools/ptx_configs.py")
PURE_PYTHON = ("config", "plan")
TESTING_MAY = frozenset({"torch", "pytest", "hypothesis", "cutlass", CORE, EMULATOR})
# Parts of the emulator that reach for more: the DSL when a function runs, pytest where pytest loads the file.
EMULATOR_PART_MAY_LATE = {"cute": frozenset({"cutlass"}), "resources": frozenset({"cutlass"})}
EMULATOR_PART_MAY = {"pytest_plugin": frozenset({"pytest"})}


@dataclass(frozen=True)
class Import:
    """One imported module (absolute, dotted); `lazy` when a function body or TYPE_CHECKING delays it.

    names are those that a `from module import ...` takes.
    """

    module: str
    line: int
    lazy: bool
    names: tuple[str, ...] = ()

    def under(self, prefix: str) -> bool:
        return self.module == prefix or self.module.startswith(prefix + ".")

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def of_core(self) -> frozenset[str]:
        """The parts of a name in `cula_core`, else nothing."""
        return frozenset(self.module.split(".")[1:] if self.top == CORE else ())


def imports(tree: ast.Module, module: str, is_package: bool, calls: bool = True) -> list[Import]:
    """Every import statement and, with `calls`, constant `import_module` call of a module, in source order."""
    parts = module.split(".")
    package = parts if is_package else parts[:-1]
    found: list[Import] = []

    def absolute(name: str, level: int) -> str:
        base = package[: len(package) - (level - 1)] if level else []
        return ".".join([*base, *([name] if name else [])])

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level)
            names = tuple(alias.name for alias in node.names)
            found.append(Import(base, node.lineno, lazy, names))
            # `from package import module` reaches the module as well.
            found.extend(Import(f"{base}.{name}", node.lineno, lazy) for name in names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            name = node.args[0].value  # type: ignore[attr-defined]
            stripped = name.lstrip(".")
            level = len(name) - len(stripped)
            found.append(Import(absolute(stripped, level), node.lineno, lazy))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside = inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            # Expressions hold calls and no import statement.
            if calls or isinstance(child, _HOLDS_STATEMENTS):
                visit(child, lazy or inside)

    visit(tree, False)
    return found


_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_DYNAMIC = ("import_module", "__import__")


def _is_dynamic_import(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _DYNAMIC or not node.args:
        return False
    return isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)


def violations(root: Path = ROOT) -> list[str]:
    """One line per broken rule: `path:line: what, and the rule`."""
    lines: list[str] = []
    _read.clear()
    ours = packages(root)
    for name, folder in base(root).items():
        lines += _check_base(root, name, folder)
        lines += _check_package_tests(root, name, folder, set(ours))
    for name, folder in ours.items():
        siblings = set(ours) - {name, HOSTS.get(name)}
        lines += _check_package(root, name, folder, siblings)
        lines += _check_package_tests(root, name, folder, siblings)
    for name, folder in development_tools(root).items():
        check_tool = _check_testing if name == TESTING else _check_tool
        lines += check_tool(root, name, folder)
        lines += _check_package_tests(root, name, folder, set(ours))
    lines += _check_meta(root, set(ours))
    folders = [root / "meta", *ours.values(), *development_tools(root).values()]
    for folder in folders:
        lines += _check_circles(root, folder / "src", folder / "src")
    for name in ("benchmarks", "tools"):
        lines += _check_circles(root, root / name, root)
    for folder_name in ("benchmarks", "tools"):
        for path, found in _imports(root / folder_name, root):
            inside = path.relative_to(root).as_posix()
            if "/tests/" in inside or inside.startswith(EMULATOR_USERS):
                continue
            lines += [
                _line(root, path, i.line, f"imports {i.top}, which only tests may")
                for i in found
                if i.top in (EMULATOR, TESTING)
            ]
    return list(dict.fromkeys(lines))


# What the files imported when this run of the rules came to them: by file, and by the folder that names modules.
_read: dict[tuple[Path, Path], list[Import]] = {}


def _imports(folder: Path, base: Path) -> Iterator[tuple[Path, list[Import]]]:
    """`_modules` without the trees; a file that was read before is not read again."""
    if all((path, base) in _read for path in sources(folder)):
        yield from ((path, _read[path, base]) for path in sources(folder))
    else:
        yield from ((path, found) for path, _, found in _modules(folder, base))


def _modules(folder: Path, base: Path) -> Iterator[tuple[Path, ast.Module, list[Import]]]:
    for path in sources(folder):
        text = path.read_text()
        tree = ast.parse(text, str(path))
        parts = path.relative_to(base).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        calls = any(name in text for name in _DYNAMIC)
        _read[path, base] = imports(tree, module, is_package, calls)
        yield path, tree, _read[path, base]


def _line(root: Path, path: Path, number: int, text: str) -> str:
    return f"{path.relative_to(root)}:{number}: {text}"


def _check_base(root: Path, name: str, folder: Path) -> Iterator[str]:
    """`cula_core`: torch on the host; the DSL in device files and `build`, which no host file imports at the top."""
    source = folder / "src"
    for path, tree, found in _modules(source, source):
        device, module = is_kernel(path), path.stem
        for item in found:
            language = item.top in KERNEL_LANGUAGES
            if language and (device or module == "build"):
                pass
            elif not _allowed(item.top, CORE_MAY | {name}):
                yield _line(
                    root, path, item.line,
                    f"imports {item.top}: {name} imports torch, and cutlass only in cute/, kernels/ and build",
                )  # fmt: skip
            if device and (item.top == "torch" or item.of_core & CORE_CALLERS):
                yield _line(
                    root, path, item.line, f"imports {item.module}: a kernel knows neither torch nor its callers"
                )  # fmt: skip
            if item.of_core & NEEDS_DSL and not (item.lazy or device or module == "build"):
                yield _line(
                    root, path, item.line,
                    f"imports {item.module} at the top: it must be imported when the op runs",
                )  # fmt: skip
            if module in PURE_PYTHON and item.top == "torch":
                yield _line(root, path, item.line, f"imports torch: {module} is pure Python")
        yield from _check_struct(root, path, tree)


def _check_testing(root: Path, name: str, folder: Path) -> Iterator[str]:
    """`cula_testing`: whatever tests need, but no kernel package, which is handed to it."""
    source = folder / "src"
    for path, _, found in _modules(source, source):
        for item in found:
            if not _allowed(item.top, TESTING_MAY | {name}):
                yield _line(
                    root, path, item.line, f"imports {item.top}: a suite is told which package it tests"
                )  # fmt: skip


def _check_package(root: Path, name: str, folder: Path, siblings: set[str]) -> Iterator[str]:
    source = folder / "src"
    languages: dict[str, None] = {}
    for path, tree, found in _modules(source, source):
        module, host = path.stem, is_host(path)
        for item in found:

            def broken(text: str, item: Import = item, path: Path = path) -> str:
                return _line(root, path, item.line, text)

            if item.top == "cula" or item.top in siblings:
                yield broken(
                    f"imports {item.top}: a kernel package imports nothing of ours but {CORE}"
                )
            elif not _allowed(item.top, PACKAGE_MAY | {name, CORE, HOSTS.get(name, name)}):
                yield broken(
                    f"imports {item.top}: a kernel package may import only torch, cutlass or triton"
                )
            if item.top in KERNEL_LANGUAGES:
                languages[item.top] = None
                if len(languages) > 1 and item.top == [*languages][-1]:
                    yield broken(
                        f"imports {item.top} beside {[*languages][0]}: one kernel language"
                    )
            if host and item.top in KERNEL_LANGUAGES:
                yield broken(f"imports {item.top}: only build and kernel files may")
            if module in PURE_PYTHON and item.top == "torch":
                yield broken(f"imports torch: {module} is pure Python")
            late = any(item.under(f"{name}.{part}") for part in ("build", "kernels"))
            if host and not item.lazy and (late or item.of_core & NEEDS_DSL):
                yield broken(
                    f"imports {item.module} at the top: it must be imported when the op runs"
                )
            if is_kernel(path):
                if item.of_core & CORE_CALLERS:
                    yield broken(
                        f"imports {item.module}: a kernel knows neither torch nor its callers"
                    )
                for forbidden in KERNEL_MAY_NOT:
                    if item.under(forbidden) or item.under(f"{name}.{forbidden}"):
                        yield broken(
                            f"imports {forbidden}: a kernel knows neither torch nor its callers"
                        )
        yield from _check_struct(root, path, tree)


def _check_tool(root: Path, name: str, folder: Path) -> Iterator[str]:
    source = folder / "src"
    for path, _, found in _modules(source, source):
        part = path.relative_to(source / name).with_suffix("").parts[0]
        late = EMULATOR_PART_MAY_LATE.get(part, frozenset())
        may = EMULATOR_MAY | EMULATOR_PART_MAY.get(part, frozenset()) | late | {name}
        for item in found:
            if not _allowed(item.top, may):
                yield _line(
                    root,
                    path,
                    item.line,
                    f"imports {item.top}: this part of {name} may import {', '.join(sorted(may - {name}))}",
                )
            elif item.top in late and not item.lazy:
                yield _line(
                    root, path, item.line, f"imports {item.top} at the top: only a function may"
                )


def _check_circles(root: Path, folder: Path, base: Path) -> Iterator[str]:
    """Modules that import each other at the top, which works or not by the order in which they are loaded."""
    files: dict[str, Path] = {}
    edges: dict[str, dict[str, int]] = {}
    listed = list(_imports(folder, base))
    for path, _ in listed:
        parts = path.relative_to(base).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for name, (_, found) in zip(files, listed, strict=True):
        edges[name] = {}
        for item in found:
            # A package that only lends its modules by `from package import module` is not needed itself.
            needed = not item.names or any(f"{item.module}.{n}" not in files for n in item.names)
            if item.module in files and item.module != name and needed and not item.lazy:
                edges[name].setdefault(item.module, item.line)
    for circle in _circles({name: set(targets) for name, targets in edges.items()}):
        line = edges[circle[0]][circle[1 % len(circle)]]
        yield _line(
            root,
            files[circle[0]],
            line,
            f"closes a circle: {' imports '.join([*circle, circle[0]])}",
        )


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A shortest circle through the first module, by name, of every group that import each other."""
    found: list[list[str]] = []
    for start in sorted(graph):
        if any(start in circle for circle in found):
            continue
        ways = [[start]]
        seen: set[str] = set()
        while ways:
            way = ways.pop(0)
            if start in graph[way[-1]]:
                found.append(way)
                break
            for target in sorted(graph[way[-1]] - seen):
                seen.add(target)
                ways.append([*way, target])
    return found


def _check_struct(root: Path, path: Path, tree: ast.Module) -> Iterator[str]:
    """@cute.struct reads its annotations as objects; the __future__ import turns them into strings."""
    structs = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(d).split("(")[0].endswith("struct") for d in node.decorator_list)
    ]
    for node in tree.body:
        if structs and isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield _line(
                root, path, node.lineno, "imports __future__ annotations, which breaks @cute.struct"
            )


def _check_package_tests(root: Path, name: str, folder: Path, siblings: set[str]) -> Iterator[str]:
    for path, _, found in _modules(folder / "tests", folder):
        for item in found:
            if item.top == "cula" or item.top in siblings | {"fla"}:
                yield _line(
                    root, path, item.line, f"imports {item.top}: a package passes its tests alone"
                )


def _check_meta(root: Path, kernels: set[str]) -> Iterator[str]:
    source = root / "meta" / "src"
    named = (
        re.compile(rf"({'|'.join(map(re.escape, sorted(kernels)))})(\.\w+)*") if kernels else None
    )
    for path, tree, found in _modules(source, source):
        inside = path.relative_to(source / "cula").parts
        may = META_MAY | META_PART_MAY.get(inside[0], frozenset()) | {"cula"}
        for item in found:
            if item.top in kernels:
                yield _line(
                    root,
                    path,
                    item.line,
                    f"imports {item.top}: kernels are reached through the registry",
                )
            elif not _allowed(item.top, may):
                yield _line(
                    root, path, item.line, f"imports {item.top}, which is not for this part of cula"
                )
            elif item.of_core & NEEDS_DSL:
                yield _line(
                    root, path, item.line, f"imports {item.module}: cula does without a kernel language"
                )  # fmt: skip
        if inside == ("_discovery.py",) or named is None:
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and named.fullmatch(node.value)
            ):
                yield _line(
                    root,
                    path,
                    node.lineno,
                    f"names {node.value}: only _discovery knows kernel packages",
                )


def _allowed(top: str, names: frozenset[str]) -> bool:
    return top in names or top in sys.stdlib_module_names or top == "__future__"


def main(root: Path = ROOT) -> int:
    broken = violations(root)
    for line in broken:
        print(line)
    print(f"import rules: {len(broken)} broken" if broken else "import rules: all hold")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
