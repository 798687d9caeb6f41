"""Whose kernels serve a call."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cula_testing.interpreters import run
from liteattention_sm89 import choice, launch

Q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 100, 2, 128))
OTHER = "another_package"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(choice, "_asked", None)
    choice._chosen.cache_clear()
    yield
    choice._chosen.cache_clear()


@pytest.fixture
def other(monkeypatch):
    """A package for capability 9.0 without a backward, on a card of that; `asked` keeps what it is told."""
    asked: list[dict] = []

    def supports(**problem):
        asked.append(problem)
        return "no backward" if problem["backward"] else None

    package, spec = ModuleType(OTHER), ModuleType(f"{OTHER}._spec")
    package.__path__ = []
    spec.__package__, spec.NAME, spec.supports = OTHER, "liteattention-sm90", supports
    theirs = ModuleType(f"{OTHER}.launch")
    theirs.forward = lambda: None
    for module in (package, spec, theirs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    points = [SimpleNamespace(value=spec.__name__)]
    monkeypatch.setattr(choice, "entry_points", lambda group: points)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    return SimpleNamespace(asked=asked, launch=theirs, spec=spec, points=points)


def chosen(name: str = "forward", keys: int = 300, **more):
    return choice.launcher(name, Q, 64, keys, False, **more)


def test_each_pass_chooses_for_itself(other):
    assert chosen() is other.launch.forward
    assert chosen("backward") is launch.backward
    assert other.asked[0] == {
        "capability": (9, 0), "dtype": torch.bfloat16, "head_dim_k": 128, "head_dim_v": 128, "block_n": 64, "tiles": 8,
        "packed": False, "use_int8": False, "backward": False, "deterministic": False,
    }  # fmt: skip
    assert other.asked[1]["backward"]


def test_a_choice_is_kept(other):
    for keys in (257, 300, 512):  # five to eight tiles
        assert chosen(keys=keys) is other.launch.forward
    assert len(other.asked) == 1
    chosen(keys=513)
    chosen(int8=True)
    assert [p["tiles"] for p in other.asked] == [8, 16, 8] and other.asked[2]["use_int8"]


def test_a_backward_may_have_to_be_deterministic(other):
    for deterministic in (True, False, True):
        assert chosen("backward", deterministic=deterministic) is launch.backward
    assert [p["deterministic"] for p in other.asked] == [True, False]


@pytest.mark.parametrize(
    "keys, tiles", [(0, 0), (1, 1), (64, 1), (65, 2), (262144, 4096), (262145, 8192)]
)
def test_tiles_of_a_row(other, keys, tiles):
    chosen(keys=keys)
    assert other.asked[0]["tiles"] == tiles


def test_a_demand_is_met_or_raises(other):
    with choice.forced("sm89"):
        assert chosen() is launch.forward and not other.asked
    with choice.forced("sm90"):
        assert chosen() is other.launch.forward and len(other.asked) == 1
        with pytest.raises(RuntimeError, match="^LITEATTENTION_KERNEL=sm90: no backward$"):
            chosen("backward")
    with choice.forced("sm91"), pytest.raises(RuntimeError, match="=sm91: no such package is inst"):
        chosen()
    assert chosen() is other.launch.forward


def test_nobody_else_is_there(other):
    other.points.clear()
    assert chosen() is launch.forward
    with choice.forced("sm90"), pytest.raises(RuntimeError, match="no such package is installed"):
        chosen()


def test_a_tree_without_metadata_has_the_package_of_the_architecture(other, monkeypatch):
    other.points.clear()
    monkeypatch.setattr(choice, "find_spec", lambda name: name.startswith("liteattention_sm90"))
    monkeypatch.setitem(sys.modules, "liteattention_sm90", sys.modules[OTHER])
    monkeypatch.setitem(sys.modules, "liteattention_sm90._spec", other.spec)
    assert chosen() is other.launch.forward
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    choice._chosen.cache_clear()
    assert chosen() is launch.forward


def test_the_environment_is_read_at_the_import(tmp_path, monkeypatch):
    import liteattention_sm89

    code = """
import os
os.environ["LITEATTENTION_KERNEL"] = "sm90"
from liteattention_sm89 import choice
assert choice._asked == "sm90"
with choice.forced(None):
    assert choice._asked is None
assert choice._asked == "sm90"
"""
    result = run(code, liteattention_sm89, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
