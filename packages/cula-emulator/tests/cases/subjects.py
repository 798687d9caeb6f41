"""Every kernel that runs on the emulator and on a GPU, in one form, in groups that are built as one module each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tables_matrix
import tables_scalar
import tables_wgmma
import torch

from cases import atomics, barriers, clusters, compare, control, copies, memory, tma
from cases.case import Case, module_text
from cases.compare import Difference
from cases.tensor_map import TensorMap

IMMEDIATE = (("immediate", 0),)
SCHEDULES = (("immediate", 0), ("random", 1), ("lazy", 1))
_CHUNK = 24  # wgmma kernels are long: several modules build side by side


@dataclass(frozen=True)
class Subject:
    """One launch of one kernel (in, out, ...). All buffers are int32 words on the CPU.

    extra: further arguments after `in` and `out`. judge: what an oracle says against the output, or None.
    difference: how two outputs compare. limit: the largest relative difference that is allowed; 0 means bit for bit
    (any NaN equals any NaN); None leaves it to `judge`, which then holds the documented bound.
    """

    family: str
    name: str
    kernel: str
    source: torch.Tensor
    out: torch.Tensor
    judge: Callable[[torch.Tensor], str | None]
    difference: Callable[[torch.Tensor, torch.Tensor], Difference]
    extra: tuple[int, ...] = ()
    grid: int = 1
    block: int = 32
    cluster: int = 1
    maps: tuple[TensorMap, ...] = ()
    limit: float | None = 0.0
    schedules: tuple[tuple[str, int], ...] = IMMEDIATE


@dataclass(frozen=True)
class Group:
    """Kernels of one module. `text` is its PTX, `subjects` what is launched."""

    text: Callable[[], str]
    subjects: Callable[[], list[Subject]]


# ---- the scalar tables
def _signed_words(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor([v - (1 << 32) if v >> 31 else v for v in values], dtype=torch.int32)


def _scalar(family: str, case: tables_scalar.Case) -> Subject:
    inputs = tables_scalar.samples(case)
    expected = tables_scalar.expected(case, inputs)
    words = (
        [case.words_out]
        if len(case.outputs) == 1
        else [2 if "64" in k else 1 for k in case.outputs]
    )

    def judge(out: torch.Tensor) -> str | None:
        wrong = tables_scalar.mismatches(case, inputs, out.tolist())
        return f"{len(wrong)} wrong: {wrong[0]}" if wrong else None

    def difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
        known = lambda thread, index: expected[thread][index] is not None  # noqa: E731
        return compare.of_cases(case.outputs, words, a.tolist(), b.tolist(), known)

    return Subject(
        family,
        case.name,
        case.name,
        _signed_words(tables_scalar.pack(case, inputs)),
        torch.zeros(len(inputs) * case.words_out, dtype=torch.int32),
        judge,
        difference,
        grid=len(inputs) // 32,
        limit=0.0 if case.kind is None else None,
        schedules=SCHEDULES if case.warp else IMMEDIATE,
    )


def _scalar_group(family: str) -> Group:
    cases = tables_scalar.FAMILIES[family]
    text = lambda: tables_scalar.HEADER + "\n".join(tables_scalar.entry(c) for c in cases)  # noqa: E731
    return Group(text, lambda: [_scalar(family, c) for c in cases])


# ---- the matrix tables
def _rounding(name: str, table: dict[str, float]) -> float:
    """The limit of `table` for a case's accumulator; 8-bit floats have their own."""
    if "s32" in name:
        return 0.0
    accumulator = "f16" if name.split("_")[4] == "f16" else "f32"
    small = "fp8" if "e4m3" in name or "e5m2" in name else ""
    return table.get(f"{accumulator}.{small}", table[accumulator])


def _matrix(family: str, case: tables_matrix.Case, kind: str) -> Subject:
    problem = case.problem(kind, 0)
    exact = not problem.allowed.any()
    limit = 0.0 if exact else _rounding(case.name, tables_matrix.TENSOR_CORE_ROUNDING)
    # `allowed` is the emulator's rounding times |A| |B| + |C|.
    size = (
        torch.ones_like(problem.allowed)
        if exact
        else problem.allowed / _rounding(case.name, tables_matrix.ROUNDING)
    )

    def judge(out: torch.Tensor) -> str | None:
        if exact:
            return problem.mismatch(out)
        gap = (problem.decode(out).double() - problem.expected.double()).abs()
        wrong = ~(gap <= limit * size)
        return f"{int(wrong.sum())} of {wrong.numel()} beyond {limit:.1e}" if wrong.any() else None

    def difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
        if exact:
            return compare.of_words(a, b)
        return compare.of_values(problem.decode(a), problem.decode(b), size)

    return Subject(
        family,
        f"{case.name}:{kind}",
        case.name,
        problem.words,
        torch.full((case.out_words,), -1, dtype=torch.int32),
        judge,
        difference,
        extra=(0,),
        block=case.threads,
        limit=limit,
        schedules=SCHEDULES if family == "wgmma" else IMMEDIATE,
    )


def _matrix_group(family: str, cases: dict[str, tables_matrix.Case]) -> Group:
    return Group(
        lambda: tables_matrix.module_text(cases),
        lambda: [_matrix(family, c, kind) for c in cases.values() for kind in c.kinds],
    )


# ---- the cases of this folder
def _case(case: Case) -> Subject:
    def judge(out: torch.Tensor) -> str | None:
        wrong = (out != case.expected).nonzero().flatten().tolist()
        if not wrong:
            return None
        first = wrong[0]
        got, want = (int(t[first]) & 0xFFFFFFFF for t in (out, case.expected))
        return f"{len(wrong)} of {out.numel()} words differ; word {first} is {got:#x} instead of {want:#x}"

    out = torch.full_like(case.expected, -1) if case.start is None else case.start
    launch = {
        "extra": (case.n,),
        "grid": case.grid,
        "block": case.block,
        "cluster": case.cluster,
        "maps": case.maps,
    }
    return Subject(
        case.family,
        case.name,
        case.name,
        case.source,
        out,
        judge,
        compare.of_words,
        schedules=SCHEDULES,
        **launch,
    )


def _case_group(cases: list[Case]) -> Group:
    return Group(lambda: module_text(cases), lambda: [_case(c) for c in cases])


@functools.cache
def groups() -> dict[str, Group]:
    found = {family: _scalar_group(family) for family in tables_scalar.FAMILIES}
    found |= {
        "mma.sync": _matrix_group("mma.sync", tables_matrix.MMA),
        "matrix moves": _matrix_group("matrix moves", tables_matrix.MOVES),
    }
    names = list(tables_wgmma.WGMMA)
    for start in range(0, len(names), _CHUNK):
        chosen = {n: tables_wgmma.WGMMA[n] for n in names[start : start + _CHUNK]}
        found[f"wgmma {start // _CHUNK}"] = _matrix_group("wgmma", chosen)
    for module in (memory, atomics, barriers, clusters, copies, tma, control):
        found[module.FAMILY] = _case_group(module.CASES)
    return found
