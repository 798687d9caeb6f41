"""The gated delta rule with its gradients."""

import dataclasses
import os

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lightning import gated_training as training
from benchmarks.ops.lightning.delta import setting


@pytest.mark.parametrize(
    "problem", [setting(70, heads=4, heads_q=2), setting(60, heads=2, sequences=3)]
)
def test_gradients_are_checked_one_by_one(problem):
    def bound(spoil=None):
        def bind(problem, x):
            run = training.step("reference", training.leaves_of(x), x)
            return lambda: tuple(
                grad * (1.03 if name == spoil else 1) for name, grad in zip(training.LEAVES, run())
            )

        return dataclasses.replace(training.OP.providers[0], bind=bind)

    with torch.inference_mode():  # as every benchmark runs
        errors = training.check(bound(), problem, "cpu")
        assert set(errors) == set(training.LEAVES) and 0 < max(errors.values()) < training.LIMIT
        for name in training.LEAVES:
            with pytest.raises(CheckFailed, match=name):
                training.check(bound(name), problem, "cpu")


def test_the_forward_alone_is_that_of_a_step():
    def bind(problem, x):
        return training.forward("reference", training.leaves_of(x), x)

    provider = dataclasses.replace(training.OP.providers[1], bind=bind)
    assert provider.name == training.FORWARD
    problem = setting(70, heads=4, heads_q=2)
    with torch.inference_mode():
        assert set(training.check(provider, problem, "cpu")) == {"o"}
        wrong = dataclasses.replace(
            provider, bind=lambda *given: lambda: (1.03 * bind(*given)()[0],)
        )
        with pytest.raises(CheckFailed, match="o"):
            training.check(wrong, problem, "cpu")


def test_every_published_shape_is_a_setting_once():
    names = [problem.name for problem in training.settings(quick=False)]
    assert len(names) == len(set(names)) == 6 + 32
    assert {"B1-T32768-H4-Q2", "N8-T8192-uniform-H32-Q16"} <= set(names)


def named(name):
    return next(provider for provider in training.OP.providers if provider.name == name)


def test_gradients_of_a_lifted_refusal_are_written_down_and_not_judged():
    def bind(problem, x):
        run = training.step("reference", training.leaves_of(x), x)
        return lambda: tuple(2 * grad for grad in run())

    wrong = dataclasses.replace(named(training.LIFTED), bind=bind)
    with torch.inference_mode():
        errors = training.check(wrong, setting(70, heads=4, heads_q=2), "cpu")
    assert set(errors) == set(training.LEAVES) and min(errors.values()) > 0.5


def test_bytes_are_those_of_inputs_and_gradients():
    """q, k, v, o of 2 bytes, two numbers per token and head of 4, and as many gradients."""
    tokens = 512 * 64
    assert training.moved(setting(512)) == 2 * tokens * (4 * 2 * 128 + 2 * 4)


@pytest.mark.parametrize(
    "problem, slots", [(setting(4096), 64), (setting(4096, heads=32, sequences=3), 67)]
)
def test_groups_of_heads_share_memory(monkeypatch, problem, slots):
    """The limit is there while the call runs, and is what the heads of a group take."""
    seen = []
    monkeypatch.delenv("CULA_SCRATCH_LIMIT", raising=False)
    monkeypatch.setattr(training, "leaves_of", lambda x: {})
    call = lambda *given: lambda: seen.append(os.environ.get("CULA_SCRATCH_LIMIT"))  # noqa: E731
    monkeypatch.setattr(training, "step", call)
    for name in "cula", training.HALVES, training.WHOLE:
        named(name).bind(problem, None)()
    heads = problem.params["H"]
    assert seen == [None, *(str(slots * of * 159_232) for of in (heads // 2, heads))]
    assert "CULA_SCRATCH_LIMIT" not in os.environ


def test_who_trains_and_who_cannot():
    providers = training.OP.providers
    assert [provider.name for provider in providers] == [
        "cula", "cula_forward", "cula_halves", "cula_whole", "fla", "fla_lifted",
    ]  # fmt: skip
    for provider in providers:
        assert provider.supports(setting(512)) is not None  # without a GPU
