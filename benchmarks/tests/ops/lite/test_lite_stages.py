"""The stages of a training step one by one, with stand-ins for the kernels on the CPU."""

import dataclasses

import pytest
import torch

from benchmarks.harness import registry, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import backward, internals, lite_stages, training
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.problem import setting
from benchmarks.tests.ops.common import assert_fits_the_h200
from liteattention_sm89 import launch, lite_attention

ALL = lite_stages.settings(False)
PROVIDERS = {p.name: p for p in lite_stages.OP.providers}
LIST = setting("list", 300, batch=2, heads=3, dim=32, density=0.4)
DENSE = setting("dense", 200, heads=2, dim=16)
KERNELS = ["forward", "row_sums", "gradients", "order_dq"]


def name_of(value):
    return value.name


def run_forward(log, q, k, v, out, lse, read, *rest):
    log.append("forward")
    assert read is None
    attended, found, _ = lite_attention(q, k, v, threshold=None)
    out.copy_(attended)
    lse.copy_(found)


def run_sums(log, out, dout, lse, dlse, sums, acc, *rest):
    """Per head all lse, and behind them the sums of out times dout."""
    log.append("row_sums")
    tokens = out.shape[1]
    sums.flatten(2)[..., :tokens] = lse
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    sums.flatten(2)[..., tokens : 2 * tokens] = delta
    acc.zero_()


def run_gradients(log, q, k, v, dout, sums, across, acc, dk, dv, starts_q, starts_k, scale, *rest):
    log.append("gradients")
    b, s, h, d = q.shape
    query, key, value, grad = (t.float().transpose(1, 2) for t in (q, k, v, dout))
    lse, delta = sums.flatten(2)[..., :s, None], sums.flatten(2)[..., s : 2 * s, None]
    weights = (scale * query @ key.mT - lse).exp()
    if across is not None:
        tiles = lite.unpack(across)[..., : -(-s // 128)].transpose(-1, -2)
        weights = weights * tiles.repeat_interleave(128, -2).repeat_interleave(64, -1)[..., :s, :s]
    dscores = weights * (grad @ value.mT - delta)
    acc.flatten(2)[..., : s * d] += (dscores @ key).flatten(2)
    dk.copy_((scale * dscores.mT @ query).transpose(1, 2))
    dv.copy_((weights.mT @ grad).transpose(1, 2))


def run_gather(log, acc, dq, starts, scale, *rest):
    log.append("order_dq")
    b, s, h, d = dq.shape
    dq.copy_(scale * acc.flatten(2)[..., : s * d].view(b, h, s, d).transpose(1, 2))


@pytest.fixture
def log(monkeypatch):
    """Puts the stand-ins in the place of the compiled kernels, and notes each launch."""
    launched = []

    def compiled(kernel):
        return lambda *facts: lambda *arguments: kernel(launched, *arguments)

    monkeypatch.setattr(launch, "_arch", lambda device: "sm_90a")
    for name, kernel in (
        ("forward", run_forward),
        ("sums", run_sums),
        ("backward", run_gradients),
        ("gather", run_gather),
    ):
        monkeypatch.setattr(launch, f"compile_{name}", compiled(kernel))
    return launched


@pytest.mark.parametrize("problem", [LIST, DENSE], ids=name_of)
def test_each_launch_is_a_stage_that_runs_alone(log, problem):
    x = backward.make_inputs(problem, "cpu", 0)
    expected = [name for name in lite_stages.LAUNCHES if name != "transpose" or x.mask is not None]
    with torch.inference_mode():
        found = internals.stages(x.q, x.k, x.v, x.dout, x.mask)
        assert list(found.launches) == expected and log == KERNELS
        for name in lite_stages.LAUNCHES:
            if name not in expected:
                continue
            call = PROVIDERS[name].bind(problem, x)
            log.clear()
            call()
            assert log == [name] * (name != "transpose")
    if x.mask is None:
        assert found.transposed is None
        return
    # Bit m of row n of the list per key tile is bit n of row m of the list.
    bits, turned = lite.unpack(x.mask)[..., :5], lite.unpack(found.transposed)[..., :3]
    assert torch.equal(turned, bits.transpose(-1, -2))


@pytest.mark.parametrize("problem", [LIST, DENSE], ids=name_of)
def test_all_launches_in_turn_and_the_step_give_the_gradients(log, problem):
    with torch.inference_mode():
        for name, provider in PROVIDERS.items():
            if name == "transpose" and problem is DENSE:
                continue
            errors = lite_stages.check(provider, problem, "cpu")
            assert list(errors) == ["dq", "dk", "dv"]
            assert 1e-3 < max(errors.values()) < backward.GRADIENT_LIMIT


@pytest.mark.parametrize("left_out", KERNELS)
def test_a_launch_that_does_nothing_is_noticed(log, monkeypatch, left_out):
    x, check = PROVIDERS["gradients"], lite_stages.check
    stages = internals.stages

    def without(*given):
        found = stages(*given)
        return dataclasses.replace(
            found, launches={**found.launches, left_out: lambda *arguments: None}
        )

    monkeypatch.setattr(internals, "stages", without)
    with pytest.raises(CheckFailed, match=r"holds values that are not finite"):
        check(x, LIST, "cpu")


def test_a_list_that_is_transposed_otherwise_is_noticed(log, monkeypatch):
    stages = internals.stages

    def other(*given):
        found = stages(*given)
        return dataclasses.replace(found, transposed=found.transposed ^ 1)

    monkeypatch.setattr(internals, "stages", other)
    with pytest.raises(CheckFailed, match="transposing the list again gives another one"):
        lite_stages.check(PROVIDERS["order_dq"], LIST, "cpu")


def test_what_surrounds_the_launches(log):
    x = backward.make_inputs(LIST, "cpu", 0)
    copies = PROVIDERS["clone"].bind(LIST, x)()
    assert all(torch.equal(a, b) and a is not b for a, b in zip(copies, (x.q, x.k, x.v)))
    loss, derivative = PROVIDERS["loss"].bind(LIST, x)()
    out = lite_attention(x.q, x.k, x.v, threshold=None)[0]
    torch.testing.assert_close(loss, (out * x.dout).sum())
    assert torch.equal(derivative, x.dout)
    found = PROVIDERS["readout"].bind(LIST, x)()
    want = backward.LITE.bind(LIST, x)()
    assert [g.shape for g in found] == [g.shape for g in want] and len(found) == 3


def test_a_step_copies_its_gradients_and_leaves_its_inputs_alone():
    x = backward.make_inputs(LIST, "cpu", 0)
    before = [t.clone() for t in (x.q, x.k, x.v)]
    with torch.inference_mode():
        found = PROVIDERS["lite"].bind(LIST, x)()
        want = training.LITE.bind(LIST, x)()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (x.q, x.k, x.v)))


def test_bytes_of_stages():
    one, rows, mask = 4096 * 16 * 128 * 2, 4096 * 16 * 4, 16 * 32 * 2 * 4
    moved = {name: p.moved(ALL[1]) for name, p in PROVIDERS.items()}
    assert moved["clone"] == moved["readout"] == moved["loss"] == 6 * one
    assert moved["forward"] == 4 * one + rows and moved["transpose"] == 2 * mask
    # fp32 accumulators of dq are twice the bytes of a tensor.
    assert moved["row_sums"] == 4 * one + 3 * rows and moved["order_dq"] == 3 * one
    assert moved["gradients"] == 8 * one + 2 * rows + mask
    assert moved["lite"] == 8 * one + rows + mask


def test_settings_and_what_is_left_out(monkeypatch):
    assert registry.get("lite_stages") is lite_stages.OP
    assert [s.name for s in ALL] == [
        "dense-B1-S4096-H16-D128", "list12.5-B1-S4096-H16-D128", "list5-B1-S4096-H16-D128",
    ]  # fmt: skip
    assert lite_stages.settings(True) == ALL[:2]
    assert list(PROVIDERS) == [
        "lite", "clone", "forward", "loss", "row_sums", "transpose", "gradients", "order_dq", "readout",
    ]  # fmt: skip
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: None)
    assert PROVIDERS["transpose"].supports(ALL[0]) == "there is no list"
    assert PROVIDERS["transpose"].supports(ALL[1]) is None
    for problem in ALL:
        assert_fits_the_h200(training.read(problem), 20 * 2 * backward.moved(problem))


def test_measured_results_hold_every_setting_and_stage():
    paths = list(results.RESULTS.glob("*/lite_stages.json"))
    assert paths
    for path in paths:
        result = results.load(path)
        for name in PROVIDERS:
            found = results.rows_of(result, provider=name, method="graph")
            wanted = ALL[1:] if name == "transpose" else ALL
            assert [row["setting"] for row in found] == [s.name for s in wanted]
