"""Problems, inputs, oracle, check, bytes and arithmetic of skip-list attention.

    out = softmax(q k^T / sqrt(D) over the listed key tiles) v          lse = the logarithm of the softmax's denominator

A query tile is BLOCK_M rows, a key tile BLOCK_N keys. Masks are int32 [B, H, Mt, W]; bit n % 32 of word n // 32 says
that key tile n is listed. A call also reports which of the tiles that it visits it keeps: the first one, and every tile
that contains, for some row, a logit larger by more than a threshold (log2 units) than all logits of the row before it.

Kinds of problems, all of random data:

    dense   no mask, no decisions
    full    every tile is listed and kept, which shows the cost of the decisions
    list    a share of the tiles, drawn at random, is listed: equally many for every query tile; all of them are kept
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting
from benchmarks.ops.checks import SEED, require_finite, require_within, worst_head
from benchmarks.ops.lite import workloads

BLOCK_M = 128
BLOCK_N = 64
WORD = 32
LOG2E = math.log2(math.e)

KINDS = ("dense", "full", "list")
# The threshold of timed calls, at which no tile is skipped.
KEEP_ALL = -math.inf

# How many rows the oracle computes at once; a multiple of BLOCK_M.
ORACLE_ROWS = 1024
OUTPUT_LIMIT = 5e-3
LSE_LIMIT = 1e-3
# Decisions may differ where a margin is this close to the threshold, in log2 units and relative to the margin.
UNDECIDED = 1e-2


@dataclass(frozen=True)
class Limits:
    """The limits of a check: the relative RMSE of a head's output, the error of lse, and UNDECIDED."""

    output: float = OUTPUT_LIMIT
    lse: float = LSE_LIMIT
    undecided: float = UNDECIDED


EXACT = Limits()
# Scores from 8-bit integers have an error of 0.012 on random data, which is the relative error of probabilities and of
# outputs too. A causal row with a single key has its score for an lse.
INT8 = Limits(output=2e-2, lse=5e-2, undecided=2e-1)


@dataclass
class Inputs:
    """One buffer set: q, k, v [B, S, H, D] bf16, and the read mask int32 [B, H, Mt, W], None for dense problems."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


@dataclass
class Result:
    """out [B, S, H, D]; lse [B, H, S] fp32 and the write mask, None where an implementation has none."""

    out: Tensor
    lse: Tensor | None = None
    write: Tensor | None = None


# (problem, inputs, threshold or None for dense, direction)
Runner = Callable[[Setting, Inputs, float | None, int], Result]


def setting(
    kind: str,
    tokens: int,
    batch: int = 1,
    heads: int = 16,
    dim: int = 128,
    causal: bool = False,
    density: float = 1.0,
) -> Setting:
    """A problem, named like dense-B1-S4096-H16-D128, full-B1-S8192-H16-D128-causal and list3.1-B1-S16384-H24-D128.

    `density` is the share of tiles that are listed, and 1 unless `kind` is "list". Lists are never causal, because some
    rows would have no key then.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    if (kind == "list") != (density != 1.0) or not 0 < density <= 1:
        raise ValueError(f"density: expected below 1 for lists and 1 for others, got {density}")
    if kind == "list" and causal:
        raise ValueError("causal: expected False for lists, got True")
    percent = f"{round(100 * density, 1):g}" if kind == "list" else ""
    name = f"{kind}{percent}-B{batch}-S{tokens}-H{heads}-D{dim}" + ("-causal" if causal else "")
    params = {"kind": kind, "B": batch, "S": tokens, "H": heads, "D": dim, "causal": causal}
    return Setting(name, {**params, "density": density})


def is_dense(problem: Setting) -> bool:
    return problem.params["kind"] == "dense"


