"""The table of Lightning prefill beside the gated delta rule, from a result that no GPU gave."""

import pytest

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.ops.lightning import tables as lightning_tables
from benchmarks.ops.lightning.lightning_prefill_delta import OP
from benchmarks.report import sections

COSTS = {
    "cula": 10.0,
    "cula_decay": 8.0,
    "flashinfer_decay": 20.0,
    "flashinfer_gate": 25.0,
    "flashinfer_delta": 30.0,
    "fla_delta": 40.0,
}
OPTIONS = "method=graph table=beside_delta"
REGION = f"<!-- bench:lightning_prefill_delta:toy-100 {OPTIONS} -->\n<!-- /bench -->\n"
SETTINGS = OP.settings(False)


@pytest.fixture
def result(timed_alone):
    """The op on the fake device, where cula takes four times as long for the first setting."""

    def cost(name, problem):
        return COSTS[name] * (4 if (name, problem.name) == ("cula", SETTINGS[0].name) else 1)

    return timed_alone(OP, cost)


def test_every_setting_has_a_line_and_the_last_one_has_the_means(result):
    header, lines = lightning_tables.beside_delta(result, "graph", "*")
    assert header[:2] == ["setting", "cula, us"] and header[7:] == [
        "cula x flashinfer_gate",
        "cula x flashinfer_delta",
        "cula x fla_delta",
        "cula_decay x flashinfer_decay",
    ]
    assert [line[0] for line in lines] == [s.name for s in SETTINGS] + ["geometric mean of 28"]
    assert lines[0][1:] == [
        "40.00 (40.00-40.00)", "8.00", "20.00", "25.00", "30.00", "40.00", "0.62", "0.75", "1.00", "2.50",
    ]  # fmt: skip
    assert lines[1][7:] == ["2.50", "3.00", "4.00", "2.50"]
    # Each mean of cula is 4 ** (1 / 28), 5 %, below the ratio of the other 27 settings.
    assert lines[-1][1:] == ["", "", "", "", "", "", "2.38", "2.86", "3.81", "2.50"]


def test_what_was_not_measured_has_no_ratio_and_no_mean(result):
    gone = (SETTINGS[3].name, "fla_delta")
    result["rows"] = [r for r in result["rows"] if (r["setting"], r["provider"]) != gone]
    for row in result["rows"]:
        if row["setting"] == gone[0]:
            del row["ratio_fla_delta"]
    _, lines = lightning_tables.beside_delta(result, "graph", "*")
    assert lines[3][6] == lines[3][9] == lines[-1][9] == "-"
    assert lines[-1][8] == "2.86"
    assert lightning_tables.beside_delta(result, "eager-host", "*")[1] == []


def test_a_document_gets_the_table(result, tmp_path):
    results.save(result, results.result_path("lightning_prefill_delta", "toy-100", tmp_path))
    text = tables.rendered(REGION, tmp_path)
    assert "| N20-T16384-skewed-H64 | 10.00 (10.00-10.00) | 8.00 |" in text
    assert "| geometric mean of 28 |  |  |" in text and "Median (20-80 %) of graph." in text
    assert tables.rendered(text, tmp_path) == text
    with pytest.raises(ValueError, match="expected a table of .*beside_delta.*, got 'beside'"):
        tables.rendered(REGION.replace("beside_delta", "beside"), tmp_path)
    with pytest.raises(ValueError, match="no row has method"):
        tables.rendered(REGION.replace(OPTIONS, f"{OPTIONS} settings=B9*"), tmp_path)


def test_the_page_of_all_results_shows_it(result, tmp_path):
    path = results.result_path("lightning_prefill_delta", "toy-100", tmp_path)
    results.save(result, path)
    section = sections.read(path)
    means = {c.other: round(c.mean, 2) for c in section.headline}
    assert means["flashinfer_delta"] == 2.86 and means["fla_delta"] == 3.81
    assert [p.caption for p in section.plots] == [
        "B=1, H=64, L2 cold",
        "B=2, H=64, L2 cold",
        "N=10, lengths=random, H=64, L2 cold",
        "N=20, lengths=random, H=64, L2 cold",
    ]
    assert any("gated_prefill has cula's gated delta rule" in note for note in section.notes)
