"""Streams beside the current one, with torch's pool of streams played by one of four."""

import contextlib
import itertools

import pytest
import torch

from cula_core import streams

POOL = 4


class Stream:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    __hash__ = None

    def wait_stream(self, other):
        waits.append((self.number, other.number))


waits: list[tuple[int, int]] = []


@pytest.fixture
def pool(monkeypatch):
    """`pool(current, turn)`: the current stream and which one the pool hands out next; returns where launches went."""
    waits.clear()
    now: list[Stream] = []
    used: list[int] = []

    @contextlib.contextmanager
    def entered(stream):
        now.append(stream)
        yield
        now.pop()

    def begin(current, turn):
        numbers = itertools.cycle(range(POOL))
        for _ in range(turn):
            next(numbers)
        now.append(Stream(current))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(numbers)))
        return used

    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    begin.launch = lambda: used.append(now[-1].number)
    return begin


@pytest.mark.parametrize("turn", range(POOL))
@pytest.mark.parametrize("current", [-1, 0, 2])  # -1: a stream that is not of the pool
@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_two_launches_share_a_stream(pool, count, current, turn):
    used = pool(current, turn)
    streams.side_by_side(torch.device("cuda"), *[pool.launch] * count)
    assert len(set(used)) == len(used) == count and used[-1] == current
    others = used[:-1]
    assert waits == [(x, current) for x in others] + [(current, x) for x in others]
