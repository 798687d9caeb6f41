"""The cache under concurrency, damage and refusal; the compiler that is absent, strange or angry."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from build_processes import PTX, RUN, compiled, finish, logging_compiler, start

import cula_emulator as emulator
from cula_emulator import build, cache, levels, library, toolchain

RUNTIME_SOURCES = sorted(path.name for path in build.RUNTIME.glob("*.cpp"))


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A cache that three processes filled at once from nothing: (its folder, the compiler, what was compiled)."""
    folder = tmp_path_factory.mktemp("raced")
    compiler = logging_compiler(folder)
    settings = {"CXX": str(compiler), "CULA_EMULATOR_CACHE": str(folder / "cache")}
    settings["CULA_EMULATOR_CXXFLAGS"] = (
        "-O0"  # it is about the order of things, so let them be quick
    )
    for process in [start(**settings) for _ in range(3)]:
        assert finish(process)[0].startswith("7 ")
    return folder / "cache", compiler, compiled(folder)


def copy_cache(old, new):
    """Copies a cache folder, but for its large headers, which are linked."""

    def copy(source, target):
        (os.link if source.endswith(".gch") else shutil.copy2)(source, target)

    shutil.copytree(old, new, copy_function=copy)


@pytest.fixture
def filled(raced, tmp_path, monkeypatch):
    """A private copy of that cache, in the environment of this process; the log is empty."""
    folder = tmp_path / "cache"
    copy_cache(raced[0], folder)
    monkeypatch.setattr(levels, "_first", levels.FULL)
    monkeypatch.setenv("CXX", str(raced[1]))
    monkeypatch.setenv("CULA_EMULATOR_CACHE", str(folder))
    monkeypatch.setenv("CULA_EMULATOR_CXXFLAGS", "-O0")
    compiled(raced[1].parent)
    return folder


@pytest.fixture
def log(raced):
    return lambda: compiled(raced[1].parent)


@pytest.fixture
def no_private_folder(monkeypatch):
    """Undoes what the warning and the temporary folder of another test left behind."""
    for function in (cache.STORE._warn, cache.STORE._private):
        function.cache_clear()
    yield
    for function in (cache.STORE._warn, cache.STORE._private):
        function.cache_clear()


def seven(module):
    out = torch.zeros(1, dtype=torch.int32)
    module.launch("seven", (1,), (1,), (out,))
    return out.item()


# ---- many processes -------------------------------------------------------------------------


def test_processes_that_build_at_once_compile_everything_once(raced):
    folder, _, done = raced
    assert sorted(done) == sorted([*RUNTIME_SOURCES, "header", "kernel.cpp", "link"])
    assert {path.suffix for path in folder.iterdir()} == {".so", ".o", ".json", ".h", ".gch"}


def test_second_run_compiles_nothing_and_starts_in_half_a_second(filled, log):
    value, seconds, path = finish(start())[0].split()
    assert (value, log()) == ("7", [])
    assert float(seconds) < 0.5
    assert Path(path).parent == filled


def test_second_run_does_not_translate(filled, monkeypatch):
    def refuse(*_):
        raise AssertionError("translated again")

    monkeypatch.setattr(build, "parse", refuse)
    module = emulator.EmulatedModule(PTX)
    assert (module.target, module.parameters, seven(module)) == ("sm_90a", {"seven": [8]}, 7)


def test_another_text_compiles_only_its_kernel(filled, log):
    eight = emulator.EmulatedModule(PTX.replace("7;", "8;"))
    assert seven(eight) == 8
    assert log() == ["kernel.cpp", "link"]


def test_another_translator_or_runtime_is_another_key(filled, monkeypatch):
    path = emulator.EmulatedModule(PTX).path
    monkeypatch.setattr(build, "_translator_key", lambda: "changed")
    assert emulator.EmulatedModule(PTX).path != path


def test_modules_of_one_text_take_turns(filled):
    first, second = emulator.EmulatedModule(PTX), emulator.EmulatedModule(PTX)
    assert first._lock is second._lock
    assert first._lock is not emulator.EmulatedModule(PTX.replace("7;", "9;"))._lock


