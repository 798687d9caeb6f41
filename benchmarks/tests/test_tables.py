"""Console tables, markdown regions, plots and the 80-multiprocessor page, from synthetic results."""

import pytest

from benchmarks import ops, plot, tables
from benchmarks.harness import report, results
from benchmarks.ops.decode import decode_80sm
from benchmarks.ops.decode.decode_80sm import H20, H200, project

BATCHES = (16, 64, 128, 256)


@pytest.fixture
def root(toy_result, tmp_path):
    results.save(toy_result, results.result_path("toy", "toy-100", tmp_path))
    return tmp_path


def test_table_holds_times_of_all_and_ratios_of_ours(toy_result):
    header, lines = report.table(toy_result, "graph")
    assert header == [
        "setting", "ours, us", "limit, us", "other, us", "floor, us", "ours GB/s", "x other", "of ceiling", "of floor",
    ]  # fmt: skip
    assert lines == [
        ["small", "10.00 (10.00-10.00)", "8.00", "-", "-", "4000", "-", "0.800", "-"],
        [
            "large",
            "10.00 (10.00-10.00)",
            "8.00",
            "15.00",
            "10.00",
            "4000",
            "1.500",
            "0.800",
            "1.000",
        ],
    ]


def test_text_table_is_aligned(toy_result):
    lines = report.as_text(report.table(toy_result, "graph")).splitlines()
    assert len(lines) == 3
    assert (
        len({line.rfind("of floor") + len("of floor") for line in lines[:1]} | {len(lines[2])}) == 1
    )


def test_markdown_table_has_a_rule_and_equal_columns(toy_result):
    lines = report.as_markdown(report.table(toy_result, "graph", "l*", spread=False)).splitlines()
    assert lines[1] == "| --- |" + " ---: |" * 8
    assert [line.count("|") for line in lines] == [10, 10, 10]
    assert lines[2].startswith("| large | 10.00 | ")


def test_origin_names_card_versions_commit_and_day(toy_result):
    assert report.origin(toy_result) == (
        "NVIDIA Toy 100, 80 of 132 multiprocessors, driver 1.2, CUDA 13.0, torch 2.11.0; "
        "commit 0123456789ab; 2026-01-02."
    )
    toy_result["provenance"]["dirty"] = True
    assert "with local changes" in report.origin(toy_result)


REGION = "Before\n\n<!-- bench:toy:toy-100 -->\nold\n<!-- /bench -->\n\nAfter\n"


def test_regions_are_filled_and_stay_filled(root):
    text = tables.rendered(REGION, root)
    assert "old" not in text and "| large | 10.00" in text
    assert text.startswith("Before\n\n<!-- bench:toy:toy-100 -->\n\n| setting |")
    assert text.endswith("<!-- /bench -->\n\nAfter\n")
    assert tables.rendered(text, root) == text


def test_regions_can_choose_settings_and_method(root):
    text = tables.rendered(
        REGION.replace(" -->\nold", " settings=l* method=eager-host -->\nold"), root
    )
    assert "| large |" in text and "| small |" not in text
    assert "of eager-host" in text


def test_several_regions_in_one_document(root):
    text = tables.rendered(REGION + REGION.replace("toy:toy-100", "toy:h200"), root)
    assert text.count("| large |") == 1
    assert "Not measured on h200." in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:toy:toy-100 -->\nno end\n", "not closed"),
        ("<!-- bench:toy:toy-100 -->\n" + REGION, "not closed"),
        (REGION.replace("toy:toy-100", "toy"), "malformed"),
        (REGION.replace("100 -->", "100 order=up -->"), "expected options"),
        (REGION.replace("100 -->", "100 settings=x* -->"), "no row"),
    ],
)
def test_bad_regions_are_refused(root, text, message):
    with pytest.raises(ValueError, match=message):
        tables.rendered(text, root)


