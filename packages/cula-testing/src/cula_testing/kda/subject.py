"""What the suites must know of the package that they test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

from cula_core.delta_rule.target import Target


@dataclass(frozen=True, eq=False)
class Subject:
    """A KDA package under test.

    package: its module. target: its architecture. unnoticed: which waits of the recurrence no schedule of the emulator
    notices when they are left out, by instruction.
    """

    package: ModuleType
    target: Target
    unnoticed: Counter = field(default_factory=Counter)

    @property
    def architectures(self) -> tuple[str, ...]:
        """What the package compiles for; the first one is emulated."""
        return tuple(self.target.compiles_for.values())

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of v per CTA of the recurrence, as the planner chooses them."""
        return tuple(sorted({1, self.target.v_tiles}))
