"""Who may import whom, read from the syntax trees: `python tools/import_rules.py`.

A kernel package stands alone: torch, one kernel language and its tensor exchange, nothing else of ours. `cula` knows
the kernel packages only by name, in its registry. Inside a package the host rooms run without a kernel language,
`launch` is imported lazily, and kernels know neither torch nor the ops that call them. The emulator is for tests:
nothing that runs a kernel imports it, and it imports torch alone until its DSL front end or its pytest plugin is used.
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
    HOST_ROOMS,
    KERNEL_LANGUAGES,
    ROOT,
    development_tools,
    is_kernel,
    packages,
    sources,
)

PACKAGE_MAY = frozenset({"torch", "cutlass", "triton", "tvm_ffi", "torch_c_dlpack_ext", "cuda"})
META_MAY = frozenset({"torch"})
# Folders of `cula` that an extra or a host program equips with more.
META_ROOM_MAY = {
    "demo": frozenset({"rich", "matplotlib", "numpy"}),
    "integrations": frozenset({"fla", "einops"}),
}
KERNEL_MAY_NOT = ("torch", "ops", "launch", "reference")
EMULATOR = "cula_emulator"
EMULATOR_MAY = frozenset({"torch", "cula_core"})
# Rooms of the emulator that reach for more: the DSL when a function runs, pytest where pytest loads the file.
EMULATOR_ROOM_MAY_LATE = {"cute": frozenset({"cutlass"}), "resources": frozenset({"cutlass"})}
EMULATOR_ROOM_MAY = {"pytest_plugin": frozenset({"pytest"})}


@dataclass(frozen=True)
class Import:
    """One imported module (absolute, dotted); `lazy` when a function body or TYPE_CHECKING delays it."""

    module: str
    line: int
    lazy: bool
    relative: bool = False

    def under(self, prefix: str) -> bool:
        return self.module == prefix or self.module.startswith(prefix + ".")

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports(tree: ast.Module, module: str, is_package: bool) -> list[Import]:
    """Every import statement and constant `import_module` call of a module, in source order."""
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
            relative = bool(node.level)
            found.append(Import(base, node.lineno, lazy, relative))
            # `from package import module` reaches the module as well.
            found.extend(
                Import(f"{base}.{alias.name}", node.lineno, lazy, relative) for alias in node.names
            )
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            name = node.args[0].value  # type: ignore[attr-defined]
            stripped = name.lstrip(".")
            level = len(name) - len(stripped)
            found.append(Import(absolute(stripped, level), node.lineno, lazy, bool(level)))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside = inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, lazy or inside)

    visit(tree, False)
    return found


def _is_dynamic_import(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("import_module", "__import__") or not node.args:
        return False
    return isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)


def violations(root: Path = ROOT) -> list[str]:
    """One line per broken rule: `path:line: what, and the rule`."""
    lines: list[str] = []
    ours = packages(root)
    for name, folder in ours.items():
        lines += _check_package(root, name, folder, set(ours) - {name})
        lines += _check_package_tests(root, name, folder, set(ours) - {name})
    for name, folder in development_tools(root).items():
        lines += _check_tool(root, name, folder)
        lines += _check_package_tests(root, name, folder, set(ours))
    lines += _check_meta(root, set(ours))
    for folder_name in ("benchmarks", "tools"):
        for path, _, found in _modules(root / folder_name, root / folder_name):
            # benchmarks/emulator*.py measure the emulator itself.
            if "tests" in path.parts or path.match("benchmarks/emulator*.py"):
                continue
            lines += [
                _line(root, path, i.line, f"imports {EMULATOR}, which only tests may")
                for i in found
                if i.under(EMULATOR)
            ]
    return list(dict.fromkeys(lines))


def _modules(folder: Path, base: Path) -> Iterator[tuple[Path, ast.Module, list[Import]]]:
    for path in sources(folder):
        tree = ast.parse(path.read_text(), str(path))
        parts = path.relative_to(base).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        yield path, tree, imports(tree, module, is_package)


def _line(root: Path, path: Path, number: int, text: str) -> str:
    return f"{path.relative_to(root)}:{number}: {text}"


def _check_package(root: Path, name: str, folder: Path, siblings: set[str]) -> Iterator[str]:
    source = folder / "src"
    kernels = {path.stem for path in sources(source) if is_kernel(path)}
    for path, tree, found in _modules(source, source):
        room = path.stem
        for item in found:

            def broken(text: str, item: Import = item, path: Path = path) -> str:
                return _line(root, path, item.line, text)

            if item.top == "cula" or item.top in siblings:
                yield broken(f"imports {item.top}: a kernel package imports nothing else of ours")
            elif not _allowed(item.top, PACKAGE_MAY | {name}):
                yield broken(
                    f"imports {item.top}: a kernel package may import only torch, cutlass or triton"
                )
            if room in HOST_ROOMS and item.top in KERNEL_LANGUAGES:
                yield broken(f"imports {item.top}: only launch and kernel files may")
            if room == "config" and item.top == "torch":
                yield broken("imports torch: config is pure Python")
            if room in HOST_ROOMS and not item.lazy:
                for late in ("launch", *sorted(kernels)):
                    if item.under(f"{name}.{late}"):
                        yield broken(
                            f"imports {late} at the top: it must be imported when the op runs"
                        )
            if room in kernels:
                for forbidden in KERNEL_MAY_NOT:
                    if item.under(forbidden) or item.under(f"{name}.{forbidden}"):
                        yield broken(
                            f"imports {forbidden}: a kernel knows neither torch nor its callers"
                        )
        yield from _check_struct(root, path, tree)


def _check_tool(root: Path, name: str, folder: Path) -> Iterator[str]:
    source = folder / "src"
    for path, _, found in _modules(source, source):
        room = path.relative_to(source / name).with_suffix("").parts[0]
        late = EMULATOR_ROOM_MAY_LATE.get(room, frozenset())
        may = EMULATOR_MAY | EMULATOR_ROOM_MAY.get(room, frozenset()) | late | {name}
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
        may = META_MAY | META_ROOM_MAY.get(inside[0], frozenset()) | {"cula"}
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
            if inside[0] == "_shared" and (item.relative or item.top == "cula"):
                yield _line(
                    root,
                    path,
                    item.line,
                    f"imports {item.module}: a shared file is copied, so it stands alone",
                )
        if inside == ("_registry.py",) or named is None:
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
                    f"names {node.value}: only the registry knows kernel packages",
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
