"""Lightning attention with its gradients."""

import dataclasses

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lightning import lightning_training as training
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.problem import setting
from benchmarks.ops.lightning.providers import CULA, FLA


@pytest.mark.parametrize(
    "problem", [setting(70, heads=4, mode="gate"), setting(100, heads=4, sequences=3)]
)
def test_gradients_are_checked_one_by_one(problem):
    leaves = training.LEAVES[problem.params["mode"]]

    def bound(spoil=None):
        def bind(problem, x):
            run = training.step("reference", problem, x)
            return lambda: tuple(
                grad * (1.03 if name == spoil else 1) for name, grad in zip(leaves, run())
            )

        return dataclasses.replace(training.OP.providers[0], bind=bind)

    with torch.inference_mode():  # as every benchmark runs
        errors = training.check(bound(), problem, "cpu")
        assert set(errors) == set(leaves) and 0 < max(errors.values()) < training.LIMIT
        for name in leaves:
            with pytest.raises(CheckFailed, match=name):
                training.check(bound(name), problem, "cpu")


def test_a_step_is_the_derivative_of_the_outputs():
    problem = setting(40, heads=2)
    x = lightning.make_inputs(problem, "cpu", 0)
    x = dataclasses.replace(x, **{name: getattr(x, name).double() for name in "qkv"})
    found = training.step("reference", problem, x)()
    nudge = 1e-6
    for index in ((0, 7, 1, 3), (0, 39, 0, 0)):
        sums = []
        for sign in (1, -1):
            k = x.k.clone()
            k[index] += sign * nudge
            o, _ = training.chunk_simple_gla(x.q, k, x.v, g_gamma=-x.decay, impl="reference")
            sums.append((o * x.v).sum())
        slope = (sums[0] - sums[1]) / (2 * nudge)
        torch.testing.assert_close(found[1][index], slope, rtol=1e-5, atol=1e-8)


def test_bytes_are_those_of_eight_activations():
    ours = training.OP.providers[0]
    state = 4 * 64 * 128 * 128
    forward = CULA.moved(setting(512)) - state - 4 * 64
    assert ours.moved(setting(512)) == 2 * forward
    assert ours.moved(setting(512, mode="gate")) == 2 * forward + 8 * 64 * 512


def test_who_trains_and_who_cannot(monkeypatch):
    ours, fla = (dataclasses.replace(p, supports=lambda _: None) for p in (CULA, FLA))
    assert "needs a CUDA device" in training._supports(ours, setting(512))
    assert "needs a CUDA device" in training._supports(fla, setting(512, mode="gate"))


def test_gradients_of_a_lifted_refusal_are_written_down_and_not_judged():
    def bind(problem, x):
        run = training.step("reference", problem, x)
        return lambda: tuple(2 * grad for grad in run())

    peer = next(p for p in training.OP.providers if p.name == training.LIFTED)
    with torch.inference_mode():
        errors = training.check(
            dataclasses.replace(peer, bind=bind), setting(70, heads=4, mode="gate"), "cpu"
        )
    assert set(errors) == {"q", "k", "v", "gate"} and min(errors.values()) > 0.5
