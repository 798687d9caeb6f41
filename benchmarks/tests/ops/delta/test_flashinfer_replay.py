"""FlashInfer's replay: windows in all phases, and a check against a replay that adds one record after the other."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.registry import CannotRun
from benchmarks.ops.delta import flashinfer_replay, providers
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import setting

PROBLEM = setting("gdn", 12, 4, "bf16", mode="step", heads=2, heads_v=4)


def recurrence(state, k, v, decays, strengths, q):
    """Outputs and the state [V, K] after some tokens, in fp64."""
    outputs = []
    for t in range(len(v)):
        state = decays[t] * state
        state = state + torch.outer(strengths[t] * (v[t] - state @ k[t]), k[t])
        outputs.append(state @ q[t] * len(k[t]) ** -0.5)
    return torch.stack(outputs), state


def replay(A_log, a, dt_bias, *, q, k, v, b, output, fold=True, **x):
    """What FlashInfer's function computes, record by record and token by token; `fold` is a mistake to plant."""
    assert x["restart_hist_on_flush"] is False
    x = SimpleNamespace(**x)
    rates, bias = A_log.bfloat16().double().exp(), dt_bias.bfloat16().double()
    for n in range(len(q)):
        slot = int(x.initial_state_indices[n])
        for h in range(v.shape[2]):
            head, state, before = h // (v.shape[2] // q.shape[2]), None, 0.0
            state = x.initial_state_source[slot, h].double()
            for j in range(int(x.hist_len[n])):
                place = (int(x.cache_base[n]) + j) % 32
                now = float(x.g_cache[slot, h, place])
                added = torch.outer(
                    x.u_cache[slot, h, place], x.k_cache[slot, head, place]
                ).double()
                state, before = math.exp(now - before) * state + added, now
            raw = torch.nn.functional.softplus(a[n, :, h].double() + bias[h])
            tokens = [y[n, :, head].double() for y in (k, q)]
            keys, queries = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in tokens)
            outputs, _ = recurrence(
                state, keys, v[n, :, h].double(), torch.exp(-rates[h] * raw),
                torch.sigmoid(b[n, :, h].double()), queries,
            )  # fmt: skip
            output[n, :, h] = outputs
            if fold and x.hist_len[n] >= x.flush_min:
                x.initial_state_source[slot, h] = state
    return output


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(delta, "DIM", 16)


@pytest.fixture
def installed(peers, monkeypatch):
    """installed(function) puts FlashInfer's function in its place."""

    def install(function):
        peers.module("flashinfer")
        peers.module("flashinfer.gdn_kernels", gated_delta_rule_mtp_ucache_flush=function)
        monkeypatch.setattr(flashinfer_replay, "_missing", lambda: None)

    return install


@pytest.mark.parametrize("tokens", flashinfer_replay.TOKENS)
def test_windows_are_those_of_all_phases_of_a_serving_loop(small, tokens):
    problem = setting("gdn", 3000, tokens, "bf16", mode="step", heads=1, heads_v=1)
    x = delta.make_inputs(problem, "cpu", 0)
    w = flashinfer_replay.windows(problem, x)
    least = flashinfer_replay.full_from(tokens)
    assert w.lengths.min() == 1 and w.lengths.max() == 16
    assert torch.equal(w.lengths % x.accepted, torch.zeros_like(w.lengths))
    # A loop in which every call accepts as many tokens, and the one that finds the window full empties it.
    full, records, calls = 0, 0, 0
    for accepted in range(1, tokens + 1):
        length = 0
        for _ in range(2520):
            length += accepted
            full, records, calls = full + (length >= least), records + length, calls + 1
            length = 0 if length >= least else length
    assert (w.lengths >= least).double().mean() == pytest.approx(full / calls, rel=0.1)
    assert w.lengths.double().mean() == pytest.approx(records / calls, rel=0.05)
    share = sum(1 / n for n in flashinfer_replay.periods(tokens)) / tokens
    assert share == pytest.approx(full / calls, rel=0.01)


def test_its_check_accepts_a_replay_record_by_record(small, installed):
    installed(replay)
    errors = providers.check(providers.FLASHINFER_REPLAY, PROBLEM, "cpu")
    assert set(errors) == {"output", "state"} and 0 < errors["state"] < 4e-3
    assert errors["output"] < delta.OUTPUT_LIMIT


def test_a_window_that_is_not_folded_is_noticed(small, installed):
    installed(lambda *given, **x: replay(*given, fold=False, **x))
    with pytest.raises(CannotRun, match="its result is wrong: .* of the state"):
        providers.check(providers.FLASHINFER_REPLAY, PROBLEM, "cpu")


def test_it_says_what_it_does_not_do(peers):
    supports = providers.FLASHINFER_REPLAY.supports
    assert supports(setting("gdn", 4, 4, "bf16")) == "the setting is no step"
    assert "bf16 states" in supports(setting("gdn", 4, 4, mode="step"))
    assert "bf16 states" in supports(setting("kda", 4, 4, "bf16", mode="step"))
    assert supports(setting("gdn", 4, 1, "bf16", mode="step")) == "takes 4 or 8 tokens"
    peers.module("flashinfer.gdn_kernels", gated_delta_rule_mtp_ucache_flush=None)
    x = delta.make_inputs(setting("gdn", 1, 4, "bf16", mode="step", heads=1, heads_v=1), "cpu", 0)
    with pytest.raises(ImportError, match="ucache_flush is missing"):
        flashinfer_replay.call(PROBLEM, x)


def test_its_bytes():
    """T=8 of 64 rows: a window of 1 to 9 records and more is folded once in 9, 5, 3, 3 and four times 2 calls."""
    problem = setting("gdn", 64, 8, "bf16", mode="step")
    state = 64 * 32 * 128 * 128 * 2
    share = (1 / 9 + 1 / 5 + 2 / 3 + 4 / 2) / 8
    records = (5 + 2 * 3 + 3 * 2 + 4 * 2 + (5 + 6 + 7 + 8) * 1.5) / 8
    record = 64 * (256 * (16 + 32) + 4 * 32)
    tokens = 64 * 8 * 2 * (2 * 16 * 128 + 2 * 32 * 128 + 64) + 32 * 8 + 64 * 4
    expected = tokens + state + share * state + (records + 8) * record
    assert flashinfer_replay.moved(problem) == pytest.approx(expected, abs=1)
