"""Calls on several GPUs: the rows of a result file, its table, and what the command refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import pairs, several_gpus, tables
from benchmarks.harness import rank_rows
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
    path = tmp_path / "toy-100" / "several_gpus.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    text = tables.rendered("<!-- bench:several_gpus:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = (
        "8.00 (7.90-8.10) | 2 | 5.00 (4.90-5.20) | 1.60 | graph | 0.100 (2.0%) | 4.0e-04, 3.0e-03"
    )
    assert f"| cula, kda T128 H4 step, equal | {cells} |" in text
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
    monkeypatch.delenv("WORLD_SIZE", raising=False)
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
