"""Runs the tables of matrix instructions on the emulator."""

import functools
from collections.abc import Iterable

import torch
from tables_matrix import HEADER, Case, Problem, module_text

import cula_emulator as emulator


@functools.cache
def _module(text: str) -> emulator.EmulatedModule:
    return emulator.EmulatedModule(text)


def build(cases: dict[str, Case], header: str = HEADER) -> emulator.EmulatedModule:
    return _module(module_text(cases, header))


@functools.cache
def _problem(case: Case, kind: str) -> Problem:
    return case.problem(kind, 0)


def launch(
    module: emulator.EmulatedModule, case: Case, kind: str, options: emulator.Options
) -> torch.Tensor:
    """Output words of a case; they are all ones before."""
    out = torch.full((case.out_words,), -1, dtype=torch.int32)
    words = _problem(case, kind).words
    module.launch(case.name, (1,), (case.threads,), (words, out, 0), options=options)
    return out


@functools.cache
def _immediate(module: emulator.EmulatedModule, case: Case, kind: str) -> torch.Tensor:
    return launch(module, case, kind, emulator.Options())


def check(
    module: emulator.EmulatedModule, case: Case, kind: str, options: emulator.Options
) -> None:
    """Compares a case with its oracle, and bit for bit with the immediate schedule: sums have one order."""
    out = launch(module, case, kind, options)
    error = _problem(case, kind).mismatch(out)
    assert error is None, f"{case.name}, {kind}: {error}"
    assert torch.equal(out, _immediate(module, case, kind)), case.name


def check_all(cases: dict[str, Case], options: emulator.Options, header: str = HEADER) -> None:
    module = build(cases, header)
    for case in cases.values():
        for kind in case.kinds:
            check(module, case, kind, options)


def run_body(
    body: str,
    words: torch.Tensor,
    out_words: int,
    threads: int = 32,
    shared: int = 0,
    header: str = HEADER,
    options: emulator.Options | None = None,
    among: Iterable[str] = (),
) -> torch.Tensor:
    """Output words of one kernel of hand-written PTX in the frame of the tables.

    `among` are all bodies of a test with parameters, which are built together to save time.
    """
    bodies = list(dict.fromkeys([*among, body]))
    cases = {
        f"k{n}": Case(f"k{n}", text, out_words, None, shared, threads)
        for n, text in enumerate(bodies)
    }
    out = torch.full((out_words,), -1, dtype=torch.int32)
    name = f"k{bodies.index(body)}"
    build(cases, header).launch(name, (1,), (threads,), (words, out, 0), options=options)
    return out
