"""First calls: the program of a fresh process, the command around it, its file and its table."""

import copy
import json
import subprocess
import sys
import types

import pytest

from benchmarks import first_call, tables
from benchmarks.first_call import Failed, Function, functions, measure
from benchmarks.harness import first_calls, fresh_process, registry, results
from benchmarks.harness.fresh_process import SKIPPED

TOY = Function("work", "json", "toy", "large", "ours")


class Machine:
    """Stands in for new processes: the first that finds a folder empty compiles for 5 s, later ones load for 0.5 s."""

    def __init__(self):
        self.folders = []

    def __call__(self, function, folder):
        assert folder.is_dir()
        kept = folder / "kernel"
        first = 0.5 if kept.exists() else 5.0
        kept.write_text("")
        self.folders.append(folder)
        times = {"first_call_s": first, "second_call_s": 1e-4, "host_s": 2e-5}
        return {"import_torch_s": 2.0, "import_s": 0.25, **times}


@pytest.mark.parametrize(("cold", "warm"), [(1, 3), (2, 3), (2, 1)])
def test_the_first_process_of_a_folder_is_cold(cold, warm, monkeypatch):
    machine = Machine()
    monkeypatch.setattr(first_call, "fresh", machine)
    row = measure(TOY, cold, warm)
    assert row["empty_cache_s"] == [5.0] * cold
    assert row["filled_cache_s"] == [0.5] * warm and row["second_call_s"] == [1e-4] * warm
    assert row["host_s"] == [2e-5] * warm
    assert row["import_torch_s"] == [2.0] * (cold + warm) and row["import_s"] == [0.25] * (
        cold + warm
    )
    assert len(set(machine.folders)) == cold
    assert not any(folder.exists() for folder in machine.folders)


def test_a_function_that_cannot_run_is_skipped_with_the_reason(monkeypatch):
    asked = []

    def run(function, folder):
        asked.append(function)
        return {SKIPPED: "no such GPU"}

    monkeypatch.setattr(first_call, "fresh", run)
    entry = measure(TOY, 2, 3)
    assert entry["reason"] == "no such GPU" and entry["setting"] == "large"
    assert asked == [TOY]


def test_a_fresh_process_finds_the_repository_and_the_folders(tmp_path, monkeypatch):
    """A real process, whose module is not there."""
    seen = []

    def run(command, **options):
        seen.append(options["env"])
        return subprocess.run(command, **options)

    namespace = types.SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(first_call, "subprocess", namespace)
    monkeypatch.chdir(tmp_path)
    absent = Function("work", "no_such_module", "lightning_decode", "B64", "cula")
    found = first_call.fresh(absent, tmp_path)
    assert found == {SKIPPED: "no_such_module cannot be imported: No module named 'no_such_module'"}
    folders = {seen[0][name] for name in first_call.CACHES}
    assert len(folders) == len(first_call.CACHES)
    assert all(folder.startswith(f"{tmp_path}/") for folder in folders)