def test_lock_of_a_dead_process_is_free(filled):
    code = """
import sys, time
from cula_emulator import cache
with cache.lock("name"):
    print("held", flush=True)
    time.sleep(600)
"""
    holder = start(code)
    assert holder.stdout.readline() == "held\n"
    begin = time.monotonic()
    with cache.lock("name", timeout=0.3):
        assert time.monotonic() - begin >= 0.3  # a living holder is waited for, but not for ever
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    begin = time.monotonic()
    with cache.lock("name", timeout=60):
        assert time.monotonic() - begin < 10
    assert not list(filled.glob("*.lock"))


def test_file_system_without_locks(filled, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert seven(emulator.EmulatedModule(PTX.replace("7;", "5;"))) == 5


# ---- levels ---------------------------------------------------------------------------------


def test_quick_build_that_ran_for_long_is_rebuilt(filled, log, monkeypatch):
    monkeypatch.setattr(levels, "_first", levels.QUICK)
    monkeypatch.setattr(levels, "_quick_builds", {})
    text = PTX.replace("7;", "2;")
    quick = emulator.EmulatedModule(text)
    assert seven(quick) == 2 and log() == ["header", "kernel.cpp", "link"]
    assert emulator.EmulatedModule(text).path == quick.path and not log()
    assert emulator.EmulatedModule(PTX).path not in levels._quick_builds  # of the full level
    (one,) = levels._quick_builds.values()
    assert 0 < one.seconds < levels.SLOW_SECONDS
    assert levels.take_slow() == []

    emulator.EmulatedModule(text)
    levels.book(quick.path, 1.5 * levels.SLOW_SECONDS)
    (slow,) = levels.take_slow()
    build.rebuild(slow)
    assert log() == ["kernel.cpp", "link"] and levels.take_slow() == []
    full = emulator.EmulatedModule(text)
    assert full.path != quick.path and seven(full) == 2 and not log()


def test_processes_that_rebuild_at_once_compile_once(filled, log):
    code = """
import sys
from cula_emulator import build, levels
build.rebuild(levels.QuickBuild(sys.argv[1], None))
"""
    for process in [start(code, PTX.replace("7;", "2;")) for _ in range(2)]:
        finish(process)
    assert log() == ["kernel.cpp", "link"]


ROUNDING = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry rounding(.param .u64 in, .param .u64 out)
{
.reg .b32 %r<4>; .reg .f32 %f<12>; .reg .b64 %rd<8>; .reg .f64 %d<8>; .reg .b16 %h<4>;
ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; mul.wide.u32 %rd5, %r1, 32;
add.s64 %rd6, %rd2, %rd5; ld.global.f32 %f1, [%rd4];
mul.f32 %f2, %f1, %f1; add.f32 %f2, %f2, %f1; st.global.f32 [%rd6], %f2;
mul.rn.f32 %f3, %f1, 0f3E9E3779; sub.f32 %f3, %f3, %f2; st.global.f32 [%rd6+4], %f3;
fma.rn.f32 %f4, %f1, %f2, %f3; st.global.f32 [%rd6+8], %f4;
div.rn.f32 %f5, %f1, %f4; sqrt.rn.f32 %f5, %f5; st.global.f32 [%rd6+12], %f5;
ex2.approx.f32 %f6, %f1; rcp.rn.f32 %f6, %f6; st.global.f32 [%rd6+16], %f6;
cvt.rn.bf16.f32 %h1, %f4; cvt.f32.bf16 %f7, %h1; st.global.f32 [%rd6+20], %f7;
cvt.f64.f32 %d1, %f1; mul.f64 %d2, %d1, %d1; add.f64 %d2, %d2, %d1; st.global.f64 [%rd6+24], %d2;
ret;
}
"""


@pytest.mark.parametrize("kernel", ["rounding", "softmax.sm_80", "matmul.sm_80"])
def test_levels_give_the_same_bits(kernel, monkeypatch):
    """Products and sums that a compiler would like to fuse, exponentials, and a pipeline of matrix products."""
    torch.manual_seed(0)
    results = []
    for level in (levels.QUICK, levels.FULL):
        monkeypatch.setattr(
            library, "build", lambda *given, at=level: build._build(toolchain.find(), at, *given)
        )
        if kernel == "rounding":
            module = emulator.EmulatedModule(ROUNDING)
            given, out = torch.linspace(-3, 7, 1024), torch.zeros(1024, 8)
            module.launch("rounding", (1,), (1024,), (given, out))
        else:
            text = (Path(__file__).parent / "triton_ptx" / f"{kernel}.ptx").read_text()
            module = emulator.EmulatedModule(text)
            (entry,) = module.kernels
            if "softmax" in kernel:
                x = torch.linspace(-5, 9, 600).view(3, 200).sin()
                out, grid = torch.zeros(3, 200), (3,)
                arguments = (x, out, 200)
            else:
                a = torch.linspace(0, 90, 64 * 128).sin().half().view(64, 128)
                b = torch.linspace(0, 70, 128 * 128).cos().half().view(128, 128)
                out, grid = torch.zeros(64, 128), (1, 2)
                arguments = (a, b, out, 64, 128, 128)
            unused = [None] * (len(module.parameters[entry]) - len(arguments))
            module.launch(entry, grid, (128,), [*arguments, *unused], shared_bytes=98304)
        results.append((module.path, out))
    (quick, one), (full, other) = results
    assert quick != full and one.count_nonzero() > one.numel() / 2
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))


# ---- folders that refuse --------------------------------------------------------------------


def test_folder_is_what_the_environment_names(monkeypatch):
    monkeypatch.setenv("CULA_EMULATOR_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache.configured() == Path("/a")
    monkeypatch.delenv("CULA_EMULATOR_CACHE")
    assert cache.configured() == Path("/b/cula-emulator")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.configured() == Path("/c/.cache/cula-emulator")


def below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CULA_EMULATOR_CACHE", str(tmp_path / "file" / "cache"))
    return "Not a directory"


def a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CULA_EMULATOR_CACHE", str(tmp_path / "file"))
    return "File exists"


def no_home(tmp_path, monkeypatch):
    def refuse():
        raise RuntimeError("no home")

    for name in ("CULA_EMULATOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    return "there is no home folder"


def home_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("CULA_EMULATOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "nobody"))
    return "Not a directory"


def read_only(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setenv("CULA_EMULATOR_CACHE", str(tmp_path / "mounted"))
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    return "Read-only file system"


@pytest.mark.parametrize(
    "refusal", [below_a_file, a_file, no_home, home_that_cannot_be_made, read_only]
)
def test_refusing_folder_gives_a_temporary_one_and_one_warning(
    refusal, tmp_path, monkeypatch, no_private_folder
):
    reason = refusal(tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning) as warned:
        first, second = cache.folder(), cache.folder()
    assert first == second and first.is_dir() and first.name.startswith("cula-emulator-")
    (warning,) = warned
    assert reason in str(warning.message)
    (first / "fresh").write_text("x")
    published = cache.publish(first / "fresh", "name.o")
    assert cache.find("name.o") == published
    assert cache.find("other.o") is None
    shutil.rmtree(first)


def test_refused_rename_goes_to_a_temporary_folder(filled, monkeypatch, no_private_folder):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        module = emulator.EmulatedModule(PTX.replace("7;", "6;"))
    assert seven(module) == 6
    assert module.path.parent == cache.STORE._private() != filled


READ_ONLY = """
import tempfile
def refuse(**_):
    raise OSError(30, "Read-only file system")
tempfile.TemporaryFile = refuse
"""


def test_read_only_cache_is_read_and_a_new_kernel_leaves_nothing_behind(filled, log):
    before = sorted(filled.iterdir())
    out, err = finish(start(READ_ONLY + RUN))
    assert out.startswith("7 ") and err == "" and log() == []
    out, err = finish(start(READ_ONLY + RUN, PTX.replace("7;", "4;")))
    value, _, path = out.split()
    assert (value, log()) == ("4", ["kernel.cpp", "link"])
    assert err.count("RuntimeWarning") == 1 and "Read-only file system" in err
    assert not Path(path).parent.exists()  # the temporary folder went with its process
    assert sorted(filled.iterdir()) == before


# ---- damaged entries ------------------------------------------------------------------------


def cut(data):
    return data[: len(data) // 2]


def blank(data):
    return bytes(len(data))


@pytest.mark.parametrize(
    "suffix, damage, rebuilt",
    [
        (".so", cut, ["link"]),
        (".so", blank, ["link"]),
        (".so", lambda data: b"", ["link"]),
        (".json", cut, ["link"]),
        (".json", lambda data: b"[]", ["link"]),
    ],
)
def test_damaged_library_is_rebuilt_once(filled, log, suffix, damage, rebuilt):
    (path,) = filled.glob(f"*{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    assert seven(emulator.EmulatedModule(PTX)) == 7
    assert log() == rebuilt
    assert seven(emulator.EmulatedModule(PTX)) == 7
    assert log() == []


@pytest.mark.parametrize(
    "damage, links", [(cut, 2), (blank, 2), (lambda data: b"", 1)], ids=["cut", "blank", "empty"]
)
def test_damaged_object_is_rebuilt(filled, log, damage, links):
    path = min(filled.glob("*.o"), key=lambda p: p.stat().st_size)
    path.write_bytes(damage(path.read_bytes()))
    assert seven(emulator.EmulatedModule(PTX.replace("7;", "3;"))) == 3
    done = log()
    assert done.count("link") == links and "kernel.cpp" in done and len(done) == links + 2


@pytest.mark.parametrize("damage", [cut, blank, lambda data: b""], ids=["cut", "blank", "empty"])
def test_damaged_header_is_left_out_or_rebuilt(filled, log, damage):
    (path,) = filled.glob("*.gch")
    data = path.read_bytes()
    path.unlink()  # the file is shared with other tests
    path.write_bytes(damage(data))
    assert seven(emulator.EmulatedModule(PTX.replace("7;", "2;"))) == 2
    assert set(log()) <= {"header", "kernel.cpp", "link"}
    assert seven(emulator.EmulatedModule(PTX.replace("7;", "1;"))) == 1


def test_old_headers_go_when_a_new_one_comes(filled, monkeypatch):
    (old,) = filled.glob("*.gch")
    old.unlink()
    old.write_text("old")
    (filled / "young.gch").write_text("young")
    os.utime(old, (0, 0))
    monkeypatch.setattr(levels, "_first", levels.QUICK)  # of which this cache has no header
    assert seven(emulator.EmulatedModule(PTX.replace("7;", "2;"))) == 2
    assert len(list(filled.glob("*.gch"))) == 2 and not old.exists()


def test_library_that_never_loads_is_a_build_error(filled, monkeypatch):
    def refuse(*_, **__):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(build.C, "CDLL", refuse)
    with pytest.raises(emulator.BuildError, match="was built, but the system does not load it"):
        emulator.EmulatedModule(PTX)


# ---- compilers ------------------------------------------------------------------------------


def test_no_compiler_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulator.BuildError) as caught:
        emulator.EmulatedModule(PTX)
    message = str(caught.value)
    assert "finds neither g++ nor clang++" in message and "CXX" in message and "\n" not in message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "value, message",
    [
        ("no-such-cc -m64", "CXX is 'no-such-cc -m64', but there is no program 'no-such-cc'"),
        ("g++ 'open", "No closing quotation"),
        ("false", "false --version failed"),
    ],
)
def test_wrong_cxx_is_named(value, message, monkeypatch):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(emulator.BuildError, match=message):
        emulator.EmulatedModule(PTX)


def test_clang_serves_where_there_is_no_gcc(tmp_path, monkeypatch):
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho clang version 99\n")
    clang.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    # The script needs its shell by absolute path only.
    assert toolchain.find().command == ("clang++",)


def test_cxx_may_hold_arguments(filled, raced, monkeypatch):
    plain = toolchain.find()
    monkeypatch.setenv("CXX", f"env COLOUR='a b' {raced[1]} -DX=1")
    tools = toolchain.find()
    assert tools.command == ("env", "COLOUR=a b", str(raced[1]), "-DX=1")
    assert tools.version == plain.version and tools.key != plain.key
    source = filled / "t.cpp"
    source.write_text("static_assert(X == 1);")
    tools.run(["-std=c++17", "-fsyntax-only", str(source)], filled)


def test_flags_that_the_compiler_refuses_are_left_out(filled, tmp_path, monkeypatch):
    picky = tmp_path / "picky"
    picky.write_text(
        '#!/bin/sh\ncase "$*" in *no-tree-pta*|*march=native*) '
        'echo "error: unknown argument" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    picky.chmod(0o755)
    usual = build._kernel_flags(toolchain.find(), levels.FULL)
    assert {
        "-march=native",
        *build._KERNEL_FLAGS,
        *levels.FULL.flags,
        *levels.FULL.wanted,
    } == set(usual)
    monkeypatch.setenv("CXX", str(picky))
    refused = build._kernel_flags(toolchain.find(), levels.FULL)
    assert set(usual) - set(refused) == {"-march=native", "-fno-tree-pta"}


@pytest.fixture
def broken_translation(filled, monkeypatch):
    source = "".join(f"int a{n} = undeclared_{n};\n" for n in range(9))
    monkeypatch.setattr(build, "translate", lambda module, _: source)
    return source


def test_compiler_errors_are_the_first_ones_without_paths(filled, broken_translation):
    with pytest.raises(emulator.BuildError) as caught:
        emulator.EmulatedModule(PTX + "\n")
    message = str(caught.value)
    assert message.count("error:") == 5 and "... and 4 more errors" in message
    assert "\nkernel.cpp:1:" in message and str(filled) not in message
    assert "int a0 = undeclared_0;" in message and "CULA_EMULATOR_KEEP=1" in message
    assert not list(filled.glob("*.cpp")) and not list(filled.glob("building-*"))


def test_keep_keeps_the_source_of_a_failed_build(filled, broken_translation, monkeypatch):
    monkeypatch.setenv("CULA_EMULATOR_KEEP", "1")
    with pytest.raises(emulator.BuildError) as caught:
        emulator.EmulatedModule(PTX + "\n")
    path = Path(str(caught.value).rpartition("the C++ is ")[2])
    assert path.parent == filled and path.read_text() == broken_translation


def test_user_flags_reach_the_compiler(filled, monkeypatch):
    monkeypatch.setenv("CULA_EMULATOR_CXXFLAGS", "-include '/no such header.h'")
    with pytest.raises(emulator.BuildError, match="fatal error: /no such header.h"):
        emulator.EmulatedModule(PTX)


def test_killed_compiler_is_named(tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    killed.write_text('#!/bin/sh\n[ "$1" = --version ] || kill -9 $$\n')
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    with pytest.raises(emulator.BuildError, match="was ended by signal 9; is the memory full"):
        toolchain.find().run(["-c", "kernel.cpp"], tmp_path)


def test_linker_messages_are_shown_without_the_summary():
    stderr = "/usr/bin/ld: a.o: file not recognized\ncollect2: error: ld returned 1 exit status\n"
    assert "a.o: file not recognized" in toolchain.first_errors(stderr)


def test_interrupted_build_leaves_no_half_files(raced, tmp_path):
    """A process that is killed while it compiles leaves a folder that the next one ignores."""
    folder, hold = tmp_path / "cache", raced[1].with_name("hold")
    copy_cache(raced[0], folder)
    settings = {"CULA_EMULATOR_CACHE": str(folder), "CULA_EMULATOR_CXXFLAGS": "-O0"}
    text = PTX.replace("7;", "5;")
    hold.touch()
    process = start(ptx=text, CXX=str(raced[1]), **settings)
    while not list(folder.glob("building-*/kernel.cpp")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    hold.unlink()
    old = {path.name for path in raced[0].iterdir()}
    assert not [path for path in folder.glob("*.json") if path.name not in old]
    assert finish(start(ptx=text, CXX=str(raced[1]), **settings))[0].startswith("5 ")
