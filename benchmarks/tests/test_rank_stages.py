"""What each of several GPUs computes: stages of ranks, the rows of a result file, and its table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import rank_stages, several_gpus, tables
from benchmarks.harness import rank_rows, stage_rows
from benchmarks.ops.kda import rank_model
from benchmarks.report import sections


@pytest.fixture
def result(first_call_result: dict[str, Any]) -> dict[str, Any]:
    def times(*medians: float) -> list[list[float]]:
        return [[ms, 0.9 * ms, 1.1 * ms] for ms in medians]

    row = {
        "op": "kda", "pass": "forward", "tokens": 131072, "heads": 64, "ranks": 4, "exchange": "auto", "samples": 3,
        "stages": {"0": times(1.0, 0.125, 0.5), "1": times(2.0, 0.0625, 0.5), "3": times(0.5, 0.0625, 0.625)},
        "one": [6.0, 5.9, 6.1],
    }  # fmt: skip
    left = [{"call": "kda T1", "reason": "too short"}]
    return {**first_call_result, "title": "Stages", "skipped": left, "rows": [row]}


@pytest.mark.parametrize("op", several_gpus.OPS)
@pytest.mark.parametrize("exchange, count", [("gather", 1), ("transpose", 2)])
def test_every_collective_divides_a_pass(op, exchange, count):
    """Into one stage more than there are of them: one exchange in a forward, and as many in its backward."""
    device = torch.device("cpu")
    for which, exchanges in (("forward", 1), ("step", 2)):
        row = rank_stages.measure(op, which, 64, 4, 4, exchange, device, 4)
        assert row["stages"].keys() == {"0", "1", "3"}
        assert {len(of_rank) for of_rank in row["stages"].values()} == {exchanges * count + 1}
        one = rank_stages.alone(op, which, 64, 4, device, 4)
        stage_rows.validate({**dict.fromkeys(stage_rows.FIELDS, []), "title": "", "provenance": {}, "rows": [
            {**row, "one": one}
        ]})  # fmt: skip


def test_time_in_collectives_does_not_count():
    from cula.distributed import exchange

    seen: list[Any] = []
    real = exchange.all_gather
    with rank_stages.watched(torch.device("cpu"), seen):
        assert exchange.all_gather is not real
        with rank_stages.one_of(1, 4, torch.device("cpu")) as mesh:
            found = exchange.all_gather(torch.arange(3), mesh.get_group())
    assert exchange.all_gather is real
    assert found.tolist() == [0, 1, 2] * 4
    assert len(seen) == 2 and seen[0].elapsed_time(seen[1]) > 0


def test_the_table_adds_up_the_slowest_stages(result, tmp_path):
    path = tmp_path / "toy-100" / "rank_stages.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    text = tables.rendered("<!-- bench:rank_stages:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = "6.00 (5.90-6.10) | 4 | 2.00 + 0.12 + 0.62 | 2.75 | 2.18 | -"
    assert f"| kda T131072 H64 forward | {cells} |" in text
    assert "NVIDIA Toy 100" in text and "Not measured: kda T1: too short." in text
    section = sections.read(path)
    assert dict(section.measured)["links between them"] == "not measured"
    assert section.tables[0].lines[0][4] == "2.75" and len(section.plots) == 1
    assert any("too short" in note for note in section.notes)


def test_what_the_model_expects_has_no_links(result):
    """Its time less that of the links, which is told apart."""
    (row,) = result["rows"]
    bounds = rank_model.bounds_of("equal", 131072, 64, 4)
    whole = rank_model.forward_ms(64, bounds, "auto")
    expected = whole - rank_model.links_us(64, 4, "auto") / 1e3
    assert (
        stage_rows.modelled(row, rank_rows.model())
        == f"{expected:.2f} ({2.75 / expected - 1:+.0%})"
    )
    assert stage_rows.modelled(row | {"pass": "step"}, rank_rows.model()) == "-"
    assert stage_rows.modelled(row | {"tokens": 64}, rank_rows.model()) == "-"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pass": "half"}, r"rows\[0\].pass: expected one of"),
        ({"exchange": "mail"}, r"rows\[0\].exchange: expected one of"),
        ({"ranks": 8}, r"rows\[0\].stages: expected ranks"),
        ({"one": [1.0, 2.0, 3.0]}, "expected 0 < 20th percentile <= median <= 80th"),
        ({"stages": {"0": [], "1": [[1.0, 1.0, 1.0]], "3": []}}, "expected as many of every rank"),
        ({"op": 3}, "op: expected"),
    ],
)
def test_wrong_rows_are_refused(result, change, message):
    result["rows"][0] |= change
    with pytest.raises(ValueError, match=message):
        stage_rows.validate(result)


def test_a_row_stands_once(result):
    result["rows"] *= 2
    with pytest.raises(ValueError, match="appears twice"):
        stage_rows.validate(result)


def test_the_command_needs_a_gpu_and_ranks(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_stages.main([]) == 2
    assert "expected a GPU" in capsys.readouterr().err
    for wrong in (["--samples", "3"], ["--ranks", "1"]):
        with pytest.raises(SystemExit, match="2"):
            rank_stages.main(wrong)
