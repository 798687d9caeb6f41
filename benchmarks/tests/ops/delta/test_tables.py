"""What documents, the page about an H20 and the first README show of decode with the delta rule."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from benchmarks import answers, plot, tables
from benchmarks.harness import results
from benchmarks.ops.decode import h20_page
from benchmarks.ops.delta import h20_section
from benchmarks.ops.delta import tables as delta_tables
from benchmarks.report import plots, sections


@pytest.fixture
def root(tmp_path, delta_result):
    """A folder of results with those of an H200: the whole card, and its part at 1.1 times the time."""
    for op, slowdown in (("delta_decode", 1.0), ("delta_decode_80sm", 1.1)):
        result = delta_result(op, slowdown)
        result["provenance"]["gpu"] = "NVIDIA H200"
        results.save(result, results.result_path(op, "h200", tmp_path))
    return tmp_path


def test_ways_to_take_a_step_stand_side_by_side(root):
    result = results.load(results.result_path("delta_decode", "h200", root))
    header, lines = delta_tables.delta_beside(result, "graph", "kda-B64-T4-fp32-vk-step")
    assert header == [
        "setting", "cula, us", "cula_commit, us", "x cula_commit", "cula_slots, us", "x cula_slots",
        "fla_inplace, us", "x fla_inplace",
    ]  # fmt: skip
    # 64 rows of 7/4 us.
    assert lines == [
        ["kda-B64-T4-fp32-vk-step", "112.0 (112.0-112.0)", "168.0", "1.50", "280.0", "2.50", "145.6", "1.30"]
    ]  # fmt: skip
    _, lines = delta_tables.delta_beside(result, "graph", "*-B64-T?-fp32-vk-step")
    assert [line[0] for line in lines][:2] == ["gdn-B64-T4-fp32-vk-step", "kda-B64-T4-fp32-vk-step"]
    assert len(lines) == 6 and lines[2].count("-") > 0  # one token has other ways


def test_times_by_tokens(root):
    result = results.load(results.result_path("delta_decode", "h200", root))
    header, lines = delta_tables.delta_tokens(result, "graph", "gdn-B64-T?-fp32-vk*")
    assert header == ["setting", "T=1, us", "T=2, us", "T=4, us", "T=8, us"]
    found = {line[0]: line[1:] for line in lines}
    assert found["gdn-B64-fp32-vk"] == ["64.00", "80.00", "112.0", "176.0"]
    assert found["gdn-B64-fp32-vk-verify"] == ["-", "80.00", "112.0", "176.0"]
    assert found["gdn-B64-fp32-vk-slots"] == ["-", "-", "112.0", "-"]


def test_one_launch_stands_beside_chains_and_engines(delta_result):
    result = delta_result("delta_decode_fused")
    header, lines = delta_tables.delta_beside(result, "graph", "kda-B8-*-conv-norm")
    assert header == [
        "setting", "cula, us", "cula_chain, us", "x cula_chain", "fla_chain, us", "x fla_chain",
        "vllm, us", "x vllm", "sglang, us", "x sglang",
    ]  # fmt: skip
    assert lines == [
        ["kda-B8-T1-fp32-vk-conv-norm", "8.00 (8.00-8.00)", "12.80", "1.60", "16.00", "2.00", "9.20",
         "1.15", "10.40", "1.30"]
    ]  # fmt: skip
    _, lines = delta_tables.delta_beside(result, "graph", "gdn-*-vk-norm")
    assert [line[0] for line in lines] == [f"gdn-B{b}-T1-fp32-vk-norm" for b in (1, 4, 16)]
    shown = plot.panels(result, "B")
    assert len(shown) == 6 and sum("conv=True" in title for title in shown) == 5
    assert "delta_decode_fused" in plots.VIEWS


def test_documents_show_the_tables(root):
    regions = (
        "settings=gdn-*-T1-fp32-vk method=graph mean=fla",
        "settings=*-step* method=graph table=delta_beside",
        "settings=*-fp32-vk* table=delta_tokens",
    )
    text = "".join(f"<!-- bench:delta_decode:h200 {r} -->\n<!-- /bench -->\n" for r in regions)
    shown = tables.rendered(text, root)
    assert "Geometric mean of x fla over 4 settings: 1.40." in shown
    assert shown.count("| setting |") == 3 and shown.count("NVIDIA H200") == 3


def test_the_page_about_an_h20_has_a_section_where_there_are_results(root, tmp_path):
    empty = tmp_path / "empty"
    assert h20_section.sections(empty) == []
    (section,) = h20_section.sections(root)
    assert section.startswith(h20_section.TITLE) and "80 of 132 multiprocessors" in section
    # 64 rows at 1.1 us and FLA at 1.4, the ceiling at 0.96; on the whole card 1 us.
    bytes_of = 2 * 64 * 32 * 128 * 128 * 4 + 64 * 2 * (6 * 1024 + 6 * 1024 + 64) + 32 * 8 + 64 * 4
    line = next(text for text in section.splitlines() if text.startswith("| gdn-B64-T1-fp32-vk |"))
    rate = f"{bytes_of / 70.4 / 1e6:.2f}"
    assert line == (
        f"| gdn-B64-T1-fp32-vk | 70.4 | 89.6 | 1.27 | 61.4 | 0.873 | {rate} | 64.0 | 1.40 | 1.100 |"
    )
    verify = next(t for t in section.splitlines() if t.startswith("| kda-B64-T4-fp32-vk-verify |"))
    assert " | - | - | " in verify  # no ceiling
    page = h20_page.page(more=[section])
    assert page.index("## The traffic of a step") < page.index(section) < page.index("## On your")
    assert h20_page.page() == page.replace(f"{section}\n\n", "")
    own = results.load(results.result_path("delta_decode", "h200", root))
    own["provenance"]["gpu"] = "NVIDIA H20"
    results.save(own, results.result_path("delta_decode", "h20", root))
    (section,) = h20_section.sections(root)
    assert "whole card" not in section.lower() and "| gdn-B1-T1-fp32-vk | 1.0 |" in section


def test_the_first_readme_answers_with_the_figures_of_the_file(root):
    (row,) = answers.delta_decode("h200", root)
    assert "GDN 1.40 x FLA in the geometric mean of 4 batches, 1.40 x at the least" in row[1]
    assert "KDA 1.40 x FLA" in row[1] and "0.96 to 0.96 of an in-place" in row[1]
    assert "1.50 times as fast as verifying and committing, and 2.50 times" in row[1]
    assert answers.delta_decode("h200", root / "empty") == []


def test_the_report_has_a_section_and_plots(root):
    path = results.result_path("delta_decode", "h200", root)
    result = results.load(path)
    wanted = plots.VIEWS["delta_decode"]
    shown = [t for v in wanted for t in plot.panels(result, v.x, v.pattern, v.merge)]
    assert len(shown) == 10 and sum("mode=step" in title for title in shown) == 2
    patterns = ("kda-*-T1-bf16-vk", "gdn-B64-*-fp32-vk-step")
    result["rows"] = [
        r for r in result["rows"] if any(fnmatchcase(r["setting"], p) for p in patterns)
    ]
    results.save(result, path)
    section = sections.read(path)
    assert section.badges == ["ran on NVIDIA H200"]
    assert {c.other for c in section.headline} == {
        "fla", "fla_inplace", "flashinfer", "inplace_ceiling"
    }  # fmt: skip
    kda, steps = (p.caption for p in section.plots)
    assert "gate=kda, T=1, state=bf16, layout=vk, mode=write" in kda
    assert "B=64" in steps and "mode=step" in steps
