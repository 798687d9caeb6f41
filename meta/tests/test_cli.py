"""`python -m cula`."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import cula.demo
from cula import __main__ as cli
from cula import _discovery, _env, _registry, delta, kda, lightning, lite
from cula._facts import OPS
from cula.integrations import fla


def on_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch claim Hopper GPUs."""
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", multi_processor_count=132, total_memory=79.6 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(_registry, "_arch_of", lambda device: "sm90")
    monkeypatch.setattr(cli, "_driver", lambda: "580.159.04")


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("missing", [False, True])
def test_info_fits_a_screen_and_names_every_public_function(
    gpus: int,
    missing: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if gpus:
        on_gpus(gpus, monkeypatch)
    for module in (_registry, _discovery, fla):
        monkeypatch.setattr(module, "importable", lambda package: not missing)
    monkeypatch.setattr(_discovery, "entry_points", lambda group: ())
    _registry.refresh()
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    # A line is left for the prompt.
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert lines[0].startswith(f"cula {cula.__version__}, Python {sys.version.split()[0]}, torch ")
    modules = (lightning, kda, delta, lite)
    made = ("new_replay", "new_convolution_ring", "fill_convolution_ring")  # for whoever serves
    names = [
        f"{m.__name__}.{name}"
        for m in modules
        for name in m.__all__
        if name not in made and not inspect.isclass(getattr(m, name))
    ]
    served = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[-len(names) - 1 : -1]}
    assert list(served) == names
    if gpus == 0:
        assert lines[1] == "no GPU: everything runs on the CPU"
        assert served.pop("cula.kda.kda_prefill_hopper") == "nothing: needs sm90"
        assert set(served.values()) == {"reference"}
    else:
        gpu = "NVIDIA H100 80GB HBM3, sm90, 132 SMs, 79.6 GiB, driver 580.159.04"
        assert lines[1] == f"{gpus} x {gpu}"
        if missing:
            assert served.pop("cula.kda.kda_prefill_hopper") == "nothing"
            assert set(served.values()) == {"reference"}
            (start,) = [n for n, line in enumerate(lines) if line.startswith("not installed: ")]
            named = "".join(lines[start:])
            assert "cula-cp-sm90" in named and "cula-kda-sm100" not in named
    assert lines[-1].endswith("python -m cula info --all")
    _registry.refresh()


def test_info_says_all_of_every_implementation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "importable", lambda package: False)
    assert cli.main(["info", "--all", "--arch", "sm75"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"cula {cula.__version__}, Python {sys.version.split()[0]}, CUDA ")
    for op, functions in OPS.items():
        for function in functions:
            assert f"\n{op}.{function} on sm75\n" in text
    assert "  reference  chosen" in text or "reference              chosen" in text
    assert "refused    flash-linear-attention is not installed: pip install fla-core" in text
    assert "\ndriver " in text and "  torch " in text and "  triton " in text


@pytest.mark.parametrize("by", ["--arch", "CULA_DISABLE"])
def test_info_about_what_there_is_not_is_one_line(
    by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "CULA_DISABLE":
        monkeypatch.setenv(by, "hopper")
        _env.env.cache_clear()
    assert cli.main(["info", *(["--arch", "hopper"] if by == "--arch" else [])]) == cli.USAGE
    monkeypatch.undo()
    _env.env.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m cula info: {by.lstrip('-')}: expected ")
    assert line.endswith("got 'hopper'")


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--arch", "cpu"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cula"] == cula.__version__
    functions = {told["function"]: told for told in facts["functions"]}
    assert functions["cula.lightning.chunk_lightning_attn"]["by"] == "reference"
    assert functions["cula.kda.kda_prefill_hopper"]["needs"] == "sm90"
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
    assert cli.render_all(facts).splitlines() == [
        "cula 1, Python 3, CUDA none in this torch",
        "driver 580",
        "GPU 0: H200, sm90, 132 SMs, 139.8 GiB",
        "  triton                 not installed",
    ]


def test_no_command_means_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "cula.kda.chunk_kda  " in capsys.readouterr().out


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
