"""The page about decode on an H20, from synthetic results."""

import copy

import pytest

from benchmarks.harness import results
from benchmarks.ops.decode import h20_page, h20_variants
from benchmarks.ops.decode.h20_estimate import H20, H200, Projection, project, ratio_range
from benchmarks.ops.decode.h20_page import Files

BATCHES = (1, 16, 64, 128, 256)


def test_projection_spans_from_multiprocessors_to_bandwidth():
    p = project(100.0, 0.98, 80, H200, H20)
    assert (p.low_us, p.high_us, p.bound) == (
        pytest.approx(102.56, abs=0.01),
        pytest.approx(120.0),
        "memory",
    )
    assert project(100.0, 0.90, 80, H200, H20).bound == "unclear"
    assert project(100.0, None, 80, H200, H20).bound == "unclear"


def test_ratio_takes_the_high_end_of_what_memory_limits():
    peer = Projection(200.0, 300.0, "unclear")
    assert ratio_range(Projection(50.0, 100.0, "memory"), peer) == (2.0, 3.0)
    assert ratio_range(Projection(50.0, 100.0, "unclear"), peer) == (2.0, 6.0)


COUNTERS = {
    "state": "fp32",
    "layout": "kv",
    "provenance": {"gpu": "NVIDIA Toy 100"},
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
                    "dram_bytes_read": 256000000,
                    "dram_bytes_written": 128000000,
                    "achieved_occupancy_pct": 61.0,
                    "l2_hit_rate_pct": 50.1,
                    "registers_per_thread": 64,
                    "block_size": 512,
                    "top_stalls": [{"reason": "long_scoreboard", "share_pct": 80.0}],
                }
            ],
        }
    ],
}
STUDY = {
    "title": "T",
    "note": "N",
    "decode_variants_us": {
        "package_kv": {"B64": 100.0, "B256": 400.0},
        "k_split_in_2_plus_sum_kv": {"B64": 125.0, "B256": 440.0},
    },
    "traffic_only_kernels": {"A": "plain", "B": "bulk"},
    "traffic_only": [
        {"kernel": "A", "shape": "128x1", "B64_us": 1.0, "B256_us": 4.06},
        {"kernel": "B", "shape": "128 thr", "B64_us": 1.5, "B256_us": 4.47},
    ],
}
TILES = {
    "cula": ("ours", 4.0),
    "tile_v=8,threads=128,direct=False": ("variant", 2.0),
    "tile_v=32,threads=256,direct=True": ("variant", 3.2),
    "tile_v=64,threads=256,direct=True": ("variant", 3.9),
}


def line_of(page, start):
    return next(line for line in page.splitlines() if line.startswith(start))


@pytest.fixture
def files(decode_result):
    """cula at 4.0 TB/s, the ceiling (the same bytes) at 4.2 and FLA at 3.5."""
    return Files(
        decode_result("lightning_decode_80sm", BATCHES),
        decode_result("lightning_decode", BATCHES, slowdown=0.98),
        decode_result("lightning_decode_variants_80sm", (64, 256), providers=TILES),
        decode_result("lightning_decode_variants", (1, 64), providers=TILES),
        COUNTERS,
        STUDY,
    )


def test_the_verdict_comes_first_and_is_computed(files):
    page = h20_page.document(files)
    first = page.split("## ")[0]
    assert "No H20 was at hand" in first and "the criterion is met in none" in first
    # 4.0 / 3.5 measured; FLA by multiprocessors and cula by bandwidth: times (80 / 78) / (4.8 / 4.0).
    expected = (
        "| fp32 `[K, V]` | 1.14, 1.14, 1.14 | missed | 1.17, 1.17, 1.17 | 0.98 to 1.14 | missed |"
    )
    assert line_of(first, "| fp32 `[K, V]`") == expected
    assert "`[V, K]` |" not in first  # this result has no such rows
    faster = copy.deepcopy(files.main)
    for row in faster["rows"]:
        if row["provider"] == "cula" and row["params"]["B"] >= 64:
            row["ratio_fla"] = 1.3
    assert "| 1.30, 1.30, 1.30 | met |" in h20_page.document(Files(faster, files.whole))


