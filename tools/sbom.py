"""Writes what an environment with `cula` holds as a CycloneDX SBOM: `python tools/sbom.py PYTHON FILE`.

PYTHON is the interpreter of an environment in which `cula` is installed and nothing that it does not bring. The work is
that of cyclonedx-py; this command gives it the version of `cula`, which is not in meta/pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import version
from tools.layout import ROOT

DYNAMIC = 'dynamic = ["version"]'


def project(root: Path = ROOT) -> str:
    """The pyproject.toml of `cula` with its version in it."""
    text = (root / "meta/pyproject.toml").read_text()
    if DYNAMIC not in text:
        raise ValueError(f"meta/pyproject.toml: expected the line {DYNAMIC}")
    return text.replace(
        DYNAMIC, f'version = "{version.current(root)["meta/src/cula/__init__.py"]}"'
    )


def write(python: str, target: Path, root: Path = ROOT) -> None:
    """Runs cyclonedx-py over the environment of `python`; it checks what it writes against CycloneDX's schema."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "pyproject.toml")
        copy.write_text(project(root))
        command = ["cyclonedx-py", "environment", "--output-reproducible", "--mc-type=library"]
        command += [f"--pyproject={copy}", f"--output-file={target}", python]
        subprocess.run(command, check=True)


def summary(target: Path) -> str:
    """What the SBOM is of, and how many components it lists."""
    sbom = json.loads(target.read_text())
    root = sbom["metadata"]["component"]
    return f"{root['name']} {root['version']}: {len(sbom['components'])} components"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="sbom", description=__doc__.splitlines()[0])
    parser.add_argument("python", metavar="PYTHON", help="interpreter of the environment")
    parser.add_argument("file", metavar="FILE", type=Path, help="the JSON file to write")
    arguments = parser.parse_args(argv)
    try:
        write(arguments.python, arguments.file, root)
    except (OSError, ValueError, version.VersionError, subprocess.CalledProcessError) as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.file}: {summary(arguments.file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
