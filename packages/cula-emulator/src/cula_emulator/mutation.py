"""Mutation test of a kernel's synchronisation: skips one wait, fence or arrive at a time and sees who notices.

    report = mutation.run(check, kernel)          # check(options) runs the kernel and raises where it is wrong
    assert [m.line for m in report.unnoticed] == []
    print(report.table())

A line whose absence nothing notices is either redundant or not tested. In a test of pytest the verdicts are kept (see
`verdicts`): where nothing has changed that they depend on, the mutants do not run again, and the report says so.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from . import verdicts
from .emit.registry import Order, order_of
from .errors import EmulatorError
from .levels import book
from .options import Options
from .ptx import ir, parse

SCHEDULES = (
    Options(detect_races=True),
    *(
        Options(async_mode=mode, seed=seed, detect_races=True)
        for seed in range(3)
        for mode in ("lazy", "random")
    ),
)

_GRACE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One schedule under which the check did not survive. how: "DataRace", "wrong result", "NaN", "killed by ..."."""

    schedule: str
    how: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One PTX line that was skipped.

    executions: threads that ran it in the unchanged kernel, summed over all runs. modelled: whether skipping it changes
    anything in the emulator. findings: what noticed; empty for lines that were not run.
    """

    line: int
    text: str
    executions: int
    modelled: bool
    findings: tuple[Finding, ...] = ()

    @property
    def status(self) -> str:
        """One of "noticed", "unnoticed", "not reached", "not modelled"."""
        if not self.modelled:
            return "not modelled"
        if not self.executions:
            return "not reached"
        return "noticed" if self.findings else "unnoticed"


@dataclasses.dataclass(frozen=True)
class Report:
    """The mutants of a kernel in the order of its lines, and the schedules that looked for them.

    kept: whether the verdicts are those of an earlier run, in which nothing was different.
    """

    mutants: tuple[Mutant, ...]
    schedules: tuple[str, ...]
    seconds: float
    kept: bool = False

    def _with_status(self, status: str) -> tuple[Mutant, ...]:
        return tuple(m for m in self.mutants if m.status == status)

    @property
    def noticed(self) -> tuple[Mutant, ...]:
        return self._with_status("noticed")

    @property
    def unnoticed(self) -> tuple[Mutant, ...]:
        return self._with_status("unnoticed")

    @property
    def not_reached(self) -> tuple[Mutant, ...]:
        return self._with_status("not reached")

    @property
    def not_modelled(self) -> tuple[Mutant, ...]:
        return self._with_status("not modelled")

    def table(self) -> str:
        """The report as a Markdown table."""
        rows = ["| line | instruction | threads | noticed by |", "|---:|---|---:|---|"]
        for m in self.mutants:
            found = ", ".join(f"{f.schedule}: {f.how}" for f in m.findings)
            what = {"noticed": found, "unnoticed": "**UNNOTICED**"}.get(m.status, m.status)
            rows.append(f"| {m.line} | `{m.text}` | {m.executions} | {what} |")
        return "\n".join(rows)

    def __str__(self) -> str:
        counts = Counter(m.status for m in self.mutants)
        summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        origin = ", verdicts kept from an earlier run" if self.kept else ""
        return (
            f"{summary or 'nothing to skip'} ({', '.join(self.schedules)}{origin})\n{self.table()}"
        )


def opcodes(mutants: Iterable[Mutant]) -> Counter[str]:
    """Instructions without operands and conditions, but with the numbers of barriers and groups."""
    found = (re.match(r"(?:@\S+ )?(\S+(?: \d+)?)", m.text) for m in mutants)
    return Counter(match[1] for match in found if match)


def synchronisation(ptx: str) -> dict[int, str]:
    """PTX line -> text of every wait, fence, arrive and commit of a module."""
    found: dict[int, str] = {}
    for kernel in parse(ptx).kernels:
        for item in kernel.body:
            if isinstance(item, ir.Instruction) and order_of(item.opcode):
                found.setdefault(item.line, " ".join(item.text.rstrip(";").split()))
    return dict(sorted(found.items()))


def run(
    check: Callable[[Options], Any],
    kernel: Any,
    lines: Iterable[int] | None = None,
    schedules: Sequence[Options] = SCHEDULES,
    *,
    processes: int | None = None,
    time_limit: float | None = None,
    exhaustive: bool = False,
) -> Report:
    """Runs `check` once per schedule, then again for every line without that line.

    check: called with Options; runs the kernel with them on fresh inputs and raises, or returns False, where the result
        is wrong. It must have compiled what it needs after its first call.
    kernel: the EmulatedKernel or EmulatedModule that `check` runs, or what the fixture `emulated` made of one.
    lines: PTX lines to skip; by default every line of `synchronisation(ptx)`.
    schedules: run in this order until one notices, or all of them with `exhaustive`. Ordinary fences matter to the race
        detector only; without detect_races in any schedule they are listed as not modelled.
    processes: how many mutants run at once, each in a forked process; by default one per CPU of this process.
    time_limit: seconds for one run of a mutant; by default the larger of 5 and twenty times the slowest unchanged run.

    A mutant is noticed by any exception of `check`, and by a process that dies or hangs. Raises RuntimeError if the
    check fails on the unchanged kernel.
    """
    module = module_of(kernel)
    started = time.monotonic()
    wanted = synchronisation("\n".join(module.ptx_lines))
    if lines is not None:
        wanted = {n: wanted.get(n, module.ptx_lines[n - 1].strip().rstrip(";")) for n in lines}
    launched, executions, slowest = _unchanged(check, module, schedules)
    limit = time_limit or max(5.0, 20 * slowest)
    races = any(o.detect_races for o in schedules)
    mutants = [
        Mutant(line, text, executions[line], _is_modelled(text, races))
        for line, text in wanted.items()
    ]
    reached = {m.line: m for m in mutants if m.modelled and m.executions}

    def job(line: int) -> list[Finding]:
        return _mutate(check, line, schedules, limit, exhaustive)

    def run_mutants() -> dict[int, tuple[Finding, ...]]:
        found, patience = {}, len(schedules) * limit + _GRACE_SECONDS
        jobs = _in_processes(job, list(reached), processes or _cpus(), patience)
        for line, findings, seconds in jobs:
            book(module.path, seconds)
            found[line] = tuple(findings)
        return found

    test, kept = verdicts.current(), None
    if test:
        counts, given = sorted(executions.items()), (list(wanted), list(schedules))
        name = verdicts.key(test, launched, counts, *given, time_limit, exhaustive)
        kept = _kept(name, set(reached))
        test.hits += kept is not None
    found = run_mutants() if kept is None else kept
    if test and kept is None:
        _keep(name, found)
    for line, findings in found.items():
        reached[line] = dataclasses.replace(reached[line], findings=findings)
    every = tuple(reached.get(m.line, m) for m in mutants)
    labels = tuple(map(_label, schedules))
    return Report(every, labels, time.monotonic() - started, kept is not None)


def _kept(name: str, lines: set[int]) -> dict[int, tuple[Finding, ...]] | None:
    """The findings for every line that an earlier run kept under a name, if there are any."""
    try:
        found = {
            int(line): tuple(Finding(*map(str, f)) for f in findings)
            for line, findings in verdicts.load(name).items()
        }
    except (AttributeError, TypeError, ValueError):
        return None
    return found if found.keys() == lines else None


def _keep(name: str, found: dict[int, tuple[Finding, ...]]) -> None:
    """Keeps findings, unless one depends on how busy the machine was."""
    timely = ("hangs", "killed", "TimeLimitExceeded")
    if not any(f.how.startswith(timely) for every in found.values() for f in every):
        every = {line: list(map(dataclasses.astuple, findings)) for line, findings in found.items()}
        verdicts.save(name, every)


def _opcode(text: str) -> str:
    words = [w for w in text.split() if not w.startswith("@")]
    return words[0] if words else ""


def _is_modelled(text: str, races: bool) -> bool:
    order = order_of(_opcode(text))
    return races if order is Order.FENCE else order is not Order.ABSENT


def _label(options: Options) -> str:
    mode = options.async_mode
    return mode if mode == "immediate" else f"{mode}-{options.seed}"


def module_of(kernel: Any) -> Any:
    """The EmulatedModule inside a kernel, or inside what the pytest fixture bound a schedule to."""
    while not hasattr(kernel, "ptx_lines"):
        kernel = kernel.kernel if hasattr(kernel, "kernel") else kernel.module
    return kernel


@contextmanager
def _counting(module: Any) -> Iterator[tuple[dict[str, None], Counter[int]]]:
    """Notes the text of every module that a check launches, and adds up the executions of `module`."""
    launched: dict[str, None] = {}
    total: Counter[int] = Counter()
    kind = type(module)
    launch = kind._run

    def counted(self: Any, *arguments: Any) -> None:
        try:
            launch(self, *arguments)
        finally:
            launched["\n".join(self.ptx_lines)] = None
            if self is module:
                total.update(module.statistics.executions)

    kind._run = counted
    try:
        yield launched, total
    finally:
        kind._run = launch


def _unchanged(
    check: Callable[[Options], Any], module: Any, schedules: Sequence[Options]
) -> tuple[list[str], Counter[int], float]:
    """The texts of what the check launches, the executions of `module`'s lines, and the slowest run's seconds."""
    slowest = 0.0
    with _counting(module) as (launched, executions):
        for options in schedules:
            begin = time.monotonic()
            try:
                good = check(options) is not False
            except Exception as error:
                raise RuntimeError(
                    f"the check fails on the unchanged kernel under {_label(options)}: {error}"
                ) from error
            if not good:
                raise RuntimeError(
                    f"the check fails on the unchanged kernel under {_label(options)}"
                )
            slowest = max(slowest, time.monotonic() - begin)
    if not executions:
        raise RuntimeError("the check never launched the kernel")
    return list(launched), executions, slowest


def _mutate(
    check: Callable[[Options], Any],
    line: int,
    schedules: Sequence[Options],
    limit: float,
    exhaustive: bool,
) -> list[Finding]:
    findings = []
    for options in schedules:
        mutated = dataclasses.replace(options, ignore_line=line, time_limit=limit)
        try:
            if check(mutated) is not False:
                continue
            finding = Finding(_label(options), "wrong result", "")
        except BaseException as error:  # pytest's failures are no Exceptions
            finding = Finding(_label(options), _how(error), str(error)[:1000])
        findings.append(finding)
        if not exhaustive:
            break
    return findings


def _how(error: BaseException) -> str:
    if isinstance(error, EmulatorError):
        return type(error).__name__
    message = str(error)
    if re.search(r"\bnan\b|not finite", message, re.IGNORECASE):
        return "NaN"
    wrong = isinstance(error, AssertionError) or type(error).__name__ == "Failed"
    return "wrong result" if wrong else type(error).__name__


# ---- processes -----------------------------------------------------------------------------------


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _child(job: Callable[[int], list[Finding]], line: int, answer: Connection) -> None:
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)  # the threads of the parent's pool do not exist here
    answer.send((job(line), time.process_time()))
    answer.close()


def _in_processes(
    job: Callable[[int], list[Finding]], lines: list[int], processes: int, patience: float
) -> Iterator[tuple[int, list[Finding], float]]:
    """(line, job(line), seconds of processor time) in the order of completion.

    A process that dies or outlives `patience` is a finding too.
    """
    context = multiprocessing.get_context(
        "fork"
    )  # the kernel, its library and the check are inherited
    waiting = list(reversed(lines))
    running: dict[Any, tuple[int, Any, float]] = {}  # by the end of a pipe
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                line = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(job, line, sender), daemon=True)
                with warnings.catch_warnings():
                    # Newer Pythons warn that threads do not survive a fork; none is needed here.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                running[receiver] = (line, process, time.monotonic())
            first_end = min(begin for _, _, begin in running.values()) + patience
            ended: list[Any] = wait(list(running), max(0.0, first_end - time.monotonic()))
            for ready in ended:
                line, process, _ = running.pop(ready)
                try:
                    findings, seconds = ready.recv()
                except EOFError:
                    process.join()
                    signal = -(process.exitcode or 0)
                    findings, seconds = [Finding("any", f"killed by signal {signal}", "")], 0.0
                process.join()
                yield line, findings, seconds
            for receiver, (line, process, begin) in list(running.items()):
                if time.monotonic() >= begin + patience:
                    del running[receiver]
                    process.kill()
                    process.join()
                    yield (
                        line,
                        [Finding("any", "hangs", f"killed after {patience:.0f} s")],
                        patience,
                    )
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
