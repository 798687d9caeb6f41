"""A training step of skip-list attention: gradients, checks, arithmetic, settings; on the CPU."""

import dataclasses
import math

import pytest
import torch

from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import backward, lite_training, training
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.problem import setting
from benchmarks.ops.lite.training import (
    LITE,
    LITE_BACKWARD,
    LITE_DENSE,
    LITE_LISTED,
    TORCH_CUDNN,
    TORCH_FLASH,
)
from benchmarks.tests.ops.common import assert_every_setting_is_measured, assert_fits_the_h200

ALL = lite_training.settings(False)
BY_NAME = {s.name: s for s in ALL}

LIST = setting("list", 300, batch=2, heads=3, dim=32, density=0.4)
FULL = setting("full", 200, heads=2, dim=16)
DENSE = setting("dense", 200, heads=2, dim=16)


def name_of(value):
    return value.name


def gradients_of_a_list(problem, x, b, h, whole):
    """dq, dk, dv of one head in fp64, term by term; `whole`: the forward pass is over all tiles."""
    q, k, v, dout = (t[b, :, h].double() for t in (x.q, x.k, x.v, x.dout))
    scale = problem.params["D"] ** -0.5
    tokens = torch.arange(len(q))
    listed = torch.ones(len(q), len(q), dtype=torch.bool)
    if x.mask is not None:
        words = x.mask[b, h].long()[tokens // 128][:, tokens // 64 // 32]
        listed = (words >> (tokens // 64 % 32)) & 1 == 1
    scores = scale * (q @ k.T)
    weights = (scores if whole else scores.masked_fill(~listed, -math.inf)).softmax(-1)
    delta = (dout * (weights @ v)).sum(-1, keepdim=True)
    kept = weights * listed
    dscores = kept * (dout @ v.T - delta)
    return scale * dscores @ k, scale * dscores.T @ q, kept.T @ dout


@pytest.mark.parametrize("problem", [LIST, FULL, DENSE], ids=name_of)
@pytest.mark.parametrize("provider", [LITE, LITE_BACKWARD, LITE_DENSE, LITE_LISTED], ids=name_of)
def test_ours_give_the_gradients_of_their_tiles(problem, provider):
    """Every provider against terms written out, and through the check, in inference mode as every benchmark runs."""
    x = backward.make_inputs(problem, "cpu", 3)
    given = dataclasses.replace(x, mask=None) if provider is LITE_DENSE else x
    if provider is LITE_LISTED and problem is DENSE:
        return
    with torch.inference_mode():
        found = provider.bind(problem, x)()
        errors = lite_training.OP.check(provider, problem, "cpu")
    whole = provider is not LITE_LISTED
    for b, h in ((0, 0), (problem.params["B"] - 1, 1)):
        want = gradients_of_a_list(problem, given, b, h, whole)
        for got, exact in zip(found, want, strict=True):
            error = (got[b, :, h].double() - exact).norm() / exact.norm()
            assert 0 < error < backward.GRADIENT_LIMIT
    assert list(errors) == ["dq", "dk", "dv"]
    assert all(1e-3 < e < backward.GRADIENT_LIMIT / 2 for e in errors.values())


def test_a_list_of_the_gradients_is_no_list_of_the_forward_pass():
    """The two ways of skipping differ, and each is refused as the other."""
    x = backward.make_inputs(LIST, "cpu", 3)
    part = gradients_of_a_list(LIST, x, 0, 0, True)
    exact = gradients_of_a_list(LIST, x, 0, 0, False)
    assert all((a - b).norm() > 0.1 * b.norm() for a, b in zip(part, exact))
    for provider, other in ((LITE, LITE_LISTED), (LITE_LISTED, LITE), (LITE_BACKWARD, LITE_DENSE)):
        wrong = dataclasses.replace(provider, bind=other.bind)
        with pytest.raises(CheckFailed, match=f"^{LIST.name}: relative RMSE of the dq"):
            training.check(wrong, LIST, "cpu")


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_torch_is_asked_for_a_backend_and_differentiated(monkeypatch, backend):
    chosen = []
    kernel = torch.nn.attention.sdpa_kernel

    def noted(found):
        chosen.append(found)
        return kernel(torch.nn.attention.SDPBackend.MATH)

    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", noted)
    provider = {"FLASH_ATTENTION": TORCH_FLASH, "CUDNN_ATTENTION": TORCH_CUDNN}[backend]
    with torch.inference_mode():
        errors = training.check(provider, DENSE, "cpu")
    assert chosen == [getattr(torch.nn.attention.SDPBackend, backend)]
    assert 0 < max(errors.values()) < training.PEER_LIMIT


def spoiled(how):
    """LITE with gradients that `how` changes in place."""

    def bind(problem, x):
        call = LITE.bind(problem, x)

        def changed():
            gradients = call()
            how(gradients)
            return gradients

        return changed

    return dataclasses.replace(LITE, bind=bind)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda g: g[1][1, 3, 0, 0].fill_(math.inf), "dk holds values that are not finite"),
        (lambda g: g[0][1, :, 2].mul_(1.05), "relative RMSE of the dq is [45].*limit 5e-03"),
        (lambda g: g[2].zero_(), r"relative RMSE of the dv is 1.00e\+00"),
    ],
)
def test_check_names_what_is_wrong(how, message):
    with pytest.raises(CheckFailed, match=f"^{LIST.name}: {message}"):
        training.check(spoiled(how), LIST, "cpu")


