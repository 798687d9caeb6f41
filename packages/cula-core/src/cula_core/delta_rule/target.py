"""The description of an architecture by which it uses the shared parts of the delta rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from .config import HEAD_DIM, RecurrenceConfig
from .plan import Costs


@dataclass(frozen=True, eq=False)
class Target:
    """An architecture that has a recurrence of its own; its package has exactly one.

    package: import name of the kernel package. compiles_for: the DSL's name of the architecture, by compute capability.
    archs: the same as a dispatcher names them. v_tile: columns of v that one group of threads of the recurrence has.
    stages, scan_stages: chunks that the recurrence, and its scan, hold at once. costs: the planner's model. recurrence:
    the kernel class as "module:name", imported at the first call on a GPU. backward: whether calls can be trained.
    """

    package: str
    compiles_for: Mapping[tuple[int, int], str]
    archs: tuple[str, ...]
    v_tile: int
    stages: int
    scan_stages: int
    costs: Costs
    recurrence: str
    backward: bool = False

    @property
    def distribution(self) -> str:
        """The name of the distribution."""
        return self.package.replace("_", "-")

    @property
    def v_tiles(self) -> int:
        """Tiles of v per head."""
        return HEAD_DIM // self.v_tile

    def recurrence_config(self, dtype: str, **fields: object) -> RecurrenceConfig:
        """Returns the config of this architecture's recurrence; fields are those of `RecurrenceConfig`."""
        stages = self.scan_stages if fields.get("scan") else self.stages
        return RecurrenceConfig(dtype, v_tile=self.v_tile, stages=stages, **fields)  # type: ignore[arg-type]

    def recurrence_class(self) -> Callable[[RecurrenceConfig], object]:
        """Imports the kernel class of the recurrence."""
        module, _, name = self.recurrence.partition(":")
        return getattr(import_module(module), name)
