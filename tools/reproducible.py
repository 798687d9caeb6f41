"""Whether the distributions in a folder can be built again byte for byte: `python tools/reproducible.py DIST`.

They are built a second time from a copy of the sources in another folder, with other times and permissions of files, in
another time zone, language and hash seed. There a wheel is built from the tree itself, while `python -m build` makes it
from the unpacked sdist; so equal wheels also show that an sdist holds all that its wheel is made of.
SOURCE_DATE_EPOCH has to be set.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

ARCHIVES = ("*.whl", "*.tar.gz")
# What the second build has otherwise.
ELSEWHERE = {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONHASHSEED": "1"}


def copy_sources(root: Path, target: Path) -> list[Path]:
    """Copies what git tracks or would track, readable for the owner alone, and returns the distributions' folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    command += ["--exclude-standard", "--", ".gitignore", "meta", "packages"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = root / name, target / name
        if not source.is_file():  # removed, but not yet in a commit
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copy.chmod(0o700 if os.access(source, os.X_OK) else 0o600)
    return sorted(path.parent for path in target.glob("**/pyproject.toml"))


def build(folders: list[Path], out: Path) -> None:
    """Builds an sdist and a wheel of each folder with the backend that the distributions name."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel"]
    for folder in folders:
        done = subprocess.run(
            [*command, "-d", str(out)],
            cwd=folder,
            env={**os.environ, **ELSEWHERE},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(f"{folder.name}: {done.stderr.strip()}")


def differences(first: Path, second: Path) -> list[str]:
    """One line for each archive that is not the same in both folders, and for each member that makes it differ."""
    found = []
    ours, theirs = (
        {path.name: path for pattern in ARCHIVES for path in folder.glob(pattern)}
        for folder in (first, second)
    )
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            found.append(f"{name}: only in {first if name in ours else second}")
        elif _digest(ours[name].read_bytes()) != _digest(theirs[name].read_bytes()):
            found += [f"{name}: {line}" for line in _members_that_differ(ours[name], theirs[name])]
    return found


def _members_that_differ(first: Path, second: Path) -> list[str]:
    ours, theirs = members(first), members(second)
    lines = []
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            lines.append(f"{name} only in the {'first' if name in ours else 'second'}")
            continue
        facts = [f for f in ours[name] if ours[name][f] != theirs[name][f]]
        lines += [f"{name}: {f} {ours[name][f]} and {theirs[name][f]}" for f in facts]
    if not lines and list(ours) != list(theirs):
        lines = ["the order of its members"]
    return lines or ["the bytes around its members"]


def members(path: Path) -> dict[str, dict[str, object]]:
    """What an archive says of each member, by name and in its order."""
    found: dict[str, dict[str, object]] = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for entry in wheel.infolist():
                found[entry.filename] = {
                    "sha256": _digest(wheel.read(entry)),
                    "mode": oct(entry.external_attr >> 16),
                    "time": entry.date_time,
                }
        return found
    with tarfile.open(path) as sdist:
        for member in sdist.getmembers():
            content = sdist.extractfile(member)
            found[member.name] = {
                "sha256": _digest(content.read()) if content else None,
                "mode": oct(member.mode),
                "time": member.mtime,
                "owner": (member.uid, member.gid, member.uname, member.gname),
            }
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="reproducible", description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="the folder with the wheels and sdists")
    dist = parser.parse_args(argv).dist
    if not os.environ.get("SOURCE_DATE_EPOCH", "").isdigit():
        parser.error("SOURCE_DATE_EPOCH: expected seconds since 1970, as the first build had")
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch, "again")
        try:
            build(copy_sources(root, Path(scratch, "sources")), again)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"reproducible: the second build failed: {error}", file=sys.stderr)
            return 1
        broken = differences(dist, again)
        count = sum(len(list(again.glob(pattern))) for pattern in ARCHIVES)
    for line in broken:
        print(line)
    print(
        f"reproducible: {len(broken)} differences"
        if broken
        else f"reproducible: {count} archives are the same, byte for byte"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
