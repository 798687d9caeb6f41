"""How a call is spread out: the kernels it takes, their grids, and the sizes of their workspaces. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import (
    BLOCK_M,
    KEY_GROUP,
    QUANTIZED_ROWS,
    QUERY_GROUP,
    BackwardConfig,
    ForwardConfig,
    Problem,
    select,
    select_backward,
)


@dataclass(frozen=True)
class ForwardPlan:
    """One launch of the forward kernel, with a CTA for each query tile of the longest sequence, head and sequence."""

    config: ForwardConfig
    query_tiles: int
    sequences: int


@dataclass(frozen=True)
class QuantizePlan:
    """One launch of the kernel that rounds queries or keys; of no tiles if there is nothing to round.

    groups: of rows with one scale that the workspace holds, of one head and batch.
    """

    tiles: int
    sequences: int
    groups: int


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of a backward pass, in this order.

    1. Sums of rows, config `ends`, grid of `row_tiles`. They lie in `slots` tiles of rows of one head and batch.
    2. Gradients of keys and values, config `main`, grid of `key_tiles`; with a mask, transposed from `mask_tiles` query
       and key tiles.
    3. Gradients of queries, grid of `query_tiles`: gathered from what `main` added up, config `ends`, or by a kernel of
       their own, config `queries`, where the order of additions must not depend on time.
    """

    main: BackwardConfig
    ends: BackwardConfig
    queries: BackwardConfig | None
    slots: int
    row_tiles: int
    key_tiles: int
    query_tiles: int
    mask_tiles: tuple[int, int]
    sequences: int


def places(tokens: int, sequences: int | None, period: int) -> int:
    """How many groups of `period` tokens there are at most: every packed sequence begins with a group of its own."""
    return _ceil(tokens, period) if sequences is None else tokens // period + sequences


def plan_forward(
    problem: Problem, arch: str, batch: int, sequences: int | None, longest: int
) -> ForwardPlan:
    """sequences: of packed input, else None. longest: the most queries that a sequence has."""
    count = batch if sequences is None else sequences
    return ForwardPlan(select(problem, arch), _ceil(longest, BLOCK_M), count)


def plan_quantize(
    of_keys: bool, batch: int, tokens: int, sequences: int | None, longest: int
) -> QuantizePlan:
    """Packed keys begin at multiples of a group, packed queries at multiples of a query tile."""
    period, group = (KEY_GROUP, KEY_GROUP) if of_keys else (BLOCK_M, QUERY_GROUP)
    groups = places(tokens, sequences, period) * (period // group)
    count = batch if sequences is None else sequences
    return QuantizePlan(_ceil(longest, QUANTIZED_ROWS), count, groups)


def plan_backward(
    problem: Problem, arch: str, batch: int, tokens: int, sequences: int | None, longest_q: int, longest_k: int,
    deterministic: bool,
) -> BackwardPlan:  # fmt: skip
    """tokens: of the queries. longest_q, longest_k: the most queries and keys that a sequence has."""
    main = select_backward(problem, "keys" if deterministic else "both", arch)
    per_place = BLOCK_M // main.rows
    return BackwardPlan(
        main=main,
        # What comes before and after does not depend on masks.
        ends=replace(main, problem=problem.plain),
        queries=select_backward(problem, "queries", arch) if deterministic else None,
        slots=places(tokens, sequences, BLOCK_M) * per_place,
        row_tiles=_ceil(longest_q, BLOCK_M) * per_place,
        key_tiles=_ceil(longest_k, main.keys),
        query_tiles=_ceil(longest_q, main.rows),
        mask_tiles=(_ceil(longest_q, BLOCK_M), _ceil(longest_k, problem.block_n)),
        sequences=batch if sequences is None else sequences,
    )


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)