def test_page_separates_measured_from_estimated(files):
    measured, estimated = h20_page.document(files).split("## Estimated for an H20")
    assert "**Nothing in this section was measured.**" in estimated
    assert "low, us" not in measured
    cold = line_of(measured, "| 64 | 135.3")
    # 541.07 MB at 4.0 TB/s, the whole card 2 % faster.
    assert cold == (
        "| 64 | 135.3 | 154.6 | 1.14 | 128.8 | 0.952 | 4.00 | 3.50 | 4.20 | 132.6 | 154.6 | 1.17 | 1.020 |"
    )
    assert "| 64 | 80 | 128.0 | 3.00 | 87.5 % | 61.0 % | 50.1 % | 64 | 512 |" in measured
    assert "**Bandwidth.** Warps spend 80 to 80 %" in measured
    assert "Not measured: B = 4, 32." in measured
    assert (
        "| B64-T1-fp32-kv-cold | 138.7 | 162.3 | memory | 158.6 | 185.5 | 0.98 to 1.14 |"
        in estimated
    )
    # 4000 / 80 against 4200 * 4.0 / 4.8 / 78 GB/s per multiprocessor.
    assert "50.0 GB/s per multiprocessor (B" in estimated and "enough if clocks" in estimated
    assert "3.50 TB/s, or 44.9 GB/s per multiprocessor" in estimated


def test_every_variant_that_was_asked_for_has_a_figure_or_says_so(files):
    text = h20_variants.section(files.variants, files.study, stand_in=True)
    eight = line_of(text, "| 8 warps | `[K, V]`")
    # The faster of two tiles with 256 threads, over the package's choice in the same run.
    assert "`tile_v=64,threads=256,direct=True` | 80 multiprocessors | 138.7 (1.03) |" in eight
    assert line_of(text, "| TILE_V = 32 | `[K, V]`").endswith("| 169.1 (1.25) | 676.3 (1.25) |")
    assert line_of(text, "| TILE_V = 16 | `[K, V]`").count("not measured") == 2
    assert line_of(text, "| K split in two, partial outputs added | `[K, V]`").endswith(
        "| 125.0 (1.25) | 440.0 (1.10) |"
    )
    assert line_of(text, "| K split in two, partial outputs added | `[V, K]`").endswith(
        "| not measured | not measured |"
    )
    assert line_of(text, "| TMA: one bulk copy").endswith("| 1.5 (1.50) | 4.5 (1.10) |")
    assert line_of(text, "| TMA: a ring").count("not measured") == 2
    assert "| bulk: 128 thr | 1.5 | 4.5 |" in text


def test_small_batches_by_the_number_of_ctas(files):
    header, lines = h20_variants.by_slices(files.small_variants, 16)
    assert header == ["CTAs per state", "B=1, fp32 `[K, V]`"]
    # 128 columns in slices of 64, 32 and 8; 8.45 MB at 3.9, 3.2, 2.0 and, for the package, 4.0 TB/s.
    assert lines == [
        ["2", "2.17"],
        ["4", "2.64"],
        ["16", "4.23"],
        ["the package's choice", "2.11"],
    ]
    assert h20_variants.slices_cost((header, lines)) == 0
    better = [["1", "2.00", "-"], ["2", "1.60", "5.00"], ["the package's choice", "2.00", "-"]]
    assert h20_variants.slices_cost(([*header, "B=4"], better)) == pytest.approx(0.25)
    assert h20_variants.by_slices(None, 16) is None


def test_page_says_what_is_missing(decode_result):
    page = h20_page.document(Files(decode_result("lightning_decode_80sm", BATCHES, 1.2)))
    assert page.count("\n\nNot measured.") == 4
    assert page.count("| not measured | not measured |") == 14
    assert "at 0.95 of the ceiling or more: none." in page
    slow = h20_page.document(Files(decode_result("lightning_decode_80sm", BATCHES, 1.3)))
    assert "38.5 GB/s per multiprocessor" in slow and "which is not enough if clocks" in slow


def test_an_h20_takes_the_place_of_the_stand_in(tmp_path, decode_result, files):
    with pytest.raises(OSError, match="lightning_decode_80sm"):
        h20_page.page(tmp_path)
    results.save(files.main, results.result_path("lightning_decode_80sm", "h200", tmp_path))
    assert h20_page.page(tmp_path) == h20_page.document(Files(files.main))
    own = decode_result("lightning_decode", BATCHES)
    own["provenance"] = {**own["provenance"], "gpu": "NVIDIA H20", "sms": 78}
    own["place"] = {**own["place"], "sms": 78, "sms_seen": None}
    for row in own["rows"]:
        row["floor_us"] = row["ratio_floor"] = None  # no attainable bandwidth is known for it
    results.save(own, results.result_path("lightning_decode", "h20", tmp_path))
    page = h20_page.page(tmp_path)
    assert "Measured on an NVIDIA H20: the criterion is met in none" in page
    assert "stimate" not in page and "whole card: cula" not in page and "stand in" not in page


def test_the_traffic_of_a_step():
    text = h20_page.document(h20_page.read()).split("## The traffic of a step")[1]
    assert "268,435,456 bytes of state, read and written 0.54 GB, and at 4.0 TB/s 0.134 ms" in text
    assert "B = 1024 (8.6 GB, 2.15 ms)" in text
