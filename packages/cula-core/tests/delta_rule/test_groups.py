"""The groups of value heads that a backward pass is divided into."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.backward.config import scratch_bytes
from cula_core.delta_rule.backward.groups import in_groups

SLOTS, HEADS = 2, 6


class Call(NamedTuple):
    """As `in_groups` reads it."""

    q: Tensor
    v: Tensor
    g: Tensor
    do: Tensor
    dht: Tensor | None = None
    cu_seqlens: Tensor | None = None
    operand: str = "float16"


class Found(NamedTuple):
    """Memory of gradients."""

    dq: Tensor
    dv: Tensor
    dg: Tensor


def made(shared: int) -> tuple[Call, Found]:
    """Returns a call whose numbers say which head they belong to."""
    heads = torch.arange(HEADS, dtype=torch.float32)
    v = heads[None, None, :, None].expand(1, 64 * SLOTS, HEADS, 128).contiguous()
    q = v[:, :, ::shared].contiguous()
    return Call(q, v, v[..., 0], v), Found(q.clone(), v.clone(), v[..., 0].clone())


def heads_of(groups: list) -> list[list[int]]:
    return [call.v[0, 0, :, 0].int().tolist() for call, _, _ in groups]


@pytest.mark.parametrize(
    "heads_that_fit, groups",
    [(6, [6]), (5, [3, 3]), (3, [3, 3]), (2, [2, 2, 2]), (1, [1] * 6), (0, [1] * 6)],
)
def test_the_environment_limits_memory(monkeypatch, heads_that_fit, groups):
    """Groups are as few as the limit allows, and all have the same memory."""
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", str(scratch_bytes(SLOTS, heads_that_fit)))
    found = list(in_groups(*made(shared=1)))
    assert [len(heads) for heads in heads_of(found)] == groups
    assert sum(heads_of(found), []) == list(range(HEADS))
    for call, gradients, kept in found:
        assert call.q[0, 0, :, 0].tolist() == call.do[0, 0, :, 0].tolist()
        assert (
            gradients.dq[0, 0, :, 0].tolist()
            == gradients.dg[0, 0].tolist()
            == call.g[0, 0].tolist()
        )
        assert kept.states.shape[:2] == (SLOTS, call.v.shape[2])
        assert kept.states.data_ptr() == found[0][2].states.data_ptr()


def test_heads_of_one_head_of_q_stay_together(monkeypatch):
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", "0")
    found = list(in_groups(*made(shared=2)))
    assert heads_of(found) == [[0, 1], [2, 3], [4, 5]]
    assert [call.q[0, 0, :, 0].tolist() for call, _, _ in found] == [[0.0], [2.0], [4.0]]


def test_an_argument_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", "0")
    assert heads_of(list(in_groups(*made(1), scratch_bytes(SLOTS, 3)))) == [[0, 1, 2], [3, 4, 5]]
    monkeypatch.delenv("CULA_SCRATCH_LIMIT")
    assert heads_of(list(in_groups(*made(1)))) == [list(range(HEADS))]


def test_limits_come_before_a_number_of_groups(monkeypatch):
    """The number is what a package takes by itself."""
    halves, thirds = [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]]
    monkeypatch.delenv("CULA_SCRATCH_LIMIT", raising=False)
    assert heads_of(list(in_groups(*made(1), groups=2))) == halves
    assert heads_of(list(in_groups(*made(1), scratch_bytes(SLOTS, 2), groups=2))) == thirds
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", str(scratch_bytes(SLOTS, HEADS)))
    assert heads_of(list(in_groups(*made(1), groups=2))) == [list(range(HEADS))]


@pytest.mark.parametrize("text", ["", "1 GB", "-1"])
def test_a_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", text)
    with pytest.raises(ValueError, match="CULA_SCRATCH_LIMIT: expected a number of bytes"):
        next(in_groups(*made(1)))
