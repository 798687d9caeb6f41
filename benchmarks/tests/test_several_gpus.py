"""Calls on several GPUs: the rows of a result file, its table, and what the command refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import several_gpus, tables
from benchmarks.harness import rank_rows
from benchmarks.report import sections


@pytest.fixture
def result(first_call_result: dict[str, Any]) -> dict[str, Any]:
    row = {
        "op": "kda", "tokens": 128, "heads": 4, "ranks": 2, "bounds": "equal", "provider": "cula", "method": "graph",
        "ms": 5.0, "p20_ms": 4.9, "p80_ms": 5.2, "one_ms": 8.0, "one_p20_ms": 7.9, "one_p80_ms": 8.1, "samples": 3,
        "message_bytes": 1024, "collective_ms": 0.1, "error": 0.0004,
    }  # fmt: skip
    left = [{"call": "kda T1", "reason": "too short"}]
    return {**first_call_result, "title": "Ranks", "skipped": left, "rows": [row]}


def test_the_table_tells_gain_and_share(result, tmp_path):
    path = tmp_path / "toy-100" / "several_gpus.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    text = tables.rendered("<!-- bench:several_gpus:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = "8.00 (7.90-8.10) | 2 | 5.00 (4.90-5.20) | 1.60 | graph | 0.100 (2.0%) | 4.0e-04"
    assert f"| cula, kda T128 H4, equal | {cells} |" in text
    assert "NVIDIA Toy 100" in text and "Not measured: kda T1: too short." in text
    section = sections.read(path)
    assert dict(section.measured)["forward on several GPUs"] == "measured"
    assert section.tables[0].lines[0][4] == "1.60" and len(section.plots) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "guess"}, r"rows\[0\].method: expected one of"),
        ({"bounds": "odd"}, r"rows\[0\].bounds: expected one of"),
        ({"ms": 9.9}, "expected 0 < p20_ms <= ms <= p80_ms"),
        ({"one_p20_ms": 0}, "expected 0 < one_p20_ms"),
        ({"error": "large"}, "error: expected"),
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
    calls = list(several_gpus.wanted(["cula", "fla"]))
    assert len(set(calls)) == len(calls) and {call[3] for call in calls} == {"cula", "fla"}
