"""Where things are in the repository, and which source files hold kernels."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_LANGUAGES = frozenset({"cutlass", "triton"})
# The rooms of a package that must run without a kernel language; every package has the same ones.
HOST_ROOMS = frozenset({"__init__", "ops", "check", "config", "reference", "_spec"})


def packages(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every kernel package -> its folder under packages/."""
    found = sorted(root.glob("packages/*/src/*/__init__.py"))
    return {init.parent.name: init.parents[2] for init in found}


def sources(folder: Path) -> list[Path]:
    """The Python files under `folder`, in a stable order."""
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def imported_names(tree: ast.AST) -> set[str]:
    """First component of every absolute import in the tree."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def is_kernel(path: Path) -> bool:
    """Whether a package's source file holds device code: it uses a kernel language and is no host room."""
    if path.stem in HOST_ROOMS or path.stem == "launch":
        return False
    return bool(imported_names(ast.parse(path.read_text())) & KERNEL_LANGUAGES)
