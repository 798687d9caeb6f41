"""Copies shared files into the packages that need them: `python tools/vendor.py [--check]`.

Kernel packages depend on no other package of this repository, so a file that two of them need has one master and
checked copies. With --check nothing is written, and a copy that differs from its master fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

# Master -> copies. Python copies get a header that names the master; other files are copied as they are.
COPIES: dict[str, tuple[str, ...]] = {
    "meta/src/cula/_shared/lightning_decode.py": (
        "packages/cula-lightning-decode/src/cula_lightning_decode/reference.py",
    ),
    # `cula` imports no kernel language, so device code has its master in the package that had it first.
    "packages/cula-lightning-sm90/src/cula_lightning_sm90/schedule.py": (
        "packages/cula-cp-sm90/src/cula_cp_sm90/schedule.py",
    ),
    # Every wheel carries the licence, and a wheel is built from its own folder alone.
    "LICENSE": (
        "meta/LICENSE",
        "packages/cula-cp-sm90/LICENSE",
        "packages/cula-emulator/LICENSE",
        "packages/cula-lightning-decode/LICENSE",
        "packages/cula-lightning-sm90/LICENSE",
        "packages/liteattention-sm89/LICENSE",
    ),
}


def rendered(root: Path, master: str) -> str:
    """The text that every copy of `master` must hold."""
    text = (root / master).read_text()
    if not master.endswith(".py"):
        return text
    return f'# Vendored from {master} by "nox -s vendor": edit the master.\n{text}'


def vendor(
    root: Path, copies: dict[str, tuple[str, ...]] = COPIES, check: bool = False
) -> list[str]:
    """Brings every copy up to date and returns the copies that were not; with `check`, writes nothing."""
    stale = []
    for master, targets in copies.items():
        text = rendered(root, master)
        for target in targets:
            path = root / target
            if path.is_file() and path.read_text() == text:
                continue
            stale.append(target)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    return stale


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="vendor", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a stale copy")
    check = parser.parse_args(argv).check
    stale = vendor(root, COPIES, check)
    for target in stale:
        print(f"{target}: {'differs from its master; run nox -s vendor' if check else 'written'}")
    if not stale:
        print(f"vendor: {sum(map(len, COPIES.values()))} copies equal their masters")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
