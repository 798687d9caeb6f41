"""Copies the licence into every distribution: `python tools/vendor.py [--check]`.

A wheel is built from its own folder alone and carries the licence. With --check nothing is written, and a copy that
differs from its master fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

# Master -> copies.
COPIES: dict[str, tuple[str, ...]] = {
    "LICENSE": (
        "meta/LICENSE",
        "packages/cula-core/LICENSE",
        "packages/cula-cp-sm90/LICENSE",
        "packages/cula-delta-decode/LICENSE",
        "packages/cula-emulator/LICENSE",
        "packages/cula-kda-sm100/LICENSE",
        "packages/cula-lightning-decode/LICENSE",
        "packages/cula-lightning-sm90/LICENSE",
        "packages/cula-testing/LICENSE",
        "packages/liteattention-sm89/LICENSE",
        "packages/liteattention-sm90/LICENSE",
    ),
}


def vendor(
    root: Path, copies: dict[str, tuple[str, ...]] = COPIES, check: bool = False
) -> list[str]:
    """Brings every copy up to date and returns the copies that were not; with `check`, writes nothing."""
    stale = []
    for master, targets in copies.items():
        text = (root / master).read_text()
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
