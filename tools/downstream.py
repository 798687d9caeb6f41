"""Whether users' type checkers see our types: `python tools/downstream.py` checks two programs with mypy --strict.

They see a distribution as users do, installed, with its types if it has a `py.typed`. In the program `correct.py` mypy
must find nothing, in `wrong.py` the errors that its comments name, and each program must import every distribution.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.install_lines import distributions
from tools.layout import ROOT

PROGRAMS = "tests-integration/downstream"
_EXPECTED = re.compile(r"# E: ([a-z-]+)$")
_REPORTED = re.compile(r"^(.+?):(\d+): error: (.*?)\s+\[([a-z-]+)\]$")


def expected(text: str) -> set[tuple[int, str]]:
    """The line and the code of every error that the comments of a program name."""
    found = ((number, _EXPECTED.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return {(number, match[1]) for number, match in found if match}


def not_imported(text: str, names: set[str]) -> list[str]:
    """The distributions that a program does not import."""
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    return sorted(name for name in names if name.replace("-", "_") not in imported)


def check(program: Path, cache: Path, python: str = sys.executable) -> list[str]:
    """One line per error that mypy reports and should not, or should and does not.

    mypy runs outside of the repository, without its settings and its path, as it does for a user.
    """
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--show-error-codes"]
    command += ["--no-pretty", "--no-color-output", f"--cache-dir={cache}"]
    command += [f"--python-executable={python}", str(program.resolve())]
    env = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return [f"{program.name}: mypy failed: {done.stdout.strip()} {done.stderr.strip()}"]
    wanted = expected(program.read_text())
    lines, seen = [], set()
    for line in done.stdout.splitlines():
        match = _REPORTED.match(line)
        if not match:
            continue
        place = int(match[2]), match[4]
        if Path(match[1]).name != program.name or place not in wanted:
            lines.append(f"{Path(match[1]).name}:{match[2]}: {match[3]} [{match[4]}]")
        seen.add(place)
    lines += [
        f"{program.name}:{number}: expected an error [{code}], mypy reports none"
        for number, code in sorted(wanted - seen)
    ]
    return lines


def main(root: Path = ROOT, cache: Path | None = None, python: str = sys.executable) -> int:
    cache = cache or root / ".mypy_cache" / "downstream"
    broken = []
    for name in ("correct.py", "wrong.py"):
        program = root / PROGRAMS / name
        missing = not_imported(program.read_text(), distributions(root))
        broken += [f"{name}: does not import {other}" for other in missing]
        broken += check(program, cache, python)
    for line in broken:
        print(f"{PROGRAMS}/{line}")
    print(f"downstream: {len(broken)} surprises" if broken else "downstream: types as expected")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