def test_a_process_that_fails_says_why(tmp_path, monkeypatch):
    done = types.SimpleNamespace(
        returncode=1, stderr="Traceback\nRuntimeError: no device\n", stdout=""
    )
    monkeypatch.setattr(first_call.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(Failed, match="json toy large ours: Traceback\nRuntimeError: no device"):
        first_call.fresh(TOY, tmp_path)


def test_a_process_that_hangs_is_given_up(tmp_path, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(first_call.subprocess, "run", run)
    with pytest.raises(Failed, match="not finished after 600 s"):
        first_call.fresh(TOY, tmp_path)


def test_torch_is_imported_inside_the_time():
    code = "import sys, benchmarks.harness.fresh_process as f; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tables.ROOT, check=True)


def test_calls_are_timed_one_by_one(monkeypatch, toy, backend):
    """The virtual clock knows only calls, 10 us each of ours, so nothing else is inside the times."""
    monkeypatch.setattr(registry, "get", lambda name: toy)
    monkeypatch.setattr(fresh_process.time, "perf_counter", backend.clock)
    found = fresh_process.calls("toy", "large", "ours", "cpu")
    assert found == dict.fromkeys(("first_call_s", "second_call_s", "host_s"), pytest.approx(1e-5))
    assert backend.log == ["ours0"] * (2 + 45 * 5)
    assert fresh_process.calls("toy", "small", "other", "cpu") == {SKIPPED: "too small"}


def test_the_program_prints_a_line_of_json(monkeypatch, toy, capsys):
    monkeypatch.setattr(registry, "get", lambda name: toy)
    assert fresh_process.main(["json", "toy", "large", "ours"], device="cpu") == 0
    printed = json.loads(capsys.readouterr().out)
    times = {"first_call_s", "second_call_s", "host_s"}
    assert set(printed) == {"import_torch_s", "import_s", *times}
    assert fresh_process.main(["no_such_module", "toy", "large", "ours"], device="cpu") == 0
    assert "no_such_module cannot be imported" in json.loads(capsys.readouterr().out)[SKIPPED]


@pytest.mark.parametrize("package", ["cula_cp_sm90", "cula_kda_sm100", None])
def test_every_function_is_a_setting_and_a_provider_of_an_op(package):
    found = functions(package)
    assert len({(f.module, f.function) for f in found}) == len(found)
    for function in found:
        op = registry.get(function.op)
        assert function.setting in {s.name for s in op.settings(False)}, function
        (provider,) = (p for p in op.providers if p.name == function.provider)
        assert provider.role == ("peer" if function.module.startswith("fla.") else "ours")
    ours = {f.module for f in found if not f.module.startswith("fla.")}
    always = {"cula_lightning_decode", "cula_delta_decode", "cula_lightning_sm90"}
    always |= {"liteattention_sm89"}
    assert ours == always | ({package} if package else set())


@pytest.fixture
def card(monkeypatch):
    """The command on a toy card whose processes are those of `Machine`; FLA cannot run there."""
    machine = Machine()

    def run(function, folder):
        absent = function.module.startswith("fla.")
        return {SKIPPED: "fla cannot be imported"} if absent else machine(function, folder)

    origin = {**first_call.provenance(), "gpu": "NVIDIA Toy 100"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(first_call, "provenance", lambda: origin)
    monkeypatch.setattr(first_call, "fresh", run)
    return machine


def test_the_command_writes_a_file_that_tables_show(card, tmp_path, capsys):
    path = tmp_path / "toy-100" / "first_call.json"
    assert first_call.main(["--json", str(path)]) == 0
    content = first_calls.load(path)
    assert [row["function"] for row in content["rows"]] == [
        f.function for f in functions("cula_cp_sm90") if not f.module.startswith("fla.")
    ]
    assert {entry["reason"] for entry in content["skipped"]} == {"fla cannot be imported"}
    said = capsys.readouterr()
    assert "skipped fla.ops.kda: chunk_kda: fla cannot be imported" in said.out
    assert said.err.count(" s\n") == len(functions("cula_cp_sm90"))
    text = tables.rendered("<!-- bench:first_call:toy-100 -->\n<!-- /bench -->\n", tmp_path)
    cells = [
        "2.00 (2.00-2.00)",
        "0.25 (0.25-0.25)",
        "5.00",
        "0.50 (0.50-0.50)",
        "0.0001 (0.0001-0.0001)",
    ]
    assert f"| `cula_cp_sm90`: chunk_kda | {' | '.join(cells)} |" in text
    assert "of 3 processes with a filled cache. NVIDIA Toy 100" in text


def test_functions_can_be_chosen(card, capsys):
    assert first_call.main(["--functions", "cula_cp_sm90:*", "--cold", "2", "--warm", "1"]) == 0
    assert len(card.folders) == 3
    assert first_call.main(["--functions", "nothing"]) == 2
    assert "'nothing' matches none" in capsys.readouterr().err


def test_functions_of_one_measurement_can_be_joined(card, monkeypatch, tmp_path, capsys):
    whole, path = tmp_path / "whole.json", tmp_path / "first_call.json"
    assert first_call.main(["--json", str(whole)]) == 0
    join = ["--json", str(path), "--join", "--functions"]
    for patterns in (["liteattention_sm89:*"], ["cula_*", "fla.*"], ["cula_cp_sm90:*"]):
        assert first_call.main([*join, *patterns]) == 0
    assert first_calls.load(path)["rows"] == first_calls.load(whole)["rows"]
    assert first_calls.load(path)["skipped"] == first_calls.load(whole)["skipped"]
    before, processes = path.read_text(), len(card.folders)
    origin = {**first_call.provenance(), "commit": "another"}
    monkeypatch.setattr(first_call, "provenance", lambda: origin)
    assert first_call.main([*join, "cula_cp_sm90:*"]) == 2
    assert "commit: the results to join have" in capsys.readouterr().err
    assert path.read_text() == before and len(card.folders) == processes


def test_only_what_is_written_is_joined(capsys):
    with pytest.raises(SystemExit):
        first_call.main(["--join"])
    assert "--join: expected --json too" in capsys.readouterr().err


def test_a_machine_where_nothing_can_run_has_no_result(card, tmp_path, capsys):
    path = tmp_path / "first_call.json"
    assert first_call.main(["--json", str(path), "--functions", "fla.*"]) == 2
    assert "rows: expected at least one function" in capsys.readouterr().err
    assert not path.exists()


def test_a_function_that_fails_leaves_no_file(card, monkeypatch, tmp_path, capsys):
    def run(function, folder):
        if function.op == "kda_prefill":
            raise Failed(f"{function.module}: wrong")
        return card(function, folder)

    monkeypatch.setattr(first_call, "fresh", run)
    path = tmp_path / "first_call.json"
    assert first_call.main(["--json", str(path)]) == 1
    assert capsys.readouterr().err.endswith("error: cula_cp_sm90: wrong\nfla.ops.kda: wrong\n")
    assert not path.exists()


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert first_call.main([]) == 2
    assert "torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--cold", "--warm"])
def test_at_least_one_process_of_each_kind(option, capsys):
    with pytest.raises(SystemExit):
        first_call.main([option, "0"])
    assert "expected at least one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.pop("rows"), "result.rows: missing"),
        (lambda c: c["rows"][0].pop("op"), r"rows\[0\].op: missing"),
        (lambda c: c["rows"][0].update(import_s=[]), r"rows\[0\].import_s: expected seconds"),
        (lambda c: c["rows"][0].update(import_s=[-1.0]), r"rows\[0\].import_s: expected seconds"),
        (lambda c: c["rows"].append(c["rows"][0]), "appears twice"),
        (lambda c: c["rows"].clear(), "expected at least one function"),
    ],
)
def test_validation_names_the_field(first_call_result, spoil, message):
    first_calls.validate(first_call_result)
    content = copy.deepcopy(first_call_result)
    spoil(content)
    with pytest.raises(ValueError, match=message):
        first_calls.validate(content)


def test_middle_lowest_and_highest_are_shown(first_call_result):
    _, lines = first_calls.table(first_call_result)
    assert lines == [
        ["`cula_lightning_decode`: linear_attention_decode", "2.00 (1.50-4.00)", "0.20", "6.00", "0.0200", "0.0001",
         "12.3"]
    ]  # fmt: skip


def test_files_have_a_row_per_line(first_call_result, tmp_path):
    results.write(first_call_result, tmp_path / "first_call.json")
    assert first_calls.load(tmp_path / "first_call.json") == first_call_result
