"""The plugin brings the emulator's, the marker and the fixtures; suites take what depends on their subject."""

from __future__ import annotations

import torch
import torch._dynamo  # what fresh_compiler asks for

# pytester forgets what an inner run imports first, and torch bears one import only.
import cula_emulator  # noqa: F401
import cula_testing.machine_code  # noqa: F401

# hypothesis would be imported anew by every inner run.
QUICK = ("-q", "-p", "no:hypothesispytest")
TESTS = """
import pytest
import torch
from cula_testing.machine_code import label


def test_fixtures(relative_rmse, assert_within, fresh_compiler):
    x = torch.ones(3)
    assert relative_rmse(x, x) == 0 and assert_within(x, x, 0.0) == 0


@pytest.mark.gpu
def test_gpu(cuda):
    assert cuda.type == "cuda"


@pytest.mark.emulated(schedules="immediate")
def test_emulated(emulated):
    assert emulated.empty((2,), torch.float32).isnan().all()
"""


def test_a_conftest_loads_it_from_a_source_tree(pytester):
    pytester.makeconftest("from cula_testing.loading import pytest_addoption")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*QUICK, "--strict-markers", "-m", "not gpu")
    result.assert_outcomes(passed=2, deselected=1)


def test_it_is_loaded_once_beside_the_entry_points(pytester):
    """In a fresh interpreter, where it also matters what is imported first."""
    pytester.makeconftest("from cula_testing.loading import pytest_addoption")
    pytester.makepyfile(TESTS)
    plugins = ("-p", "cula_testing.plugin", "-p", "cula_emulator.pytest_plugin")
    # PyTorch's remark where there is no NumPy, as beside a package alone.
    quiet = ("-q", "-W", "ignore:Failed to initialize NumPy:UserWarning")
    result = pytester.runpytest_subprocess(*quiet, "--strict-markers", "-m", "not gpu", *plugins)
    result.assert_outcomes(passed=2, deselected=1, warnings=0)


def test_a_machine_without_a_gpu_fails_in_one_line(pytester, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makeconftest("from cula_testing.loading import pytest_addoption")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*QUICK, "-m", "gpu")
    result.assert_outcomes(errors=1, deselected=2)
    result.stdout.fnmatch_lines(["*needs a CUDA GPU; -m 'not gpu' leaves such tests out*"])
