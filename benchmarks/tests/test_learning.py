"""Training runs: a tiny model on a CPU, the rows of a result file, its table and its curves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from benchmarks import curves, learning, tables
from benchmarks.harness import loss_rows
from benchmarks.harness.loss_rows import EXACT
from benchmarks.report import sections

TINY = learning.Sizes(layers=1, width=16, heads=2, dim=8, batch=2, tokens=40, rate=1e-2)
CPU = torch.device("cpu")
EXACTLY, ROUNDED = learning.PROVIDERS[3], learning.PROVIDERS[2]


@pytest.fixture(scope="module")
def corpus() -> torch.Tensor:
    return learning.text()


def test_a_tiny_model_learns_the_same_every_time(corpus):
    # Not the files of the repository, which change.
    corpus = torch.tensor(list(b"one text again and again, " * 400), dtype=corpus.dtype)
    row, again = (learning.train(EXACTLY, TINY, corpus, 12, CPU) for _ in range(2))
    assert row["losses"] == again["losses"] and row["backward"] == "reference"
    assert 5.0 < row["losses"][0] < 6.2  # about log 256
    assert row["losses"][-1] < row["losses"][0] - 0.3
    half = learning.train(ROUNDED, TINY, corpus, 12, CPU)
    assert 0 < loss_rows.apart(half, row) < 2e-2


def test_every_parameter_has_a_gradient(corpus):
    model = learning.Model(TINY, "reference")
    ids, following = next(learning.batches(corpus, TINY, 1))
    assert torch.equal(ids[:, 1:], following[:, :-1])
    model(ids).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def row_of(provider: str, *losses: float) -> dict[str, Any]:
    return {
        "provider": provider, "backward": "x", "dtype": "float32", "ms": 2.0, "peak_gib": None, "losses": list(losses),
    }  # fmt: skip


@pytest.fixture
def result(first_call_result: dict[str, Any]) -> dict[str, Any]:
    skipped = [{"provider": "fla", "reason": "not installed"}]
    rows = [row_of("cula", 5.0, 3.0), row_of(EXACT, 5.0, 3.2)]
    return {**first_call_result, "title": "Losses", "model": {}, "skipped": skipped, "rows": rows}


def test_the_table_compares_with_fp32(result, tmp_path):
    path = tmp_path / "toy-100" / f"{loss_rows.OP}.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    marker = f"<!-- bench:{loss_rows.OP}:toy-100 -->\n<!-- /bench -->\n"
    text = tables.rendered(marker, tmp_path)
    assert "| cula | x | float32 | 5.0000 | 4.0000 | 1.4e-01 | 2.0 |" in text
    assert f"| {EXACT} | x | float32 | 5.0000 | 4.1000 | - | 2.0 |" in text
    assert "NVIDIA Toy 100" in text and "Not measured: fla: not installed." in text
    section = sections.read(path)
    assert section.tables[0].lines[0][0] == "cula" and section.notes[-1].startswith("Not measured")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provider": EXACT}, "appears twice"),
        ({"losses": [1.0]}, "as many steps"),
        ({"losses": [1.0, float("nan")]}, "finite"),
        ({"backward": None}, "backward: expected"),
    ],
)
def test_wrong_rows_are_refused(result, change, message):
    result["rows"][0] |= change
    if "provider" in change:
        result["rows"].reverse()
    with pytest.raises(ValueError, match=message):
        loss_rows.validate(result)


def test_the_curves_are_drawn(result, tmp_path, capsys):
    source, out = tmp_path / "x.json", tmp_path / "plots" / "x.png"
    source.write_text(json.dumps(result))
    assert curves.main([str(source), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(result | {"rows": []}))
    assert curves.main([str(source)]) == 2


def test_the_command(result, tmp_path, capsys, monkeypatch):
    """On a toy card, whose only providers are those of torch."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(learning, "provenance", lambda: copy.deepcopy(result["provenance"]))
    monkeypatch.setattr(learning, "train", lambda p, *_: row_of(p.name, 5.0, 3.0))
    monkeypatch.setattr(learning, "why_not", lambda p: None if p.impl == "reference" else "no")
    path = tmp_path / "losses.json"
    assert learning.main(["--json", str(path)]) == 0
    content = loss_rows.load(path)
    assert [row["provider"] for row in content["rows"]] == ["torch bf16", EXACT]
    assert [entry["provider"] for entry in content["skipped"]] == ["cula", "fla"]
    assert learning.main(["--providers", "fla"]) == 2
    with pytest.raises(SystemExit):
        learning.main(["--steps", "0"])


def test_a_provider_stands_for_its_own_backward(monkeypatch):
    assert learning.why_not(EXACTLY) is None
    assert "cpu" in str(learning.why_not(learning.PROVIDERS[0]))
