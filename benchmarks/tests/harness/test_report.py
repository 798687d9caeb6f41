"""Console tables and markdown tables of a synthetic result."""

from benchmarks.harness import report


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
