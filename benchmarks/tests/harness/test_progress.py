"""The progress bar."""

import io
import sys

from benchmarks.harness.progress import progress
from benchmarks.harness.registry import Setting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_draws_only_on_a_terminal(monkeypatch):
    items = [Setting("one", {}), Setting("two", {})]
    quiet, terminal, plain = io.StringIO(), Terminal(), Terminal()
    assert list(progress(items, quiet)) == items and quiet.getvalue() == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress(items, plain)) == items
    assert "[1/2] two" in plain.getvalue() and plain.getvalue().endswith("\r\033[K")
    monkeypatch.undo()
    assert list(progress(items, terminal)) == items
