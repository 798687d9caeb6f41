"""pytest plugin: a test that takes the fixture `emulated` runs under several schedules and compiles its kernel once.

    @pytest.mark.emulated(arch="sm_90a")
    def test_gemm(emulated):
        kernel = emulated(gemm, *fake_tensors)              # compiled for the first schedule, reused by the others
        out = emulated.empty((128, 64), torch.float32)      # NaN; writes beside it fail the test
        kernel(a, b, out)
        torch.testing.assert_close(out, expected)

The module is the pytest11 entry point of the distribution; from a source tree it is loaded with
`-p cula_emulator.pytest_plugin`. It imports neither torch nor cutlass before a test asks for them.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import levels, verdicts

if TYPE_CHECKING:
    import torch

    from . import EmulatedKernel, EmulatedModule, Options

DEFAULT_SCHEDULES = ("immediate", "random", "lazy")
DEFAULT_SEEDS = 2
_OWN_ARGUMENTS = ("schedules", "seeds", "arch")
_GUARD_BYTES = 512
_KEPT = "emulator_kept_verdicts"
_compiled: pytest.StashKey[dict[Hashable, Any]] = pytest.StashKey()
_counted_before: pytest.StashKey[frozenset[Path]] = pytest.StashKey()


# ---- settings ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cula-emulator", "emulated GPU kernels")
    group.addoption(
        "--emulator-seeds",
        type=int,
        metavar="N",
        default=None,
        help="run emulated tests with at least N seeds of each of the random and lazy schedules",
    )
    group.addoption(
        "--emulator-in-turn",
        action="store_true",
        help="run each case of an emulated test that does not name its schedules in immediate mode and in one deferred"
        " schedule, the next one for each case",
    )
    group.addoption(
        "--emulator-races",
        action="store_true",
        default=None,
        dest="emulator_races",
        help="detect races on shared memory in every schedule of emulated tests; by default in the first one",
    )
    group.addoption(
        "--no-emulator-races",
        action="store_false",
        default=None,
        dest="emulator_races",
        help="do not detect races; tests whose marker asks for it still do",
    )
    group.addoption(
        "--emulator-no-rebuild",
        action="store_true",
        help="do not compile slow kernels again for the next run; for machines that throw the cache away",
    )
    group.addoption(
        "--emulator-no-verdicts",
        action="store_true",
        help="run every mutant of mutation tests, also where nothing has changed since its verdict was kept",
    )
    parser.addini(
        "emulator_detect_races",
        "the schedules of an emulated test in which races are detected: first, true for all, false for none",
        default="first",
    )
    parser.addini(
        "emulator_time_limit", "seconds that one emulated launch may take, 0 for any", default="300"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "emulated(schedules=('immediate', 'random', 'lazy'), seeds=2, arch=None, **options): how the fixture `emulated`"
        " runs its kernels; further keywords are fields of cula_emulator.Options, of which detect_races may be 'first',"
        " for the first schedule only. Every test with the fixture has the marker.",
    )
    config.stash[_compiled] = {}
    # By the tests around a run that is a test itself: theirs to compile.
    config.stash[_counted_before] = levels.counted()
    levels.quick_first()


def _marker_arguments(node: pytest.Item | pytest.Collector, where: str) -> dict[str, Any]:
    """The keywords of all `emulated` markers of a test, the closest one first."""
    from .options import Options

    arguments: dict[str, Any] = {}
    known = {*_OWN_ARGUMENTS, *(f.name for f in dataclasses.fields(Options))} - {
        "async_mode",
        "seed",
    }
    for marker in node.iter_markers("emulated"):
        if marker.args or not known >= marker.kwargs.keys():
            wrong = ", ".join([*map(repr, marker.args), *sorted(marker.kwargs.keys() - known)])
            pytest.fail(
                f"{where}: the marker `emulated` does not take {wrong}; it takes {', '.join(sorted(known))}",
                pytrace=False,
            )
        arguments = {**marker.kwargs, **arguments}
    return arguments


def _wanted_races(config: pytest.Config, arguments: dict[str, Any]) -> bool | str:
    """Where races are detected: True, False, or "first" for the first schedule of each test."""
    wanted, option = arguments.get("detect_races"), config.getoption("emulator_races", None)
    if wanted is None and option is None:
        wanted = str(config.getini("emulator_detect_races")).lower()
        wanted = {"true": True, "false": False}.get(wanted, wanted)
    elif wanted is None or (wanted == "first" and option):
        wanted = option
    if wanted not in (True, False, "first"):
        raise ValueError(f"detect_races must be True, False or 'first', not {wanted!r}")
    return wanted


def _schedules(names: Sequence[str], seeds: int) -> Iterator[tuple[str, int]]:
    """("immediate", "lazy-3") -> (mode, seed); a deferred mode without a number stands for all its seeds."""
    for name in names:
        mode, _, seed = name.partition("-")
        if seed:
            yield mode, int(seed)
        else:
            yield from ((mode, n) for n in range(1 if mode == "immediate" else seeds))


def _seeds(config: pytest.Config, arguments: dict[str, Any]) -> int:
    """How many seeds each deferred mode without a number has."""
    least = config.getoption("emulator_seeds", None) or 0
    return max(arguments.get("seeds", DEFAULT_SEEDS), least)


def _label(options: Options) -> str:
    return (
        options.async_mode
        if options.async_mode == "immediate"
        else f"{options.async_mode}-{options.seed}"
    )


@pytest.hookimpl(trylast=True)  # so that the schedule comes last in the name of the test
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "emulator_schedule" not in metafunc.fixturenames:
        return
    from .options import Options

    config, where = metafunc.config, metafunc.definition.nodeid
    arguments = _marker_arguments(metafunc.definition, where)
    fixed = {name: value for name, value in arguments.items() if name not in _OWN_ARGUMENTS}
    fixed.setdefault("time_limit", float(config.getini("emulator_time_limit")) or None)
    seeds = _seeds(config, arguments)
    names = arguments.get("schedules", DEFAULT_SCHEDULES)
    try:
        races = _wanted_races(config, arguments)
        modes = dict.fromkeys(_schedules([names] if isinstance(names, str) else names, seeds))
        every = [
            Options(mode, seed, **{**fixed, "detect_races": n == 0 if races == "first" else races})
            for n, (mode, seed) in enumerate(modes)
        ]
    except ValueError as error:
        pytest.fail(f"{where}: {error}", pytrace=False)
    if not every:
        pytest.fail(f"{where}: the marker `emulated` leaves no schedule", pytrace=False)
    metafunc.parametrize("emulator_schedule", every, indirect=True, ids=[_label(o) for o in every])


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-m emulated` selects every test with the fixture, whether its author wrote the marker or not."""
    if "emulator_schedule" in getattr(item, "fixturenames", ()) and not item.get_closest_marker(
        "emulated"
    ):
        item.add_marker("emulated")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --emulator-in-turn, leaves out the schedules of a case that the cases before and behind it have."""
    if not config.getoption("emulator_in_turn", False):
        return
    cases: dict[str, dict[Hashable, int]] = {}
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        chosen[_has_the_turn(config, item, cases)].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    items[:] = chosen[True]


def _has_the_turn(
    config: pytest.Config, item: pytest.Item, cases: dict[str, dict[Hashable, int]]
) -> bool:
    """Whether a test belongs to --emulator-in-turn; cases: those met so far, by test, with their numbers."""
    options = getattr(getattr(item, "callspec", None), "params", {}).get("emulator_schedule")
    if options is None:
        return True
    arguments = _marker_arguments(item, item.nodeid)
    if "schedules" in arguments:
        return True
    case = _test_without_schedule(item)
    numbers = cases.setdefault(item.nodeid.partition("[")[0], {})
    number = numbers.setdefault(case, len(numbers))
    seeds = range(_seeds(config, arguments))
    turns = [(mode, seed) for seed in seeds for mode in ("lazy", "random")]
    mine = turns[number % len(turns)]
    return options.async_mode == "immediate" or (options.async_mode, options.seed) == mine


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Compiles the kernels that ran for long at the full level, for the next session."""
    slow = levels.take_slow(session.config.stash[_counted_before])
    finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not slow or not finished or session.config.getoption("emulator_no_rebuild", False):
        return
    from .build import rebuild
    from .errors import BuildError

    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter:
        reporter.ensure_newline()
        reporter.write_line(f"cula-emulator compiles {len(slow)} slow kernel(s) for the next run")
    # A worker of pytest-xdist has others beside it.
    processes = 1 if hasattr(session.config, "workerinput") else os.cpu_count() or 1
    with ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(rebuild, one) for one in slow]:
            if isinstance(error := done.exception(), BuildError):
                warnings.warn(
                    f"a slow kernel stays as it is: {error}", RuntimeWarning, stacklevel=1
                )
            elif error:
                raise error


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture
def emulator_schedule(request: pytest.FixtureRequest) -> Options:
    """The Options of this run of the test; parametrised by the marker `emulated`."""
    return request.param


