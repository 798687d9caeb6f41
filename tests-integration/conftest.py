"""The distributions as users get them: built from the tree, unpacked beside each other."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> its wheel, built by the backend that its pyproject.toml names."""
    built = {}
    for folder in (ROOT / "meta", *sorted((ROOT / "packages").iterdir())):
        out = tmp_path_factory.mktemp("wheels")
        name = "cula" if folder.name == "meta" else folder.name
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        (built[name],) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds every distribution the way an installer would lay it out."""
    folder = tmp_path_factory.mktemp("site")
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder
