"""Tables and regions of what is predicted for Blackwell."""

import pytest

from benchmarks import tables
from benchmarks.ops.kda import model
from benchmarks.ops.kda import tables as kda_tables


@pytest.fixture(scope="module")
def document():
    return model.document()


def test_tables_say_what_they_are(document):
    published = kda_tables.published()
    header, lines = kda_tables.prediction_table(document, published)
    assert [line[0] for line in lines] == kda_tables.MAIN
    assert all("predicted" in name or "published" in name for name in header[1:-1])
    predicted, _ = kda_tables.captions(document, published)
    assert "predicted, not measured" in predicted and "not run by us" in predicted
    by_name = {line[0]: line for line in lines}
    assert by_name["B1-T16384-H64"][2:4] == ["1.883", "2.706"]
    assert by_name["B2-T16384-H64"][5:7] == ["3.870", "5.510"]
    assert by_name["B2-T512-H64"][2:4] == ["-", "-"]


def test_regions_are_filled_and_unknown_tables_refused():
    text = "<!-- bench:kda_prefill_blackwell:predicted{} -->\nold\n<!-- /bench -->\n"
    assert "| B1-T512-H64 |" in tables.rendered(text.format(""))
    assert "modelled, us" in tables.rendered(text.format(" table=held_out"))
    with pytest.raises(ValueError, match="held_out"):
        tables.rendered(text.format(" table=rates"))


def test_the_document_is_current():
    page = tables.ROOT / "docs" / "kda-sm100.md"
    assert "bench:kda_prefill_blackwell:predicted -->" in page.read_text()
    assert tables.update([page], check=True) == []
