"""The table beside the report of a port to SM89."""

import json

import pytest

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.ops.lite import published

REGION = "<!-- bench:lite_rtx4090:published{} -->\n<!-- /bench -->\n"


def test_ratios_are_of_one_card_each():
    timed = {"params": {}, "method": "graph", "setting": "a"}
    rows = [
        timed | {"provider": p, "median_us": us} for p, us in (("lite", 50), ("lite_dense", 40))
    ]
    asked = {"op": "o", "setting": "a", "what": "w", "dense_us": 100, "listed_us": 200}
    _, lines = published.table([asked], {"o": {"rows": rows}})
    assert lines == [["a", "w", "100", "200", "2.000", "40", "50", "1.250"]]


def test_the_region_has_every_row_and_its_source():
    text = tables.rendered(REGION.format(""))
    rows = json.loads(results.result_path(published.OP, "published").read_text())["rows"]
    assert all(f"| {row['setting']} | {row['what']} |" in text for row in rows)
    assert "RTX 4090" in text and "Not measured here" in text and "NVIDIA H200" in text
    with pytest.raises(ValueError, match="expected no table"):
        tables.rendered(REGION.format(" table=lists"))
