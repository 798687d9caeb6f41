"""`python -m cula compile` and `cache`, with the smallest kernel that there is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cula.__main__ import main
from cula_core.compiled import artifacts, bundles
from cula_core.compiled.artifacts import Unit
from cula_core.delta_rule.config import MergeConfig

UNIT = Unit("cula_core.delta_rule.build", MergeConfig(), "sm_90a")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, whose kernels the processes that compile find as well."""
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CULA_BUNDLE", raising=False)
    monkeypatch.delenv("CULA_JIT", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Path:
    """A list that names one kernel twice."""
    path = tmp_path / "asked"
    monkeypatch.setenv("CULA_RECORD", str(path))
    for _ in range(2):
        bundles.record(UNIT)
    return path


def test_a_list_becomes_a_bundle(asked, tmp_path, folder, capfd):
    before = artifacts.compiles
    out = tmp_path / "bundle"
    assert main(["compile", str(asked), "--out", str(out)]) == 0
    text = capfd.readouterr().out
    assert text.count(": compiled") == 1 and f"{out} has 1 kernels" in text
    assert json.loads((out / "manifest.json").read_text())["kernels"].keys() == {UNIT.asked}
    assert artifacts.compiles == before  # other processes compile
    assert main(["cache"]) == 0
    assert f"{folder}: 1 kernels" in capfd.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "deleted" in capfd.readouterr().out and not list(folder.rglob("*.so"))


def test_a_list_fills_the_cache(asked, folder, capfd):
    assert main(["compile", str(asked), "--jobs", "1"]) == 0
    assert "1 kernels are in the cache" in capfd.readouterr().out
    assert len(list(folder.glob("libraries/*/*.so"))) == 1


def test_a_kernel_that_cannot_be_compiled(asked, tmp_path, capfd):
    facts = json.loads(asked.read_text().splitlines()[0])
    asked.write_text(json.dumps(facts | {"arch": "sm_1"}) + "\n")
    out = tmp_path / "bundle"
    assert main(["compile", str(asked), "--out", str(out)]) == 1
    said = capfd.readouterr()
    assert "sm_1" in said.out and "1 of 1 kernels could not be compiled" in said.err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["nothing"], "No such file"),
        (["asked", "--jobs", "0"], "--jobs: expected at least 1, got 0"),
        (["wrong"], "line 1: no recorded kernel"),
        (["asked", "--with-runtime"], "--with-runtime: expected --out"),
    ],
)
def test_what_is_refused(asked, tmp_path, capfd, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    Path("wrong").write_text("?\n")
    assert main(["compile", *arguments]) == 2
    assert text in capfd.readouterr().err


def test_a_folder_that_is_no_bundle(asked, tmp_path, capfd):
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["compile", str(asked), "--out", str(tmp_path)]) == 1
    assert "no manifest of a bundle" in capfd.readouterr().err
    assert os.listdir(tmp_path / "cache")
