"""The fixtures of the root conftest.py, which every other test leans on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def test_assert_close_returns_the_relative_rmse(assert_close: Callable[..., float]) -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert assert_close(expected + torch.tensor([3e-3, 4e-3]), expected) == pytest.approx(
        1e-3, rel=1e-6
    )
    assert assert_close(torch.zeros(2), torch.zeros(2)) == 0.0
    assert assert_close(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, 2.0], [1.0, 2.1], "relative RMSE"),
        ([1.0, float("nan")], [1.0, 2.0], "1 of 2 values are not finite"),
        ([float("inf"), 1.0], [float("inf"), 1.0], "not finite"),
        ([1.0], [1.0, 1.0], "shape"),
        ([1e-9], [0.0], "relative RMSE inf"),
        ([1.0], [float("nan")], "relative RMSE nan"),
    ],
)
def test_assert_close_fails(
    actual: list[float], expected: list[float], message: str, assert_close: Callable[..., float]
) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        assert_close(torch.tensor(actual), torch.tensor(expected))


def test_assert_close_holds_a_result_to_its_baseline(assert_close: Callable[..., float]) -> None:
    expected = torch.ones(4, dtype=torch.float64)
    assert assert_close(expected * 1.0014, expected, baseline=expected * 1.001) > 1e-3
    with pytest.raises(pytest.fail.Exception, match=r"relative RMSE 1\.600e-03 exceeds 1\.500e-03"):
        assert_close(expected * 1.0016, expected, baseline=expected * 1.001)
    with pytest.raises(pytest.fail.Exception, match=r"exceeds 5\.000e-03"):
        assert_close(expected * 1.006, expected, baseline=expected * 1.1)


def test_nan_poison_reaches_every_way_to_get_fresh_memory(nan_poison: None) -> None:
    like = torch.zeros(3, dtype=torch.bfloat16)
    for fresh in (
        torch.empty(3),
        torch.empty_like(like),
        torch.empty_strided((3,), (2,)),
        like.new_empty(3),
    ):
        assert torch.isnan(fresh).all()
    assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_nan_poison_ends_with_its_test() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


def test_seed_makes_a_test_repeatable(seed: int) -> None:
    values = torch.rand(3), random.random()
    torch.manual_seed(seed)
    random.seed(seed)
    assert torch.equal(values[0], torch.rand(3)) and values[1] == random.random()


@pytest.mark.parametrize(
    ("capability", "archs", "served"),
    [
        ((9, 0), ("sm90",), True),
        ((9, 0), ("sm80+",), True),
        ((10, 3), ("sm100", "sm103"), True),
        ((9, 0), ("sm89",), False),
        ((8, 0), ("sm89+",), False),
        (None, ("sm90",), False),
    ],
)
def test_require_arch(
    capability: tuple[int, int] | None,
    archs: tuple[str, ...],
    served: bool,
    require_arch: Callable[..., torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if served:
        assert require_arch(*archs) == torch.device("cuda", 0)
    else:
        with pytest.raises(pytest.fail.Exception, match=f"needs {archs[0]}".replace("+", r"\+")):
            require_arch(*archs)


def test_gpu_test_fails_in_one_line_without_a_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    root = str(Path(__file__).parents[1] / "conftest.py")
    loaded = pytestconfig.pluginmanager.get_plugins()
    plugins = [plugin for plugin in loaded if getattr(plugin, "__file__", None) == root]
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(
        "import pytest\n\n@pytest.mark.gpu\ndef test_kernel():\n    raise SystemError"
    )
    failed = pytester.runpytest_inprocess(plugins=plugins)
    failed.assert_outcomes(errors=1)
    failed.stdout.fnmatch_lines(["needs a CUDA GPU; -m 'not gpu' leaves such tests out"])
    failed.stdout.no_fnmatch_line("*SystemError*")
    pytester.runpytest_inprocess("-m", "not gpu", plugins=plugins).assert_outcomes(deselected=1)
