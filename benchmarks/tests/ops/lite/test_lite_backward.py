"""Gradients of skip-list attention: inputs, checks, arithmetic, settings; with reference implementations on the CPU."""

import dataclasses
import math

import pytest
import torch

from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import backward, lite_attention, lite_backward
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.backward import (
    LITE,
    LITE_DENSE,
    LITE_DETERMINISTIC,
    LITE_SM89,
    TORCH_FLASH,
)
from benchmarks.ops.lite.problem import setting
from benchmarks.tests.ops.common import assert_every_setting_is_measured, assert_fits_the_h200
from liteattention_sm89 import choice

ALL = lite_backward.settings(False)
BY_NAME = {s.name: s for s in ALL}

LIST = setting("list", 500, batch=2, heads=3, dim=32, density=0.3)
SMALL = [
    LIST,
    setting("list", 200, heads=2, dim=16, density=0.5),
    setting("dense", 300, batch=2, heads=2, dim=16),
    setting("dense", 300, heads=2, dim=16, causal=True),
]


def name_of(problem):
    return problem.name


def dense_autograd(problem, x, heads):
    """Gradients by autograd through a softmax in fp64 that knows no tiles but a mask of keys, [P, S, D] each."""
    found = []
    for b, h in heads:
        q, k, v = (t[b, :, h].double().requires_grad_() for t in (x.q, x.k, x.v))
        scores = q @ k.T * problem.params["D"] ** -0.5
        tokens = torch.arange(len(q))
        hidden = torch.zeros(len(q), len(q), dtype=torch.bool)
        if problem.params["causal"]:
            hidden |= tokens > tokens[:, None]
        if x.mask is not None:
            words = x.mask[b, h].long()[tokens // 128][:, tokens // 64 // 32]
            hidden |= (words >> (tokens // 64 % 32)) & 1 == 0
        out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        found.append(torch.autograd.grad(out, (q, k, v), x.dout[b, :, h].double()))
    return [torch.stack(parts) for parts in zip(*found)]


@pytest.mark.parametrize("problem", SMALL, ids=name_of)
def test_the_oracle_is_autograd_over_the_listed_keys(problem):
    x = backward.make_inputs(problem, "cpu", 3)
    heads = [(0, 1), (problem.params["B"] - 1, 0)]
    found = backward.oracle(problem, x, x.mask, heads)
    for got, want in zip(found, dense_autograd(problem, x, heads), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    if x.mask is not None:
        every = dataclasses.replace(x, mask=None)
        found = backward.oracle(problem, x, None, heads)
        for got, want in zip(found, dense_autograd(problem, every, heads), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("provider", [LITE, LITE_SM89, LITE_DETERMINISTIC, LITE_DENSE], ids=name_of)
@pytest.mark.parametrize("problem", SMALL, ids=name_of)
def test_ours_pass_the_check_on_the_cpu(problem, provider):
    with torch.inference_mode():
        errors = lite_backward.OP.check(provider, problem, "cpu")
    assert list(errors) == ["dq", "dk", "dv"]
    assert all(1e-3 < e < backward.GRADIENT_LIMIT / 2 for e in errors.values())


def flash_on_the_cpu():
    """Torch's operators for the CPU behind the arguments of those for CUDA."""
    aten = torch.ops.aten

    def attend(q, k, v, dropout, causal):
        assert dropout == 0.0 and all(t.shape == q.shape for t in (k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal)
        return out, lse, "starts_q", "starts_k", q.shape[2], k.shape[2], "seed", "offset", None

    def differentiate(dout, q, k, v, out, lse, *rest):
        rows, keys = q.shape[2], k.shape[2]
        causal = rest[5]
        assert rest == ("starts_q", "starts_k", rows, keys, 0.0, causal, "seed", "offset")
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal
        )

    return attend, differentiate


@pytest.mark.parametrize("problem", SMALL[2:], ids=name_of)
def test_torch_passes_the_check_with_its_operators_for_the_cpu(monkeypatch, problem):
    monkeypatch.setattr(backward, "_torch_operators", flash_on_the_cpu)
    errors = lite_backward.OP.check(TORCH_FLASH, problem, "cpu")
    assert all(0 < e < backward.GRADIENT_LIMIT for e in errors.values())


def test_the_operators_of_torch_take_what_they_are_given():
    """Names of the arguments for CUDA, in the order in which they are passed; the last ones have defaults."""
    attend, differentiate = backward._torch_operators()
    names = [a.name for a in attend._schema.arguments]
    assert names[:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    assert len(attend._schema.returns) == 9
    names = [a.name for a in differentiate._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert names[6:12] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert len(names) == 15 and names[-1] == "scale"


def spoiled(how):
    """LITE_DETERMINISTIC with gradients that `how(gradients, number of the call)` changes in place."""

    def bind(problem, x):
        call, calls = LITE_DETERMINISTIC.bind(problem, x), []

        def changed():
            calls.append(None)
            gradients = call()
            how(gradients, len(calls))
            return gradients

        return changed

    return dataclasses.replace(LITE_DETERMINISTIC, bind=bind)


def not_finite(gradients, number):
    gradients[1][1, 3, 0, 0] = math.inf


def wrong_head(gradients, number):
    gradients[0][1, :, 2] *= 1.01


def no_values(gradients, number):
    gradients[2].zero_()


def noisy(gradients, number):
    gradients[0][0, 0, 1, 0] += 1e-2 * (number - 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (not_finite, "dk holds values that are not finite"),
        (wrong_head, "relative RMSE of the dq is 1.*limit 5e-03"),
        (no_values, r"relative RMSE of the dv is 1.00e\+00"),
        (noisy, "dq differs from call to call"),
    ],
)
def test_check_names_what_is_wrong(how, message):
    with pytest.raises(CheckFailed, match=f"^{LIST.name}: {message}"):
        backward.check(spoiled(how), LIST, "cpu")


def test_gradients_over_other_tiles_are_refused():
    """Over all tiles with the forward of the listed ones, and over the listed ones with a forward over all."""
    for provider, bind in ((LITE, LITE_DENSE.bind), (LITE_DENSE, LITE.bind)):
        with pytest.raises(CheckFailed, match="relative RMSE of the dq"):
            backward.check(dataclasses.replace(provider, bind=bind), LIST, "cpu")
    x = backward.make_inputs(LIST, "cpu", 20_231)
    x.mask[:] = backward.make_inputs(LIST, "cpu", 5).mask
    wrong = dataclasses.replace(LITE, bind=lambda problem, _: LITE.bind(problem, x))
    with pytest.raises(CheckFailed, match="relative RMSE of the dq"):
        backward.check(wrong, LIST, "cpu")


@pytest.mark.parametrize(
    ("provider", "listed", "deterministic"),
    [(LITE, True, False), (LITE_DETERMINISTIC, True, True), (LITE_DENSE, False, False)],
    ids=["lite", "lite_deterministic", "lite_dense"],
)
def test_a_timed_call_is_one_call_of_the_operator(monkeypatch, provider, listed, deterministic):
    x = backward.make_inputs(LIST, "cpu", 0)
    calls = []
    with monkeypatch.context() as patch:
        fake = type("Operator", (), {"default": staticmethod(lambda *a: calls.append(a))})
        patch.setattr(torch.ops.liteattention_sm89, "backward", fake)
        call = provider.bind(LIST, x)
        assert calls == []
        patch.setattr("liteattention_sm89.lite_attention", None)
        call()
    ((dout, dlse, q, k, v, out, lse, mask, *rest),) = calls
    assert (dout is x.dout, dlse, q is x.q, k is x.k, v is x.v) == (True, None, True, True, True)
    assert mask is (x.mask if listed else None)
    assert rest == [None, None, 500, 500, 32**-0.5, False, 128, 64, deterministic]
    assert out.shape == x.q.shape and lse.shape == (2, 3, 500)


def test_kernels_are_asked_for_in_the_call_that_is_timed_and_before_it(monkeypatch):
    asked = []

    def note(*given, **options):
        asked.append(choice._asked)
        return None, None, None

    monkeypatch.setattr("liteattention_sm89.lite_attention", note)
    monkeypatch.setattr("benchmarks.ops.lite.internals.backward_operator", lambda: note)
    x = backward.make_inputs(LIST, "cpu", 0)
    for provider in (LITE, LITE_SM89, LITE):
        provider.bind(LIST, x)()
    assert asked == [None, None, "sm89", "sm89", None, None]


def test_inputs_are_those_of_the_forward_pass_and_dout():
    x, again = (backward.make_inputs(LIST, "cpu", 4) for _ in range(2))
    forward = lite.make_inputs(LIST, "cpu", 4)
    for name in ("q", "k", "v", "mask"):
        assert torch.equal(getattr(x, name), getattr(forward, name))
    assert torch.equal(x.dout, again.dout) and x.dout.dtype == torch.bfloat16
    assert x.dout.shape == x.q.shape and float(x.dout.float().std()) == pytest.approx(1, rel=0.02)
    assert not any(torch.equal(x.dout, t) for t in (x.q, x.k, x.v))
    assert not torch.equal(x.dout, backward.make_inputs(LIST, "cpu", 5).dout)


def test_the_settings_are_those_11():
    assert registry.get("lite_backward") is lite_backward.OP
    assert ALL[:6] == lite_attention.settings(False)[:6]
    assert list(BY_NAME)[6:] == [
        "list5-B1-S8192-H16-D128", "list12.5-B1-S8192-H16-D128", "list25-B1-S8192-H16-D128",
        "list50-B1-S8192-H16-D128", "list12.5-B1-S16384-H24-D128",
    ]  # fmt: skip
    assert [lite.listed_tiles(s) for s in ALL[6:]] == [6, 16, 32, 64, 32]
    quick = lite_backward.settings(True)
    assert len(quick) == 2 and {s.name for s in quick} < set(BY_NAME)


def test_arithmetic_is_that_of_five_products():
    """10 B H S^2 D is 343.6 GFLOP at S=4096, H=16, D=128."""
    flops = {name: backward.flops(s) for name, s in BY_NAME.items()}
    unit = 10 * 16 * 4096**2 * 128
    assert unit == 343_597_383_680
    assert flops["dense-B1-S4096-H16-D128"] == unit
    assert flops["dense-B1-S16384-H24-D128"] == 24 * unit
    assert flops["dense-B2-S4096-H32-D128"] == 4 * unit
    assert flops["dense-B1-S8192-H16-D64"] == flops["dense-B1-S8192-H16-D128-causal"] == 2 * unit
    assert flops["list50-B1-S8192-H16-D128"] == 2 * unit
    assert flops["list5-B1-S8192-H16-D128"] == 4 * unit * 6 // 128
    assert flops["list12.5-B1-S16384-H24-D128"] == 3 * unit


def test_bytes_are_those_of_all_tensors():
    activation, lse, mask = 8192 * 16 * 128 * 2, 8192 * 16 * 4, 16 * 64 * 4 * 4
    dense, listed = BY_NAME["dense-B1-S8192-H16-D128"], BY_NAME["list25-B1-S8192-H16-D128"]
    assert LITE.moved(dense) == TORCH_FLASH.moved(dense) == 8 * activation + lse
    assert LITE.moved(listed) == LITE_DETERMINISTIC.moved(listed) == 8 * activation + lse + mask
    assert LITE_DENSE.moved(listed) == LITE.moved(dense)
    assert backward.read(listed) == 5 * activation + lse + mask


@pytest.mark.parametrize("problem", ALL, ids=name_of)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    # Inputs, an out per provider, gradients and fp32 workspace of every captured call.
    assert_fits_the_h200(backward.read(problem), 4 * 2 * backward.moved(problem))


def test_providers_say_what_they_need(monkeypatch, card):
    dense, listed = ALL[0], ALL[-1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert TORCH_FLASH.supports(dense) == "needs an NVIDIA GPU"
    assert TORCH_FLASH.supports(listed) == "takes no lists of tiles"
    assert LITE_DENSE.supports(dense) == "is lite itself"
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: "not installed")
    for provider in (LITE, LITE_SM89, LITE_DETERMINISTIC):
        assert provider.supports(listed) == provider.supports(dense) == "not installed"
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: None)
    card(8, 9)
    assert LITE_SM89.supports(listed) == LITE_SM89.supports(dense) == "is lite itself"
    card(9, 0)
    assert LITE_SM89.supports(listed) is LITE_SM89.supports(dense) is None


def test_a_run_yields_rates_and_ratios(measured, card, monkeypatch):
    costs = {
        "lite": 10.0,
        "lite_sm89": 19.0,
        "lite_deterministic": 15.0,
        "lite_dense": 30.0,
        "torch_flash": 12.0,
    }
    for name in ("_lite_missing", "_hopper_missing"):
        monkeypatch.setattr(lite_providers, name, lambda: None)
    card(9, 0)
    result = measured(
        lite_backward.OP, lambda name, problem: costs[name], SMALL, check=lambda *_: {"dq": 0.0}
    )
    results.validate(result)
    assert len(result["rows"]) == 2 * 4 + 2 * 4
    (row,) = results.rows_of(result, setting=LIST.name, provider="lite")
    assert row["ratio_lite_dense"] == 3.0 and "ratio_torch_flash" not in row
    assert row["tflops"] == round(10 * 2 * 3 * 500 * (500 * 2 // 8) * 32 / 10.0 / 1e6, 1)
    (row,) = results.rows_of(result, setting=SMALL[2].name, provider="lite")
    assert row["ratio_torch_flash"] == 1.2


def test_measured_results_hold_every_setting():
    assert_every_setting_is_measured("lite_backward", BY_NAME, ("lite", "lite_deterministic"))
