"""Problems over sequences, which are rows of a batch or packed: names, lengths, offsets, initial states and bytes.

The name of a packed setting says how the lengths of its N sequences, each at least 1, add up to its tokens:
    uniform   all lengths are equal up to one token
    random    N - 1 distinct cuts are drawn from all positions between two tokens
    skewed    one sequence has half of all tokens, the others form a geometric series of ratio 0.7; the order is random
    long      the first sequence is long, and every other one has SHORT tokens

A problem has at most one feature. Those that are known here:
    gva       there are GROUP value heads per query head
    state     the call gets an initial state of every sequence
    pool      initial states are rows of a pool, found through indices, and the call updates them in place
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Setting

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
    """The number of sequences, which are packed or rows of the batch."""
    return problem.params.get("N", batch_of(problem))


def query_heads(problem: Setting) -> int:
    p = problem.params
    return p.get("HQ", p["H"] // GROUP if has(problem, "gva") else p["H"])


def lengths_of(sequences: int, tokens: int, kind: str, seed: int = 0) -> list[int]:
    """Lengths of packed sequences of a kind that the docstring of this module describes; they sum to `tokens`."""
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
    # Every sequence gets one token first, so that the shortest ones of the series are not empty.
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
    """The same tensors for all buffer sets of a setting, so that a peer that plans once per tensor plans once."""
    p = problem.params
    return _offsets(p["N"], p["T"], p["lengths"], str(device)) if is_packed(problem) else None


@functools.cache
def _offsets(sequences: int, tokens: int, kind: str, device: str) -> Offsets:
    ends = torch.tensor([0, *lengths_of(sequences, tokens, kind)]).cumsum(0)
    return Offsets(ends.to(device, torch.int32), ends.to(device), ends)


def initial_states(
    problem: Setting, dim: int, generator: torch.Generator
) -> tuple[Tensor | None, Tensor | None]:
    """Random initial states, fp32 [N or rows of the pool, H, dim, dim], and the int32 row of every sequence [N].

    Both are None where a problem has no initial states, and the rows are None where it has no pool.
    """
    count, state, indices = sequences_of(problem), None, None
    if has(problem, "pool"):
        count += SPARE_ROWS
    if has(problem, "state") or has(problem, "pool"):
        shape = (count, problem.params["H"], dim, dim)
        state = torch.randn(shape, generator=generator, device=generator.device)
    if has(problem, "pool"):
        rows = torch.randperm(count, generator=generator, device=generator.device)
        indices = rows[: sequences_of(problem)].to(torch.int32)
    return state, indices


def initial_state_of(
    sequence: int, state: Tensor | None, indices: Tensor | None, like: Tensor, heads: list[int]
) -> Tensor:
    """The fp64 state [heads, K, V] that a sequence starts from, zeros where it is given none.

    `like` is v of the problem; its last dimension is K and V.
    """
    if state is None:
        dim = like.shape[-1]
        return torch.zeros(len(heads), dim, dim, dtype=torch.float64, device=like.device)
    return state[sequence if indices is None else int(indices[sequence])][heads].double()


def state_bytes(problem: Setting, dim: int) -> int:
    """Bytes of one fp32 state per sequence and value head."""
    return sequences_of(problem) * problem.params["H"] * dim * dim * 4


def input_bytes(problem: Setting, dim: int) -> int:
    """Bytes of q, k, v, initial states, offsets and indices, each once; gates are not among them."""
    p, tokens = problem.params, batch_of(problem) * problem.params["T"]
    activations = tokens * (2 * query_heads(problem) + p["H"]) * dim * 2
    initial = state_bytes(problem, dim) if has(problem, "state") or has(problem, "pool") else 0
    offsets = 4 * (p["N"] + 1) if is_packed(problem) else 0
    indices = 4 * sequences_of(problem) if has(problem, "pool") else 0
    return activations + initial + offsets + indices


def output_bytes(problem: Setting, dim: int) -> int:
    """Bytes of o and of the final states, each once."""
    p = problem.params
    return batch_of(problem) * p["T"] * p["H"] * dim * 2 + state_bytes(problem, dim)
