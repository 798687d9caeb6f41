"""pytest plugin: prints at the end of a run how long each folder of tests took, and which went over its budget.

`nox -s tests` loads it and hands it the table `BUDGETS` of noxfile.py in the environment variable CULA_TEST_BUDGETS, as
JSON: {folder: seconds}. A folder's time is the sum over its tests, setup and teardown included, divided by the number
of workers. A run that leaves tests out prints nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "CULA_TEST_BUDGETS"


class Budgets:
    """Adds up the time of tests by folder; folders: seconds that each may take."""

    def __init__(self, folders: dict[str, float], workers: int) -> None:
        self.folders, self.workers = folders, workers
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for folder in self.folders:
            if report.nodeid.startswith(f"{folder}/"):
                self.seconds[folder] += report.duration

    def lines(self) -> list[str]:
        """A line per folder: its seconds, its budget, and whether it went over."""
        found = []
        for folder, budget in self.folders.items():
            seconds = self.seconds[folder] / self.workers
            over = "  over its budget" if seconds > budget else ""
            found.append(f"{folder:42} {seconds:6.0f} s of {budget:4.0f} s{over}")
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each folder, on all workers together")
        for line in self.lines():
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Only in the process that gathers the results, and only for a run of every folder with a budget."""
    text = os.environ.get(VARIABLE)
    if not text or hasattr(config, "workerinput"):
        return
    folders = json.loads(text)
    chosen = {Path(argument).as_posix() for argument in config.args}
    if set(folders) <= chosen and not config.getoption("keyword"):
        workers = max(1, int(config.getoption("numprocesses", None) or 1))
        config.pluginmanager.register(Budgets(folders, workers), "cula-budgets")


if __name__ == "__main__":
    sys.exit("tools/budgets.py is a plugin of pytest: nox -s tests loads it")
