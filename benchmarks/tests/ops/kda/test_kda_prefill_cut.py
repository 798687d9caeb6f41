"""The benchmark beside FLA's own cutting: what FLA is given, and whether it cut; on the CPU with a stand-in for FLA."""

import os
import sys
import types

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.kda import kda_prefill, kda_prefill_cut
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda.kda_prefill_cut import FLA_CUT, OP, SWITCH
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.sequences import batch_of


@pytest.fixture
def fla(monkeypatch):
    """FLA whose chunk_kda is the oracle; it cuts like the true one: where it is asked to, and in inference mode."""
    asked = []
    merging = types.ModuleType("fla.ops.common.intracard_cp")
    merging.intracard_merge = lambda: None

    def chunk_kda(q, k, v, cu_seqlens, cu_seqlens_cpu, **options):
        asked.append((os.environ.get(SWITCH), cu_seqlens.tolist(), cu_seqlens_cpu.tolist()))
        if os.environ.get(SWITCH) == "1" and torch.is_inference_mode_enabled():
            merging.intracard_merge()
        problem = setting(q.shape[1], heads=v.shape[2])
        x = kda.make_inputs(problem, "cpu", seed=kda_prefill_cut.kda.checks.SEED)
        return kda.oracle(problem, x, list(range(v.shape[2])))

    function = types.ModuleType("fla.ops.kda")
    function.chunk_kda = chunk_kda
    common = types.ModuleType("fla.ops.common")
    common.intracard_cp = merging
    for module in (function, common, merging):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return types.SimpleNamespace(asked=asked, merging=merging, function=function)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_switch_is_on_in_the_call_and_back_behind_it(fla, small, monkeypatch, before):
    monkeypatch.delenv(SWITCH, raising=False)
    if before:
        monkeypatch.setenv(SWITCH, before)
    problem = setting(100, heads=2)
    FLA_CUT.bind(problem, kda.make_inputs(problem, "cpu", seed=0))()
    assert fla.asked == [("1", [0, 100], [0, 100])]
    assert os.environ.get(SWITCH) == before


def test_the_check_says_whether_it_cut_and_refuses_wrong_results(fla, small, monkeypatch):
    problem = setting(100, heads=2)
    assert kda_prefill_cut.check(FLA_CUT, problem, "cpu")["cut"] == 0.0
    kda_prefill_cut._count_cuts()
    kda_prefill_cut._count_cuts()  # the second time changes nothing
    errors = kda_prefill_cut.check(FLA_CUT, problem, "cpu")
    assert errors["cut"] == 1.0 and errors["output"] < 1e-6
    right = fla.function.chunk_kda
    fla.function.chunk_kda = lambda *args, **options: tuple(
        1.1 * y for y in right(*args, **options)
    )
    with pytest.raises(CheckFailed, match="relative RMSE"):
        kda_prefill_cut.check(FLA_CUT, problem, "cpu")


def test_settings_are_the_long_ones_that_fla_can_be_given_packed():
    names = [s.name for s in OP.settings(False)]
    assert names == [s.name for s in kda_prefill.few_heads()] and len(set(names)) == len(names)
    assert all(batch_of(s) == 1 and not s.params["feature"] for s in OP.settings(False))
    assert [s.name for s in OP.settings(True)] == ["B1-T16384-H8"]
    assert [p.name for p in OP.providers] == ["cula", "fla", "fla_cp", "copy_ceiling"]
