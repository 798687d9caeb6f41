"""Interpreters that start from torch and nothing else."""

from __future__ import annotations

import pytest

from cula_testing import interpreters
from cula_testing.interpreters import python, run


def test_every_run_starts_anew():
    """With torch, without what this process or an earlier run imported, set or changed."""
    code = """
import os, sys
print("torch" in sys.modules, [m for m in sys.modules if m.startswith(("cula", "pytest"))])
print(sorted(globals().keys() - {"__builtins__"}), hasattr(sys, "left"), os.environ.get("LEFT"))
import cula_core
print(cula_core.__file__)
sys.left, os.environ["LEFT"] = True, "1"
"""
    first = python(code)
    lines = ["True []", "['__name__', 'os', 'sys'] False None", interpreters.cula_core.__file__]
    assert first.splitlines() == lines and python(code) == first


def test_what_a_run_leaves_is_returned(tmp_path):
    code = "import os, sys; print(os.getcwd()); print('no', file=sys.stderr); sys.exit(3)"
    result = run(code, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (3, f"{tmp_path}\n", "no\n")


def test_an_error_fails_the_test():
    with pytest.raises(AssertionError, match="ValueError: broken"):
        python("raise ValueError('broken')")
    assert run("import os; os.abort()").returncode < 0
