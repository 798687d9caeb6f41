"""`python -m cula`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cula.demo
from cula import __main__ as cli
from cula._facts import OPS
from cula.integrations import fla


def test_info_lists_every_function_and_its_implementations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "importable", lambda package: False)
    assert cli.main(["info", "--arch", "sm75"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"cula {cula.__version__}, Python {sys.version.split()[0]}, CUDA ")
    for op, functions in OPS.items():
        for function in functions:
            assert f"\n{op}.{function} on sm75\n" in text
    assert "  reference  chosen" in text
    assert "\ndriver " in text and "  torch " in text and "  triton " in text


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--arch", "cpu"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cula"] == cula.__version__
    assert [op["function"] for op in facts["ops"]] == [
        f for functions in OPS.values() for f in functions
    ]
    for op in facts["ops"]:
        assert op["arch"] == "cpu"
        chosen = [row["name"] for row in op["implementations"] if row["verdict"] == "chosen"]
        assert chosen == ["reference"]
        assert all(row["reason"] for row in op["implementations"] if row["verdict"] == "refused")


def test_info_names_the_gpus() -> None:
    gpu = {"name": "H200", "arch": "sm90", "multiprocessors": 132, "memory_gib": 139.8}
    facts = {"cula": "1", "python": "3", "cuda": None, "driver": "580"}
    facts |= {"gpus": [gpu], "versions": {"triton": None}, "ops": []}
    assert cli.render(facts).splitlines() == [
        "cula 1, Python 3, CUDA none in this torch",
        "driver 580",
        "GPU 0: H200, sm90, 132 SMs, 139.8 GiB",
        "  triton                 not installed",
    ]


def test_no_command_means_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "kda.prefill.chunk_kda on" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], ["info", "--nothing"]])
def test_unknown_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m cula" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cula {cula.__version__}\n"


def test_demo_gets_its_arguments_and_its_exit_code_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        seen.append(arguments)
        return 1

    monkeypatch.setattr(cula.demo, "main", main)
    assert cli.main(["demo", "--seed", "3", "a.txt"]) == 1
    assert seen == [["--seed", "3", "a.txt"]]


def test_bench_runs_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "meta/src/cula/__main__.py"))
    assert cli.main(["bench", "decode"]) == 2
    assert "clone the repository and run benchmarks/run.py" in capfd.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/run.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    assert cli.main(["bench", "decode", "--json"]) == 7
    assert capfd.readouterr().out == "['decode', '--json']\n"


def test_driver_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")
    tool.chmod(0o755)
    monkeypatch.setattr(cli.shutil, "which", lambda name: str(tool))
    assert cli._driver() == "580.95.05"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert cli._driver() is None
    monkeypatch.setattr(cli.shutil, "which", lambda name: None)
    assert cli._driver() is None


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cula", "info", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cula"] == cula.__version__
