"""What the checks of several families share: errors head by head, limits, and rows that a call must leave alone.

A check runs an implementation once, on inputs of the seed SEED, before anything is timed. It raises CheckFailed with a
sentence that names the setting, the quantity, its error and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting

# Far from the seeds of the buffer sets that are timed, which count from 0.
SEED = 20_231
# Random rows besides the first and the last one, whose results are compared.
CHECKED_ROWS = 3


def relative_rmse(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of `want`, which is fp64."""
    return float((got.double() - want).norm() / want.norm())


def worst_head(got: Tensor, want: Tensor, axis: int) -> float:
    """The relative RMSE of the worst head along `axis`, so that a head with a large state does not hide the others."""
    dims = [d for d in range(want.dim()) if d != axis]
    errors = (got.double() - want).square().sum(dims) / want.square().sum(dims)
    return float(errors.sqrt().max())


def checked_heads(heads: int) -> list[int]:
    """The first, the middle and the last value head."""
    return sorted({0, heads // 2, heads - 1})


def checked_rows(rows: int, seed: int = 0) -> list[int]:
    """The first row, the last one and random ones between, which show a wrong stride or a grid that is too small."""
    middle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(dict.fromkeys([0, rows - 1, *middle][: CHECKED_ROWS + 2]))


def require_finite(problem: Setting, **tensors: Tensor) -> None:
    """Raises CheckFailed for the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            name = name.replace("_", " ")
            raise CheckFailed(f"{problem.name}: {name} holds values that are not finite")


def require_within(
    problem: Setting,
    errors: Mapping[str, float],
    limits: Mapping[str, float],
    measures: Mapping[str, str] | None = None,
) -> None:
    """Raises CheckFailed for the first error beyond its limit.

    `measures` names the measure of every error that is not a relative RMSE.
    """
    for name, error in errors.items():
        # Written so that NaN fails too.
        if not error <= limits[name]:
            measure = (measures or {}).get(name, "relative RMSE")
            raise CheckFailed(
                f"{problem.name}: {measure} of the {name} is {error:.2e}, limit {limits[name]:.0e}"
            )


class SpareRows:
    """Remembers the rows of a state pool that belong to no sequence; it remembers nothing where there is no pool."""

    def __init__(self, state: Tensor | None, indices: Tensor | None) -> None:
        self.pool: Tensor | None = None
        if state is not None and indices is not None:
            owned = torch.zeros(len(state), dtype=torch.bool, device=state.device)
            owned[indices.long()] = True
            self.pool, self.rows = state, (~owned).nonzero()[:, 0]
            self.before = state[self.rows].clone()

    def require_unchanged(self, problem: Setting) -> None:
        """Raises CheckFailed where one of these rows has changed."""
        if self.pool is not None and not torch.equal(self.pool[self.rows], self.before):
            raise CheckFailed(
                f"{problem.name}: rows of the pool that no sequence owns were changed"
            )
