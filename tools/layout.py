"""Where things are in the repository, and which source files hold kernels."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_LANGUAGES = frozenset({"cutlass", "triton"})
# The rooms of a package that must run without a kernel language; every package has the same ones.
HOST_ROOMS = frozenset({"__init__", "ops", "check", "config", "reference", "_spec"})
# Rooms that only some packages have.
HOST_ROOMS |= {"masks", "state", "module", "calibration", "images", "thresholds", "functional"}
HOST_ROOMS |= {"arch", "autograd", "mass", "quality", "replay", "diffusers"}
# Distributions under packages/ that kernel packages are built on, and that serve tests; the others are kernel packages.
BASE = ("cula-core",)
DEVELOPMENT_TOOLS = ("cula-emulator", "cula-testing")
# Folders of a package that hold device code and nothing else.
DEVICE_FOLDERS = frozenset({"kernels", "cute"})


def packages(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every kernel package -> its folder under packages/."""
    others = (*BASE, *DEVELOPMENT_TOOLS)
    return {k: v for k, v in _distributions(root).items() if v.name not in others}


def base(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every distribution that kernel packages are built on -> its folder under packages/."""
    return {k: v for k, v in _distributions(root).items() if v.name in BASE}


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
    """Whether a package's source file holds device code: it lies in a folder for that.

    In a package without such a folder, it is a file that uses a kernel language and is no host room.
    """
    parts = path.parts
    inside = len(parts) - 1 - parts[::-1].index("src") + 2 if "src" in parts else len(parts)
    if DEVICE_FOLDERS & set(parts[inside:-1]):
        return True
    package = Path(*parts[:inside])
    if any(folder.is_dir() for name in DEVICE_FOLDERS for folder in package.rglob(name)):
        return False
    if path.stem in HOST_ROOMS or path.stem == "launch":
        return False
    return bool(imported_names(ast.parse(path.read_text())) & KERNEL_LANGUAGES)
