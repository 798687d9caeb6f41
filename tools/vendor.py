"""Copies shared files into the packages that need them: `python tools/vendor.py [--check]`.

Kernel packages depend on no other package of this repository, so a file that two of them need has one master and
checked copies. With --check nothing is written, and a copy that differs from its master fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

KDA, KDA_BLACKWELL = "packages/cula-cp-sm90", "packages/cula-kda-sm100"
# Of the KDA packages these are the same for every GPU; `arch.py` and `recurrence.py` are not.
KDA_MODULES = (
    "_spec", "check", "common", "config", "factors", "fragments", "inverse", "items", "launch", "merge", "ops",
    "prepare", "reference", "states", "tokens",
)  # fmt: skip
KDA_TESTS = {
    "conftest": "conftest",
    "kda_compiled": "kda_sm100_compiled",
    "kda_emulated": "kda_sm100_emulated",
    "kda_inputs": "kda_sm100_inputs",
    "prefill_checks": "prefill_sm100_checks",
    "sanitizer": "sanitizer",
    "test_emulated": "test_emulated",
    "test_ops": "test_ops",
    "test_prefill": "test_prefill",
    "test_stages": "test_stages",
}
# Words that are others in the copies of a folder. All tests run in one process, so helpers differ by name.
WORDS = {
    f"{KDA_BLACKWELL}/tests/": {
        "cula_cp_sm90": "cula_kda_sm100",
        "cula-cp-sm90": "cula-kda-sm100",
        "kda_facts": "kda_sm100_facts",
        **{name: other for name, other in KDA_TESTS.items() if name != other},
    },
}
# Master -> copies. Python copies get a header that names the master; other files are copied as they are.
COPIES: dict[str, tuple[str, ...]] = {
    "meta/src/cula/_shared/lightning_decode.py": (
        "packages/cula-lightning-decode/src/cula_lightning_decode/reference.py",
    ),
    # `cula` imports no kernel language, so device code has its master in the package that had it first.
    "packages/cula-lightning-sm90/src/cula_lightning_sm90/schedule.py": (
        f"{KDA}/src/cula_cp_sm90/schedule.py",
        f"{KDA_BLACKWELL}/src/cula_kda_sm100/schedule.py",
    ),
    **{
        f"{KDA}/src/cula_cp_sm90/{name}.py": (f"{KDA_BLACKWELL}/src/cula_kda_sm100/{name}.py",)
        for name in KDA_MODULES
    },
    **{
        f"{KDA}/tests/{name}.py": (f"{KDA_BLACKWELL}/tests/{other}.py",)
        for name, other in KDA_TESTS.items()
    },
    # Every wheel carries the licence, and a wheel is built from its own folder alone.
    "LICENSE": (
        "meta/LICENSE",
        f"{KDA}/LICENSE",
        f"{KDA_BLACKWELL}/LICENSE",
        "packages/cula-emulator/LICENSE",
        "packages/cula-lightning-decode/LICENSE",
        "packages/cula-lightning-sm90/LICENSE",
        "packages/liteattention-sm89/LICENSE",
    ),
}


def rendered(root: Path, master: str, target: str) -> str:
    """The text that a copy of `master` must hold."""
    text = (root / master).read_text()
    if not master.endswith(".py"):
        return text
    for folder, words in WORDS.items():
        if target.startswith(folder):
            for word, other in words.items():
                text = re.sub(rf"\b{word}\b", other, text)
    return f'# Vendored from {master} by "nox -s vendor": edit the master.\n{text}'


def vendor(
    root: Path, copies: dict[str, tuple[str, ...]] = COPIES, check: bool = False
) -> list[str]:
    """Brings every copy up to date and returns the copies that were not; with `check`, writes nothing."""
    stale = []
    for master, targets in copies.items():
        for target in targets:
            path, text = root / target, rendered(root, master, target)
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
