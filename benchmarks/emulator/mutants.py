"""Counts what the mutation tests of the packages notice, with races detected in more and in fewer schedules.

    python benchmarks/emulator/mutants.py [--json [PATH]] [--only PACKAGE ...]

Runs every test that takes the fixture `emulated` and calls `mutation.run`, itself or in a fixture. The tests say what
is mutated, with which inputs and under which schedules, and fail as ever; behind each report the same mutants run again
with races detected in the first schedule only, and in none. Every mutant runs, whatever verdicts earlier runs kept.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from benchmarks.emulator import mutant_rows, speed  # noqa: E402
from benchmarks.harness import report, results  # noqa: E402
from benchmarks.harness.commands import fail  # noqa: E402

if TYPE_CHECKING:
    from cula_emulator import Options
    from cula_emulator.mutation import Report

RESULT = ROOT / "benchmarks" / "results" / "cpu" / f"{mutant_rows.OP}.json"
CALL = "mutation.run("


def is_mutation_test(item: pytest.Item) -> bool:
    """Whether a test mutates a kernel that the fixture `emulated` gave it."""
    if not isinstance(item, pytest.Function) or "emulated" not in item.fixturenames:
        return False
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    return any(CALL in inspect.getsource(function) for function in (item.function, *fixtures))


def name_of(item: pytest.Item) -> str:
    """A test as pytest names it, without the schedule, which is "immediate" for all mutation tests."""
    return item.nodeid.replace("[immediate]", "").replace("-immediate]", "]")


def with_races(schedules: Sequence[Options], count: int) -> list[Options]:
    """The schedules, with races detected in the first `count` of them."""
    return [replace(options, detect_races=n < count) for n, options in enumerate(schedules)]


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest that leaves mutation tests only, and makes a row of every kernel that one of them mutates."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = filter(is_mutation_test, items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self.recording(item):
            return (yield)

    @contextmanager
    def recording(self, item: pytest.Item) -> Iterator[None]:
        """Makes `mutation.run` note its reports; a kernel that a test mutates twice counts once."""
        from cula_emulator import mutation

        original, seen = mutation.run, set()

        def run(
            check: Callable[[Options], Any],
            kernel: Any,
            lines: Sequence[int] | None = None,
            schedules: Sequence[Options] = mutation.SCHEDULES,
            **named: Any,
        ) -> Report:
            def again(races: int) -> Report:
                return original(check, kernel, lines, with_races(schedules, races), **named)

            found = original(check, kernel, lines, schedules, **named)
            ptx = "\n".join(mutation.module_of(kernel).ptx_lines)
            if ptx not in seen:
                seen.add(ptx)
                if not all(options.detect_races for options in schedules):
                    raise ValueError(f"{item.nodeid}: expected races to be detected everywhere")
                self.rows.append(row(item, ptx, found, again(1), again(0)))
            return found

        mutation.run = run
        try:
            yield
        finally:
            mutation.run = original


def row(item: pytest.Item, ptx: str, every: Report, first: Report, none: Report) -> dict[str, Any]:
    """The counts of one kernel; ValueError where a mutant was not reached, or nobody notices it without a reason."""
    from cula_emulator import mutation

    test = name_of(item)
    if every.not_reached:
        raise ValueError(f"{test}: {len(every.not_reached)} instructions are not reached")
    return {
        "package": item.path.relative_to(item.config.rootpath / "packages").parts[0],
        "test": test,
        "target": re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1],
        "mutants": len(every.mutants),
        "noticed_every": len(every.noticed),
        "noticed_first": len(first.noticed),
        "noticed_none": len(none.noticed),
        "not_modelled": len(every.not_modelled),
        "unnoticed": mutant_rows.reasons(test, mutation.opcodes(every.unnoticed)),
    }


def packages() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "packages").glob("*/tests"))


def measure(names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the mutation tests of packages; RuntimeError where one fails."""
    # This tree's sources, whatever is installed.
    sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    recorder = Recorder()
    chosen = ("-m", "emulated and not gpu", *(str(ROOT / "packages" / n / "tests") for n in names))
    command = [
        f"--rootdir={ROOT}",
        "-q",
        "-p",
        "no:cacheprovider",
        "--emulator-no-verdicts",
        *chosen,
    ]
    if status := pytest.main(command, plugins=[recorder]):
        raise RuntimeError(f"the mutation tests failed: pytest ended with {status}")
    return recorder.rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Counts what mutation tests notice.")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=RESULT, help=f"default {RESULT.relative_to(ROOT)}"
    )
    parser.add_argument("--only", nargs="+", choices=packages(), metavar="PACKAGE")
    options = parser.parse_args()
    try:
        rows = measure(options.only or packages())
    except RuntimeError as error:
        return fail(error)
    content = {
        "schema": 1,
        "op": mutant_rows.OP,
        "title": "What mutation tests of synchronisation notice",
        "provenance": speed.place(),
        "rows": rows,
    }
    mutant_rows.validate(content)
    print(report.as_markdown(mutant_rows.kernel_table(content)))
    if options.json:
        results.write(content, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
