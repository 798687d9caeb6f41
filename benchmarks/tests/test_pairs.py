"""Plots of pairs: which times belong together, and the PNG."""

from __future__ import annotations

import json

from benchmarks import pairs
from benchmarks.harness import model_rows, rank_rows, results


def test_models_and_ranks_are_read(tmp_path):
    for op, names, where in (
        (model_rows.OP, ("without cula", "with cula"), "provider"),
        (rank_rows.OPS[0], ("one GPU", "together"), "one_ms"),
    ):
        content = json.loads(results.result_path(op, "h200").read_text(encoding="utf-8"))
        found = pairs.pairs(content)
        assert found[0] == names and where in content["rows"][0]
        assert len(found[1]) == len({pair.label for pair in found[1]}) > 5
        first = found[1][0]
        own = [row for row in content["rows"] if row["ms"] == first.after[0]]
        assert own and first.after == tuple(own[0][n] for n in ("ms", "p20_ms", "p80_ms"))
        assert all(low <= middle <= high for p in found[1] for middle, low, high in p[1:])


def test_the_command_writes_a_png(tmp_path, capsys):
    source, out = results.result_path(model_rows.OP, "h200"), tmp_path / "plots" / "m.png"
    assert pairs.main([str(source), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and str(out) in capsys.readouterr().out
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"rows": []}')
    assert pairs.main([str(wrong), "--out", str(out)]) == 2
