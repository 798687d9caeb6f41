"""The command for owners of a card: its table, what it would do, and which GPUs it refuses."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from typing import Any

import pytest

import noxfile
from benchmarks import ops
from benchmarks.harness import registry
from benchmarks.harness.provenance import gpu_slug
from tools import evidence, gpu
from tools.gpu import Gpu

GIB = evidence.GIB
H20 = Gpu("NVIDIA H20", (9, 0), 78, 96 * GIB)
FITTING = {
    "h20": (H20,),
    "h100": (
        Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 79 * GIB),
        Gpu("NVIDIA H100 PCIe", (9, 0), 114, 79 * GIB),
    ),
    "h200": (Gpu("NVIDIA H200", (9, 0), 132, 140 * GIB),),
    "sm89": (Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * GIB),),
    "sm100": (
        Gpu("NVIDIA B200", (10, 0), 148, 180 * GIB),
        Gpu("NVIDIA GB300", (10, 3), 152, 280 * GIB),
    ),
    "sm120": (Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * GIB),),
}


@pytest.mark.parametrize("name", evidence.CARDS)
def test_every_card_knows_its_own_and_no_other(name: str) -> None:
    for other, gpus in FITTING.items():
        for there in gpus:
            reason = evidence.refusal(evidence.CARDS[name], [there])
            if other == name:
                assert reason is None
            else:
                assert (
                    reason == f"this is a {there.name}, which is not {evidence.CARDS[name].title}"
                )


@pytest.mark.parametrize(
    ("there", "line"),
    [
        ([], "needs an H20; this machine has no NVIDIA GPU"),
        (
            [Gpu("NVIDIA H20-3e", (9, 0), 78, 140 * GIB)],
            "this is a NVIDIA H20-3e, which is not an H20",
        ),
        (
            [H20._replace(multiprocessors=39)],
            "this NVIDIA H20 shows 39 multiprocessors, where an H20 has 78",
        ),
        (
            [H20._replace(memory_bytes=48 * GIB)],
            "this NVIDIA H20 shows 48 GiB of memory, where an H20 has 90 to 100",
        ),
        (
            [*FITTING["sm89"], H20],
            "this is a NVIDIA GeForce RTX 4090, which is not an H20; GPU 1 is one, so set CUDA_VISIBLE_DEVICES=1",
        ),
    ],
)
def test_another_gpu_is_refused_in_one_line(
    there: list[Gpu], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "found", lambda: there)
    monkeypatch.setattr(evidence, "run", lambda lines: pytest.fail("something was run"))
    for options in ([], ["--check"]):
        assert evidence.main(["h20", *options]) == 2
        assert capsys.readouterr() == ("", f"error: {line}\n")


@pytest.mark.parametrize("name", evidence.CARDS)
def test_the_commands_exist(name: str) -> None:
    """Every path is there, and every op is one that `run.py` knows."""
    card = evidence.CARDS[name]
    lines = evidence.commands(card, ncu=True)
    for line in lines:
        assert all((noxfile.ROOT / word).exists() for word in line if "/" in word), line
    assert {op for op, *_ in card.ops} <= set(registry.names())
    assert lines[-1] == ["benchmarks/tables.py"]
    assert all("--json" in line for line in lines if line[0] == "benchmarks/run.py")


@pytest.mark.parametrize("arch", noxfile.ARCHITECTURES)
def test_the_table_has_every_package_of_an_architecture(arch: str) -> None:
    packages = {name for name, archs in noxfile.PACKAGES.items() if arch in archs}
    capabilities = gpu.ARCHITECTURES[arch]
    cards = [c for c in evidence.CARDS.values() if set(c.capabilities) <= set(capabilities)]
    assert cards and all(packages <= set(card.packages) for card in cards)


def test_every_op_is_measured_on_some_card() -> None:
    measured = {op for card in evidence.CARDS.values() for op, *_ in card.ops}
    assert measured == set(registry.names())


def test_headlines_are_measured_under_a_sustained_load_and_first_calls_on_every_card() -> None:
    for card in evidence.CARDS.values():
        lines = evidence.commands(card, ncu=False)
        assert ["benchmarks/first_call.py", "--json"] in lines
        loaded = {line[1] for line in lines if line[2:4] == ["--methods", "sustained"]}
        assert loaded == {op for op, *_ in card.ops} & set(ops.HEADLINES)
        # A load follows the bursts of its op in a run of its own, into a file of its own.
        for op in loaded:
            runs = [line for line in lines if line[:2] == ["benchmarks/run.py", op]]
            assert [line[3:4] == ["sustained"] for line in runs[-2:]] == [False, True]
            # What only some settings have is measured after all of them, and joins the same file.
            assert all("--join" in line for line in runs[1:-1])


def test_a_dry_run_says_what_would_happen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "run", lambda lines: pytest.fail("something was run"))
    monkeypatch.setattr(gpu, "found", lambda: [H20])
    monkeypatch.setattr(evidence.shutil, "which", lambda name: f"/bin/{name}")
    assert evidence.main(["h20", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "needs   an H20 (compute capability 9.0, 78 multiprocessors, 90 to 100 GiB of memory)",
        "        on this machine: NVIDIA H20",
    ]
    assert "runs    python benchmarks/run.py lightning_decode --json" in lines
    counters = "runs    python benchmarks/ops/decode/ncu_decode.py profile --sms 0 --batches 1 16 64 128 256"
    assert counters in lines
    assert lines[-2:] == [
        "writes  benchmarks/results/h20/*.json",
        "        BENCHMARK_H20.md and benchmarks/results/h20/README.md",
    ]
    monkeypatch.setattr(gpu, "found", list)
    monkeypatch.setattr(evidence.shutil, "which", lambda name: None)
    assert evidence.main(["sm100", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "on this machine: needs a GPU of sm100; this machine has no NVIDIA GPU" in said
    assert "ncu_decode" not in said and "ncu is not on PATH" in said
    assert said.endswith("benchmarks/results/<gpu>/README.md\n")


@pytest.mark.parametrize("there", [True, False])
def test_an_op_that_only_compares_needs_what_it_compares_with(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "find_spec", lambda name: object() if there else None)
    card = evidence.CARDS["h200"]
    run = {word for line in evidence.commands(card, ncu=True) for word in line}
    assert ("kda_prefill_flashkda" in run) is there and "kda_prefill_kernels" in run
    said = "without kda_prefill_flashkda: flash_kda is not installed"
    assert (said in evidence.plan(card, [], ncu=True)) is not there
    assert "flash_kda" not in evidence.plan(evidence.CARDS["sm89"], [], ncu=True)


def test_results_of_no_two_cards_share_a_folder() -> None:
    names = [there.name for gpus in FITTING.values() for there in gpus]
    assert len({gpu_slug(name) for name in names}) == len(names)
    assert gpu_slug("NVIDIA H20") == "h20" and gpu_slug("NVIDIA H200 NVL") == "h200-nvl"


def test_what_fails_is_named_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [["-c", "print('one')"], ["-c", "raise SystemExit(3)"], ["-c", "print('three')"]]
    monkeypatch.setattr(gpu, "found", lambda: [H20])
    monkeypatch.setattr(evidence, "commands", lambda card, ncu: lines)
    assert evidence.main(["h20"]) == 1
    said = capfd.readouterr().out
    assert re.search(r"\none\n(.*\n)+three\n", said)
    assert said.endswith("\nfailed: python -c raise SystemExit(3)\n")
    monkeypatch.setattr(evidence, "commands", lambda card, ncu: lines[:1])
    assert evidence.main(["h20"]) == 0
    assert capfd.readouterr().out.endswith("\nall went well\n")


def test_an_unknown_card_is_refused() -> None:
    command = [sys.executable, "tools/evidence.py", "h21"]
    done = subprocess.run(command, cwd=noxfile.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "choose from" in done.stderr


class Driver:
    """A libcuda with one GPU, whose functions fill what they are given."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuDeviceGetCount":
                args[0]._obj.value = 1
            elif name == "cuDeviceGetName":
                args[0].value = b"NVIDIA H20"
            elif name == "cuDeviceTotalMem_v2":
                args[0]._obj.value = 96 * GIB
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = {16: 78, 75: 9, 76: 0}[args[1]]
            return int(name == self.failing)

        return call


def test_the_driver_tells_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpu.found() == [H20] and gpu.capabilities() == [(9, 0)]
    for failing in ("cuInit", "cuDeviceGetCount"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, failing=failing: Driver(failing))
        assert gpu.found() == []
    for failing in ("cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, failing=failing: Driver(failing))
        with pytest.raises(RuntimeError, match="GPU 0"):
            gpu.found()
