"""KDA prefill kernel by kernel."""

import math

import pytest
import torch

from benchmarks.ops.kda import kda_prefill_kernels
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.internals import kernel_of
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.providers import CULA
from benchmarks.ops.kda.work import H200, work
from cula_core.delta_rule import launch  # noqa: F401 (only what is imported is pretended)
from cula_core.delta_rule import plan as planning
from cula_testing.shortcuts import pretended_gpu

KERNELS = {p.name: p for p in kda_prefill_kernels.OP.providers}


@pytest.mark.parametrize(
    "problem, all_of_them",
    [
        (setting(128, heads=2), ["prepare", "recurrence"]),
        (setting(8192, heads=1), ["prepare", "scan", "merge", "recurrence"]),
    ],
    ids=["whole", "cut"],
)
def test_each_kernel_is_launched_alone(launched, problem, all_of_them):
    x = kda.make_inputs(problem, "cpu", 0)
    for name, provider in KERNELS.items():
        launched.clear()
        provider.bind(problem, x)()
        names = [kernel for kernel, _ in launched]
        if name == "cula":
            assert names == all_of_them
        elif name == kda_prefill_kernels.REPEATED:
            assert names == ["prepare"]
        else:
            assert names == [name] * (name in all_of_them)
    launched.clear()
    kda_providers.workspace(problem, "cpu").zero_()
    kda_prefill_kernels._in_two(problem, x)
    assert [kernel for kernel, _ in launched] == all_of_them
    assert bool((kda_providers.workspace(problem, "cpu") == 255).all())


def test_each_kernel_is_launched_alone_after_calls_of_all(monkeypatch):
    """Neither a list that cula leaves behind nor a plan with kernels beside each other changes what is launched."""
    # The planner always has kernels beside each other.
    monkeypatch.setattr(planning.CostModel, "apart_us", lambda *facts: math.inf)
    problem = setting(8192, heads=1)
    x = kda.make_inputs(problem, "cpu", 0)
    with pretended_gpu() as launches:
        for name, provider in KERNELS.items():
            call = provider.bind(problem, x)
            for _ in range(3):
                launches.seen.clear()
                call()
                found = [unit.config for unit, *_ in launches.seen]
                beside = [getattr(config, "beside", False) for config in found]
                if name == "cula":
                    assert beside == [True, True]
                else:
                    assert [kernel_of(config) for config in found] == [name.split("_")[0]]
                    assert beside == [False]


def test_what_is_repeated_is_one_chunk(launched):
    problem = setting(256, batch=2, heads=3)
    x = kda.make_inputs(problem, "cpu", 0)
    KERNELS[kda_prefill_kernels.REPEATED].bind(problem, x)()
    ((_, (q, k, g, beta, *_)),) = launched
    for given, whole in ((q, x.q), (k, x.k), (g, x.gate), (beta, x.beta)):
        assert given.shape[:3] == (8, 64, 3) and given.stride(0) == 0
        assert given.data_ptr() == whole.data_ptr() and torch.equal(given[7], whole[0, :64])


def test_bytes_of_kernels():
    whole, cut = setting(512), setting(4096, heads=4)
    w = work(cut, H200)
    moved = {name: p.moved(cut) for name, p in KERNELS.items()}
    assert moved["prepare"] == w.prepare_bytes and moved["recurrence"] == w.walk_bytes
    assert moved["scan"] == w.scan_bytes
    # 4 segments: the map and the state that it adds to, and the start.
    assert moved["merge"] == 4 * 4 * 3 * 65_536
    assert KERNELS["prepare_repeated"].moved(whole) == 512 * 59_904
    assert KERNELS["cula"].moved(whole) == CULA.moved(whole)


def test_what_is_left_out_says_why():
    for name in ("scan", "merge"):
        assert KERNELS[name].supports(setting(4096)) == "with many heads no sequence is cut"
        assert KERNELS[name].supports(setting(8192, heads=4)) is None
    assert KERNELS["prepare"].supports(setting(4096)) is None
