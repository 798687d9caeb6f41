"""The page about 80 multiprocessors, from synthetic results."""

import pytest

from benchmarks.harness import results
from benchmarks.ops.decode import decode_80sm
from benchmarks.ops.decode.decode_80sm import H20, H200, project

BATCHES = (16, 64, 128, 256)


def test_every_page_about_80_multiprocessors_is_current():
    for result in results.RESULTS.glob("*/lightning_decode_80sm.json"):
        page = result.parent / decode_80sm.NAME
        assert page.read_text() == decode_80sm.page(result.parent.name)


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
