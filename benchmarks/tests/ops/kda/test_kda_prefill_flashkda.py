"""The benchmark beside FlashKDA: what it is given, its check, and its tables; on the CPU with a stand-in for it."""

import sys
import types
from collections import Counter

import pytest
import torch

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops import sequences
from benchmarks.ops.kda import flashkda_tables, kda_prefill, kda_prefill_flashkda
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.kda_prefill_flashkda import FLASH_KDA, FLASH_KDA_LIMIT, OP
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.providers import CEILING, CULA

DENSE = setting(40, batch=2, heads=4)
PACKED = setting(40, heads=4, sequences=3, lengths="skewed")


class FlashKda(types.ModuleType):
    """FlashKDA in fp64, token by token; `mistake` names what it gets wrong, `factors` multiply outputs of heads."""

    def __init__(self):
        super().__init__("flash_kda")
        self.calls, self.mistake, self.factors = [], None, [1.0] * 64

    def fwd(
        self, q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,
        initial_state=None, final_state=None, cu_seqlens=None,
    ):  # fmt: skip
        self.calls.append(
            {"q": q, "g": g, "beta": beta, "scale": scale, "out": out, "dt_bias": dt_bias}
            | {"initial_state": initial_state, "final_state": final_state, "cu_seqlens": cu_seqlens}
        )
        if self.mistake == "nothing written":
            return
        batch, tokens, heads, dim = q.shape
        spans = [(b, 0, tokens) for b in range(batch)]
        if cu_seqlens is not None:
            ends = cu_seqlens.tolist()
            spans = [(0, *ends[n : n + 2]) for n in range(len(ends) - 1)]
        strength = beta.double() if self.mistake == "beta as it is" else beta.double().sigmoid()
        for n, (b, start, end) in enumerate(spans):
            for h in range(heads):
                state = torch.zeros(dim, dim, dtype=torch.float64)  # [V, K]
                rate = A_log[h].double().exp()
                for t in range(start, end):
                    q_t, k_t = (x[b, t, h].double() for x in (q, k))
                    q_t, k_t = (x / (x.square().sum() + 1e-6).sqrt() for x in (q_t, k_t))
                    decay = lower_bound * (rate * (g[b, t, h].double() + dt_bias[h])).sigmoid()
                    state = state * decay.exp()
                    new = strength[b, t, h] * (v[b, t, h].double() - state @ k_t)
                    state = state + torch.outer(new, k_t)
                    out[b, t, h] = self.factors[h] * scale * (state @ q_t)
                final_state[n, h] = state.T if self.mistake == "states [K, V]" else state


@pytest.fixture
def flash_kda(monkeypatch):
    made = FlashKda()
    monkeypatch.setitem(sys.modules, "flash_kda", made)
    monkeypatch.setattr(kda_prefill_flashkda, "_flash_kda_missing", lambda: None)
    return made


def test_logits_change_nothing_but_beta(small):
    ready, raw = (kda.make_inputs(DENSE, "cpu", 3, raw_beta=raw) for raw in (False, True))
    for name in ("q", "k", "v", "gate", "A_log", "dt_bias"):
        assert torch.equal(getattr(ready, name), getattr(raw, name)), name
    assert raw.beta.dtype == torch.bfloat16 and raw.beta.min() < -4 and raw.beta.max() > 1
    # A logit below 16 in bf16 is off by 2^-5 at most, and so is the logarithm of a sigmoid.
    torch.testing.assert_close(
        raw.beta.double().sigmoid(), ready.beta.double(), rtol=2**-5 + 2**-8, atol=0
    )
    assert kda_providers.gate_arguments(DENSE, raw)["use_beta_sigmoid_in_kernel"] is True
    assert "use_beta_sigmoid_in_kernel" not in kda_providers.gate_arguments(DENSE, ready)
    assert OP.make_inputs(DENSE, "cpu", 3).raw_beta


