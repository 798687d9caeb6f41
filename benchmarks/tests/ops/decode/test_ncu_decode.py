"""Reading hardware counters with ncu, without ncu."""

import pytest

from benchmarks.ops.decode import ncu_decode

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name",'
    '"Context","Stream","Block Size","Grid Size","Device","CC"'
)
FIXED = '"0","1","python3","host","kernel_decode","1","7","(128, 1, 1)","(4096, 1, 1)","0","9.0"'
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "88.25"),
    "gpu__time_duration.sum": ("ns", "128,416"),
    "dram__bytes_read.sum": ("byte", "268435456"),
    "launch__registers_per_thread": ("register/thread", "64"),
    "lts__t_sector_hit_rate.pct": ("%", "n/a"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "30"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "6"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "0"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio": ("inst", "3"),
}


def wide_csv():
    names = ",".join(f'"{name}"' for name in METRICS)
    units = ",".join(f'"{unit}"' for unit, _ in METRICS.values())
    values = ",".join(f'"{value}"' for _, value in METRICS.values())
    blank = ",".join(['""'] * 11)
    table = f"{HEAD},{names}\n{blank},{units}\n{FIXED},{values}"
    return f"==PROF== Connected\nprinted by the program\n{table}\n==PROF== Bye\n"


def long_csv():
    lines = [f'{HEAD},"Section Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'{FIXED},"Command line","{n}","{u}","{v}"' for n, (u, v) in METRICS.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [wide_csv(), long_csv()], ids=["wide", "long"])
def test_ncu_output_is_parsed(text):
    (kernel,) = ncu_decode.parse(text)
    assert kernel["kernel"] == "kernel_decode"
    assert kernel["duration_ns"] == 128416
    assert kernel["dram_throughput_pct"] == 88.25
    assert kernel["dram_bytes_read"] == 268435456
    assert kernel["registers_per_thread"] == 64
    assert kernel["l2_hit_rate_pct"] is None
    assert kernel["achieved_occupancy_pct"] is None
    assert kernel["top_stalls"] == [
        {"reason": "long_scoreboard", "share_pct": 75.0},
        {"reason": "barrier", "share_pct": 15.0},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "ERR_NVGPUCTRPERM"),
        ("", "no output"),
        (f"{HEAD}\n", "no kernel"),
    ],
)
def test_ncu_failures_are_reported(text, message):
    with pytest.raises(ValueError, match=message):
        ncu_decode.parse(text)


def test_ncu_command_changes_no_clock_and_profiles_only_the_fenced_step():
    line = ncu_decode.command(64, 80, "fp32", "kv")
    assert line[line.index("--clock-control") + 1] == "none"
    assert line[line.index("--profile-from-start") + 1] == "off"
    assert line[line.index("workload") :] == [
        "workload", "--batch", "64", "--sms", "80", "--state", "fp32", "--layout", "kv",
    ]  # fmt: skip
    assert ncu_decode.arguments().parse_args(line[line.index("workload") :]).batch == 64


def test_ncu_falls_back_to_the_whole_card_and_says_why(monkeypatch):
    def fake_run(arguments, raw, name):
        if arguments[arguments.index("--sms") + 1] == "80":
            raise ValueError("not here")
        return wide_csv()

    monkeypatch.setattr(ncu_decode, "_run", fake_run)
    found = ncu_decode.profile([64, 128], 80, "fp32", "kv", None)
    assert [(e["B"], e["sms"]) for e in found["entries"]] == [(64, None), (128, None)]
    assert found["entries"][0]["failed"] == ["80 multiprocessors: not here"]


def test_missing_ncu_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert ncu_decode.main(["profile", "--batches", "64", "--sms", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: B=64: all multiprocessors: ")
