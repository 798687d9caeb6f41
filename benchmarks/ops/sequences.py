"""Problems over sequences, rows of a batch or packed: names, lengths, offsets, and errors head by head.

Packed settings are named after how the lengths of their N sequences, all of them >= 1, make up the tokens:
    uniform   equal up to one token
    random    N - 1 distinct cuts, drawn from all positions between two tokens
    skewed    one sequence has half of all tokens, the others a geometric series of ratio 0.7; in random order
    long      the first sequence has all tokens but SHORT of each other one
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting

GROUP = 4
SPARE_ROWS = 2
SHRINK = 0.7
SHORT = 1024

LENGTHS = ("uniform", "random", "skewed")
KINDS = (*LENGTHS, "long")

BATCHES = (1, 2)
TOKENS = (512, 1024, 4096, 8192, 16384)
SEQUENCES = (10, 20)
PACKED_TOKENS = (4096, 8192, 16384)


@dataclass(frozen=True)
class Offsets:
    """Cumulative lengths of packed sequences: int32 and int64 on the device, int64 on the host."""

    int32: Tensor
    int64: Tensor
    host: Tensor


def named(
    tokens: int,
    batch: int,
    heads: int,
    sequences: int | None,
    lengths: str,
    feature: str | None,
    suffix: str = "",
    **more: Any,
) -> Setting:
    """A dense problem of B x T tokens, or with `sequences` a packed one of T tokens in all; H value heads."""
    packing: dict[str, Any] = {"B": batch, "T": tokens}
    name = f"B{batch}-T{tokens}-H{heads}"
    if sequences is not None:
        packing = {"N": sequences, "T": tokens, "lengths": lengths}
        name = f"N{sequences}-T{tokens}-{lengths}-H{heads}"
    name += suffix + (f"+{feature}" if feature else "")
    return Setting(name, {**packing, "H": heads, **more, "feature": feature or False})


def main_sizes() -> list[dict[str, Any]]:
    """Arguments of the main settings: ten dense and eighteen packed problems."""
    dense = [{"tokens": t, "batch": b} for b in BATCHES for t in TOKENS]
    packed = [
        {"tokens": t, "sequences": n, "lengths": lengths}
        for n in SEQUENCES
        for t in PACKED_TOKENS
        for lengths in LENGTHS
    ]
    return dense + packed


def is_packed(problem: Setting) -> bool:
    return "N" in problem.params


def has(problem: Setting, feature: str) -> bool:
    return problem.params["feature"] == feature


def batch_of(problem: Setting) -> int:
    return problem.params.get("B", 1)


def sequences_of(problem: Setting) -> int:
    """How many sequences there are, packed or as rows of the batch."""
    return problem.params.get("N", batch_of(problem))


def query_heads(problem: Setting) -> int:
    heads = problem.params["H"]
    return heads // GROUP if has(problem, "gva") else heads


def lengths_of(sequences: int, tokens: int, kind: str, seed: int = 0) -> list[int]:
    """Lengths of packed sequences, see the head of this module; they sum to `tokens`."""
    if not 1 <= sequences <= tokens:
        raise ValueError(f"sequences: expected 1..{tokens}, got {sequences}")
    generator = random.Random(seed)
    if kind == "uniform":
        cuts = [tokens * i // sequences for i in range(1, sequences)]
    elif kind == "random":
        cuts = sorted(generator.sample(range(1, tokens), sequences - 1))
    elif kind == "skewed":
        return _skewed(sequences, tokens, generator)
    elif kind == "long":
        return _long(sequences, tokens)
    else:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens])]


def _skewed(sequences: int, tokens: int, generator: random.Random) -> list[int]:
    if sequences == 1:
        return [tokens]
    # One token each is given out first, so that the series can end in sequences of next to nothing.
    half = min(tokens // 2, tokens - (sequences - 1))
    free = tokens - half - (sequences - 1)
    weights = [SHRINK**i for i in range(sequences - 1)]
    others = [1 + int(free * w / sum(weights)) for w in weights]
    others[0] += tokens - half - sum(others)
    lengths = [half, *others]
    generator.shuffle(lengths)
    return lengths


def _long(sequences: int, tokens: int) -> list[int]:
    first = tokens - (sequences - 1) * SHORT
    if first < SHORT:
        raise ValueError(f"tokens: expected at least {sequences * SHORT}, got {tokens}")
    return [first, *[SHORT] * (sequences - 1)]


def spans(problem: Setting) -> list[tuple[int, int, int]]:
    """Batch row, first token and end of every sequence."""
    p = problem.params
    if not is_packed(problem):
        return [(b, 0, p["T"]) for b in range(p["B"])]
    found, start = [], 0
    for length in lengths_of(p["N"], p["T"], p["lengths"]):
        found.append((0, start, start + length))
        start += length
    return found


def offsets_of(problem: Setting, device: Any) -> Offsets | None:
    """The same tensors for all buffer sets of a setting: whoever plans ahead per tensor plans once."""
    p = problem.params
    return _offsets(p["N"], p["T"], p["lengths"], str(device)) if is_packed(problem) else None


@functools.cache
def _offsets(sequences: int, tokens: int, kind: str, device: str) -> Offsets:
    ends = torch.tensor([0, *lengths_of(sequences, tokens, kind)]).cumsum(0)
    return Offsets(ends.to(device, torch.int32), ends.to(device), ends)


def checked_heads(heads: int) -> list[int]:
    """First, middle and last value head."""
    return sorted({0, heads // 2, heads - 1})


def worst_head(got: Tensor, want: Tensor, axis: int) -> float:
    """Relative RMSE of the worst head, so that one with a large state does not hide the others."""
    dims = [d for d in range(want.dim()) if d != axis]
    errors = (got.double() - want).square().sum(dims) / want.square().sum(dims)
    return float(errors.sqrt().max())


def refuse_not_finite(problem: Setting, **tensors: Tensor) -> None:
    """CheckFailed names the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            name = name.replace("_", " ")
            raise CheckFailed(f"{problem.name}: {name} holds values that are not finite")


class SpareRows:
    """Rows of a state pool that no sequence owns, as they were; none without a pool."""

    def __init__(self, state: Tensor | None, indices: Tensor | None) -> None:
        self.pool: Tensor | None = None
        if state is not None and indices is not None:
            owned = torch.zeros(len(state), dtype=torch.bool, device=state.device)
            owned[indices.long()] = True
            self.pool, self.rows = state, (~owned).nonzero()[:, 0]
            self.before = state[self.rows].clone()

    def refuse_changed(self, problem: Setting) -> None:
        if self.pool is not None and not torch.equal(self.pool[self.rows], self.before):
            raise CheckFailed(
                f"{problem.name}: rows of the pool that no sequence owns were changed"
            )