def tiles(tokens: int) -> tuple[int, int]:
    """The numbers of query tiles and of key tiles."""
    return -(-tokens // BLOCK_M), -(-tokens // BLOCK_N)


def listed_tiles(problem: Setting) -> int:
    """How many key tiles are listed for every query tile."""
    return max(1, round(problem.params["density"] * tiles(problem.params["S"])[1]))


def make_inputs(problem: Setting, device: Any, seed: int) -> Inputs:
    """Fresh random data of one buffer set."""
    p = problem.params
    shape = workloads.Shape(p["B"], (1, 1, p["S"]), p["H"], p["D"])
    q, k, v = next(workloads.random(shape, 1, device, seed))
    mask = None
    if not is_dense(problem):
        generator = torch.Generator(device).manual_seed(seed)
        rows = (p["B"], p["H"], tiles(p["S"])[0])
        mask = random_mask(rows, tiles(p["S"])[1], listed_tiles(problem), generator)
    return Inputs(q, k, v, mask)


def random_mask(
    rows: tuple[int, ...], key_tiles: int, listed: int, generator: torch.Generator
) -> Tensor:
    """A mask [*rows, W] with `listed` bits in every row, drawn without repetition."""
    order = torch.rand(*rows, key_tiles, generator=generator, device=generator.device)
    bits = torch.zeros_like(order, dtype=torch.bool)
    return pack(bits.scatter_(-1, order.topk(listed).indices, True))


def pack(bits: Tensor) -> Tensor:
    """bool [..., Nt] to int32 words [..., W]."""
    missing = -bits.shape[-1] % WORD
    parts = torch.nn.functional.pad(bits.long(), (0, missing)).unflatten(-1, (-1, WORD))
    words = (parts << torch.arange(WORD, device=bits.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack(mask: Tensor) -> Tensor:
    """int32 words [..., W] to bool [..., 32 W]."""
    shifts = torch.arange(WORD, device=mask.device, dtype=torch.int32)
    return ((mask[..., None] >> shifts) & 1).bool().flatten(-2)


def visible(problem: Setting, device: Any) -> Tensor:
    """Tiles with a key that some row may use, bool [Mt, Nt]; all of them unless the problem is causal."""
    rows, keys = tiles(problem.params["S"])
    if not problem.params["causal"]:
        return torch.ones(rows, keys, dtype=torch.bool, device=device)
    ends = (torch.arange(1, rows + 1, device=device) * BLOCK_M).clamp(max=problem.params["S"])
    return torch.arange(keys, device=device) * BLOCK_N < ends[:, None]


def visited(problem: Setting, mask: Tensor | None, device: Any) -> Tensor:
    """The tiles that a call visits, which are the visible ones that are listed, bool [B, H, Mt, Nt].

    Without a mask all tiles count as listed.
    """
    p, seen = problem.params, visible(problem, device)
    if mask is None:
        return seen.expand(p["B"], p["H"], *seen.shape)
    return unpack(mask)[..., : seen.shape[1]] & seen


def activation_bytes(problem: Setting) -> int:
    """Bytes of one of q, k, v and out."""
    p = problem.params
    return p["B"] * p["S"] * p["H"] * p["D"] * 2


def mask_bytes(problem: Setting) -> int:
    """Bytes of one mask."""
    p, (rows, keys) = problem.params, tiles(problem.params["S"])
    return 0 if is_dense(problem) else p["B"] * p["H"] * rows * -(-keys // WORD) * 4


def read(problem: Setting) -> int:
    """Bytes of q, k, v and the read mask, each once."""
    return 3 * activation_bytes(problem) + mask_bytes(problem)


def moved(problem: Setting) -> int:
    """The fewest bytes of a call, which are those of `read`, of out, lse and the write mask."""
    p = problem.params
    lse = 4 * p["B"] * p["H"] * p["S"]
    return read(problem) + activation_bytes(problem) + lse + mask_bytes(problem)


def flops(problem: Setting) -> int:
    """Operations of both products over the listed tiles; a causal problem counts half of them."""
    p = problem.params
    keys = p["S"] * listed_tiles(problem) // tiles(p["S"])[1]
    return 4 * p["B"] * p["H"] * p["S"] * keys * p["D"] // (2 if p["causal"] else 1)


def checked_heads(batch: int, heads: int) -> list[tuple[int, int]]:
    """Batch row and head of the first, a middle and the last one."""
    return sorted({(0, 0), (batch - 1, heads // 2), (batch - 1, heads - 1)})


@dataclass
class Expected:
    """fp64 results of P heads: out [P, S, D], lse [P, S], and the largest logit of every row and key tile.

    peaks [P, Mt, BLOCK_M, Nt] are in log2 units, -inf for rows that do not exist and keys that are not visible.
    """

    out: Tensor
    lse: Tensor
    peaks: Tensor


def oracle(
    problem: Setting, x: Inputs, listed: Tensor | None, heads: list[tuple[int, int]]
) -> Expected:
    """fp64 results of (batch row, head) pairs over the tiles `listed` [B, H, Mt, Nt]; None lists all."""
    found = [_head(problem, x, None if listed is None else listed[b, h], b, h) for b, h in heads]
    return Expected(*(torch.stack(parts) for parts in zip(*found)))


def _head(
    problem: Setting, x: Inputs, listed: Tensor | None, b: int, h: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t[b, :, h].double() for t in (x.q, x.k, x.v))
    tokens, key_tiles = len(q), tiles(len(q))[1]
    parts = []
    for start in range(0, tokens, ORACLE_ROWS):
        rows = torch.arange(start, min(start + ORACLE_ROWS, tokens), device=q.device)
        logits = q[rows] @ k.mT * q.shape[-1] ** -0.5
        if problem.params["causal"]:
            later = torch.arange(tokens, device=q.device) > rows[:, None]
            logits = logits.masked_fill(later, -torch.inf)
        padding = (0, key_tiles * BLOCK_N - tokens, 0, -len(rows) % BLOCK_M)
        padded = torch.nn.functional.pad(logits * LOG2E, padding, value=-torch.inf)
        peaks = padded.unflatten(1, (key_tiles, BLOCK_N)).amax(-1).unflatten(0, (-1, BLOCK_M))
        if listed is not None:
            wanted = listed[rows // BLOCK_M].repeat_interleave(BLOCK_N, 1)[:, :tokens]
            logits = logits.masked_fill(~wanted, -torch.inf)
        lse = logits.logsumexp(-1)
        parts.append(((logits - lse[:, None]).exp() @ v, lse, peaks))
    out, lse, peaks = (torch.cat(p) for p in zip(*parts))
    return out, lse, peaks


def margins(peaks: Tensor, seen: Tensor, direction: int) -> Tensor:
    """By how much the largest logit of a row in a tile exceeds all before it, for the best row, [..., Mt, Nt].

    It is +inf for the first tile and -inf for tiles that are not visited. Tiles are visited upwards, or downwards where
    direction is -1.
    """
    if direction < 0:
        return margins(peaks.flip(-1), seen.flip(-1), 1).flip(-1)
    so_far = peaks.masked_fill(~seen[..., None, :], -torch.inf).cummax(-1).values
    before = torch.nn.functional.pad(so_far[..., :-1], (1, 0), value=-torch.inf)
    # -inf - -inf belongs to a row without keys so far and in this tile; such a row keeps no tile.
    lift = (peaks - before).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    first = seen & (seen.cumsum(-1) == 1)
    return lift.amax(-2).masked_fill(~seen, -torch.inf).masked_fill(first, torch.inf)


def check_dense(
    run: Callable[[Setting, Inputs], Result], problem: Setting, device: Any, limits: Limits = EXACT
) -> dict[str, float]:
    """Compares attention over all keys with the fp64 oracle on fresh data; lists of the problem are ignored."""
    x = make_inputs(problem, device, seed=SEED)
    heads = checked_heads(problem.params["B"], problem.params["H"])
    errors = _errors(problem, run(problem, x), oracle(problem, x, None, heads), heads)
    return _checked(problem, errors, limits)


def check_listed(
    run: Runner, problem: Setting, device: Any, limits: Limits = EXACT
) -> dict[str, float]:
    """Compares attention over the listed tiles, and the write mask, with the fp64 oracle on fresh data.

    The first call is the one that is timed, and must keep every tile that it visits. The second one visits tiles in the
    other direction, with a threshold that at least half of the tiles exceed. Its results must be as exact, and it must
    keep the first tile, no tile that is not listed, and otherwise the tiles that the oracle keeps; tiles close to the
    threshold are not compared.
    """
    x = make_inputs(problem, device, seed=SEED)
    heads = checked_heads(problem.params["B"], problem.params["H"])
    seen = visited(problem, x.mask, device)
    want = oracle(problem, x, seen, heads)
    before = x.mask.clone()

    timed = run(problem, x, KEEP_ALL, 1)
    errors = _checked(problem, _errors(problem, timed, want, heads), limits)
    if not torch.equal(_kept(problem, timed, seen), seen):
        raise CheckFailed(f"{problem.name}: the write mask has lost tiles that nothing skips")

    index = tuple(torch.tensor(heads, device=device).T)
    lifts = margins(want.peaks, seen[index], -1)
    finite = lifts[lifts.isfinite()]
    threshold = min(float(finite.median()), 0.0) if len(finite) else 0.0
    back = run(problem, x, threshold, -1)
    other = _checked(problem, _errors(problem, back, want, heads), limits)
    kept = _kept(problem, back, seen)
    _require_first_tiles(problem, kept, seen)
    decided = (lifts - threshold).abs() > limits.undecided * (1 + lifts.abs())
    if not torch.equal(kept[index] & decided, seen[index] & (lifts > threshold) & decided):
        raise CheckFailed(f"{problem.name}: the write mask differs from the rule")
    if not torch.equal(x.mask, before):
        raise CheckFailed(f"{problem.name}: the read mask was changed")
    return {name: max(error, other[name]) for name, error in errors.items()}


def _require_first_tiles(problem: Setting, kept: Tensor, seen: Tensor) -> None:
    """Raises CheckFailed unless every query tile keeps the tile that it visits first, going downwards."""
    order = seen.flip(-1).cumsum(-1).flip(-1)
    if not bool(kept[seen & (order == 1)].all()):
        raise CheckFailed(f"{problem.name}: the write mask lacks the first tile of a query tile")


def _kept(problem: Setting, result: Result, seen: Tensor) -> Tensor:
    """The tiles of a write mask; CheckFailed if some were not visited, or if bits behind the last tile are set."""
    if result.write is None:
        raise CheckFailed(f"{problem.name}: there is no write mask")
    bits = unpack(result.write)
    kept, behind = bits[..., : seen.shape[-1]], bits[..., seen.shape[-1] :]
    if kept.shape != seen.shape or bool(behind.any()):
        raise CheckFailed(f"{problem.name}: the write mask has bits behind the last tile")
    if bool((kept & ~seen).any()):
        raise CheckFailed(f"{problem.name}: the write mask has tiles that were not visited")
    return kept


def _errors(
    problem: Setting, got: Result, want: Expected, heads: list[tuple[int, int]]
) -> dict[str, float]:
    require_finite(problem, output=got.out, **({} if got.lse is None else {"lse": got.lse}))
    out = torch.stack([got.out[b, :, h] for b, h in heads])
    errors = {"output": worst_head(out, want.out, 0)}
    if got.lse is not None:
        lse = torch.stack([got.lse[b, h] for b, h in heads])
        errors["lse"] = float((lse.double() - want.lse).abs().max())
    return errors


def _checked(problem: Setting, errors: dict[str, float], limits: Limits) -> dict[str, float]:
    """Returns the errors, or raises CheckFailed for one that is too large."""
    most = {"output": limits.output, "lse": limits.lse}
    require_within(problem, errors, most, measures={"lse": "largest error"})
    return errors