def test_flash_kda_is_called_with_its_own_conventions(small, flash_kda):
    for problem in (DENSE, PACKED):
        x = OP.make_inputs(problem, "cpu", 0)
        run = FLASH_KDA.bind(problem, x)
        first, second = run(), run()
        assert first[0].data_ptr() != second[0].data_ptr()
        assert first[1].data_ptr() != second[1].data_ptr()
        call = flash_kda.calls[-1]
        assert call["q"] is x.q and call["g"] is x.gate and call["beta"] is x.beta
        assert call["out"] is second[0] and call["final_state"] is second[1]
        assert call["scale"] == 0.25 and call["initial_state"] is None
        assert call["dt_bias"].shape == (4, 16) and call["dt_bias"].is_contiguous()
        assert call["final_state"].dtype == torch.float32
        assert call["final_state"].shape == (sequences.sequences_of(problem), 4, 16, 16)
    assert flash_kda.calls[0]["cu_seqlens"] is None
    assert flash_kda.calls[-1]["cu_seqlens"] is x.offsets.int64
    assert x.offsets.int64.dtype == torch.int64


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=lambda p: p.name)
def test_everyone_passes_the_check_on_logits(small, flash_kda, problem):
    theirs = OP.check(FLASH_KDA, problem, "cpu")
    assert theirs["state"] < 1e-6 and theirs["output"] < 2e-3
    ours = OP.check(CULA, problem, "cpu")
    assert ours.keys() == theirs.keys() == {*kda.FIRST, *kda.FIRST.values()}
    assert all(ours[first] <= ours[kind] < kda.LIMIT for kind, first in kda.FIRST.items())
    assert OP.check(CEILING, problem, "cpu") == {}


def test_a_ready_beta_is_not_mistaken_for_the_same_setting_with_logits(small, flash_kda):
    OP.check(FLASH_KDA, DENSE, "cpu")
    assert kda_providers.check(CULA, DENSE, "cpu")["output"] < kda.LIMIT


def test_its_limit_is_its_own_and_that_of_the_first_head(small, flash_kda, monkeypatch):
    flash_kda.factors[0], flash_kda.factors[3] = 1 + 0.7 * FLASH_KDA_LIMIT, 1.5
    errors = OP.check(FLASH_KDA, DENSE, "cpu")
    first = errors["output of the first head"]
    assert first == pytest.approx(0.7 * FLASH_KDA_LIMIT, rel=0.05) and first > kda.LIMIT
    assert errors["output"] == pytest.approx(0.5, rel=0.01)
    flash_kda.factors[0] = 1 + 1.3 * FLASH_KDA_LIMIT
    with pytest.raises(CheckFailed, match="of the output of the first head is 3.9"):
        OP.check(FLASH_KDA, DENSE, "cpu")


def test_ours_is_limited_in_every_head(small, flash_kda, monkeypatch):
    def spoiled(problem, x):
        o, final = kda.oracle(problem, x, list(range(4)))
        o[:, :, 3] *= 1 + 1.3 * kda.LIMIT
        return o, final

    monkeypatch.setitem(kda_providers._RESULTS, "cula", spoiled)
    with pytest.raises(CheckFailed, match="of the output is 3.9.*limit 3e-03"):
        OP.check(CULA, DENSE, "cpu")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("nothing written", "not finite"),
        ("beta as it is", "relative RMSE of the output of the first head"),
        ("states [K, V]", "relative RMSE of the state of the first head"),
    ],
)
def test_the_check_refuses_mistakes(small, flash_kda, mistake, message):
    flash_kda.mistake = mistake
    with pytest.raises(CheckFailed, match=message):
        OP.check(FLASH_KDA, PACKED, "cpu")


def test_without_flash_kda_the_op_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_kda", None)
    kda_prefill_flashkda._flash_kda_missing.cache_clear()
    assert FLASH_KDA.supports(DENSE).startswith("flash_kda cannot be imported")
    kda_prefill_flashkda._flash_kda_missing.cache_clear()