@pytest.fixture
def emulated(request: pytest.FixtureRequest, emulator_schedule: Options) -> Iterator[Emulated]:
    """Compiles kernels once and runs them under the schedule of this test; see `Emulated`."""
    arguments = _marker_arguments(request.node, request.node.nodeid)
    tool = Emulated(
        emulator_schedule,
        arguments.get("arch"),
        request.config.stash[_compiled],
        _test_without_schedule(request.node),
    )
    yield tool
    tool.check_guards()


def _test_without_schedule(item: pytest.Item) -> Hashable:
    """Names a test and its parameters, the same for all schedules."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    # A value of `parametrize` is one object for all schedules, and lives as long as the session.
    values = {(n, id(value)) for n, value in parameters.items() if n != "emulator_schedule"}
    return item.nodeid.partition("[")[0], frozenset(values)


class Emulated:
    """What the fixture `emulated` gives a test.

    options: the Options of this run. arch: the architecture that the marker names, or None.
    """

    def __init__(
        self,
        options: Options,
        arch: str | None,
        compiled: dict[Hashable, Any],
        test: Hashable = None,
    ) -> None:
        self.options, self.arch = options, arch
        self._compiled, self._test, self._calls = compiled, test, 0
        self._guarded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        kernel: Callable,
        *fake_arguments: Any,
        arch: str | None = None,
        key: Hashable = None,
        **named: Any,
    ) -> BoundKernel:
        """Compiles a CuTe DSL function, once for all schedules of the test, and binds the schedule to it.

        kernel, fake_arguments, named: as for `cula_emulator.compile`. arch: as there; the marker's if not given.
        key: anything hashable that tells apart what the fake arguments and the kernel's own settings can differ in;
            the kernel is then shared by all tests of the session that use the same function or class, arch and key.
        """
        import cula_emulator

        arch = arch or self.arch
        if arch is None:
            raise ValueError(
                'name the architecture: emulated(..., arch="sm_90a") or the marker\'s arch'
            )
        self._calls += 1
        place = (self._test, self._calls) if key is None else key
        entry = (_name_of(kernel), arch, key is None, place)
        if entry not in self._compiled:
            self._compiled[entry] = cula_emulator.compile(
                kernel, *fake_arguments, arch=arch, **named
            )
        return BoundKernel(self._compiled[entry], self.options)

    def load(self, ptx: str, host_object: bytes, entry: str) -> BoundKernel:
        """Binds the schedule to a kernel that was compiled before, built once in a session; see EmulatedKernel.load."""
        import cula_emulator

        place = ("kernel", ptx, host_object, entry)
        if place not in self._compiled:
            self._compiled[place] = cula_emulator.EmulatedKernel.load(ptx, host_object, entry)
        return BoundKernel(self._compiled[place], self.options)

    def ptx(self, text: str) -> BoundModule:
        """The kernels of a PTX text; every distinct text is built once in a session."""
        import cula_emulator

        if ("ptx", text) not in self._compiled:
            self._compiled["ptx", text] = cula_emulator.EmulatedModule(text)
        return BoundModule(self._compiled["ptx", text], self.options)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor for a kernel to fill: NaN, integers their maximum, bool True; 256-byte aligned.

        512 bytes before and after it, and the gaps between its strides, are watched: the test fails if they changed.
        """
        import torch

        dtype = dtype or torch.get_default_dtype()
        stride = (
            torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
        )
        extent = sum((n - 1) * s for n, s in zip(shape, stride)) + 1 if all(shape) else 0
        guard = _GUARD_BYTES // dtype.itemsize
        storage = torch.empty(extent + 3 * guard, dtype=dtype)
        first = guard + (-storage.data_ptr() % 256) // dtype.itemsize
        view = storage.as_strided(tuple(shape), stride, first)
        storage.fill_(_poison(dtype))
        self._guarded.append((storage, view))
        return view

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`empty` with the shape, the dtype and, as `torch.empty_like` does, the order of dimensions of a tensor."""
        import torch

        stride = torch.empty_like(tensor, device="meta").stride()
        return self.empty(tensor.shape, dtype or tensor.dtype, stride=stride)

    def check_guards(self) -> None:
        """Fails the test if a kernel wrote beside a tensor that `empty` made; called when the test is over."""
        __tracebackhide__ = True
        import torch

        for storage, view in self._guarded:
            size, untouched = (
                storage.element_size(),
                torch.full_like(storage, _poison(storage.dtype)),
            )
            seen = storage.clone()
            seen.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(
                _poison(storage.dtype)
            )
            changed = (
                (seen.view(torch.uint8) != untouched.view(torch.uint8))
                .view(-1, size)
                .any(1)
                .nonzero()
            )
            if len(changed):
                first = (int(changed[0]) - view.storage_offset()) * size
                pytest.fail(
                    f"{len(changed)} value(s) beside an output of shape {tuple(view.shape)} changed,"
                    f" the first one at byte {first} from its start",
                    pytrace=False,
                )


@dataclasses.dataclass(frozen=True)
class BoundKernel:
    """A compiled kernel with the schedule of a test. Keywords of a call change fields of the Options."""

    kernel: EmulatedKernel
    options: Options

    def __call__(self, *arguments: Any, **changes: Any) -> None:
        self.kernel(*arguments, options=dataclasses.replace(self.options, **changes))


@dataclasses.dataclass(frozen=True)
class BoundModule:
    """The kernels of a PTX text with the schedule of a test; `launch` is that of EmulatedModule."""

    module: EmulatedModule
    options: Options

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence = (),
        **named: Any,
    ) -> None:
        self.module.launch(kernel, grid, block, arguments, **{"options": self.options, **named})


def _name_of(kernel: Callable) -> str:
    target = kernel if hasattr(kernel, "__qualname__") else type(kernel)
    return f"{target.__module__}.{target.__qualname__}"


def _poison(dtype: torch.dtype) -> float | int | bool:
    import torch

    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Keeps the verdicts of mutation tests, and tells the report when they are kept ones."""
    wanted = not item.config.getoption("emulator_no_verdicts", False)
    test = verdicts.Test(item.nodeid, item.path, item.config.rootpath) if wanted else None
    with verdicts.kept_for(test):
        try:
            return (yield)
        finally:
            if test and test.hits:
                item.user_properties.append((_KEPT, test.hits))


