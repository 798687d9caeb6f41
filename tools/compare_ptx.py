"""Compares the PTX of kernels before and after a refactoring: `python tools/compare_ptx.py --base REVISION`.

Every config of `tools/ptx_configs.py` is compiled in two trees, each a folder or a revision, and what both make must be
equal but for names of symbols and labels, comments and debugging information. No GPU is needed. The PTX of a package is
kept by the digest of its sources, so only what is missing is compiled. Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import ptx_configs
from tools.layout import ROOT
from tools.ptx_configs import Spec, label

SHOWN = 16  # lines of a difference
_DEFINITION = re.compile(
    r"^\s*(?:\.(?:visible|extern|weak|common)\s+)*\.(?:entry|(?:func|global|const|shared)\b.*?)\s+([\w$]+)\s*(?:\(|\[|=|;|$)"
)
_LABEL = re.compile(r"(?:^|[{;])\s*([A-Za-z_$][\w$]*)\s*:(?!:)")
_DEBUGGING = re.compile(r"^\s*\.(?:loc|file)\b|^\s*$")


def normalized(ptx: str) -> list[str]:
    """The lines of a PTX text, with symbols and labels numbered in the order in which they are defined."""
    text = re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL)
    text = re.sub(r"^\s*\.section\s+\.debug.*?^\s*\}", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\s*//.*", "", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if not _DEBUGGING.match(line)]
    names: dict[str, str] = {}
    for line in lines:
        if found := _DEFINITION.match(line):
            names.setdefault(found[1], f"symbol_{len(names)}")
        for name in _LABEL.findall(line):
            names.setdefault(name, f"label_{len(names)}")

    def renamed(word: re.Match[str]) -> str:
        name, parameter, number = word[0].partition("_param_")
        return names.get(name, name) + parameter + number

    return [re.sub(r"(?<![\w$%.])[A-Za-z_$][\w$]*", renamed, line) for line in lines]


@dataclass(frozen=True)
class Tree:
    """A folder with packages/, and where the PTX of its packages is kept."""

    root: Path
    cache: Path

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        return {package: digest(self.root, package) for package in ptx_configs.PACKAGES}

    def kept(self, package: str) -> Path:
        return self.cache / package / self.digests[package]

    def ptx(self, spec: Spec) -> Path:
        return self.kept(spec["package"]) / spec["arch"] / f"{label(spec)}.ptx"


def compare(base: Tree, changed: Tree, spec: Spec) -> tuple[str, list[str]]:
    """Whether the PTX of a spec is "equal", "differs" or "failed" to compile, and lines that say why."""
    texts = []
    for path in (base.ptx(spec), changed.ptx(spec)):
        if not path.exists():
            error = path.with_suffix(".error")
            reason = error.read_text().splitlines() if error.exists() else ["it was not compiled"]
            return "failed", [f"{path}:", *reason[-SHOWN:]]
        texts.append(normalized(path.read_text()))
    lines = list(difflib.unified_diff(*texts, "base", "changed", lineterm="", n=2))
    return ("differs", lines[:SHOWN]) if lines else ("equal", [])


@contextlib.contextmanager
def sources(tree: str) -> Iterator[Path]:
    """A temporary copy of what a folder or a revision has under packages/, which nobody edits meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        if Path(tree, "packages").is_dir():
            for found in sorted(Path(tree).glob("packages/*/src")):
                shutil.copytree(found, Path(folder, found.relative_to(tree)))
        else:
            archive = subprocess.run(
                ["git", "archive", tree, "packages"], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def digest(root: Path, package: str) -> str:
    """Of the sources that a package's PTX is made of, those of the base included, and the version of the DSL."""
    found = hashlib.sha256(_dsl_version().encode())
    for name in ("cula-core", package):
        for path in sorted((root / "packages" / name / "src").rglob("*.py")):
            found.update(f"{path.relative_to(root)}\0{path.read_text()}\0".encode())
    return found.hexdigest()[:16]


def _dsl_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version("nvidia-cutlass-dsl")
    return "none"


def _start(root: Path, arguments: list[str]) -> subprocess.Popen:
    """A process in which the packages of a tree are imported, and of this repository nothing but the tools."""
    paths = [*map(str, sorted(root.glob("packages/*/src"))), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "tools.ptx_configs", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _finish(process: subprocess.Popen, text: str = "") -> str:
    out, _ = process.communicate(text)
    if process.returncode:
        raise SystemExit(f"{' '.join(process.args[2:])} failed")
    return out


def listed(tree: Tree, package: str) -> list[Spec]:
    """The specs of a package of a tree; kept beside the PTX, by the text that lists them."""
    text = Path(ptx_configs.__file__).read_bytes()
    kept = tree.kept(package) / f"{hashlib.sha256(text).hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = _finish(_start(tree.root, ["list", package]))
        kept.write_text(found)
    return json.loads(kept.read_text())


def compile_missing(tree: Tree, specs: list[Spec], jobs: int) -> int:
    """Compiles in `jobs` processes what is not kept of a tree, and returns how many that were."""
    missing = [(spec, str(tree.ptx(spec))) for spec in specs if not tree.ptx(spec).exists()]
    parts = [part for part in (missing[number::jobs] for number in range(jobs)) if part]
    running = [(_start(tree.root, ["compile"]), json.dumps(part)) for part in parts]
    for process, text in running:
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
    for process, _ in running:
        _finish(process)
    return len(missing)


def sample(specs: list[Spec], size: int | None) -> list[Spec]:
    """Always the same few of every package, spread over its kernels and architectures."""

    def number_of(spec: Spec) -> bytes:
        text = f"{spec['package']} {spec['arch']} {label(spec)}"
        return hashlib.sha256(text.encode()).digest()

    order = sorted(specs, key=number_of)
    seen: Counter[tuple] = Counter()
    rounds = []
    for spec in order:
        kind = spec["package"], spec["arch"], spec["kernel"]
        rounds.append((seen[kind], len(rounds)))
        seen[kind] += 1
    taken: Counter[str] = Counter()
    chosen = []
    for _, number in sorted(rounds):
        spec = order[number]
        if size is None or taken[spec["package"]] < size:
            taken[spec["package"]] += 1
            chosen.append(spec)
    return chosen


def report(base: Tree, changed: Tree, specs: list[Spec]) -> bool:
    """Prints what differs, and counts by package and architecture; whether everything is equal."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for spec in specs:
        outcome, lines = compare(base, changed, spec)
        counts.setdefault((spec["package"], spec["arch"]), Counter())[outcome] += 1
        if lines:
            print(f"{spec['package']} {spec['arch']} {label(spec)} {outcome}:", *lines, sep="\n  ")
    for (package, arch), found in sorted(counts.items()):
        print(f"{package:24}{arch:10}" + ", ".join(f"{n} {what}" for what, n in found.items()))
    return all(set(found) == {"equal"} for found in counts.values())


def default_cache() -> Path:
    chosen = os.environ.get("CULA_EMULATOR_CACHE") or Path.home() / ".cache/cula-emulator"
    return Path(chosen, "ptx")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", required=True, help="a revision, or a folder with packages/")
    parser.add_argument("--changed", default=str(ROOT), help="the same; the default is this tree")
    parser.add_argument("--package", nargs="+", choices=ptx_configs.PACKAGES, metavar="PACKAGE")
    parser.add_argument("--arch", nargs="+", help="such as sm_90a")
    parser.add_argument("--sample", type=int, help="so many configs of every package")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where PTX is kept")
    given = parser.parse_args(arguments)
    with sources(given.base) as base, sources(given.changed) as changed:
        trees = [Tree(root, given.cache) for root in (base, changed)]
        specs = [
            spec
            for package in given.package or ptx_configs.PACKAGES
            for spec in listed(trees[0], package)
            if given.arch is None or spec["arch"] in given.arch
        ]
        specs = sample(specs, given.sample)
        for name, tree in zip((given.base, given.changed), trees):
            count = compile_missing(tree, specs, given.jobs)
            print(f"{name}: {count} of {len(specs)} configs compiled", flush=True)
    return 0 if specs and report(*trees, specs) else 1


if __name__ == "__main__":
    sys.exit(main())
