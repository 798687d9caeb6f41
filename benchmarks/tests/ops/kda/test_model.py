"""The model of KDA prefill: its terms, its constants, its errors on the H200, and its file."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.harness import results
from benchmarks.ops.kda import internals, kda_prefill_kernels, model
from benchmarks.ops.kda import tables as kda_tables
from benchmarks.ops.kda.kda_prefill_schedule import planned
from benchmarks.ops.kda.model import Chains, Constants
from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.work import GB200, GB300, H200, Work, work

# The worst error of a time that the fit has not seen, relative to the measured one, and the error in the median.
WORST, MEDIAN = 0.12, 0.03
FIT = Constants(share=0.8, prepare_clk=6000.0, start_us=5.0, merge_us=(4.0, 1.5))


@pytest.fixture(scope="module")
def document():
    return model.document()


def test_terms_by_hand():
    w = Work(1000, 1, 1, False, 8_000_000, 4_000_000, 10, 0, 0)
    card = replace(H200, sms=100, clock_ghz=2.0, memory_tbs=5.0)
    found = model.estimate(w, card, FIT, Chains({1: 1.0}, 1.0))
    # 10 chunk-heads x 6000 clk at 2 GHz against 8 MB at 4 TB/s; 10 us of chain with 1 us of memory.
    assert found.kernels["prepare"] == pytest.approx(5 + 30)
    assert found.kernels["recurrence"] == pytest.approx(5 + 10)
    assert found.limits == {"prepare": "throughput", "recurrence": "chain"}
    assert found.us == pytest.approx(sum(found.kernels.values()))
    cut = replace(w, parts=4, packed=True, scan_bytes=4_000_000, scan_chunks=5)
    longer = model.estimate(cut, card, FIT, Chains({1: 1.0}, 1.0))
    assert longer.kernels["scan"] == pytest.approx(5 + (5**2.5 + 1) ** 0.4)
    assert longer.kernels["merge"] == 4.0 + 2 * 1.5 and longer.kernels["table"] == 5


@pytest.mark.parametrize("card", [H200, GB200, GB300], ids=lambda card: card.name)
def test_more_work_takes_longer_and_a_better_card_less(card):
    chains = model.hopper_chains() if card is H200 else model.blackwell_chains(card, 300)

    def us(tokens, batch=1, on=card):
        return model.estimate(work(setting(tokens, batch), card), on, FIT, chains).us

    by_tokens = [us(t) for t in (512, 1024, 4096, 8192, 16384)]
    assert by_tokens == sorted(set(by_tokens))
    assert us(4096) < us(4096, 2)
    assert us(4096, on=replace(card, memory_tbs=2 * card.memory_tbs)) < us(4096)


def test_blackwells_chain_by_hand():
    # Per chunk: 128 x 64 x 16 products take 32 clk, 8 for x and 4 for u; 4 of 128 x 128 x 16 for the state. o: 12 more.
    assert model.tensor_clk(scan=True) == 8 * 32 + 4 * 32 + 4 * 64 == 640
    assert model.tensor_clk(scan=False) == 640 + 12 * 32 == 1024
    chains = model.blackwell_chains(GB200, 300)
    assert chains.scan == chains.forward[1] == pytest.approx((640 + 900) / 1900)
    assert model.blackwell_chains(GB200, 0).forward[1] == pytest.approx(1024 / 1900)


@pytest.mark.parametrize("card", [H200, GB200], ids=lambda card: card.name)
def test_instructions_of_prepare(card, instructions_of_prepare):
    counts = instructions_of_prepare(card.package, card.target)
    found = sum(counts.values()) - counts["NOP"] - counts["BRA"]
    # Other compilers may count a few more or less.
    assert found == pytest.approx(model.INSTRUCTIONS[card.target], rel=0.03)


@pytest.mark.parametrize("scan", [False, True])
def test_products_of_the_recurrence(scan, instructions_of_recurrence):
    counts = instructions_of_recurrence(GB200.package, GB200.target, scan)
    assert counts["UTCHMMA"] == sum(n for n, _ in model.products(scan).values())


def test_the_fit_finds_the_constants_of_a_model():
    chains, made = model.hopper_chains(), Constants(0.85, 8400.0, 8.0, (3.0, 2.5))
    rows = []
    for row in model.alone():
        w = replace(row.work, prepare_bytes=0) if "repeated" in row.kernel else row.work
        us = model.estimate(w, H200, made, chains).kernels[row.kernel.removesuffix("_repeated")]
        rows.append(replace(row, us=us))
    found = model.fit(rows)
    assert max(map(abs, model.errors(rows, found))) < 0.01
    assert found.merge_us == pytest.approx(made.merge_us)
    assert found.prepare_clk == pytest.approx(made.prepare_clk, rel=0.01)


def test_rows_to_fit_and_rows_to_check():
    fitted, held_out = model.alone(), model.measured()
    assert len(held_out) == 65 and not any("unbounded" in r.setting for r in held_out)
    counts = Counter(r.kernel for r in fitted)
    cut = len({r.setting for r in fitted if r.work.parts > 1})
    whole = dict.fromkeys(("prepare", "prepare_repeated", "recurrence"), 14)
    assert counts == whole | {"scan": cut, "merge": cut} and cut == 4
    # What runs alone makes up the call, which was timed in the same turns, where no two kernels ran beside each other.
    result = results.load(results.result_path("kda_prefill_kernels", "h200"))
    rows = results.rows_of(result, role="ours", method=results.device_method(result))
    apart = {s.name for s in kda_prefill_kernels.settings(False) if not planned(s, "auto").beside}
    assert len(apart) == 8
    for name, us in ((r["setting"], r["median_us"]) for r in rows if r["setting"] in apart):
        parts = [r.us for r in fitted if r.setting == name and r.kernel != "prepare_repeated"]
        assert sum(parts) == pytest.approx(us, rel=0.04), name


def test_error_on_rows_that_the_fit_has_not_seen():
    found = sorted(abs(e) for e in model.errors(model.measured(), model.fit(model.alone())))
    assert found[-1] < WORST and found[len(found) // 2] < MEDIAN


def test_prepare_is_held_up_by_the_multiprocessors(document):
    """With inputs that stay in the L2 it is hardly faster: its clk are not what memory takes."""
    times = {(r.setting, r.kernel): r.us for r in model.alone()}
    for name in ("B1-T4096-H64", "B1-T16384-H64", "B1-T131072-H8"):
        assert 0.92 < times[name, "prepare_repeated"] / times[name, "prepare"] < 1
    c = document["constants"]
    assert 7500 < c["prepare_clk"] < c["highest_prepare_clk"] < 8500


def test_hoppers_planner_counts_a_merge_as_it_was_measured(document):
    costs = internals.planner_costs(H200.package)
    merge = document["constants"]["merge_us"]
    assert pytest.approx(merge, rel=0.05) == (costs.merge_us, costs.merge_step_us)


def test_blackwells_planner_has_the_constants_of_the_model(document):
    costs, c = internals.planner_costs(GB200.package), document["constants"]
    pace = GB200.memory_tbs * c["share"] * 1e6  # bytes in a microsecond
    # A block, v and o; for each of the scan's two halves half of v and a block without what only o needs.
    assert pytest.approx(92_672 / pace, rel=0.02) == costs.block_us
    assert pytest.approx((59_904 - 16_384 - 5_120 + 8_192) / pace, rel=0.02) == costs.scan_block_us
    assert pytest.approx(c["start_us"], rel=0.05) == costs.start_us
    assert pytest.approx(c["merge_us"], rel=0.05) == (costs.merge_us, costs.merge_step_us)
    chains = model.blackwell_chains(GB200, model.HAND_OVER_CLK["mid"])
    assert pytest.approx(chains.forward[1], rel=0.01) == costs.chain_us[1] == costs.scan_chain_us


def test_cases_are_in_order(document):
    for row in document["rows"]:
        assert 0 < row["low_us"] <= row["mid_us"] <= row["high_us"], row
    by_card = {(r["card"], r["setting"]): r["mid_us"] for r in document["rows"]}
    for name in kda_tables.MAIN:
        assert by_card["GB300", name] <= by_card["GB200", name]


def test_the_file_is_what_the_model_gives(document):
    path = results.result_path(kda_tables.OP, "predicted")
    assert json.loads(path.read_text()) == json.loads(results.as_json(document))
