"""Every program of the folder examples/ runs on a CPU, as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/*.py"))


def test_there_are_examples() -> None:
    assert "examples/migrate_from_cula.py" in PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_runs_without_a_gpu(program: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout and "Traceback" not in done.stderr, done.stderr
