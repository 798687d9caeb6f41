"""Who imports whom in the benchmarks, and which ops are registered."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks import ops, tables
from benchmarks.harness import registry
from tools.import_rules import imports

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(("benchmarks", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py" and "tests" not in path.relative_to(ROOT).parts
}


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def imported(module: str) -> set[str]:
    """The modules of the benchmarks that a module imports anywhere, and the names that it takes from them."""
    return {i.module for i in imports(tree_of(module), module, False) if i.under("benchmarks")}


def family_of(module: str) -> str | None:
    """The family that a dotted name belongs to."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["ops"] and parts[2] in ops.FAMILIES else None


def test_the_modules_are_found():
    assert {"benchmarks.run", "benchmarks.harness.results", "benchmarks.ops.sequences"} <= set(
        MODULES
    )
    assert {family_of(m) for m in MODULES} == {None, *ops.FAMILIES}
    assert "benchmarks.harness.registry.Setting" in imported("benchmarks.ops.kda.problem")


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_private_names(module):
    private = [name for name in imported(module) if name.rpartition(".")[2].startswith("_")]
    assert private == []
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks")
        for alias in node.names
        if f"{node.module}.{alias.name}" in MODULES
    }
    used = [
        ast.unparse(node)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in aliases
        and node.attr.startswith("_")
    ]
    assert used == []


@pytest.mark.parametrize("module", [m for m in MODULES if family_of(m)])
def test_families_do_not_know_each_other(module):
    families = {family_of(name) for name in imported(module) if name.startswith("benchmarks.ops.")}
    assert families <= {None, family_of(module)}


def test_imports_have_no_circle():
    """Imports inside functions count too."""
    graph = {module: imported(module) & set(MODULES) for module in MODULES}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("benchmarks.ops.kda.work") < order.index("benchmarks.ops.kda.model")


def is_module_of_package(name: str) -> bool:
    """Whether a dotted name is a module inside a kernel package, and not a name that the package itself offers."""
    top, *rest = name.split(".")
    sources = ROOT.parent.glob(f"packages/*/src/{top}")
    return bool(rest) and any(s.joinpath(*rest).with_suffix(".py").is_file() for s in sources)


def imports_by_name(module: str) -> bool:
    """Whether a module calls `import_module` with a name that it puts together."""
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "import_module"
        and isinstance(node.args[0], ast.JoinedStr)
        for node in ast.walk(tree_of(module))
    )


def test_the_internals_of_kernel_packages_are_imported_in_one_module_per_family():
    """`emulator/workloads.py` is no part of a family: it runs in a process of its own."""
    found = {
        module
        for module in MODULES
        for i in imports(tree_of(module), module, False)
        if is_module_of_package(i.module) and not i.under("cula_emulator")
    }
    found |= {m for m in MODULES if family_of(m) and imports_by_name(m)}
    assert found == {
        "benchmarks.emulator.workloads",
        *(
            f"benchmarks.ops.{family}.internals"
            for family in ("decode", "delta", "kda", "lightning", "lite")
        ),
    }


def test_every_module_that_defines_an_op_is_registered():
    defining = {
        module
        for module in MODULES
        for node in tree_of(module).body
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["OP"]
        if isinstance(node.value, ast.Call)
    }
    assert defining == set(registry.modules().values())


def named_in_documents(before: str = "") -> set[str]:
    """Files of the benchmarks that documents name by their path in the repository, behind the words `before`."""
    texts = [path.read_text() for path in tables.documents()]
    pattern = re.compile(rf"{before}(benchmarks/[\w/]+\.py)\b")
    return {name for text in texts for name in pattern.findall(text)}


def test_files_that_documents_name_are_there():
    named = named_in_documents()
    assert "benchmarks/run.py" in named
    assert [name for name in sorted(named) if not (tables.ROOT / name).is_file()] == []


COMMANDS = sorted(named_in_documents("python "))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_documents_name_run_from_anywhere(command, tmp_path):
    words = [sys.executable, str(tables.ROOT / command), "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr
