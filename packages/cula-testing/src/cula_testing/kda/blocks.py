"""What the chunk-parallel kernel hands to the recurrence: its definition in fp64, and where parts of a block lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cula_core.delta_rule.config import CHUNK, HEAD_DIM, SUB, TRIANGLE, chunk_slots
from cula_core.delta_rule.kernels.block import AQK, BLOCK, DECAY, KG, KH, QG, T_PRIME, WIDE
from cula_core.reference import kda as reference
from cula_core.reference.common import normalized
from cula_emulator.pytest_plugin import Emulated

from .problems import Problem

LOG2_E = 1.4426950408889634
# Relative RMSE. A factor of 2^G has the error of its exponent, which is a sum of up to 64 rounded decays.
FACTOR_ERROR, PRODUCT_ERROR, INVERSE_ERROR = 4e-4, 1e-3, 1e-3


@dataclass
class Factors:
    """What a chunk and value head hands to the recurrence, in fp64; rows past the end are zero."""

    q: Tensor  # [64, 128], normalized
    k: Tensor
    decays: Tensor  # [64, 128], log2, of every token
    beta: Tensor  # [64]
    scale: float

    @cached_property
    def sums(self) -> Tensor:
        return self.decays.cumsum(0)

    @cached_property
    def apart(self) -> Tensor:
        """2^(G_i - G_j), j <= i, else 0: [64, 64, 128]."""
        rows = torch.arange(CHUNK)
        seen = (rows[:, None] >= rows)[..., None]
        return torch.where(seen, self.sums[:, None] - self.sums, -torch.inf).exp2()

    @property
    def qg(self) -> Tensor:
        return self.scale * self.q * self.sums.exp2()

    @property
    def kh(self) -> Tensor:
        return self.k * self.sums.exp2()

    @property
    def kg(self) -> Tensor:
        return self.k * (self.sums[-1] - self.sums).exp2()

    @property
    def decay(self) -> Tensor:
        return self.sums[-1].exp2()

    @property
    def aqk(self) -> Tensor:
        return self.scale * torch.einsum("ic,jc,ijc->ij", self.q, self.k, self.apart)

    @property
    def inverse(self) -> Tensor:
        akk = torch.einsum("i,ic,jc,ijc->ij", self.beta, self.k, self.k, self.apart).tril(-1)
        return torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + akk)

    @property
    def t_prime(self) -> Tensor:
        return self.inverse * self.beta


PARTS = {
    "decay": FACTOR_ERROR, "qg": FACTOR_ERROR, "kh": FACTOR_ERROR, "kg": FACTOR_ERROR, "aqk": PRODUCT_ERROR,
    "t_prime": INVERSE_ERROR,
}  # fmt: skip


def factors(problem: Problem) -> dict[tuple[int, int], Factors]:
    """Returns those of every (slot, value head) that has a token."""
    x = {name: problem.given[name].double() for name in ("q", "k", "g", "beta")}
    constants = problem.given["A_log"], problem.given["dt_bias"]
    bound = problem.options["lower_bound"]
    decays = reference._log_decay(x["g"], *constants, problem.gate, bound) * LOG2_E
    if problem.strength != "plain":
        x["beta"] = (2 if problem.strength == "doubled" else 1) * x["beta"].sigmoid()
    q, k = (normalized(x[name]) if problem.l2norm else x[name] for name in ("q", "k"))
    group = decays.shape[2] // q.shape[2]
    found = {}
    for n, slot, rows in chunks(problem):
        for head in range(decays.shape[2]):
            heads = (head // group, head // group, head, head)
            own = (
                filled(problem.tokens(tensor, n)[rows, h])
                for tensor, h in zip((q, k, decays, x["beta"]), heads)
            )
            found[slot, head] = Factors(*own, problem.scale)
    return found


def chunks(problem: Problem) -> Iterator[tuple[int, int, slice]]:
    """Yields (sequence, slot, tokens of the sequence) of every chunk."""
    start = 0
    for n, length in enumerate(problem.lengths):
        for chunk in range(-(-length // CHUNK)):
            slot = start // CHUNK + n + chunk if problem.packed else n * -(-length // CHUNK) + chunk
            yield n, slot, slice(chunk * CHUNK, min(length, (chunk + 1) * CHUNK))
        start += length


def filled(rows: Tensor) -> Tensor:
    """Returns rows with zeros up to a whole chunk."""
    whole = torch.zeros(CHUNK, *rows.shape[1:], dtype=torch.float64)
    whole[: len(rows)] = rows
    return whole


# ---- blocks ----------------------------------------------------------------------------------------------------------


def wide_places() -> Tensor:
    """Returns where the elements of a [64, 128] matrix lie: panels of 64 columns, units of 8 permuted by the row."""
    row, column = torch.meshgrid(torch.arange(CHUNK), torch.arange(HEAD_DIM), indexing="ij")
    unit = column % 64 // 8 ^ row % 8
    return column // 64 * (CHUNK * 64) + row * 64 + unit * 8 + column % 8


def triangle_places() -> tuple[Tensor, Tensor]:
    """Returns where the elements of T' or Aqk lie, and which of them do: panels of 16 columns from the diagonal on."""
    row, column = torch.meshgrid(torch.arange(CHUNK), torch.arange(CHUNK), indexing="ij")
    panel = column // SUB
    before = torch.tensor([sum((CHUNK - SUB * p) * SUB for p in range(n)) for n in range(4)])
    unit = column % SUB // 8 ^ row // 4 % 2
    place = before[panel] + (row - SUB * panel) * SUB + unit * 8 + column % 8
    return place, row >= SUB * panel


def unpacked(block: Tensor) -> dict[str, Tensor]:
    """Returns the parts of a block."""
    wide = {"qg": QG, "kh": KH, "kg": KG}
    parts = {name: block[at : at + WIDE][wide_places()] for name, at in wide.items()}
    place, there = triangle_places()
    for name, at in (("t_prime", T_PRIME), ("aqk", AQK)):
        own = block[at : at + TRIANGLE]
        parts[name] = torch.where(there, own[place.clamp(min=0)], torch.zeros((), dtype=own.dtype))
    return parts | {"decay": block[DECAY : DECAY + 2 * HEAD_DIM].view(torch.float32)}


def packed(parts: Factors, dtype: torch.dtype) -> Tensor:
    """Returns a block of exact parts."""
    block = torch.full((BLOCK,), torch.nan, dtype=dtype)
    for at, x in ((QG, parts.qg), (KH, parts.kh), (KG, parts.kg)):
        block[at : at + WIDE][wide_places()] = x.to(dtype)
    place, there = triangle_places()
    for at, x in ((T_PRIME, parts.t_prime), (AQK, parts.aqk)):
        block[at : at + TRIANGLE][place[there]] = x[there].to(dtype)
    block[DECAY : DECAY + 2 * HEAD_DIM].view(torch.float32)[:] = parts.decay.float()
    return block


def blocks_of(problem: Problem, emulated: Emulated) -> Tensor:
    """Returns memory for the blocks of a problem, for a kernel to fill."""
    heads_v = problem.given["v"].shape[2]
    batch, tokens = problem.given["q"].shape[:2]
    slots = chunk_slots(batch, tokens, len(problem.lengths) if problem.packed else None)
    return emulated.empty((slots, heads_v, BLOCK), getattr(torch, problem.operand))
