"""The pytest plugin, run on small test files of its own."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# pytester forgets what an inner run imports first, and torch bears one import only.
import cula_emulator
from cula_emulator import build, levels

pytest_plugins = ["pytester"]

COPY = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to, .param .u32 shift)
{
    .reg .b32 %r<8>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.u32 %r1, [shift];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r3, [%rd4];
    add.u32 %r4, %r2, %r1;
    mul.wide.s32 %rd5, %r4, 4;
    add.s64 %rd6, %rd2, %rd5;
    st.global.u32 [%rd6], %r3;
    ret;
}
"""
PREAMBLE = f"""
import pytest, torch
import cula_emulator as emulator

COPY = {COPY!r}
X = torch.arange(32, dtype=torch.float32)
"""

# hypothesis would be imported anew by every inner run.
PLUGINS = ("-p", "cula_emulator.pytest_plugin", "-p", "no:hypothesispytest")


@pytest.fixture
def run(pytester):
    def run(source, *arguments, plugins=PLUGINS, ini=""):
        pytester.makepyfile(test_inner=PREAMBLE + textwrap.dedent(source))
        pytester.makeini(f"[pytest]\naddopts = --strict-markers --strict-config\n{ini}")
        return pytester.runpytest_inprocess(*plugins, *arguments)

    return run


def names(result):
    return [
        line.partition("::")[2] for line in result.outlines if line.startswith("test_inner.py::")
    ]


USES_IT = "def test(emulated): pass"


def test_default_schedules(run):
    shown = names(run(USES_IT, "--collect-only", "-q"))
    assert shown == [
        f"test[{s}]" for s in ("immediate", "random-0", "random-1", "lazy-0", "lazy-1")
    ]


@pytest.mark.parametrize(
    ("marker", "arguments", "expected"),
    [
        ("schedules=('immediate', 'lazy')", (), ["immediate", "lazy-0", "lazy-1"]),
        ("schedules='immediate'", (), ["immediate"]),
        ("schedules=('lazy',), seeds=3", (), ["lazy-0", "lazy-1", "lazy-2"]),
        ("", ("--emulator-in-turn",), ["immediate", "lazy-0"]),
        ("schedules=('random', 'lazy'), seeds=1", ("--emulator-in-turn",), ["random-0", "lazy-0"]),
        ("schedules=('lazy-7', 'random-2')", ("--emulator-seeds=9",), ["lazy-7", "random-2"]),
        ("schedules=('random',), seeds=1", ("--emulator-seeds=2",), ["random-0", "random-1"]),
        (
            "schedules=('random',), seeds=3",
            ("--emulator-seeds=1",),
            ["random-0", "random-1", "random-2"],
        ),
        ("schedules=('lazy', 'lazy-1')", (), ["lazy-0", "lazy-1"]),
    ],
)
def test_schedules_of_the_marker(run, marker, arguments, expected):
    result = run(f"@pytest.mark.emulated({marker})\n{USES_IT}", "--collect-only", "-q", *arguments)
    assert names(result) == [f"test[{s}]" for s in expected]


def test_cases_take_turns_at_the_deferred_schedules(run):
    source = """
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
    def test(n, emulated): pass

    @pytest.mark.emulated(seeds=1)
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_seed(n, emulated): pass

    @pytest.mark.emulated(schedules="random")
    def test_named(emulated): pass

    def test_other(emulated): pass

    def test_plain(): pass
    """
    result = run(source, "--collect-only", "-q", "--emulator-in-turn")
    turns = ("lazy-0", "random-0", "lazy-1", "random-1", "lazy-0")
    cases = {f"test[{n}-{s}]" for n, turn in enumerate(turns, 1) for s in ("immediate", turn)}
    turns = ("lazy-0", "random-0", "lazy-0")
    cases |= {f"test_seed[{n}-{s}]" for n, turn in enumerate(turns, 1) for s in ("immediate", turn)}
    named = {"test_named[random-0]", "test_named[random-1]"}
    assert set(names(result)) == cases | named | {
        "test_other[immediate]", "test_other[lazy-0]", "test_plain",
    }  # fmt: skip
    assert "21/42 tests" in str(result.stdout)


def test_the_closest_marker_wins_and_the_others_fill_in(run):
    source = """
    pytestmark = pytest.mark.emulated(schedules="immediate", concurrent_ctas=4)

    @pytest.mark.emulated(concurrent_ctas=2)
    def test(emulated):
        assert emulated.options == emulator.Options(concurrent_ctas=2, detect_races=True, time_limit=300)
    """
    run(source).assert_outcomes(passed=1)


