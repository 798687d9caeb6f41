"""What the page says of single result files, and which files it refuses."""

import copy
import json

import pytest

from benchmarks.harness import report, results
from benchmarks.report import plots, sections


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here, and has tests of its own."""
    monkeypatch.setattr(plots, "as_svg", lambda figure, prefix: f'<svg id="{prefix}"></svg>')


@pytest.fixture
def written(tmp_path, decode_result):
    """Writes a result of the toy GPU, changed by a function, and returns its path."""

    def write(change=lambda content: None, name="toy-100/lightning_decode.json"):
        content = copy.deepcopy(decode_result("lightning_decode", (16, 64, 128)))
        change(content)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    return write


def test_a_section_has_badge_machine_ratios_and_what_is_missing(written):
    section = sections.read(written())
    assert section.badges == ["ran on NVIDIA Toy 100"]
    assert dict(section.origin) == {
        "device": "NVIDIA Toy 100, 80 of 132 multiprocessors",
        "driver": "1.2",
        "CUDA": "13.0",
        "torch": "2.11.0",
        "triton": "not recorded",
        "CuTe DSL": "not recorded",
        "commit": "0123456789abcdef",
        "date": "2026-01-02 03:04:05 UTC",
    }
    assert dict(section.measured) == {
        "burst": "measured",
        "sustained": "not measured",
        "energy, J per call": "not measured",
        "first call, s": "not measured",
    }
    assert [table.header[0] for table in section.tables] == ["setting"]
    assert "not measured" not in str(section.tables)


def test_a_flag_of_a_check_is_no_error():
    checks = [{"errors": {"output": 2e-3, "cut": 1.0}}, {"errors": {"output": 1e-3}}]
    assert sections._checks({"checks": checks}).endswith("the largest error found was 0.002.")


def test_ratios_are_those_of_the_documents(written):
    path = written()
    fla, ceiling, floor = sections.read(path).comparisons
    mean, count = report.geometric_mean(results.load(path), "graph", "*", "fla")
    assert (fla.ours, fla.other, fla.mean, fla.count) == ("cula", "fla", mean, count)
    assert fla.low <= fla.mean <= fla.high
    assert (ceiling.other, round(ceiling.mean, 3)) == ("inplace_ceiling", round(4.0 / 4.2, 3))
    assert (floor.role, round(floor.mean, 3)) == ("floor", round(4.0 / 4.3, 3))


def test_sustained_times_stand_beside_the_burst(written, monkeypatch):
    monkeypatch.setattr(results, "METHODS", (*results.METHODS, "sustained"))

    def change(content):
        first, *_ = content["rows"]
        slow = {**first, "method": "sustained"}
        slow |= {key: 2 * first[key] for key in ("p20_us", "median_us", "p80_us")}
        content["rows"].append(slow)

    path = written(change)
    section = sections.read(path)
    assert dict(section.measured)["sustained"] == "measured"
    (table,) = section.tables
    assert table.header[1:3] == ["cula, us", "cula sustained, us"]
    (row,) = results.rows_of(results.load(path), method="sustained")
    assert table.lines[0][2] == report.time(row, spread=True)
    assert table.lines[1][2] == "not measured"
    assert {len(line) for line in table.lines} == {len(table.header)}


def test_energy_and_first_calls_get_a_table(written):
    def change(content):
        content["rows"][0] |= {"joules_per_call": 0.25, "first_call_s": 1.5}

    section = sections.read(written(change))
    assert dict(section.measured)["energy, J per call"] == "measured"
    assert section.tables[-1].lines == [["B16-T1-fp32-kv-cold", "cula", "graph", "0.25", "1.5"]]


def test_many_implementations_become_lines(written):
    def change(content):
        copies = [{**content["rows"][0], "provider": f"v{n}", "role": "variant"} for n in range(9)]
        content["rows"] += copies

    (table,) = sections.read(written(change)).tables
    assert table.header[0] == "us" and len(table.header) == 4
    assert {"cula", "fla", "v8", "floor"} <= {line[0] for line in table.lines}


def wrong_gpu(content):
    content["provenance"]["gpu"] = "NVIDIA Other"


def wrong_field(content):
    content["rows"][3]["median_us"] = "fast"


def wrong_method(content):
    content["rows"][0]["method"] = "guess"


def wrong_op(content):
    content["op"] = "another"


def no_rows(content):
    content["rows"] = []


def no_place(content):
    content["provenance"] = []


@pytest.mark.parametrize(
    "change, words",
    [
        (wrong_gpu, "expected the GPU of folder 'toy-100'"),
        (wrong_field, r"rows\[3\].median_us"),
        (wrong_method, "method: expected one of"),
        (wrong_op, "op: expected 'lightning_decode'"),
        (no_rows, "method: expected one of"),
        (no_place, "a shape that the report does not know"),
    ],
)
def test_a_file_of_an_unknown_shape_is_named(written, change, words):
    path = written(change)
    with pytest.raises(ValueError, match=words) as caught:
        sections.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["ncu_decode", "time", "emulator", "lite_quality", "lite_trajectory", "kda_blackwell"],
)
def test_shapes_of_their_own_are_checked_too(written, name):
    path = written(name=f"toy-100/{name}.json")
    with pytest.raises(ValueError) as caught:
        sections.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["h200/more/x.json", "x.json", "h200/x.csv"])
def test_a_file_in_another_place_is_named(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected <folder>/<name>.json") as caught:
        sections.files(tmp_path)
    assert str(path) in str(caught.value)


def test_text_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="x.json"):
        sections.read(path)
