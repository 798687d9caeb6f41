"""Command lines, provenance, progress and the ncu parser, without a GPU."""

import dataclasses
import io
import subprocess
import sys
from contextlib import nullcontext

import pytest

from benchmarks import run
from benchmarks.harness import gpu, provenance, registry, results
from benchmarks.harness.progress import progress
from benchmarks.harness.registry import CheckFailed, Setting
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


def test_commit_from_the_environment(monkeypatch):
    monkeypatch.setenv("CULA_COMMIT", "abc123-dirty")
    assert provenance.commit() == {"commit": "abc123", "dirty": True}
    monkeypatch.setenv("CULA_COMMIT", "abc123")
    assert provenance.commit() == {"commit": "abc123", "dirty": False}


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def test_commit_and_dirty_flag_from_git(monkeypatch, tmp_path):
    monkeypatch.delenv("CULA_COMMIT", raising=False)
    assert provenance.commit(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "file").write_text("1")
    for step in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        git(tmp_path, *step)
    clean = provenance.commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "benchmarks" / "results" / "new.json").write_text("{}")
    assert provenance.commit(tmp_path)["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert provenance.commit(tmp_path)["dirty"] is True


def test_smi_values_are_numbers_where_they_can_be():
    assert provenance.parse_smi("580.159.03, 345, 3201, 1980, 3201, 75.31, 31\n") == {
        "driver": "580.159.03",
        "sm_mhz": 345,
        "memory_mhz": 3201,
        "sm_max_mhz": 1980,
        "memory_max_mhz": 3201,
        "power_w": 75.31,
        "temperature_c": 31,
    }
    assert provenance.parse_smi("1.2, [N/A], 1, 1, 1, [N/A], 3")["power_w"] == "[N/A]"


def test_provenance_works_without_a_gpu():
    found = provenance.provenance()
    assert {"date", "gpu", "driver", "cuda", "versions", "commit", "dirty"} <= set(found)
    assert found["versions"]["torch"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
    ],
)
def test_gpu_slug(name, slug):
    assert provenance.gpu_slug(name) == slug


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_draws_only_on_a_terminal(monkeypatch):
    items = [Setting("one", {}), Setting("two", {})]
    quiet, terminal, plain = io.StringIO(), Terminal(), Terminal()
    assert list(progress(items, quiet)) == items and quiet.getvalue() == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress(items, plain)) == items
    assert "[1/2] two" in plain.getvalue() and plain.getvalue().endswith("\r\033[K")
    monkeypatch.undo()
    assert list(progress(items, terminal)) == items


def test_run_lists_settings(capsys):
    assert run.main(["lightning_decode", "--list", "--settings", "B1-T1-fp32-kv-*", "--quick"]) == 0
    assert capsys.readouterr().out.split() == ["B1-T1-fp32-kv-resident", "B1-T1-fp32-kv-cold"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lightning_decode", "--settings", "nothing"], "'nothing' matches none"),
        (["lightning_decode", "--against", "nobody"], "no peer named nobody"),
    ],
)
def test_run_refuses_wrong_arguments(argv, message, capsys):
    assert run.main(argv) == 2
    assert message in capsys.readouterr().err


def test_run_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run.main(["lightning_decode"]) == 2
    assert capsys.readouterr().err == "error: benchmarks need a CUDA device, and torch sees none\n"


@pytest.fixture
def toy_card(monkeypatch, toy, backend):
    """`run.py toy` on the fake device."""
    place = gpu.Place(132, None, "whole card")
    origin = {**provenance.provenance(), "gpu": "NVIDIA Toy 100", "l2_bytes": 150}
    monkeypatch.setattr(registry, "names", lambda: ["toy"])
    monkeypatch.setattr(registry, "get", lambda name: toy)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "place_of", lambda op: nullcontext(place))
    monkeypatch.setattr(gpu, "CudaBackend", lambda place: backend)
    monkeypatch.setattr(run, "provenance", lambda: origin)
    return toy


def test_run_measures_from_command_line_to_file(toy_card, tmp_path, capsys):
    path = tmp_path / "toy.json"
    assert run.main(["toy", "--quick", "--against", "other", "--json", str(path)]) == 0
    result = results.load(path)
    assert {row["provider"] for row in result["rows"]} == {"ours", "other", "limit"}
    assert {row["method"] for row in result["rows"]} == {"graph", "eager-host", "eager-event"}
    assert {"clocks_before", "clocks_after"} <= set(result["provenance"])
    printed = capsys.readouterr().out
    assert all(f"Toy: {method}" in printed for method in ("graph", "eager-host", "eager-event"))
    assert f"wrote {path}" in printed


def test_run_names_what_was_skipped(toy_card, capsys):
    assert run.main(["toy"]) == 0
    printed = capsys.readouterr().out
    assert "skipped other: too small" in printed and "wrote" not in printed


def test_run_joins_settings_of_one_measurement(toy_card, tmp_path):
    whole, path = tmp_path / "whole.json", tmp_path / "toy.json"
    assert run.main(["toy", "--json", str(whole)]) == 0
    for name in ("large", "small", "large"):
        line = ["toy", "--settings", name, "--json", str(path), "--join"]
        assert run.main(line) == 0
    joined, expected = results.load(path), results.load(whole)
    for field in ("rows", "checks", "skipped"):
        assert joined[field] == expected[field], field
    assert run.main(["toy", "--settings", "large", "--json", str(path)]) == 0
    assert {row["setting"] for row in results.load(path)["rows"]} == {"large"}


def test_run_joins_only_what_it_writes(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["lightning_decode", "--join"])
    assert stop.value.code == 2
    assert "--join: expected --json too" in capsys.readouterr().err


def test_run_joins_nothing_else(toy_card, monkeypatch, tmp_path, capsys, backend):
    path = tmp_path / "toy.json"
    assert run.main(["toy", "--settings", "small", "--json", str(path)]) == 0
    before, calls = path.read_text(), len(backend.log)
    origin = run.provenance() | {"commit": "another"}
    monkeypatch.setattr(run, "provenance", lambda: origin)
    assert run.main(["toy", "--settings", "large", "--json", str(path), "--join"]) == 2
    assert "commit: the results to join have" in capsys.readouterr().err
    assert path.read_text() == before and len(backend.log) == calls


def test_run_writes_nothing_when_a_check_fails(toy_card, monkeypatch, tmp_path, capsys):
    def check(provider, setting, device):
        raise CheckFailed(f"{setting.name}: wrong")

    monkeypatch.setattr(registry, "get", lambda name: dataclasses.replace(toy_card, check=check))
    assert run.main(["toy", "--json", str(tmp_path / "toy.json")]) == 1
    assert capsys.readouterr().err == "error: small: wrong\n"
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_was_asked_for_must_be_there(toy_card, capsys):
    assert run.main(["toy", "--against", "other", "--settings", "small"]) == 2
    assert capsys.readouterr().err == "error: other: too small\n"
