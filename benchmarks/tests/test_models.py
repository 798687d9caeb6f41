"""Whole models: the rows of a result file, its table, and the command with toy models."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks import models, tables
from benchmarks.harness import model_rows
from benchmarks.harness.model_rows import OURS


def rows(model: str = "toy", work: str = "prefill", theirs: str = "fla") -> list[dict[str, Any]]:
    """8 ms without cula, 2 of them linear attention, and 7 ms with it."""
    row = {
        "model": model, "parameters": 5, "work": work, "batch": 1, "tokens": 64, "samples": 3, "peak_gib": 0.5,
        "p20_ms": 6.5, "p80_ms": 9.5,
    }  # fmt: skip
    first = {"provider": theirs, "ms": 8.0, "tokens_per_s": 8000.0, "device_ms": 7.5, "error": None}
    last = {"provider": OURS, "ms": 7.0, "tokens_per_s": 9142.9, "device_ms": 6.5, "error": 0.01}
    none = theirs == "torch"
    return [row | first | {"linear_ms": None if none else 2.0}, row | last | {"linear_ms": 1.0}]


@pytest.fixture
def result(first_call_result: dict[str, Any]) -> dict[str, Any]:
    left = {"model": "toy", "work": "train", "reason": "no backward"}
    return {**first_call_result, "title": "Whole models", "skipped": [left], "rows": rows()}


def test_the_table_has_a_bound(result, tmp_path):
    path = tmp_path / "toy-100" / "models.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    text = tables.rendered("<!-- bench:models:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = "8.0 (6.5-9.5) | 7.0 (6.5-9.5) | 1.14 | 9,143 | 2.00 / 1.00 | 7.50 / 6.50 | 6.0"
    assert f"| toy, prefill B1-T64 | {cells} |" in text
    assert "NVIDIA Toy 100" in text and "Not measured: toy, train: no backward." in text
    result["rows"] = rows(theirs="torch", work="decode")
    (line,) = model_rows.table(result)[1]
    assert line[0] == "toy, decode B1" and line[5:] == ["- / 1.00", "7.50 / 6.50", "-"]
    result["rows"] = [row | {"device_ms": 3.0} for row in rows(work="decode")]
    (line,) = model_rows.table(result)[1]
    assert line[3] == "bound by the host" and line[7] == "-"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": "sleep"}, r"rows\[1\].work: expected one of"),
        ({"ms": 9.9}, "expected 0 < p20_ms <= ms <= p80_ms"),
        ({"provider": "fla"}, "appears twice"),
        ({"tokens": 65}, "expected another provider and cula"),
        ({"error": "large"}, "error: expected"),
    ],
)
def test_wrong_rows_are_refused(result, change, message):
    result["rows"][1] |= change
    with pytest.raises(ValueError, match=message):
        model_rows.validate(result)


@pytest.fixture
def card(monkeypatch, result):
    """The command on a toy card, whose models take as long as `rows` says."""
    origin = {**result["provenance"]}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(models, "provenance", lambda: copy.deepcopy(origin))
    monkeypatch.setattr(models, "measure", lambda model, work, rounds: rows(model.name))
    return origin


def test_the_command_writes_after_every_model_and_joins(card, tmp_path, capsys, monkeypatch):
    path = tmp_path / "models.json"
    assert models.main(["--json", str(path), "--models", "kimi*"]) == 0
    assert {row["model"] for row in model_rows.load(path)["rows"]} == {"kimi_linear"}
    assert models.main(["--json", str(path), "--join", "--models", "qwen*", "minimax"]) == 0
    content = model_rows.load(path)
    assert [row["model"] for row in content["rows"][::2]] == [
        "kimi_linear",
        "qwen3_next",
        "minimax",
    ]
    assert [(e["model"], e["work"]) for e in content["skipped"]] == [("qwen3_next", "train")]
    monkeypatch.setattr(models, "provenance", lambda: {**card, "commit": "another"})
    assert models.main(["--json", str(path), "--join", "--models", "kimi*"]) == 2
    assert "commit: the results to join have" in capsys.readouterr().err
    assert models.main(["--models", "nothing"]) == 2
    assert "'nothing' matches none" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--join"], ["--rounds", "0"], ["--work", "sleep"]])
def test_wrong_arguments(card, wrong):
    with pytest.raises(SystemExit):
        models.main(wrong)


def test_kernels_of_linear_attention_are_told_by_name():
    ours = (
        "kernel_cutlass_kernel_cula_core_KdaPrepare",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    )
    others = (
        "nvjet_tst_128x256",
        "void at::native::vectorized_elementwise_kernel",
        "flash_fwd_splitkv",
    )
    assert all(models.LINEAR.search(name) for name in ours)
    assert not any(models.LINEAR.search(name) for name in others)


def test_work_that_a_model_does():
    kimi, qwen, _ = models.MODELS
    every = ("prefill", "decode", "train")
    assert [w for w, _, _ in models.works(kimi, every)].count("train") == 1
    assert {w for w, _, _ in models.works(qwen, every)} == {"prefill", "decode"}
    assert [w for w, _, _ in models.works(kimi, ["train"])] == ["train"]
