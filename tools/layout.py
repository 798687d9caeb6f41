"""Where things are in the repository, and which source files hold kernels."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_LANGUAGES = frozenset({"cutlass", "triton"})
# The host modules of packages whose device code has no folder `kernels` of its own: they use no kernel language.
HOST_MODULES = frozenset({"__init__", "ops", "check", "config", "reference", "_spec", "arch"})
# Distributions under packages/ that serve tests; everything else there is a kernel package.
DEVELOPMENT_TOOLS = ("cula-emulator",)


def packages(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every kernel package -> its folder under packages/."""
    return {k: v for k, v in _distributions(root).items() if v.name not in DEVELOPMENT_TOOLS}


def development_tools(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every development tool -> its folder under packages/."""
    return {k: v for k, v in _distributions(root).items() if v.name in DEVELOPMENT_TOOLS}


def _distributions(root: Path) -> dict[str, Path]:
    found = sorted(root.glob("packages/*/src/*/__init__.py"))
    return {init.parent.name: init.parents[2] for init in found}


def sources(folder: Path, *suffixes: str) -> list[Path]:
    """The files under `folder` with one of the suffixes, Python's if none is named, in a stable order."""
    wanted = suffixes or (".py",)
    found = (path for suffix in wanted for path in folder.rglob(f"*{suffix}"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


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
    """Whether a package's source file holds device code: what lies under a folder `kernels` does.

    In a package without that folder it is what uses a kernel language and is neither a host module nor `launch`.
    """
    package = package_of(path)
    if _has_kernels(package):
        return "kernels" in path.relative_to(package).parts[:-1]
    if path.stem in HOST_MODULES or path.stem == "launch":
        return False
    return bool(imported_names(ast.parse(path.read_text())) & KERNEL_LANGUAGES)


def is_host(path: Path) -> bool:
    """Whether a package's source file must run without a kernel language: outside `kernels`, all but `launch`."""
    if _has_kernels(package_of(path)):
        return path.stem != "launch" and not is_kernel(path)
    return path.stem in HOST_MODULES


def _has_kernels(package: Path) -> bool:
    return any(found.is_dir() for found in package.rglob("kernels"))


def package_of(path: Path) -> Path:
    """The folder `src/<import_name>` in which a source file lies."""
    return next(parent for parent in path.parents if parent.parent.name == "src")