# ---- reports -------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure tells the schedule, and how to run this one test again."""
    report = yield
    options = getattr(item, "funcargs", {}).get("emulator_schedule")
    if options is not None and report.failed:
        changed = [
            f"{f.name}={getattr(options, f.name)!r}"
            for f in dataclasses.fields(options)
            if getattr(options, f.name) != f.default and f.name != "time_limit"
        ]
        seeds = options.seed + 1
        more = f" --emulator-seeds={seeds}" if seeds > DEFAULT_SEEDS else ""
        chosen = item.config.getoption("emulator_races", None)
        more += {True: " --emulator-races", False: " --no-emulator-races"}.get(chosen, "")
        lines = f"Options({', '.join(changed)})\nagain: pytest '{item.nodeid}'{more}"
        arguments = _marker_arguments(item, item.nodeid)
        if not options.detect_races and _wanted_races(item.config, arguments) == "first":
            lines += "\n--emulator-races detects races in this schedule too"
        report.sections.append(("emulator schedule", lines))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many mutation tests did not run their mutants; their reports come from workers, too."""
    kept = {
        report.nodeid
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, _ in getattr(report, "user_properties", ())
        if name == _KEPT
    }
    if kept:
        terminalreporter.write_line(
            f"cula-emulator: the verdicts of {len(kept)} mutation test(s) are kept ones, because nothing that"
            " they depend on has changed; --emulator-no-verdicts runs the mutants again"
        )
