"""`python -m cula_emulator`, as a user calls it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from build_processes import PTX

import cula_core
import cula_emulator

UNSUPPORTED = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry strange()
{
.reg .b32 %r<4>;
mov.b32 %r1, 1;
frobnicate.b32 %r2, %r1;
@%p ret;
ret;
}
""".replace("@%p ret;\n", "frobnicate.twice.b32 %r3,\n  %r2;\n")


def call(*arguments, input="", **environment):
    """(exit status, standard output, standard error) of one call."""
    sources = [str(Path(m.__file__).parents[1]) for m in (cula_emulator, cula_core)]
    paths = [*sources, sysconfig.get_paths()["purelib"]]
    done = subprocess.run(
        [sys.executable, "-m", "cula_emulator", *map(str, arguments)],
        input=input,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.ptx"
    path.write_text(PTX)
    return path


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.ptx"
    path.write_text(UNSUPPORTED)
    return path


def test_a_file_that_runs_is_one_line(good):
    line = f"{good}: runs; sm_90a, 3 instructions, kernels: seven\n"
    assert call(good) == (0, line, "")
    assert call("check", good) == (0, line, "")


def test_what_would_not_run_is_listed_by_line(bad):
    lines = [
        f"{bad}:8: frobnicate.b32 %r2, %r1   [no emitter]",
        f"{bad}:9: frobnicate.twice.b32 %r3, %r2   [no emitter]",
        f"{bad}: 2 unsupported instructions",
    ]
    assert call(bad) == (1, "\n".join(lines) + "\n", "")


def test_several_files_are_all_read(good, bad):
    status, out, err = call(bad, good)
    assert (status, err) == (1, "")
    assert out.splitlines()[-1] == f"{good}: runs; sm_90a, 3 instructions, kernels: seven"
    assert len(out.splitlines()) == 4


def test_standard_input():
    line = "-: runs; sm_90a, 3 instructions, kernels: seven\n"
    assert call("-", input=PTX) == (0, line, "")


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file or directory"),
        (b"\x7fELF\xff\xfe", "not text"),
        (b"", "PTX line 1: no .version and no .target: this is not PTX"),
        (PTX[: PTX.index(".visible")].encode(), "no kernel (.entry) in it"),
        (PTX.replace(".reg .b64 %rd<2>;", "").encode(), "PTX line 7: unknown register '%rd1'"),
    ],
    ids=["missing", "binary", "empty", "no kernel", "syntax"],
)
def test_a_bad_file_is_one_line(content, message, tmp_path):
    path = tmp_path / "kernel.ptx"
    if content is not None:
        path.write_bytes(content)
    status, out, err = call(path)
    assert (status, out) == (2, "")
    assert err.startswith(f"{path}: {message}") and err.count("\n") == 1


def test_translate_prints_the_cpp(good, bad):
    status, out, err = call("translate", good)
    assert (status, err) == (0, "")
    assert out.startswith('#include "kernel.h"\n') and '"seven"' in out
    status, out, err = call("translate", bad)
    assert (status, out) == (2, "") and "PTX line 8: frobnicate.b32 %r2, %r1" in err


def test_resources_are_those_of_the_report(good, tmp_path):
    pytest.importorskip("cutlass")  # brings an assembler
    from cula_emulator import resources

    assert call("resources", good) == (0, f"{resources.report(good)}\n", "")
    good.write_text(PTX.replace("sm_90a", "sm_80"))
    status, out, _ = call("resources", good, "--arch", "sm_100a")
    assert status == 0 and out.startswith("seven (sm_100a")
    for content in (None, b"neither", b"\x7fELF but no cubin"):
        path = tmp_path / "kernel"
        if content is not None:
            path.write_bytes(content)
        status, out, err = call("resources", path)
        assert (status, out) == (2, "") and err.startswith(f"{path}: ")


def test_cache_shows_and_clears(tmp_path):
    folder = {"CULA_EMULATOR_CACHE": str(tmp_path / "cache")}
    assert call("cache", **folder) == (0, f"{tmp_path}/cache\n0 kernels, 0 files, 0.0 MiB\n", "")
    (tmp_path / "cache" / "building-left").mkdir(parents=True)
    for name in ("a.so", "a.json", "b.o"):
        (tmp_path / "cache" / name).write_bytes(bytes(1 << 19))
    (tmp_path / "cache" / "notes.txt").write_text("not ours")
    line = f"{tmp_path}/cache\n1 kernels, 3 files, 1.5 MiB\n"
    assert call("cache", **folder) == (0, line, "")
    line = f"removed 3 files\n{tmp_path}/cache\n0 kernels, 0 files, 0.0 MiB\n"
    assert call("cache", "--clear", **folder) == (0, line, "")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["notes.txt"]


def test_no_compiler_is_needed_to_ask(good, tmp_path):
    assert call(good, PATH=str(tmp_path), CXX="no-such-compiler")[0] == 0


def test_version_and_help():
    assert call("--version") == (0, f"{cula_emulator.__version__}\n", "")
    status, out, _ = call("--help")
    assert status == 0
    assert all(command in out for command in ("check", "translate", "resources", "cache"))
    assert call()[0] == 2