def test_check_names_drift_and_changes_nothing(root):
    page = root / "README.md"
    page.write_text(REGION)
    assert tables.update([page], True, root) == [page]
    assert page.read_text() == REGION
    assert tables.update([page], False, root) == [page]
    assert tables.update([page], True, root) == []


def test_a_new_measurement_is_drift(root, toy_result):
    page = root / "README.md"
    page.write_text(tables.rendered(REGION, root))
    toy_result["rows"][0]["median_us"] = toy_result["rows"][0]["p80_us"] = 11.0
    results.save(toy_result, results.result_path("toy", "toy-100", root))
    assert tables.update([page], True, root) == [page]


def test_documents_leave_out_hidden_and_generated_folders(tmp_path):
    for name in ("README.md", "docs/a.md", ".nox/b.md", "dist/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(p.relative_to(tmp_path)) for p in tables.documents(tmp_path)]
    assert found == ["README.md", "docs/a.md"]


@pytest.mark.parametrize(
    ("excused", "found"),
    [
        ({}, ["other: no result of a GPU, and no reason in WITHOUT_RESULTS"]),
        ({"other": ""}, ["other: no result of a GPU, and no reason in WITHOUT_RESULTS"]),
        ({"other": "not measured yet"}, []),
        (
            {"other": "not measured yet", "toy": "no"},
            ["toy: has a result now; remove it from WITHOUT_RESULTS"],
        ),
        (
            {"other": "not measured yet", "gone": "no"},
            ["gone: WITHOUT_RESULTS names an op that is not registered"],
        ),
    ],
)
def test_every_op_has_a_result_or_a_reason(root, excused, found):
    """Figures of a CPU, of a model and of others are no result of an op."""
    for folder in tables.NOT_GPUS:
        (root / folder).mkdir()
        (root / folder / "other.json").write_text("{}")
    assert tables.without_results(["toy", "other"], excused, root) == found


def test_check_fails_for_an_op_without_a_result(monkeypatch, capsys, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("No tables.")
    assert tables.main([str(page), "--check"]) == 0 and capsys.readouterr().out == ""
    monkeypatch.setattr(ops, "WITHOUT_RESULTS", {})
    assert tables.main([str(page), "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: no result of a GPU, and no reason in WITHOUT_RESULTS"
        for name in ("kda_prefill_parts", "kda_training")
    ]
    assert tables.main([str(page)]) == 0


def test_the_repository_itself_has_no_drift():
    assert tables.update(tables.documents(), check=True) == []


def test_every_page_about_80_multiprocessors_is_current():
    for result in results.RESULTS.glob("*/lightning_decode_80sm.json"):
        page = result.parent / decode_80sm.NAME
        assert page.read_text() == decode_80sm.page(result.parent.name)


def test_plot_writes_a_png(tmp_path, decode_result):
    out = tmp_path / "plots" / "decode.png"
    plot.draw(decode_result("lightning_decode", BATCHES), out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert out.stat().st_size > 10_000


def test_plot_panels_group_by_everything_but_x(decode_result):
    result = decode_result("lightning_decode", BATCHES)
    result["rows"][0]["params"]["layout"] = "vk"
    panels = plot.panels(result, "B")
    assert list(panels) == ["T=1, state=fp32, layout=kv, commit=True, L2 cold"]
    (rows,) = panels.values()
    lines = plot.series(rows, "B")
    assert [r["params"]["B"] for r in lines["fla"]] == list(BATCHES)
    assert [r["params"]["B"] for r in lines["cula"]] == list(BATCHES[1:])


def test_plot_refuses_a_result_without_a_curve(toy_result, tmp_path):
    with pytest.raises(ValueError, match="3 or more values of B"):
        plot.draw(toy_result, tmp_path / "x.png")


def test_projection_spans_from_multiprocessors_to_bandwidth():
    p = project(100.0, 0.98, 80, H200, H20)
    assert (p.low_us, p.high_us, p.bound) == (
        pytest.approx(102.56, abs=0.01),
        pytest.approx(120.0),
        "memory",
    )
    assert project(100.0, 0.90, 80, H200, H20).bound == "unclear"
    assert project(100.0, None, 80, H200, H20).bound == "unclear"


COUNTERS = {
    "state": "fp32",
    "layout": "kv",
    "entries": [
        {
            "B": 64,
            "sms": 80,
            "failed": [],
            "kernels": [
                {
                    "kernel": "decode",
                    "duration_ns": 128000,
                    "dram_throughput_pct": 87.5,
                    "achieved_occupancy_pct": 61.0,
                    "l2_hit_rate_pct": 50.1,
                    "registers_per_thread": 64,
                    "top_stalls": [{"reason": "long_scoreboard", "share_pct": 80.0}],
                }
            ],
        }
    ],
}


def test_page_separates_measured_from_extrapolated(decode_result):
    page = decode_80sm.document(
        decode_result("lightning_decode_80sm", BATCHES),
        decode_result("lightning_decode", BATCHES, slowdown=0.98),
        decode_result(
            "v", (64, 256), providers={"cula": ("ours", 4.0), "tile_v=8": ("variant", 2.0)}
        ),
        COUNTERS,
        {
            "title": "T",
            "note": "N",
            "decode_variants_us": {"k_split": {"B64": 1.25, "B256": 5.0}},
            "traffic_only_kernels": {"A": "plain"},
            "traffic_only": [{"kernel": "A", "shape": "128x1", "B64_us": 1.0, "B256_us": 4.06}],
        },
    )
    measured, extrapolated = page.split("## Extrapolated to an H20")
    assert "**Nothing in this section was measured.**" in extrapolated
    assert "H20 low" not in measured
    cold = next(line for line in measured.splitlines() if line.startswith("| B64-T1-fp32-kv-cold"))
    # 541.07 MB at 4.0 TB/s, the ceiling row (the same bytes here) at 4.2, the whole card 2 % faster.
    assert cold == "| B64-T1-fp32-kv-cold | 135.3 | 128.8 | 0.952 | 4.00 | 4.20 | 132.6 | 1.020 |"
    assert "| 64 | 80 | 128.0 | 87.5 % | 61.0 % | 50.1 % | 64 | long_scoreboard 80 % |" in measured
    assert "| tile_v=8 | 270.5 |" in measured
    assert "| k_split | 1.2 | 5.0 |" in measured and "| plain: 128x1 | 1.0 | 4.1 |" in measured
    assert "| B64-T1-fp32-kv-cold | 138.7 | 162.3 | memory |" in extrapolated
    # 4000 / 80 against 4200 * 4.0 / 4.8 / 78 GB/s per multiprocessor.
    assert (
        "50.0 GB/s per multiprocessor (B16" in extrapolated and "enough if clocks" in extrapolated
    )
    assert "3.50 TB/s, or 44.9 GB/s per multiprocessor" in extrapolated


def test_page_says_what_is_missing(decode_result):
    page = decode_80sm.document(
        decode_result("lightning_decode_80sm", BATCHES, 1.2), None, None, None
    )
    assert page.count("Not measured.") == 3
    assert "at 0.95 of the ceiling or more: none." in page
    slow = decode_80sm.document(
        decode_result("lightning_decode_80sm", BATCHES, 1.3), None, None, None
    )
    assert "38.5 GB/s per multiprocessor" in slow and "which is not enough if clocks" in slow


def test_page_is_read_from_the_files_of_one_card(tmp_path, decode_result):
    with pytest.raises(OSError, match="lightning_decode_80sm"):
        decode_80sm.page("h200", tmp_path)
    result = decode_result("lightning_decode_80sm", BATCHES)
    results.save(result, results.result_path("lightning_decode_80sm", "h200", tmp_path))
    assert decode_80sm.page("h200", tmp_path) == decode_80sm.document(result, None, None, None)
