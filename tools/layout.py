"""Where things are in the repository, and which source files hold kernels."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_LANGUAGES = frozenset({"cutlass", "triton"})
# Distributions under packages/ that kernel packages are built on, and that serve tests; the others are kernel packages.
BASE = ("cula-core",)
DEVELOPMENT_TOOLS = ("cula-emulator", "cula-testing")
# Kernel packages without a host side of their own -> the package whose host side they serve, and which they import.
HOSTS = {"liteattention_sm90": "liteattention_sm89"}
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


def is_kernel(path: Path) -> bool:
    """Whether a package's source file holds device code: it lies in a folder for that."""
    return bool(DEVICE_FOLDERS & set(path.relative_to(package_of(path)).parts[:-1]))


def is_host(path: Path) -> bool:
    """Whether a package's source file must run without a kernel language: all but device code and `build`."""
    return path.stem != "build" and not is_kernel(path)


def package_of(path: Path) -> Path:
    """The folder `src/<import_name>` in which a source file lies."""
    return next(parent for parent in path.parents if parent.parent.name == "src")
