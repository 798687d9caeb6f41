"""Fixtures for every test of the repository. Nothing of ours is imported here: each package is tested alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("hypothesis"):
    from hypothesis import settings

    # A shared two-core machine misses any deadline now and then; examples repeat from run to run.
    settings.register_profile("cula", deadline=None, derandomize=True)
    settings.load_profile("cula")

pytest_plugins = ["pytester"]
MAX_RELATIVE_RMSE = 5e-3
BASELINE_FACTOR = 1.5


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU; -m 'not gpu' leaves such tests out", pytrace=False)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Runs a function of an importable module on three ranks; returns what each of them returned. See tools/ranks.py.

    One world serves the session, because starting it takes longer than what runs in it.
    """
    from tools.ranks import World

    with World(3, "gloo", tmp_path_factory.mktemp("world")) as run:
        yield run


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds `random` and torch from the test's name, so order and parallel workers change nothing."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # which takes a trace of the stack for a GPU that is not there, a millisecond a test
        torch.default_generator.manual_seed(value)
    return value


def relative_rmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of `expected`, in fp64; inf where only the difference is non-zero."""
    wanted = expected.detach().to("cpu", torch.float64)
    difference = actual.detach().to("cpu", torch.float64) - wanted
    error, size = difference.square().mean().sqrt().item(), wanted.square().mean().sqrt().item()
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., float]:
    """Returns `check(actual, expected, budget=None, *, baseline=None, name="result")`, which returns the relative RMSE.

    The error must stay within `budget`, by default 5e-3. With `baseline`, the same result computed by plain torch in
    the low precision under test, it must also stay within 1.5 times what the baseline loses. Shapes must be equal and
    every value finite, so that memory left unwritten is found.
    """

    def check(
        actual: torch.Tensor,
        expected: torch.Tensor,
        budget: float | None = None,
        *,
        baseline: torch.Tensor | None = None,
        name: str = "result",
    ) -> float:
        __tracebackhide__ = True
        if actual.shape != expected.shape:
            pytest.fail(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        if actual.numel() == 0:
            return 0.0
        broken = (~torch.isfinite(actual)).sum().item()
        if broken:
            pytest.fail(f"{name}: {broken} of {actual.numel()} values are not finite")
        limit = MAX_RELATIVE_RMSE if budget is None else budget
        if baseline is not None:
            limit = min(limit, BASELINE_FACTOR * relative_rmse(baseline, expected))
        error = relative_rmse(actual, expected)
        if not error <= limit:
            pytest.fail(f"{name}: relative RMSE {error:.3e} exceeds {limit:.3e}")
        return error

    return check


@pytest.fixture
def nan_poison() -> Iterator[None]:
    """Fills every uninitialised tensor (`torch.empty` and its relatives) with NaN, integers with their maximum."""
    from cula_emulator.memory import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture(scope="session")
def require_arch() -> Callable[..., torch.device]:
    """Returns `require(*archs)`: the CUDA device if it is one of e.g. "sm90", or "sm80+" for SM80 and newer.

    On any other machine the test fails in one line; it is never skipped.
    """

    def require(*archs: str) -> torch.device:
        __tracebackhide__ = True
        wanted = " or ".join(archs)
        if not torch.cuda.is_available():
            pytest.fail(f"needs {wanted}; there is no CUDA GPU", pytrace=False)
        major, minor = torch.cuda.get_device_capability()
        for arch in archs:
            number = int(arch.removeprefix("sm").removesuffix("+"))
            capability = 10 * major + minor
            if capability == number or (arch.endswith("+") and capability > number):
                return torch.device("cuda", torch.cuda.current_device())
        pytest.fail(f"needs {wanted}; this GPU is sm{major}{minor}", pytrace=False)

    return require
