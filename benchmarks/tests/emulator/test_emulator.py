"""The emulator's figures as tables, and the arithmetic behind them."""

import json

import pytest

from benchmarks import tables
from benchmarks.emulator import speed
from benchmarks.emulator import tables as emulator_tables

SPEED = {
    "before": "abc1234",
    "provenance": {
        "cpu": "Some CPU",
        "compiler": "g++ 12",
        "date": "2026-01-02T03:04:05Z",
        "commit": None,
    },
    "build": {"lines": 10_000, "cold_seconds": 3.26, "warm_seconds": 0.144},
    "rows": [
        {
            "about": "a loop.",
            "instructions": 22_500_000,
            "minstr_per_s": 600.4,
            "minstr_per_s_before": 150.1,
            "gain": 4.0,
        }
    ],
}
COLUMNS = ("family", "cases", "identical", "within", "disagree", "max_ulp", "max_relative")
AGREEMENT = {
    "provenance": {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "date": "2026-01-02",
        "commit": "0123456789",
    },
    "families": [
        dict(zip(COLUMNS, row))
        for row in (
            ("integer", 5, 5, 0, 0, 0, 0.0),
            ("floating", 4, 1, 3, 0, 2, 1e-7),
            ("wgmma", 2, 1, 1, 0, 0, 3e-7),
        )
    ],
}


def test_speed_table_names_rate_gain_and_build_time():
    text = emulator_tables.speed(SPEED)
    assert "| a loop | 22.5 | 600 | 150 | 4.0x |" in text
    assert (
        "10,000 lines builds in 3.3 s of CPU time" in text
        and "has it ready in 0.14 s" in text
        and "no commit" in text
    )


def test_agreement_table_adds_up():
    text = emulator_tables.agreement(AGREEMENT)
    assert "| floating | 4 | 1 | 3 | 0 | 2 ulp |" in text
    assert "| wgmma | 2 | 1 | 1 | 0 | 3.0e-07 of the operands' size |" in text
    assert "| all | 11 | 7 | 4 | 0 |" in text
    assert "NVIDIA H200, driver 580.1, 2026-01-02, commit 0123456." in text


def test_regions_are_filled_and_drift_is_found(tmp_path):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "emulator_agreement.json").write_text(json.dumps(AGREEMENT))
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- bench:emulator_agreement:h200 -->\nold\n<!-- /bench -->\n"
        "<!-- bench:emulator:cpu -->\n<!-- /bench -->\n"
    )
    assert tables.update([page], check=True, root=tmp_path) == [page]
    tables.update([page], check=False, root=tmp_path)
    assert "| integer | 5 | 5 | 0 | 0 | none |" in page.read_text()
    assert "Not measured on cpu." in page.read_text()
    assert tables.update([page], check=True, root=tmp_path) == []


def test_the_quickest_round_counts_and_rates_share_the_instruction_count():
    def measured(seconds, count):
        kernel = {"about": "x.", "median_seconds": seconds, "runs": 3, "instructions": count}
        return {"kernels": {"k": kernel}, "build": None}

    now = speed.best_of([measured(0.4, 8_000_000), measured(0.2, 8_000_000)])
    before = speed.best_of([measured(0.8, None), measured(1.0, None)])
    (row,) = speed.rows(now, before)
    assert row["minstr_per_s"] == pytest.approx(40) and row["minstr_per_s_before"] == pytest.approx(
        10
    )
    assert row["gain"] == pytest.approx(4)