def test_settings_are_those_of_kda_prefill_without_features():
    chosen, all_of_them = OP.settings(False), kda_prefill.settings(False)
    assert chosen == [s for s in all_of_them if not s.params["feature"]] and len(chosen) == 60
    assert {s.name for s in OP.settings(True)} < {s.name for s in chosen}
    assert [p.name for p in OP.providers] == ["cula", "flash_kda", "copy_ceiling"]
    assert {p.moved(chosen[0]) for p in OP.providers[:2]} == {kda.moved(chosen[0])}


COSTS = {"cula": 10.0, "flash_kda": 25.0, "copy_ceiling": 8.0}
CHOSEN = [setting(24, heads=64), setting(40, heads=2), setting(24, heads=64, sequences=2)]


@pytest.fixture
def result(small, flash_kda, measured, monkeypatch):
    """The op on the fake device, where FlashKDA takes 25 us, and 20 in the setting of few heads."""
    errors = {"copy_ceiling": {}}
    errors["cula"] = {"output": 1.2e-3, "output of the first head": 2e-4}
    errors["flash_kda"] = {"output": 3e-2, "output of the first head": 5.7e-3}
    return measured(
        OP,
        lambda name, problem: 20.0 if (name, problem) == ("flash_kda", CHOSEN[1]) else COSTS[name],
        CHOSEN,
        check=lambda provider, problem, device: errors[provider.name],
    )


def test_a_run_yields_rows(result):
    results.validate(result)
    found = Counter(row["provider"] for row in result["rows"])
    assert found == {"cula": 3, "flash_kda": 3, "copy_ceiling": 3}
    ours = results.rows_of(result, setting="B1-T24-H64", provider="cula")[0]
    assert (ours["ratio_flash_kda"], ours["ratio_ceiling"]) == (2.5, 0.8)


REGION = "<!-- bench:kda_prefill_flashkda:h200{} -->\n<!-- /bench -->\n"


def test_tables_hold_times_ratio_and_errors_of_both(result, tmp_path):
    results.save(result, results.result_path(OP.name, "h200", tmp_path))
    main, long, both = (
        tables.rendered(REGION.format(option), tmp_path)
        for option in (" table=main", " table=long", "")
    )
    line = (
        "| B1-T24-H64 | 10.00 (10.00-10.00) | 25.00 (25.00-25.00) | 2.50 "
        "| 2.0e-04 | 5.7e-03 | 1.2e-03 | 3.0e-02 |"
    )
    assert line in main and "N2-T24-uniform-H64" in main and "-H2 |" not in main
    assert "2 settings: 2.50; the lowest: 2.50" in main
    assert "| B1-T40-H2 |" in long and "-H64 |" not in long and "1 settings: 2.00" in long
    # The cube root of 2.5 * 2.5 * 2.
    assert both.count("\n| ") == 5 and "3 settings: 2.32; the lowest: 2.00" in both
    with pytest.raises(ValueError, match="table=main, table=long or none"):
        tables.rendered(REGION.format(" table=cut"), tmp_path)


def test_a_card_without_flash_kda_has_a_table_too(small, measured, monkeypatch):
    monkeypatch.setattr(kda_prefill_flashkda, "_flash_kda_missing", lambda: "not here")
    alone = measured(
        OP,
        lambda name, problem: COSTS[name],
        CHOSEN[:1],
        check=lambda provider, problem, device: {"output": 1e-3, "output of the first head": 2e-4},
    )
    assert [s["reason"] for s in alone["skipped"]] == ["not here"]
    header, (line,) = flashkda_tables.table(alone)
    assert len(header) == len(line)
    assert line[2:] == ["-", "-", "2.0e-04", "-", "1.0e-03", "-"]
    assert flashkda_tables.caption(alone).startswith("Errors:")


def test_every_measured_setting_has_both():
    for path in results.RESULTS.glob("*/kda_prefill_flashkda.json"):
        rows = results.load(path)["rows"]
        ours = {r["setting"] for r in rows if r["role"] == "ours" and r.get("ratio_flash_kda")}
        assert ours == {s.name for s in OP.settings(False)}