def test_schedule_comes_last_among_parameters(run):
    source = """
    @pytest.mark.emulated(schedules=("immediate", "lazy-1"))
    @pytest.mark.parametrize("n", [4, 8])
    def test(n, emulated): pass
    """
    shown = names(run(source, "--collect-only", "-q"))
    assert shown == ["test[4-immediate]", "test[4-lazy-1]", "test[8-immediate]", "test[8-lazy-1]"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (
            "architecture='sm_80'",
            "the marker `emulated` does not take architecture; it takes arch, check_bounds,",
        ),
        ("'lazy'", "does not take 'lazy'"),
        ("schedules=('eager',)", "test_inner.py::test: async_mode must be one of"),
        ("seed=1", "does not take seed"),
        ("schedules=()", "test_inner.py::test: the marker `emulated` leaves no schedule"),
        ("schedules=('lazy-x',)", "test_inner.py::test: invalid literal"),
    ],
)
def test_wrong_marker_is_an_error_at_collection(run, marker, message):
    result = run(f"@pytest.mark.emulated({marker})\n{USES_IT}")
    result.assert_outcomes(errors=1)
    assert message in result.stdout.str()


def test_tests_without_the_fixture_are_left_alone(run):
    result = run(
        "@pytest.mark.emulated(schedules='lazy')\ndef test(): pass", "--collect-only", "-q"
    )
    assert names(result) == ["test"]


def test_marker_expression_selects_every_emulated_test(run):
    result = run(f"{USES_IT}\ndef test_plain(): pass", "-m", "not emulated", "--collect-only", "-q")
    assert names(result) == ["test_plain"]


FIRST, EVERY, NONE = [True, False, False, False, False], [True] * 5, [False] * 5


@pytest.mark.parametrize(
    ("marker", "arguments", "ini", "expected"),
    [
        ("", (), "", FIRST),
        ("", (), "emulator_detect_races = true", EVERY),
        ("", (), "emulator_detect_races = false", NONE),
        ("", ("--emulator-races",), "", EVERY),
        ("", ("--emulator-races",), "emulator_detect_races = false", EVERY),
        ("", ("--no-emulator-races",), "", NONE),
        ("detect_races=True", (), "", EVERY),
        ("detect_races=True", ("--no-emulator-races",), "", EVERY),
        ("detect_races=False", ("--emulator-races",), "", NONE),
        ("detect_races='first'", (), "emulator_detect_races = false", FIRST),
        ("detect_races='first'", ("--no-emulator-races",), "", FIRST),
        ("detect_races='first'", ("--emulator-races",), "", EVERY),
        ("detect_races='first', schedules=('lazy-4', 'lazy', 'lazy-4', 'random')", (), "", FIRST),
    ],
)
def test_race_detection_marker_then_command_line_then_ini(run, marker, arguments, ini, expected):
    source = f"""
    seen = []

    @pytest.mark.emulated({marker})
    def test(emulated, emulator_schedule):
        assert emulated.options is emulator_schedule
        seen.append(emulated.options.detect_races)

    def test_last():
        assert seen == {expected}
    """
    run(source, *arguments, ini=ini).assert_outcomes(passed=6)


def test_wrong_race_detection_is_an_error_at_collection(run):
    for marker, ini in (("detect_races='last'", ""), ("", "emulator_detect_races = last")):
        result = run(f"@pytest.mark.emulated({marker})\n{USES_IT}", ini=ini)
        result.assert_outcomes(errors=1)
        assert "detect_races must be True, False or 'first', not 'last'" in result.stdout.str()


@pytest.mark.parametrize(("ini", "expected"), [("12.5", 12.5), ("0", None)])
def test_time_limit_of_the_ini_file(run, ini, expected):
    source = f"def test(emulated): assert emulated.options.time_limit == {expected}"
    run(source, ini=f"emulator_time_limit = {ini}").assert_outcomes(passed=5)


def test_ptx_runs_under_the_schedule(run):
    source = """
    seen = []

    def test(emulated):
        out = emulated.empty((32,))
        module = emulated.ptx(COPY)
        module.launch("copy", (1,), (32,), (X, out, 0))
        assert torch.equal(out, X)
        seen.append((id(module.module), module.options.async_mode, module.options.seed))

    def test_last():
        assert len({i for i, _, _ in seen}) == 1
        assert [s[1:] for s in seen] == [
            ("immediate", 0), ("random", 0), ("random", 1), ("lazy", 0), ("lazy", 1)
        ]
    """
    run(source).assert_outcomes(passed=6)


