"""Calls on several GPUs: the rows of a result file, its table, and what the command refuses."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import pairs, several_gpus, tables
from benchmarks.harness import rank_rows, results, stage_rows
from benchmarks.ops.kda import rank_model
from benchmarks.report import sections


@pytest.fixture
def result(first_call_result: dict[str, Any]) -> dict[str, Any]:
    row = {
        "op": "kda", "tokens": 128, "heads": 4, "ranks": 2, "bounds": "equal", "exchange": "auto",
        "provider": "cula", "pass": "step", "method": "graph",
        "ms": 5.0, "p20_ms": 4.9, "p80_ms": 5.2, "one_ms": 8.0, "one_p20_ms": 7.9, "one_p80_ms": 8.1, "samples": 3,
        "message_bytes": 1024, "collective_ms": 0.1, "error": 0.0004, "gradient_error": 0.003,
    }  # fmt: skip
    left = [{"call": "kda T1", "reason": "too short"}]
    return {**first_call_result, "title": "Ranks", "skipped": left, "rows": [row]}


def test_the_table_tells_gain_and_share(result, tmp_path):
    path = tmp_path / "toy-100" / "several_gpus_x2.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    text = tables.rendered("<!-- bench:several_gpus_x2:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = "8.00 (7.90-8.10) | 2 | 5.00 (4.90-5.20) | 1.60 | - | graph | 0.100 (2.0%) | 4.0e-04, 3.0e-03"
    assert f"| cula, kda T128 H4 step, equal, graph | {cells} |" in text
    assert "NVIDIA Toy 100" in text and "Not measured: kda T1: too short." in text
    section = sections.read(path)
    measured = dict(section.measured)
    assert measured["step on several GPUs"] == "measured" != measured["forward on several GPUs"]
    assert section.tables[0].lines[0][4] == "1.60" and len(section.plots) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "guess"}, r"rows\[0\].method: expected one of"),
        ({"bounds": "odd"}, r"rows\[0\].bounds: expected one of"),
        ({"ms": 9.9}, "expected 0 < p20_ms <= ms <= p80_ms"),
        ({"one_p20_ms": 0}, "expected 0 < one_p20_ms"),
        ({"error": "large"}, "error: expected"),
        ({"pass": "half"}, r"rows\[0\].pass: expected one of"),
        ({"exchange": "mail"}, r"rows\[0\].exchange: expected one of"),
        ({"one_ms": None}, "expected all times of one GPU, or none"),
    ],
)
def test_wrong_rows_are_refused(result, change, message):
    result["rows"][0] |= change
    with pytest.raises(ValueError, match=message):
        rank_rows.validate(result)


def test_a_row_stands_once(result):
    result["rows"] *= 2
    with pytest.raises(ValueError, match="appears twice"):
        rank_rows.validate(result)


def test_the_command_needs_ranks_and_samples(monkeypatch, capsys):
    for ranks, gpus in ((0, 1), (1, 1), (3, 3), (2, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, gpus))
        assert several_gpus.main([]) == 2
        assert "torchrun" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        several_gpus.main(["--samples", "1"])


def test_every_call_has_inputs_of_its_size():
    for op in ("kda", "gated_delta_rule", "simple_gla"):
        given, options = several_gpus.inputs(op, 64, 2, "cpu")
        o, state = several_gpus.calls(op, "cula")(*given, output_final_state=True, **options)
        assert (
            o.shape == (1, 64, 2, 128) and state.shape == (1, 2, 128, 128) and not o.isnan().any()
        )
    args = several_gpus.parse(["--providers", "cula", "fla", "--exchanges", "gather", "transpose"])
    calls = list(several_gpus.wanted(args))
    assert len(set(calls)) == len(calls) == 2 * (3 * 6 * 2 + 2 * 6)
    assert {(c[4], c[1], c[-1]) for c in calls} == {
        ("cula", "forward", "graph"), ("cula", "step", "eager"),
        ("fla", "forward", "eager"), ("fla", "step", "eager"),
    }  # fmt: skip
    both = list(several_gpus.wanted(several_gpus.parse(["--steps", "eager", "graph"])))
    assert len(set(both)) == len(both) == 3 * 6 * 3


def test_fla_tunes_on_a_rank_by_itself_and_across_ranks(monkeypatch):
    seen = []

    def call(q, *_, cp_context, **options):
        seen.append((q.shape[1], cp_context))
        return q, None

    monkeypatch.setattr(several_gpus, "TUNED", 32)
    monkeypatch.setattr(several_gpus, "calls", lambda op, provider: call)
    monkeypatch.setattr(several_gpus, "contexts", lambda _, tokens, *more: [("equal", tokens, ())])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    several_gpus.tune("kda", "forward", 2, "cpu")
    assert seen == [(32, None), (32, 128)]


def test_what_fla_refuses_is_told_once_per_reason():
    args = several_gpus.parse(["--providers", "fla", "--tokens", "64", "--passes", "step"])
    first, second, third, _ = several_gpus.wanted(args)
    error = RuntimeError("CUDA out of memory. Tried to allocate 8.00 GiB.\nand more")
    skipped = [
        several_gpus.refused(first, error),
        several_gpus.refused(second, RuntimeError("not on Hopper.")),
        several_gpus.refused(third, error),
    ]
    assert rank_rows.left_out({"skipped": skipped}) == [
        "Not measured: fla, kda T64 H64 step; fla, gated_delta_rule T64 H64 step: CUDA out of memory.",
        "Not measured: fla, kda T64 H16 step: not on Hopper.",
    ]


@pytest.mark.parametrize("op", several_gpus.OPS)
def test_ranks_draw_what_the_whole_has(op, monkeypatch):
    monkeypatch.setattr(several_gpus, "SLAB", 16)
    whole, options = several_gpus.inputs(op, 100, 2, "cpu")
    for own in ((0, 100), (0, 7), (7, 48), (48, 100), (99, 100), (64, 64)):
        part, same = several_gpus.inputs(op, 100, 2, "cpu", own)
        assert all(torch.equal(x[:, slice(*own)], y) for x, y in zip(whole, part, strict=True))
        assert same.keys() == options.keys()
    assert len({x.flatten()[i].item() for x in whole for i in (0, -1)}) == 10


def test_a_row_without_one_gpu(result, tmp_path):
    result["rows"][0] |= dict.fromkeys(("one_ms", "one_p20_ms", "one_p80_ms"))
    rank_rows.validate(result)
    assert rank_rows.table(result)[1][0][1:5] == ["-", "2", "5.00 (4.90-5.20)", "-"]
    assert pairs.pairs({**result, "rows": [result["rows"][0] | {"one_ms": None}]})[1] == []


class TestModel:
    """Of KDA's forward: against what was measured, and its parts by hand."""

    def test_two_gpus_take_what_it_says(self):
        rows = [
            row
            for row in rank_rows.load(results.result_path("several_gpus_x2", "h200"))["rows"]
            if (row["provider"], row["op"], row["pass"]) == ("cula", "kda", "forward")
        ]
        assert len(rows) == 15
        assert {row["bounds"] for row in rows} == set(rank_rows.BOUNDS)
        assert {row["exchange"] for row in rows} == set(rank_rows.EXCHANGES)
        for row in rows:
            bounds = rank_model.bounds_of(row["bounds"], row["tokens"], row["heads"], row["ranks"])
            ms = rank_model.forward_ms(row["heads"], bounds, row["exchange"])
            assert ms == pytest.approx(row["ms"], rel=0.05), rank_rows.label(row)
            assert rank_rows.modelled(row, rank_rows.model()).startswith(
                f"{round(ms, 4):.2f} ("  # as the file has it
            )

    def test_ranks_compute_as_long_as_it_says(self):
        rows = [
            row
            for row in stage_rows.load(results.result_path(stage_rows.OP, "h200"))["rows"]
            if (row["op"], row["pass"]) == ("kda", "forward")
        ]
        assert len(rows) == 12
        for row in rows:
            size = row["tokens"], row["heads"], row["ranks"]
            links = rank_model.links_us(*size[1:], row["exchange"]) / 1e3
            ms = rank_model.forward_ms(row["heads"], rank_model.bounds_of("equal", *size)) - links
            assert sum(stage_rows.slowest(row)) == pytest.approx(ms, rel=0.05), stage_rows.label(
                row
            )

    def test_the_file_is_what_the_model_gives(self):
        path = results.result_path(rank_rows.PREDICTED, "predicted")
        assert json.loads(path.read_text(encoding="utf-8")) == rank_model.document()

    def test_what_it_does_not_know(self, result):
        (row,) = result["rows"]
        forward = row | {"pass": "forward", "tokens": 131072, "heads": 64}
        assert rank_rows.modelled(forward, rank_rows.model()) == "4.80 (+4%)"
        for change in (
            {"pass": "step"}, {"op": "simple_gla"}, {"provider": "fla"}, {"tokens": 64}, {"exchange": "transpose"},
        ):  # fmt: skip
            assert (rank_rows.modelled(forward | change, rank_rows.model()) == "-") == (
                "exchange" not in change
            )

    def test_bytes_of_an_exchange(self):
        """300 GB/s: 1 MB takes 10 / 3 us. A state of a head has 65,536 bytes. Eight ranks fold by six products."""
        state = 64 * 65536 / 300e3
        assert rank_model.exchange_us(64, 2, "auto") == pytest.approx(50 + state)
        gathered = 50 + 7 * 2 * state + 18 + 6 * 3
        assert rank_model.exchange_us(64, 8, "gather") == pytest.approx(gathered)
        by_heads = 2 * 50 + 7 / 8 * 3 * state + 18 + 6 * 3
        assert rank_model.exchange_us(64, 8, "transpose") == pytest.approx(by_heads)
        assert rank_model.exchange_us(64, 8, "auto") == pytest.approx(by_heads)

    def test_ranks_by_their_place(self):
        """With 64 heads nothing is cut: the first one scans for A, inner ones for A and M, the last one does not."""
        first, inner, last = (
            rank_model.halves_us(16384, 64, comes_on, goes_on)
            for comes_on, goes_on in ((False, True), (True, True), (True, False))
        )
        assert last[0] < first[0] < inner[0] and first[1] == inner[1] == last[1]
        # Few heads are cut, so the last rank scans too; the map of an inner one is a product of many.
        first, inner, last = (
            rank_model.halves_us(65536, 4, comes_on, goes_on)
            for comes_on, goes_on in ((False, True), (True, True), (True, False))
        )
        assert inner[0] - last[0] > 10 * rank_model.FOLD_US and last[0] < first[0] < inner[0]

    def test_the_table_of_more_gpus(self):
        text = tables.rendered("<!-- bench:several_gpus:predicted -->\n<!-- /bench -->\n")
        lines = [line for line in text.splitlines() if line.startswith("| T")]
        assert len(lines) == 8 and "not measured" in text
        for line in lines:
            gains = [float(x.split(" (")[1][:-1]) for x in line.split(" | ")[2:4]]
            assert 1 < gains[0] < gains[1] < 4


