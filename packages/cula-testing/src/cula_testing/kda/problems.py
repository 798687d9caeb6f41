"""What emulated tests call kernels with: problems, what the oracle makes of them, memory that shows forbidden reads."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cula_core.reference import kda as reference

from ..comparing import assert_within, same
from ..packing import Slots
from ..tensors import one_thread
from .inputs import BOUNDED_KINDS, LOWER_BOUNDS, inputs

# Relative RMSE of outputs and states by what the tensor cores are given.
BOUNDS = {"float16": 3e-3, "bfloat16": 5e-3}
# Where keys are alike errors of T' add up: 3.2e-3 was seen with correlated ones.
KIND_BOUNDS = {"correlated_weak": 3.5e-3, "one_key": 5e-3}
SPLIT_AND_WHOLE = 1.5e-3  # how far a call with segments may be from the same without
# Whether beta is a logit, and whether its sigmoid is doubled.
STRENGTHS = {"plain": (False, False), "sigmoid": (True, False), "doubled": (True, True)}


@dataclass(frozen=True, eq=False)
class Problem(Slots):
    """The inputs of one call, whatever the layout in memory that they are given.

    given: q, k [B, T, H, 128], v, g [B, T, HV, 128], beta [B, T, HV], A_log [HV] and dt_bias [HV * 128] or None.
    lengths: of every sequence; packed ones follow each other in a batch of 1. initial [rows, HV, K, V] or None, slots:
    the row of each sequence, or None for row n. final: None, "separate" or "in place".
    """

    given: dict[str, Tensor | None]
    lengths: tuple[int, ...]
    packed: bool = False
    initial: Tensor | None = None
    slots: tuple[int, ...] | None = None
    final: str | None = "separate"
    v_first: bool = False
    gate: str = "safe"
    bounded: bool = True
    l2norm: bool = True
    strength: str = "plain"
    operand: str = "float16"
    scale: float = 0.125

    @property
    def options(self) -> dict:
        """Those of the oracle, which the launcher takes too."""
        beta_sigmoid, neg_eigval = STRENGTHS[self.strength]
        return {
            "scale": self.scale, "gate": self.gate, "lower_bound": LOWER_BOUNDS[self.gate],
            "l2norm": self.l2norm, "beta_sigmoid": beta_sigmoid, "neg_eigval": neg_eigval,
        }  # fmt: skip

    @functools.cached_property
    def expected(self) -> Outcome:
        """In fp64, from the very numbers that the kernels get."""
        cu_seqlens = self.cu_seqlens(torch.int64) if self.packed else None
        slots = None if self.slots is None else torch.tensor(self.slots)
        with one_thread():
            return Outcome(
                *reference.recurrent_prefill(
                    **self.given, initial_state=self.initial, state_indices=slots, cu_seqlens=cu_seqlens,
                    dtype=torch.float64, **self.options,
                )
            )  # fmt: skip

    def cu_seqlens(self, dtype: torch.dtype) -> Tensor:
        """Returns the offsets of packed sequences."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(dtype)

    def tokens(self, tensor: Tensor, n: int) -> Tensor:
        """Returns the tokens of a sequence."""
        if not self.packed:
            return tensor[n, : self.lengths[n]]
        start = sum(self.lengths[:n])
        return tensor[0, start : start + self.lengths[n]]


class Outcome(NamedTuple):
    """out [B, T, HV, V], states [N, HV, K, V] or None."""

    out: Tensor
    states: Tensor | None


