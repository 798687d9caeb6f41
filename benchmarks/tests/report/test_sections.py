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
    checks = [
        {"provider": "fla_cp", "errors": {"output": 2e-3, "cut": 1.0}},
        {"provider": "cula", "errors": {"output": 1e-3}},
    ]
    said = sections._checks({"checks": checks})
    assert said.endswith("the largest error found was 0.002, of fla_cp.")


def test_ratios_are_those_of_the_documents(written):
    path = written()
    fla, ceiling, floor = sections.read(path).comparisons
    mean, count = report.geometric_mean(results.load(path), "graph", "*", "fla")
    assert (fla.ours, fla.other, fla.mean, fla.count) == ("cula", "fla", mean, count)
    assert fla.low <= fla.mean <= fla.high
    assert (ceiling.other, round(ceiling.mean, 3)) == ("inplace_ceiling", round(4.0 / 4.2, 3))
    assert (floor.role, round(floor.mean, 3)) == ("floor", round(4.0 / 4.3, 3))


@pytest.fixture
def sustained(written):
    """Writes what the burst becomes under a load: twice the times, at 1500 MHz and 600 W."""

    def change(content):
        content["title"] += ", sustained load"
        content["provenance"]["commit"] = "fedcba9876543210"
        for row in content["rows"]:
            row |= {"method": "sustained", "sm_clock_mhz": 1500, "power_w": 600.0}
            row |= {key: 2 * row[key] for key in ("p20_us", "median_us", "p80_us")}
            row["joules_per_call"] = 600e-6 * row["median_us"]

    return lambda more=lambda content: None: written(
        lambda content: (change(content), more(content)),
        name="toy-100/lightning_decode_sustained.json",
    )


def test_sustained_times_stand_beside_the_burst(written, sustained):
    burst_path, path = written(), sustained()
    section = sections.read(path)
    assert section.title == "Decode, sustained load"
    assert dict(section.measured) == {
        "burst": "measured, in lightning_decode.json",
        "sustained": "measured",
        "energy, J per call": "measured",
    }
    (table,) = section.tables
    assert table.caption.startswith("sustained load (sustained), beside burst, replays of")
    assert table.header == [
        "setting", "implementation", "burst, us", "sustained, us", "share of burst", "time over cula", "SM clock, MHz",
        "power, W", "mJ per call",
    ]  # fmt: skip
    first = results.load(path)["rows"][0]
    before = results.load(burst_path)["rows"][0]
    times = [report.time(row, spread=True) for row in (before, first)]
    energy = f"{0.6 * first['median_us']:.2f}"
    assert table.lines[0] == [
        "B16-T1-fp32-kv-cold", "cula", *times, "0.50", "1.00", "1500", "600", energy
    ]  # fmt: skip
    assert (table.lines[2][1], table.lines[2][5]) == ("fla", f"{4.0 / 3.5:.2f}")
    assert dict(section.origin)["commit"] == "fedcba9876543210"
    assert "lightning_decode.json: NVIDIA Toy 100" in section.sentences[-1]
    assert "commit 0123456789ab" in section.sentences[-1]
    (fla, *_) = section.comparisons
    assert (fla.other, round(fla.mean, 3)) == ("fla", round(4.0 / 3.5, 3))


def test_a_burst_names_the_files_of_sustained_times_and_first_calls(
    written, sustained, first_call_result
):
    path = written()
    sustained()
    written(lambda content: content, name="toy-100/first_call.json").write_text(
        json.dumps(first_call_result)
    )
    assert dict(sections.read(path).measured) == {
        "burst": "measured",
        "sustained": "measured, in lightning_decode_sustained.json",
        "energy, J per call": "measured, in lightning_decode_sustained.json",
        "first call, s": "measured, in first_call.json",
    }


def test_a_load_without_a_meter_and_without_bursts(sustained):
    def change(content):
        for row in content["rows"]:
            for key in ("sm_clock_mhz", "power_w", "joules_per_call"):
                del row[key]

    section = sections.read(sustained(change))
    assert dict(section.measured) == {
        "burst": "not measured",
        "sustained": "measured",
        "energy, J per call": "not measured",
    }
    (table,) = section.tables
    assert "burst" not in " ".join((table.caption, *table.header))
    assert table.lines[0][-3:] == ["-", "-", "-"]


def test_first_calls_have_a_section(written, first_call_result):
    path = written(name="toy-100/first_call.json")
    path.write_text(json.dumps(first_call_result))
    section = sections.read(path)
    assert section.badges == ["ran on NVIDIA Toy 100"]
    assert section.measured == [("first call, s", "measured")]
    (table,) = section.tables
    assert table.lines[0][0] == "cula_lightning_decode: linear_attention_decode"
    assert table.lines[0][3:5] == ["6.00", "0.0200"]
    assert len(section.plots) == 1


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


def sustained_under_another_name(content):
    for row in content["rows"]:
        row["method"] = "sustained"


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
        (sustained_under_another_name, "got 'lightning_decode_sustained'"),
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
    [
        "ncu_decode",
        "time",
        "emulator",
        "lite_quality",
        "lite_trajectory",
        "lite_end_to_end",
        "kda_blackwell",
        "first_call",
    ],
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


def test_whole_models_have_a_section(written, first_call_result):
    row = {
        "model": "toy", "parameters": 5, "work": "prefill", "batch": 1, "tokens": 64, "samples": 3, "peak_gib": 0.5,
        "p20_ms": 6.5, "p80_ms": 9.5, "tokens_per_s": 8000.0, "device_ms": 7.5, "linear_ms": 2.0, "error": None,
    }  # fmt: skip
    pair = [row | {"provider": "cula", "ms": 7.0}, row | {"provider": "fla", "ms": 8.0}]
    skipped = [{"model": "toy", "work": "train", "reason": "no backward"}]
    path = written(name="toy-100/models.json")
    path.write_text(json.dumps(first_call_result | {"skipped": skipped, "rows": pair}))
    section = sections.read(path)
    assert dict(section.measured)["whole models, eager"] == "measured"
    (table,) = section.tables
    assert table.lines[0][:4] == ["toy, prefill B1-T64", "8.0 (6.5-9.5)", "7.0 (6.5-9.5)", "1.14"]
    assert section.notes[-1] == "Not measured: toy, train: no backward."
    assert len(section.plots) == 1
