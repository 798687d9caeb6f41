"""The licence of everything that our distributions bring: `python tools/licences.py [--check]` writes docs/licences.md.

It reads the metadata of the environment in which it runs, which the session `licences` prepares. The command fails
where a licence is unknown, and with --check, which writes nothing, where the document is not what it would write.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.install_lines import distributions
from tools.layout import DEVELOPMENT_TOOLS, ROOT

DOCUMENT = "docs/licences.md"
TESTS = "test"  # the extra that users do not install
# Classifiers that name one licence. That of BSD does not: there are several.
CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
_NVIDIA = "LicenseRef-NVIDIA-Software-License-Agreement"
# What the licence file of a distribution says whose metadata do not name a licence in a way that a program can read.
READ_BY_US = {
    "contourpy": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "fla-core": "MIT",
    "jinja2": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "LicenseRef-Matplotlib",
    "mpmath": "BSD-3-Clause",
    "nvidia-cutlass-dsl": _NVIDIA,
    "nvidia-cutlass-dsl-libs-base": _NVIDIA,
    "nvidia-cutlass-dsl-libs-core": _NVIDIA,
    "nvidia-cutlass-dsl-libs-cu12": _NVIDIA,
    "nvidia-cutlass-dsl-libs-cu13": _NVIDIA,
    "protobuf": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
}
# Builds of PyTorch for CUDA bring libraries that its build for CPUs does not.
TORCH = "torch"
ONLY_WITH_CUDA = ("nvidia-", "cuda-", "triton")

HEAD = """\
# Licences of dependencies

`cula` and its packages are under Apache-2.0. This is what they bring when they are installed with all their extras but
`test`, on Linux: each distribution, its licence as an SPDX expression, and what requires it. Exact versions are in
`constraints-ci.txt`, and those for `cula[sm90]` also in the SBOM that `bash .ci/run build` writes to `dist/`.

The page is written from the metadata of the installed distributions; `bash .ci/run licences` fails where it is stale or
a licence is unknown, and `bash .ci/run licences -- --write` writes it anew.

| distribution | licence | required by |
|---|---|---|
"""
TAIL = """
`*` marks a licence that was read from the distribution's licence file, because its metadata do not name it in a form
that programs read. `LicenseRef-NVIDIA-Software-License-Agreement` is NVIDIA's own and not an open-source licence;
`LicenseRef-Matplotlib` is Matplotlib's own, modelled on that of Python.

Left out:

- what PyTorch's builds for CUDA bring beside its build for CPUs, which CI installs: NVIDIA's libraries and Triton;
- what is for development alone: the extra `test`, `cula-emulator`, `cula-testing`, and the tools that the sessions
  install. None of it is installed with `cula` or a kernel package.
"""


class LicenceError(Exception):
    """What is unknown, in one line."""


@dataclass
class Dependency:
    """A distribution of others, and who requires it."""

    name: str
    licence: str | None
    required_by: set[str] = field(default_factory=set)


Finder = Callable[[str], metadata.Distribution]


def licence(distribution: metadata.Distribution) -> str | None:
    """The SPDX expression that the metadata give, or None."""
    facts = distribution.metadata
    for text in (facts.get("License-Expression"), facts.get("License")):
        try:
            return canonicalize_license_expression(text or "")
        except InvalidLicenseExpression:
            continue
    lines = facts.get_all("Classifier") or []
    named = {CLASSIFIERS.get(line) for line in lines if line.startswith("License ::")}
    return named.pop() if len(named) == 1 else None


def dependencies(
    ours: Iterable[str], find: Finder = metadata.distribution
) -> dict[str, Dependency]:
    """All that `ours` require with every extra but `test`, directly or through others, in order of names."""
    ours = {canonicalize_name(name) for name in ours}
    found: dict[str, Dependency] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [
        (name, extra)
        for name in sorted(ours)
        for extra in (
            "",
            *sorted(set(find(name).metadata.get_all("Provides-Extra") or ()) - {TESTS}),
        )
    ]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in find(name).requires or ():
            wanted = Requirement(line)
            marker = wanted.marker
            if marker and not marker.evaluate({"extra": extra}):
                continue
            if extra and (not marker or marker.evaluate({"extra": ""})):
                continue  # required without the extra too
            other = canonicalize_name(wanted.name)
            if other not in ours:
                if name == TORCH and other.startswith(ONLY_WITH_CUDA):
                    continue
                if other not in found:
                    found[other] = Dependency(_distribution(other, name, find).name, None)
                found[other].required_by.add(f"{name}[{extra}]" if extra else name)
            waiting += [(other, ""), *((other, more) for more in sorted(wanted.extras))]
    return dict(sorted(found.items()))


def _distribution(name: str, by: str, find: Finder) -> metadata.Distribution:
    try:
        return find(name)
    except metadata.PackageNotFoundError:
        raise LicenceError(f"{by} requires {name}, which is not installed") from None


def table(found: dict[str, Dependency], find: Finder = metadata.distribution) -> str:
    """The document. Raises LicenceError with all that is unknown, and with what we need not have read ourselves."""
    rows, wrong = [], []
    for name, dependency in found.items():
        named, read = licence(find(name)), READ_BY_US.get(name)
        if named and read:
            wrong.append(f"{name}: its metadata say {named}; remove it from READ_BY_US")
        elif not (named or read):
            wrong.append(
                f"{name}: unknown licence; expected one in its metadata, or in READ_BY_US what its licence file says"
            )
        by = ", ".join(f"`{other}`" for other in sorted(dependency.required_by))
        rows.append(f"| {dependency.name} | {named or f'{read} *'} | {by} |")
    wrong += [
        f"{name}: not required; remove it from READ_BY_US"
        for name in READ_BY_US
        if name not in found
    ]
    if wrong:
        raise LicenceError("\n".join(wrong))
    return HEAD + "\n".join(rows) + "\n" + TAIL


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="licences", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a stale list")
    check = parser.parse_args(argv).check
    document = root / DOCUMENT
    try:
        found = dependencies(distributions(root) - set(DEVELOPMENT_TOOLS))
        text = table(found)
    except (LicenceError, metadata.PackageNotFoundError) as error:
        print(f"licences: {error}", file=sys.stderr)
        return 1
    stale = not document.is_file() or document.read_text() != text
    if stale and check:
        print(f"{DOCUMENT}: stale; bash .ci/run licences -- --write", file=sys.stderr)
        return 1
    if stale:
        document.write_text(text)
        print(f"{DOCUMENT}: written")
    print(f"licences: {len(found)} dependencies, every licence is known")
    return 0


if __name__ == "__main__":
    sys.exit(main())
