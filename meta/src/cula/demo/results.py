"""What the demo's steps hand to its report: checks with their bounds, table rows and the curves of the plot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Check:
    """One number and its bound; `at_least` turns the bound from a ceiling into a floor. NaN never passes."""

    label: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        if math.isnan(self.value):
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.label} {self.value:.3g} {sign} {self.bound:.3g}" + (
            "" if self.ok else "  (failed)"
        )


@dataclass(frozen=True)
class Row:
    """One line of the table. `error` is the relative RMSE against the fp64 recurrent oracle."""

    op: str
    what: str
    impl: str = ""
    tokens_per_s: float | None = None
    error: Check | None = None
    checks: tuple[Check, ...] = ()
    note: str = ""
    failure: str = ""

    @property
    def checked(self) -> bool:
        """Whether anything was asserted: a row of plain figures is neither a pass nor a failure."""
        return bool(self.failure or self.error or self.checks)

    @property
    def ok(self) -> bool:
        every = self.checks if self.error is None else (self.error, *self.checks)
        return not self.failure and all(check.ok for check in every)


@dataclass(frozen=True)
class RecallCurve:
    """Share of contexts recalled, in a window around each position of the text.

    `kind` is "delta", "plain", "forgetful" (no delta rule, with decay) or "baseline"; it sets the line's style.
    """

    label: str
    kind: str
    positions: list[float]
    recall: list[float]


@dataclass(frozen=True)
class SkipTrace:
    """Density of the mask read and relative error against dense attention, for each step of a sequence."""

    label: str
    density: list[float]
    error: list[float]


@dataclass
class Outcome:
    """Everything that a step found."""

    rows: list[Row] = field(default_factory=list)
    recall: list[RecallCurve] = field(default_factory=list)
    skips: list[SkipTrace] = field(default_factory=list)

    def extend(self, other: Outcome) -> None:
        """Append what another step found."""
        self.rows += other.rows
        self.recall += other.recall
        self.skips += other.skips

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def relative_rmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over RMS of `want`, in fp64 on the CPU; NaN or inf in `got` comes out as NaN or inf."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.shape != want.shape:
        raise ValueError(f"got: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if want.numel() == 0:
        return 0.0
    size = want.square().mean().sqrt().item()
    gap = (got - want).square().mean().sqrt().item()
    return gap / size if size > 0 else gap
