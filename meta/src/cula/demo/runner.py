"""Runs the demo's steps one after the other; a step that breaks becomes a failed row and the others still run."""

from __future__ import annotations

from functools import partial
from types import ModuleType

from rich.progress import Progress

from cula.demo import kda_steps, lightning_steps, memory, skip_steps
from cula.demo.data import Corpus, Projections
from cula.demo.results import Outcome, Row
from cula.demo.runtime import Machine

STEPS: tuple[tuple[str, ModuleType], ...] = (
    ("Lightning: prefill, then decode", lightning_steps),
    ("KDA: one go, pieces, packed", kda_steps),
    ("Delta rule as a memory", memory),
    ("Skip-list attention", skip_steps),
)


def run(
    machine: Machine, corpus: Corpus, projections: Projections, tokens: int, progress: Progress
) -> Outcome:
    """All steps on the same text; `progress` shows one bar per step."""
    width = max(len(title) for title, _ in STEPS)
    tasks = [
        progress.add_task(title.ljust(width), total=step.TICKS, start=False)
        for title, step in STEPS
    ]
    found = Outcome()
    for task, (title, step) in zip(tasks, STEPS, strict=True):
        progress.start_task(task)
        try:
            found.extend(
                step.run(machine, corpus, projections, tokens, partial(progress.advance, task))
            )
        except Exception as error:  # whatever an implementation raises is this step's result, not the end of the demo
            reason = str(error).partition("\n")[0]
            found.rows.append(Row("", title, failure=f"{type(error).__name__}: {reason}"))
        progress.stop_task(task)
    return found