def test_kernels_are_compiled_once(run):
    """Per test and parameters without a key; with a key once for all tests, but per kernel and architecture."""
    source = """
    compiled = []

    def compile(kernel, *fake_arguments, arch, **named):
        compiled.append((kernel.__name__, fake_arguments, arch))
        return lambda *arguments, options: calls.append(options)

    calls = []
    def f(): pass
    def g(): pass

    @pytest.fixture(autouse=True)
    def replaced(monkeypatch):
        monkeypatch.setattr(emulator, "compile", compile)

    @pytest.mark.emulated(arch="sm_80")
    @pytest.mark.parametrize("n", [1, 2])
    def test_a(emulated, n):
        emulated(f, n)(concurrent_ctas=2)
        emulated(f, -n)
        assert calls.pop() == emulated.options.__class__(
            async_mode=emulated.options.async_mode, seed=emulated.options.seed,
            detect_races=emulated.options.async_mode == "immediate", time_limit=300, concurrent_ctas=2
        )

    def test_b(emulated):
        emulated(f, "b", arch="sm_90a", key="k")

    def test_c(emulated):
        emulated(f, "c", arch="sm_90a", key="k")
        emulated(f, "c", arch="sm_89", key="k")
        emulated(g, "c", arch="sm_90a", key="k")

    def test_last():
        assert compiled == [
            ("f", (1,), "sm_80"), ("f", (-1,), "sm_80"), ("f", (2,), "sm_80"), ("f", (-2,), "sm_80"),
            ("f", ("b",), "sm_90a"), ("f", ("c",), "sm_89"), ("g", ("c",), "sm_90a"),
        ]
    """
    run(source).assert_outcomes(passed=21)


def test_kernels_that_were_compiled_before_are_built_once(run):
    """Whatever tests ask for the same PTX, host code and entry."""
    source = """
    built, calls = [], []

    def load(*parts):
        built.append(parts)
        return lambda *arguments, options: calls.append((arguments, options))

    @pytest.fixture(autouse=True)
    def replaced(monkeypatch):
        monkeypatch.setattr(emulator.EmulatedKernel, "load", load)

    def test_a(emulated):
        emulated.load("ptx", b"host", "entry")(1, 2)
        assert calls.pop() == ((1, 2), emulated.options)

    def test_b(emulated):
        for parts in (("ptx", b"host", "entry"), ("other", b"host", "entry"), ("ptx", b"other", "entry"),
                      ("ptx", b"host", "other")):
            emulated.load(*parts)

    def test_last():
        assert built == [("ptx", b"host", "entry"), ("other", b"host", "entry"), ("ptx", b"other", "entry"),
                         ("ptx", b"host", "other")]
    """
    run(source).assert_outcomes(passed=11)


def test_architecture_must_be_named(run):
    result = run(
        "@pytest.mark.emulated(schedules='immediate')\ndef test(emulated): emulated(print)"
    )
    result.assert_outcomes(failed=1)
    assert "name the architecture" in result.stdout.str()


def test_outputs_are_poisoned_and_aligned(run):
    source = """
    DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]

    @pytest.mark.emulated(schedules="immediate")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_floats(emulated, dtype):
        out = emulated.empty((3, 5), dtype)
        assert out.shape == (3, 5) and out.dtype == dtype and out.is_contiguous()
        assert out.float().isnan().all() and out.data_ptr() % 256 == 0

    @pytest.mark.emulated(schedules="immediate")
    def test_the_rest(emulated):
        assert emulated.empty((2,)).dtype == torch.float32
        assert (emulated.empty((4,), torch.int32) == 2**31 - 1).all()
        assert (emulated.empty((4,), torch.uint8) == 255).all()
        assert emulated.empty((4,), torch.bool).all()
        assert emulated.empty(()).isnan() and emulated.empty((0, 3)).shape == (0, 3)
        turned = emulated.empty_like(torch.zeros(4, 6).t())
        assert turned.stride() == (1, 6) and turned.isnan().all()
        assert emulated.empty_like(X, torch.int8).dtype == torch.int8
        wide = emulated.empty((4, 3), stride=(8, 1))
        assert wide.stride() == (8, 1)
        wide.zero_()
    """
    run(source).assert_outcomes(passed=7)


@pytest.mark.parametrize(
    ("shift", "stride", "values", "first"),
    [(1, None, 1, 128), (-2, None, 2, -8), (120, None, 32, 480), (0, (8, 1), 16, 16)],
    ids=["after", "before", "far", "between rows"],
)
def test_a_write_beside_an_output_fails_the_test(run, shift, stride, values, first):
    source = f"""
    @pytest.mark.emulated(schedules="immediate", check_bounds=False)
    def test(emulated):
        out = emulated.empty({(4, 4) if stride else (32,)}, stride={stride})
        emulated.ptx(COPY).launch("copy", (1,), (32,), (X + 1, out, {shift} % 2**32))
    """
    result = run(source)
    result.assert_outcomes(passed=1, errors=1)
    shown = re.search(r"(\d+) value\(s\) beside an .* at byte (-?\d+) from", result.stdout.str())
    assert [int(n) for n in shown.groups()] == [values, first]