class OneRank:
    """A world of one process."""

    @pytest.fixture(autouse=True)
    def world(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class TestPasses(OneRank):
    @pytest.mark.parametrize("op", several_gpus.OPS)
    def test_a_step_has_gradients_of_all_inputs(self, op):
        given, options = several_gpus.inputs(op, 70, 2, "cpu")
        function = several_gpus.calls(op, "cula")
        o, *gradients = several_gpus.passed("step", function, given, options)()
        assert torch.equal(o, several_gpus.passed("forward", function, given, options)()[0])
        leaves = [x.clone().requires_grad_() for x in given]
        (function(*leaves, **options)[0] * given[2]).sum().backward()
        right = [x.grad for x in leaves if x.grad is not None]
        assert len(right) == (4 if op == "simple_gla" else 5)
        for x, found in zip(right, gradients, strict=True):
            assert several_gpus.rmse(found, x) < 1e-6 and found.any()

    @pytest.mark.parametrize("op", several_gpus.OPS)
    def test_states_are_handed_on(self, op):
        given, options = several_gpus.inputs(op, 70, 2, "cpu")
        function = several_gpus.calls(op, "cula")
        handed = several_gpus.handed_on(function, given, options)
        assert torch.equal(handed, function(*given, **options)[0])

    def test_rmse_by_hand(self):
        exact, found = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
        assert several_gpus.rmse(found, exact) == pytest.approx(0.1)
