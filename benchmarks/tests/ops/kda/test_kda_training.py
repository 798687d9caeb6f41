"""KDA prefill with its gradients."""

import dataclasses
import functools

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.kda import kda_training
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.providers import CULA


def in_bf16(problem, x, spoil=None):
    """The reference's gradients in the dtypes of the inputs, perhaps one of them spoiled."""

    def run():
        found = dict(zip(kda_training.LEAVES, kda_training.step("reference", problem, x)()))
        if spoil is not None:
            found[spoil] = found[spoil] * 1.03
        return tuple(found.values())

    return run


@pytest.mark.parametrize("problem", [setting(100, heads=4), setting(100, heads=4, sequences=3)])
def test_gradients_are_checked_one_by_one(small, problem):
    ours, kept, fla = (dataclasses.replace(p, bind=in_bf16) for p in kda_training.OP.providers)
    with torch.inference_mode():  # as every benchmark runs
        errors = kda_training.check(ours, problem, "cpu")
    assert set(errors) == set(kda_training.LEAVES) and max(errors.values()) < 5e-3
    for name in kda_training.LEAVES:
        bind = functools.partial(in_bf16, spoil=name)
        wrong = dataclasses.replace(ours, bind=bind)
        with pytest.raises(CheckFailed, match=f"gradient of {name} of cula: .*, limit 5.00e-03"):
            kda_training.check(wrong, problem, "cpu")
        with pytest.raises(CheckFailed, match="of cula_kept: .*, limit 5.00e-03"):
            kda_training.check(dataclasses.replace(kept, bind=bind), problem, "cpu")
        # FLA may be so far off.
        theirs = dataclasses.replace(fla, bind=bind)
        assert kda_training.check(theirs, problem, "cpu")[name] > kda_training.LIMIT


def test_a_step_is_the_derivative_of_the_outputs(small):
    problem = setting(40, heads=2)
    x = kda.make_inputs(problem, "cpu", 0)
    found = kda_training.step("reference", problem, kda_training.heads_of(x, [0, 1]))()
    given = kda_training.heads_of(x, [0, 1])
    nudge = 1e-6
    for index in ((0, 7, 1, 3), (0, 39, 0, 0)):
        sums = []
        for sign in (1, -1):
            v = given.v.clone()
            v[index] += sign * nudge
            options = kda_providers.gate_arguments(problem, given) | {"impl": "reference"}
            o, _ = kda_training.chunk_kda(given.q, given.k, v, **options)
            sums.append((o * given.v).sum())
        slope = (sums[0] - sums[1]) / (2 * nudge)
        torch.testing.assert_close(found[2][index], slope, rtol=1e-5, atol=1e-8)


def test_who_trains_and_who_cannot(monkeypatch):
    ours, kept, fla = kda_training.OP.providers
    assert kda_training.impl(kept.name) == kda_training.impl(ours.name)
    assert kda_training.impl(ours.name) == "cula-cp-sm90" and kda_training.impl(fla.name) == "fla"
    assert ours.moved(setting(512)) == 2 * CULA.moved(setting(512))
    monkeypatch.setitem(kda_providers._MISSING, "cula_cp_sm90", lambda: "not installed")
    assert ours.supports(setting(512)) == "not installed"
    monkeypatch.setitem(kda_providers._MISSING, "cula_cp_sm90", lambda: None)
    monkeypatch.setattr(kda_providers, "_fla_missing", lambda: None)
    assert "needs a CUDA device" in ours.supports(setting(512))


def test_only_one_provider_keeps_blocks(monkeypatch):
    told = []
    monkeypatch.setattr(kda_training, "step", lambda *args, **named: told.append(named))
    for provider in kda_training.OP.providers:
        provider.bind(setting(512), None)
    assert [named["disable_recompute"] for named in told] == [False, True, False]
