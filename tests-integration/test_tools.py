"""The vendor tool, the file-size report, the GPU probe and compute-sanitizer's runner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import file_sizes, gpu, layout, sanitizer, vendor

COPIES = {"LICENSE": ("a/LICENSE", "b/deep/LICENSE")}


@pytest.fixture
def masters(tmp_path: Path) -> Path:
    (tmp_path / "LICENSE").write_text("terms\n")
    return tmp_path


def test_vendor_writes_copies(masters: Path) -> None:
    assert vendor.vendor(masters, COPIES) == ["a/LICENSE", "b/deep/LICENSE"]
    assert (masters / "b/deep/LICENSE").read_text() == "terms\n"
    assert vendor.vendor(masters, COPIES) == []


@pytest.mark.parametrize("drift", ["copy edited", "master edited", "copy removed"])
def test_vendor_check_finds_drift_and_writes_nothing(masters: Path, drift: str) -> None:
    vendor.vendor(masters, COPIES)
    copy, master = masters / "a/LICENSE", masters / "LICENSE"
    if drift == "copy edited":
        copy.write_text(copy.read_text() + "more\n")
    elif drift == "master edited":
        master.write_text("other terms\n")
    else:
        copy.unlink()
    before = {path: path.read_text() for path in masters.rglob("*") if path.is_file()}
    expected = ["a/LICENSE", "b/deep/LICENSE"] if drift == "master edited" else ["a/LICENSE"]
    assert vendor.vendor(masters, COPIES, check=True) == expected
    assert before == {path: path.read_text() for path in masters.rglob("*") if path.is_file()}


def test_vendor_check_sets_the_exit_code(
    masters: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vendor, "COPIES", COPIES)
    assert vendor.main(["--check"], masters) == 1
    assert "a/LICENSE: differs from its master; run nox -s vendor" in capsys.readouterr().out
    assert vendor.main([], masters) == 0
    assert vendor.main(["--check"], masters) == 0


def test_repository_copies_equal_their_masters(root: Path) -> None:
    assert vendor.vendor(root, check=True) == []


def test_long_kernel_file_fails_and_long_host_file_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "packages/cula-x/src/cula_x"
    kernel = source / "kernels" / "fwd.py"
    kernel.parent.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    kernel.write_text("import cutlass\n" + "X = 1\n" * (file_sizes.KERNEL_LINES - 1))
    (source / "ops.py").write_text("X = 1\n" * (file_sizes.HOST_LINES + 1))
    assert file_sizes.main(tmp_path) == 0
    assert capsys.readouterr().out.startswith(
        "warning: packages/cula-x/src/cula_x/ops.py: 601 lines"
    )

    kernel.write_text("import cutlass\n" + "X = 1\n" * file_sizes.KERNEL_LINES)
    assert file_sizes.main(tmp_path) == 1
    assert "error: packages/cula-x/src/cula_x/kernels/fwd.py: 901 lines" in capsys.readouterr().out


def test_development_tool_is_no_kernel_package(tmp_path: Path) -> None:
    for name, module in (("cula-x", "cula_x"), ("cula-emulator", "cula_emulator")):
        source = tmp_path / "packages" / name / "src" / module
        source.mkdir(parents=True)
        (source / "__init__.py").write_text("")
    assert layout.packages(tmp_path) == {"cula_x": tmp_path / "packages/cula-x"}
    tools = {"cula_emulator": tmp_path / "packages/cula-emulator"}
    assert layout.development_tools(tmp_path) == tools


def test_long_cpp_file_warns(tmp_path: Path) -> None:
    runtime = tmp_path / "packages/cula-emulator/src/cula_emulator/runtime"
    runtime.mkdir(parents=True)
    (runtime / "long.cpp").write_text("int x;\n" * (file_sizes.HOST_LINES + 1))
    (runtime / "fits.h").write_text("int x;\n" * file_sizes.HOST_LINES)
    assert file_sizes.report(tmp_path) == (
        [],
        [
            "packages/cula-emulator/src/cula_emulator/runtime/long.cpp: 601 lines, over the host budget of 600"
        ],
    )


def test_gpu_refusal_is_one_line_that_names_what_is_there() -> None:
    assert gpu.refusal("sm90", [(9, 0)]) is None
    assert gpu.refusal("sm100", [(8, 0), (10, 3)]) is None
    assert gpu.refusal("sm90", []) == "needs an sm90 GPU; this machine has no NVIDIA GPU"
    assert gpu.refusal("sm89", [(9, 0), (9, 0)]) == "needs an sm89 GPU; this machine has sm90"


def test_gpu_probe_without_a_driver_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    assert gpu.capabilities() == []


@pytest.fixture
def compute_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that prints the tool and what the problems get to know, and finds something with racecheck."""
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$1 $6 $7"; echo said >&2; [ "$1" != --tool=racecheck ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("compute_sanitizer")
def test_sanitizer_runs_every_tool_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer.main(["liteattention-sm89"]) == 1
    every = [
        f"{tool}: {line}" for tool in sanitizer.TOOLS for line in (f"--tool={tool} 0 1", "said")
    ]
    assert capsys.readouterr().out.splitlines() == every
    assert sanitizer.main(["liteattention-sm89", "memcheck", "initcheck"]) == 0


@pytest.mark.usefixtures("compute_sanitizer")
def test_sanitizer_deals_out_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer.main(["liteattention-sm89", "memcheck", "initcheck", "--jobs", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = {
        f"{tool} {first + 1}/3: --tool={tool} {first} 3"
        for tool in ("memcheck", "initcheck")
        for first in range(3)
    }
    assert {line for line in lines if "said" not in line} == shares and len(lines) == 12


def test_sanitizer_knows_its_arguments(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = root / "packages/liteattention-sm89"
    problems = Path(sanitizer.command(package, "memcheck", 0, 1)[-3])
    assert problems == package / "tests/sanitizer.py" and problems.is_file()
    jobs = [["liteattention-sm89", "--jobs", number] for number in ("0", "11")]
    for wrong in (*jobs, ["liteattention-sm89", "racechek"], ["liteattention"], []):
        with pytest.raises(SystemExit):
            sanitizer.main(wrong)
    assert "racechek: expected one of memcheck" in capsys.readouterr().err
