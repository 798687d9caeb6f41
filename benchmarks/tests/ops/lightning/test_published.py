"""The gated delta rule's backward beside what others published, with times of ours that no GPU gave."""

import json
import shutil

import pytest

from benchmarks import tables
from benchmarks.harness import results
from benchmarks.ops.lightning import gated_training, published

REGION = "<!-- bench:gated_h200:published{} -->\n<!-- /bench -->\n"
PUBLISHED = results.result_path(published.OP, "published")
COSTS = {
    "cula": 1250.0, "cula_forward": 250.0, "cula_halves": 1500.0, "cula_whole": 1200.0, "fla": 3000.0,
    "fla_lifted": 3000.0,
}  # fmt: skip


@pytest.fixture
def result(timed_alone):
    """1 ms for every backward of ours."""
    return timed_alone(gated_training.OP, lambda name, problem: COSTS[name], peaks=False)


@pytest.fixture
def root(result, tmp_path):
    """A folder of results with this one in place of ours."""
    (tmp_path / "published").mkdir()
    shutil.copy(PUBLISHED, tmp_path / "published")
    results.save(result, results.result_path(published.MEASURED, published.CARD, tmp_path))
    return tmp_path


def rows():
    return json.loads(PUBLISHED.read_text())["rows"]


def test_our_backward_is_a_step_less_its_forward():
    timed = {"params": {}, "method": "graph", "setting": "a"}
    step = timed | {"provider": "cula", "median_us": 900.0}
    forward = timed | {"provider": "cula_forward", "median_us": 400.0}
    ours = {"rows": [step, forward]}
    row = {"setting": "a", "flashqla_ms": 0.75, "fla_ms": 2.0}
    assert published.ratio(row, ours) == 1.5
    _, (line,) = published.table([row], ours)
    assert line == ["a", "0.900", "0.400", "0.500", "0.750", "1.50", "2.000"]
    assert published.mean([row, row | {"flashqla_ms": 3.0}], ours) == "3.00 over 2 settings"
    for kept in (step, forward):
        with pytest.raises(ValueError, match="a was not measured with cula and cula_forward"):
            published.ratio(row, {"rows": [kept]})


def test_every_published_setting_is_one_that_is_measured():
    problems = {problem.name: problem for problem in gated_training.settings(quick=False)}
    names = [row["setting"] for row in rows()]
    assert len(names) == len(set(names)) == 32 and set(names) <= set(problems)
    assert all(row["sequences"] == problems[row["setting"]].params.get("N", 1) for row in rows())


def test_the_region_names_the_source_and_both_means(root):
    text = tables.rendered(REGION.format(""), root)
    assert "| B1-T8192-H32-Q16 | 1.250 | 0.250 | 1.000 | 0.789 | 0.79 | 1.444 |" in text
    assert "| N8-T32768-uniform-H4-Q2 | 1.250 | 0.250 | 1.000 | 0.547 | 0.55 | 1.057 |" in text
    # The mean of 0.789, 2.515, 0.452, 1.377, 0.321, 0.887, 0.290 and 0.548.
    assert "0.70 over 8 settings of one sequence" in text and "over 32 settings in all" in text
    assert "drawn at random" in text and "Not measured here. Here sequences have equal" in text
    with pytest.raises(ValueError, match="expected no table, got 'cut'"):
        tables.rendered(REGION.format(" table=cut"), root)