def test_failure_names_schedule_and_how_to_run_it_again(run):
    source = """
    @pytest.mark.emulated(schedules=("immediate", "lazy"))
    @pytest.mark.parametrize("n", [5])
    def test(emulated, n):
        assert emulated.options.seed != 3
    """
    result = run(source, "--emulator-seeds=4")
    result.assert_outcomes(passed=4, failed=1)
    text = result.stdout.str()
    assert "Options(async_mode='lazy', seed=3)" in text
    assert "--emulator-races detects races in this schedule too" in text
    again = re.search(r"again: pytest '(\S+)' (\S+)", text)
    assert again.groups() == ("test_inner.py::test[5-lazy-3]", "--emulator-seeds=4")
    rerun = run(source, *again.groups(), "--emulator-races")
    rerun.assert_outcomes(failed=1)
    text = rerun.stdout.str()
    assert "Options(async_mode='lazy', seed=3, detect_races=True)" in text
    assert "--emulator-seeds=4 --emulator-races" in text and "in this schedule too" not in text


def test_distributed_over_workers(run):
    pytest.importorskip("xdist")
    source = """
    def test(emulated):
        out = emulated.empty((32,))
        emulated.ptx(COPY).launch("copy", (1,), (32,), (X, out, 0))
        assert torch.equal(out, X) and emulated.options.seed != 1
    """
    result = run(source, "-n2")
    result.assert_outcomes(passed=3, failed=2)
    assert "Options(async_mode='lazy', seed=1)" in result.stdout.str()


@pytest.mark.parametrize(
    ("end", "arguments", "error", "rebuilt"),
    [
        ("pass", (), None, True),
        ("assert False", (), None, True),
        ("pytest.exit('enough')", (), None, False),
        ("pass", ("--emulator-no-rebuild",), None, False),
        ("pass", (), cula_emulator.BuildError("no room"), True),
    ],
    ids=["passes", "fails", "is stopped", "is told not to", "does not build"],
)
@pytest.mark.filterwarnings("default:a slow kernel stays as it is")
def test_slow_kernels_are_compiled_when_the_tests_are_over(
    run, monkeypatch, end, arguments, error, rebuilt
):
    seen = []

    def rebuild(quick):
        seen.append(quick.ptx)
        if error:
            raise error

    monkeypatch.setattr(build, "rebuild", rebuild)
    monkeypatch.setattr(levels, "_first", levels.FULL)
    monkeypatch.setattr(levels, "_quick_builds", {})
    source = f"""
    from pathlib import Path
    from cula_emulator import levels

    def test():
        assert levels.first() is levels.QUICK
        for name, seconds in (("quick", 0.9), ("slow", 1.1)):
            levels.remember(Path(name), name, None)
            levels.book(Path(name), seconds / 2)
            levels.book(Path(name), seconds / 2)
        {end}
    """
    text = run(source, *arguments).stdout.str()
    assert seen == ["slow"] * rebuilt
    assert ("compiles 1 slow kernel(s) for the next run" in text) == rebuilt
    assert ("a slow kernel stays as it is: no room" in text) == bool(error)


def test_slow_kernels_of_the_run_around_it_are_left_to_that(run, monkeypatch):
    monkeypatch.setattr(build, "rebuild", lambda quick: pytest.fail("compiled"))
    monkeypatch.setattr(levels, "_quick_builds", {})
    levels.remember(Path("slow"), "slow", None)
    levels.book(Path("slow"), 2 * levels.SLOW_SECONDS)
    assert "for the next run" not in run("def test(): pass").stdout.str()
    assert [one.ptx for one in levels.take_slow()] == ["slow"]


def test_loading_it_twice_is_harmless(pytester):
    pytester.makepyfile(test_inner=f'pytest_plugins = ["cula_emulator.pytest_plugin"]\n{USES_IT}')
    pytester.makeconftest('pytest_plugins = ["cula_emulator.pytest_plugin"]')
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(passed=5)


def test_importing_it_is_cheap():
    """Every pytest run of an environment with the package imports the plugin."""
    program = (
        "import sys, cula_emulator.pytest_plugin;"
        "print(*sorted({'torch', 'cutlass', 'numpy', 'tvm_ffi'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_entry_point_has_the_name_of_the_module():
    """pytest skips a plugin that is registered under its name; under another one it would be there twice."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '"cula_emulator.pytest_plugin" = "cula_emulator.pytest_plugin"' in project
