"""Tables of KDA beside what others published for an H200."""

import json

import pytest

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.ops.kda import published


@pytest.fixture(scope="module")
def measured():
    return results.load(results.result_path("kda_prefill", "h200"))


def rows():
    path = results.result_path(published.OP, "published")
    return {row["setting"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_ratio_is_the_lowest_published_time_over_ours():
    timed = {"params": {}, "method": "graph", "setting": "a"}
    ours = {"rows": [timed | {"provider": "cula", "median_us": 500.0}]}
    row = {"setting": "a", "cula_april_ms": 2.0, "cula_best_ms": 1.25}
    assert published.ratio(row, published.WHOLE, ours) == 2.5
    _, (line,) = published.whole_table([row], ours)
    assert line == ["a", "0.500", "2.000", "-", "1.250", "2.50", "-", "-"]
    with pytest.raises(ValueError, match="b was not measured"):
        published.ratio({"setting": "b", "cula_cut_ms": 1.0}, published.CUT, ours)
    cut = {"setting": "a", "cula_cut_ms": 1.0, "cula_serial_ms": 4.0}
    _, (line,) = published.cut_table([cut], ours)
    assert line == ["a", "0.500", "-", "1.000", "4.000", "2.00", "8.00"]
    header, (line,) = published.cut_table([cut | {"fla_cut_ms": 1.5}], ours)
    assert (
        header[3] == "FLA, cut, ms" and line[3] == "1.500" and line[-3:] == ["3.00", "2.00", "8.00"]
    )


def test_every_setting_is_one_that_was_measured(measured):
    ours = {row["setting"] for row in measured["rows"]}
    assert set(rows()) <= ours
    assert {s for s in ours if s.endswith("-H64")} <= set(rows())


def test_regions_name_the_source():
    region = "<!-- bench:kda_h200:published{} -->\n<!-- /bench -->\n"
    asked = ("", " table=cut", " table=proposal")
    whole, cut, proposal = (tables.rendered(region.format(table)) for table in asked)
    assert "| N8-T32768-uniform-H16 |" in proposal and "Neither the card nor" in proposal
    assert "| B1-T8192-H64 |" in whole and "28 settings" in whole
    assert "| N6-T70656-long-H4 |" in cut and "14 settings" in cut
    assert all("published benchmark tables" in text for text in (whole, cut))
    assert all("Not measured here" in text for text in (whole, cut, proposal))
    with pytest.raises(ValueError, match="table=cut, table=proposal or none"):
        tables.rendered(region.format(" table=whole"))
