"""The command `run.py`, without a GPU."""

import dataclasses
from contextlib import nullcontext

import pytest

from benchmarks import ops, run
from benchmarks.harness import gpu, nvml, provenance, registry, results
from benchmarks.harness.registry import CheckFailed


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


@pytest.fixture
def metered(monkeypatch, meter):
    monkeypatch.setattr(ops, "HEADLINES", {"toy": ("large",)})
    monkeypatch.setattr(nvml, "current", lambda: meter)


def test_a_sustained_load_is_measured_on_the_headline(
    toy_card, metered, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "json_path", lambda given, op, card: tmp_path / card / f"{op}.json")
    assert run.main(["toy", "--methods", "sustained", "--json"]) == 0
    result = results.load(tmp_path / "toy-100" / "toy_sustained.json")
    rows = [(r["setting"], r["provider"], r["method"]) for r in result["rows"]]
    assert rows == [("large", name, "sustained") for name in ("ours", "other", "limit")]
    assert all(r["power_w"] == pytest.approx(500, rel=0.02) for r in result["rows"])
    said = capsys.readouterr()
    assert "Toy, sustained load: sustained" in said.out and "SM clock, MHz" in said.out
    assert "without" not in said.err


def test_other_settings_are_loaded_when_they_are_named(toy_card, metered, tmp_path):
    path = tmp_path / "toy.json"
    line = ["toy", "--methods", "sustained", "--json", str(path), "--settings"]
    assert run.main([*line, "small"]) == 0
    assert run.main([*line, "large", "--join"]) == 0
    assert [r["setting"] for r in results.load(path)["rows"]] == ["small"] * 2 + ["large"] * 3


def test_without_the_management_library_times_are_measured(toy_card, monkeypatch, tmp_path, capsys):
    def absent():
        raise nvml.Unreachable("no library")

    monkeypatch.setattr(nvml, "current", absent)
    path = tmp_path / "toy.json"
    line = ["toy", "--methods", "sustained", "--settings", "large", "--json", str(path)]
    assert run.main(line) == 0
    assert capsys.readouterr().err == "without clock, power and energy: no library\n"
    assert not any("power_w" in row for row in results.load(path)["rows"])


def test_bursts_do_not_ask_for_a_meter(toy_card, monkeypatch):
    monkeypatch.setattr(nvml, "current", lambda: pytest.fail("a meter was opened"))
    assert run.main(["toy", "--quick", "--methods", "graph"]) == 0


@pytest.mark.parametrize("more", [["graph"], ["--quick"]])
def test_a_sustained_load_is_measured_alone(more, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["lightning_decode", "--methods", "sustained", *more])
    assert stop.value.code == 2
    assert (
        "expected no other method, which it would heat, and no --quick" in capsys.readouterr().err
    )


def test_a_sustained_load_needs_settings(capsys):
    assert run.main(["kda_prefill_parts", "--methods", "sustained"]) == 2
    assert "HEADLINES has none of kda_prefill_parts" in capsys.readouterr().err


def test_a_sustained_load_needs_graphs(toy_card, monkeypatch, capsys):
    place = gpu.Place(80, 80, "green context", graphs=False)
    monkeypatch.setattr(gpu, "place_of", lambda op: nullcontext(place))
    assert run.main(["toy", "--methods", "sustained", "--settings", "large"]) == 2
    assert "a sustained load needs graphs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ops.HEADLINES)
def test_headlines_are_settings_of_their_op(name):
    assert set(ops.HEADLINES[name]) <= {s.name for s in registry.get(name).settings(False)}