def test_a_step_leaves_its_inputs_alone_and_repeats():
    x = backward.make_inputs(LIST, "cpu", 0)
    before = [t.clone() for t in (x.q, x.k, x.v, x.dout, x.mask)]
    with torch.inference_mode():
        call = LITE.bind(LIST, x)
        first, second = call(), call()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(before, (x.q, x.k, x.v, x.dout, x.mask)))
    assert not any(t.requires_grad for t in (x.q, x.k, x.v))


def test_the_settings_are_those_18():
    assert registry.get("lite_training") is lite_training.OP
    kinds = ["dense", "full", "list75", "list25", "list12.5", "list5"]
    shapes = ["B1-S4096-H16-D128", "B1-S8192-H16-D128", "B2-S4096-H32-D128"]
    assert list(BY_NAME) == [f"{kind}-{shape}" for shape in shapes for kind in kinds]
    assert [lite.listed_tiles(s) for s in ALL[1:6]] == [64, 48, 16, 8, 3]
    assert [s.name for s in lite_training.settings(True)] == [
        f"{kind}-B1-S4096-H16-D128" for kind in ("dense", "full", "list12.5")
    ]


def test_arithmetic_is_that_of_both_passes():
    """4 B H S^2 D is 137.4 GFLOP at S=4096, H=16, D=128, and the backward pass two and a half times that."""
    unit = 137_438_953_472
    flops = {name: training.flops(s) for name, s in BY_NAME.items()}
    assert flops["dense-B1-S4096-H16-D128"] == flops["full-B1-S4096-H16-D128"] == unit * 7 // 2
    assert flops["list12.5-B1-S8192-H16-D128"] == 4 * unit + 4 * unit * 5 // 2 // 8
    assert flops["list75-B2-S4096-H32-D128"] == 4 * unit + 4 * unit * 5 // 2 * 3 // 4


def test_bytes_are_those_of_all_tensors():
    activation, lse, mask = 4096 * 16 * 128 * 2, 4096 * 16 * 4, 16 * 32 * 2 * 4
    dense, listed = BY_NAME["dense-B1-S4096-H16-D128"], BY_NAME["list25-B1-S4096-H16-D128"]
    assert LITE.moved(listed) == LITE_LISTED.moved(listed) == 8 * activation + lse + mask
    assert LITE_DENSE.moved(listed) == TORCH_FLASH.moved(dense) == 8 * activation + lse
    assert training.read(listed) == 4 * activation + mask


@pytest.mark.parametrize("problem", ALL, ids=name_of)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    # Inputs, their copies, out, gradients and fp32 workspace of every captured call of every provider.
    assert_fits_the_h200(training.read(problem), 6 * 2 * backward.moved(problem))


def test_providers_say_what_they_need(monkeypatch):
    dense, full, listed = ALL[0], ALL[1], ALL[3]
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: None)
    assert LITE_LISTED.supports(dense) == LITE_LISTED.supports(full) == "there is nothing to skip"
    assert LITE_LISTED.supports(listed) is None and LITE_DENSE.supports(dense) == "is lite itself"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert TORCH_CUDNN.supports(dense) == "needs an NVIDIA GPU"
    assert TORCH_CUDNN.supports(listed) == "takes no lists of tiles"
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    refusal = lambda *given: asked.append(given) or "refused"  # noqa: E731
    monkeypatch.setattr(lite_providers, "torch_refusal", refusal)
    assert TORCH_CUDNN.supports(dense) == TORCH_FLASH.supports(dense) == "refused"
    assert asked == [("CUDNN_ATTENTION", 128, True), ("FLASH_ATTENTION", 128, True)]


@pytest.mark.parametrize("training_too", [False, True])
def test_a_backend_is_tried_once_and_its_refusal_is_the_reason(monkeypatch, training_too):
    seen = []

    def attend(q, k, v):
        seen.append((tuple(q.shape), q.dtype, q.requires_grad, torch.is_inference_mode_enabled()))
        if q.shape[3] > 128:
            raise RuntimeError("No available kernel.\nand more")
        return q * 2

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, device, **more: ones(*a, **more))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    lite_providers.torch_refusal.cache_clear()
    with torch.inference_mode():
        for _ in range(2):
            refused = lite_providers.torch_refusal("CUDNN_ATTENTION", 256, training_too)
            assert refused == "does not take this problem: No available kernel."
        assert lite_providers.torch_refusal("CUDNN_ATTENTION", 64, training_too) is None
    lite_providers.torch_refusal.cache_clear()
    assert seen == [((1, 1, 128, d), torch.bfloat16, training_too, False) for d in (256, 64)]


def test_a_run_yields_rates_and_ratios(measured, card, monkeypatch):
    costs = {"lite": 10.0, "lite_listed": 8.0, "lite_backward": 6.0, "lite_dense": 30.0}
    costs |= {"torch_flash": 12.0, "torch_cudnn": 9.0}
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: None)
    monkeypatch.setattr(lite_providers, "torch_refusal", lambda *given: None)
    card(9, 0)
    result = measured(
        lite_training.OP, lambda name, problem: costs[name], [DENSE, LIST], check=lambda *_: {}
    )
    results.validate(result)
    assert len(result["rows"]) == 4 + 4
    (row,) = results.rows_of(result, setting=LIST.name, provider="lite")
    assert row["ratio_lite_dense"] == 3.0 and "ratio_torch_flash" not in row
    (row,) = results.rows_of(result, setting=DENSE.name, provider="lite")
    assert (row["ratio_torch_flash"], row["ratio_torch_cudnn"]) == (1.2, 0.9)
    assert row["tflops"] == round(14 * 2 * 200 * 200 * 16 / 10.0 / 1e6, 1)


def test_measured_results_hold_every_setting():
    assert_every_setting_is_measured("lite_training", BY_NAME, ("lite", "lite_backward"))