@functools.cache
def make_problem(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (1, 1),
    kind: str = "typical",
    *,
    packed: bool = False,
    dtype: str = "bfloat16",
    gate: str = "safe",
    gate_dtype: str = "float32",
    beta_dtype: str = "float32",
    strength: str = "plain",
    l2norm: bool = True,
    rate: bool = True,
    bias: bool = True,
    initial: bool = True,
    seed: int = 0,
    **fields,
) -> Problem:
    """Returns a problem with inputs of `inputs`; the pool has two rows more than there are sequences."""
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    assert packed or set(lengths) == {tokens}
    dtypes = {"gate_dtype": gate_dtype, "beta_dtype": beta_dtype, "dtype": dtype}
    given = inputs(
        batch, tokens, *heads, kind, gate=gate, seed=seed, states=len(lengths) + 2, initial=True,
        logits=strength != "plain", normalized=not l2norm,
        **{name: getattr(torch, value) for name, value in dtypes.items()},
    )  # fmt: skip
    state = given.pop("initial_state")
    given.pop("cu_seqlens")
    given |= {} if rate else {"A_log": None}
    given |= {} if bias else {"dt_bias": None}
    return Problem(
        given, lengths, packed, state if initial else None, gate=gate, l2norm=l2norm, strength=strength,
        **{"bounded": kind in BOUNDED_KINDS and gate != "softplus"} | fields,
    )  # fmt: skip


def poisoned(problem: Problem, *sequences: int) -> Problem:
    """Returns the same problem with NaN and infinities in all that belongs to some sequences' tokens."""
    values = {"q": math.nan, "k": math.inf, "v": -math.inf, "g": math.nan, "beta": math.inf}
    changed = {name: problem.given[name].clone() for name in values}
    for name, n in itertools.product(values, sequences):
        part = problem.tokens(changed[name], n)
        part[:] = values[name]
        part[1::2] = math.nan
    return replace(problem, given=problem.given | changed)


def alone(problem: Problem, n: int) -> Problem:
    """Returns one sequence of a packed problem, alone, with the same state in the same row."""
    names = ("q", "k", "v", "g", "beta")
    parts = {name: problem.tokens(problem.given[name], n)[None] for name in names}
    return replace(
        problem,
        given=problem.given | parts,
        lengths=(problem.lengths[n],),
        slots=(problem.rows[n],),
    )


def assert_right(problem: Problem, actual: Outcome, bound: float | None = None) -> None:
    """Holds outputs and states of every head against the oracle; padding sequences have zeros."""
    expected, bound = problem.expected, bound or BOUNDS[problem.operand]
    live = [n for n in range(len(problem.lengths)) if n not in problem.padding]
    for n in problem.padding:
        assert not problem.tokens(actual.out, n).any(), "outputs of a padding sequence"
    for head in range(actual.out.shape[2]):
        pair = (
            torch.cat([problem.tokens(x.out, n)[:, head] for n in live]) for x in (actual, expected)
        )
        assert_within(*pair, bound)
        if problem.final:
            assert_within(*(x.states[live, head] for x in (actual, expected)), bound)


def assert_same(first: Outcome, second: Outcome) -> None:
    """Holds two outcomes to the same bits."""
    for name, one, other in zip(Outcome._fields, first, second):
        assert (one is None) == (other is None)
        assert one is None or same(one, other), name


# ---- memory ----------------------------------------------------------------------------------------------------------


def views(given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Returns q, k, v as slices of one projection, g and beta as slices of tensors in another order, between NaN.

    A_log begins at an address that is a multiple of 4 bytes only.
    """
    batch, tokens = given["q"].shape[:2]
    widths = {name: given[name][0, 0].numel() for name in ("q", "k", "v")}
    whole = given["q"].new_full((2 * batch, tokens + 2, sum(widths.values()) + 32), math.nan)
    changed, first = {}, 8
    for name, width in widths.items():
        view = whole[1::2, 1 : 1 + tokens, first : first + width]
        changed[name] = view.unflatten(2, given[name].shape[2:]).copy_(given[name])
        first += width + 8
    heads_v, dim_k = given["g"].shape[2:]
    gates = given["g"].new_full((batch, heads_v + 1, tokens + 3, dim_k + 8), math.nan)
    view = gates[:, 1:, 2 : 2 + tokens, :dim_k].transpose(1, 2)
    changed["g"] = view.copy_(given["g"])
    strengths = given["beta"].new_full((batch, heads_v + 1, tokens + 3), math.nan)
    changed["beta"] = strengths[:, 1:, 2 : 2 + tokens].transpose(1, 2).copy_(given["beta"])
    if given["A_log"] is not None:
        rate = given["A_log"].new_full((heads_v + 1,), math.nan)
        changed["A_log"] = rate[1:].copy_(given["A_log"])
    return given | changed
