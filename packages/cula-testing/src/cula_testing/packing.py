"""Sequences of tests, packed or not, and the rows of a pool that their states have."""

from __future__ import annotations

import random


class Slots:
    """What follows from the sequences of a problem. lengths: of each; slots: its row of the pool, or None for row n."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...] | None

    @property
    def rows(self) -> tuple[int, ...]:
        """The pool's row of each sequence."""
        return tuple(range(len(self.lengths))) if self.slots is None else self.slots

    @property
    def padding(self) -> tuple[int, ...]:
        """The sequences that are padding."""
        return tuple(n for n, row in enumerate(self.rows) if row < 0)


def spread(seed: int, sequences: int, tokens: int) -> list[int]:
    """Returns lengths of random packed sequences, empty ones and single tokens among them."""
    rng = random.Random(seed)
    cuts = sorted(rng.choice((rng.randint(0, tokens), 64, 65)) for _ in range(sequences - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens])]
