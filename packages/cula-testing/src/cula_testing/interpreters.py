"""Fresh interpreters, for what depends on which modules were imported before."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import cula_core


def python(code: str, *modules: ModuleType) -> str:
    """Returns the output of a fresh interpreter that finds the sources of these packages, and of their base, first."""
    files = [module.__file__ for module in (*modules, cula_core)]
    paths = [os.path.dirname(os.path.dirname(file)) for file in files if file]
    inherited = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, inherited])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout
