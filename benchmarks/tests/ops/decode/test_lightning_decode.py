"""Lightning decode's oracle, checks, byte counts and settings; on the CPU with four heads of 64."""

import math
from collections import Counter

import pytest
import torch

from benchmarks.harness import registry
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.decode import lightning_decode, lightning_decode_80sm
from benchmarks.ops.decode import lightning_decode_variants as variants
from benchmarks.ops.decode import problem as decode
from benchmarks.ops.decode import providers as decode_providers
from cula_lightning_decode.plan import select

ALL = [*lightning_decode.settings(False), *lightning_decode_80sm.settings(False)]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(decode, "HEADS", 4)
    monkeypatch.setattr(decode, "DIM", 64)


def naive(problem, x, *, forget=True, transpose=False, write=True):
    """Step by step in fp32 with explicit loops over rows and heads; the flags plant one mistake each."""
    out = torch.zeros_like(x.v)
    for b in range(x.q.shape[0]):
        slot = b if x.indices is None else int(x.indices[b])
        for h in range(x.q.shape[2]):
            s = x.state[slot, h].float()
            s = s.T if decode.v_first(problem) != transpose else s
            for t in range(x.q.shape[1]):
                s = s * (math.exp(-float(x.decay[h])) if forget else 1.0)
                s = s + torch.outer(x.k[b, t, h].float(), x.v[b, t, h].float())
                out[b, t, h] = (x.q[b, t, h].float() @ s) * decode.DIM**-0.5
            if write:
                x.state[slot, h] = s.T if decode.v_first(problem) != transpose else s
    return out, x.state


CHECKED = [
    decode.setting(3),
    decode.setting(3, layout="vk"),
    decode.setting(5, tokens=4, state="bf16"),
    decode.setting(4, indexed=True),
    decode.setting(4, layout="vk", indexed=True),
]


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = decode.check_decode(naive, problem, "cpu")
    assert errors["output"] < decode.OUTPUT_LIMIT / 2
    assert set(errors) == {"output", "state"}


def test_check_accepts_verification_that_leaves_the_state(small):
    problem = decode.setting(3, tokens=4, commit=False)
    errors = decode.check_decode(lambda p, x: naive(p, x, write=False), problem, "cpu")
    assert set(errors) == {"output"}


@pytest.mark.parametrize(
    "mistake", [{"forget": False}, {"transpose": True}, {"write": False}], ids=str
)
def test_check_refuses_a_wrong_implementation(small, mistake):
    with pytest.raises(CheckFailed, match="relative RMSE"):
        decode.check_decode(lambda p, x: naive(p, x, **mistake), decode.setting(3), "cpu")


def test_check_refuses_a_changed_state_in_verification(small):
    with pytest.raises(CheckFailed, match="changed the state"):
        decode.check_decode(naive, decode.setting(3, commit=False), "cpu")


def test_check_refuses_an_output_that_was_not_written(small):
    def unwritten(problem, x):
        out, state = naive(problem, x)
        out[1, 0, 2, 5] = float("nan")
        return out, state

    with pytest.raises(CheckFailed, match="not finite"):
        decode.check_decode(unwritten, decode.setting(3), "cpu")


def test_check_refuses_nan_in_the_state(small):
    def poisoned(problem, x):
        out, state = naive(problem, x)
        state[0, 0, 0, 0] = float("nan")
        return out, state

    with pytest.raises(CheckFailed, match="state is nan"):
        decode.check_decode(poisoned, decode.setting(3), "cpu")


@pytest.mark.parametrize("problem", CHECKED, ids=lambda p: p.name)
def test_cula_and_the_ceiling_pass_their_checks_on_the_cpu(small, problem):
    assert decode_providers.CULA.supports(problem) is None
    errors = decode_providers.check(decode_providers.CULA, problem, "cpu")
    assert errors["output"] < decode.OUTPUT_LIMIT
    assert decode_providers.check(decode_providers.CEILING, problem, "cpu") == {}


def test_what_is_timed_is_the_call_that_was_checked(small):
    problem = decode.setting(2, layout="vk")
    x, y = (decode.make_inputs(problem, "cpu", 3) for _ in range(2))
    want, state = naive(problem, y)
    got = decode_providers.CULA.bind(problem, x)()
    assert decode.relative_rmse(got, want.double()) < 5e-3
    assert decode.relative_rmse(x.state, state.double()) < 1e-5


def test_buffer_sets_differ_and_repeat_from_their_seed(small):
    problem = decode.setting(2)
    first, again, other = (decode.make_inputs(problem, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(first.state, again.state) and torch.equal(first.q, again.q)
    assert not torch.equal(first.state, other.state)


def test_thousands_of_updates_keep_the_state_in_range(small):
    problem = decode.setting(1)
    x = decode.make_inputs(problem, "cpu", 0)
    step, ceiling = (p.bind(problem, x) for p in (decode_providers.CULA, decode_providers.CEILING))
    for _ in range(1000):
        step()
    ceiling()
    size = x.state.abs()
    assert size.max() < 1e3
    assert (size < torch.finfo(torch.float32).tiny).float().mean() < 1e-3


def test_decays_lie_strictly_between_zero_and_one():
    factors = torch.exp(-decode.decays("cpu"))
    assert factors.min() == pytest.approx(math.exp(-(2 ** (-1 / 8))), rel=1e-5)
    assert factors.max() == pytest.approx(math.exp(-(2**-8)), rel=1e-5)


def test_bytes_of_a_step_are_counted_as_the_floor_has_them():
    """B=64 in fp32 at 4.3 TB/s: 124.9 us for the states alone, plus 4.2 MB of activations."""
    problem = decode.setting(64)
    states = 2 * 64 * 64 * 128 * 128 * 4
    activations = 4 * 64 * 64 * 128 * 2
    assert decode.moved(problem) == states + activations + 64 * 4
    assert states / 4.3e6 == pytest.approx(124.9, abs=0.1)
    assert decode.moved(decode.setting(64, commit=False)) == states // 2 + activations + 64 * 4
    assert decode.moved(decode.setting(64, indexed=True)) == states + activations + 64 * 4 + 64 * 4
    assert decode_providers.CEILING.moved(problem) == states


def test_fla_writes_a_bf16_state_back_in_fp32():
    problem = decode.setting(64, state="bf16")
    states = 64 * 64 * 128 * 128
    assert decode.moved(problem) - decode.moved(decode.setting(64)) == -4 * states
    assert decode_providers.FLA.moved(problem) - decode.moved(problem) == 2 * states


def test_peers_and_ceiling_say_what_they_do_not_do():
    assert decode_providers.FLA.supports(decode.setting(4, indexed=True)) == "takes no pool indices"
    assert "no state" in decode_providers.CEILING.supports(decode.setting(4, commit=False))


def test_fla_is_tuned_anew_for_every_setting(peers):
    kernels = peers.kernels("fused_recurrent_fwd_kernel")
    peers.module("fla.ops.common.fused_recurrent", **vars(kernels))
    (tuner,) = peers.tuners
    decode_providers.FLA.prepare(decode.setting(4))
    assert tuner.cache == {} and tuner.cache_results is False


def test_settings_cover_what_the_tables_promise():
    full = lightning_decode.settings(False)
    cold = {(s.params["B"], s.params["state"], s.params["layout"]) for s in full if s.l2 == "cold"}
    assert cold >= {
        (b, state, layout)
        for b in (1, 4, 16, 32, 64, 128, 256)
        for state in ("fp32", "bf16")
        for layout in ("kv", "vk")
    }
    assert {s.params["B"] for s in full if s.l2 == "resident"} == {1, 4}
    assert {s.params["T"] for s in full} == {1, 2, 4, 8}
    assert {s.params["T"] for s in full if not s.params["commit"]} == {1, 2, 4, 8}
    assert {s.params["B"] for s in lightning_decode_80sm.settings(False)} == {
        1,
        4,
        16,
        32,
        64,
        128,
        256,
    }
    assert all(Counter(s.name for s in full)[s.name] == 1 for s in full)


def test_quick_settings_are_a_subset():
    for op in (registry.get("lightning_decode"), registry.get("lightning_decode_80sm")):
        assert {s.name for s in op.settings(True)} < {s.name for s in op.settings(False)}


@pytest.mark.parametrize("chosen", variants.settings(False), ids=lambda s: s.name)
def test_variants_are_the_candidates(chosen):
    found = variants.configurations(chosen)
    problem = variants.problem_of(chosen)
    assert problem.illegal() is None
    assert len(found) == len(variants.candidates(problem)) > 5
    assert set(found) <= set(variants.NAMES)
    assert select(problem, "sm_90a") in found.values()
    supported = {
        p.name for p in variants.OP.providers if p.role == "variant" and p.supports(chosen) is None
    }
    assert supported == set(found)
