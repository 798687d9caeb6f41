"""Timing loops over CUDA-graph replays and eager calls, in which providers take turns, and their statistics.

Nothing here calls CUDA directly: a backend (`gpu.CudaBackend`, or a fake one in the tests) captures, replays, records
events and reads clocks. All times are microseconds per call.

Cold timing rotates over buffer sets that together exceed three times the L2, so that the lines of a set are evicted
before it is used again; resident timing repeats one set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], Any]
Calls = Mapping[str, Sequence[Call]]

L2_FACTOR = 3
MAX_SETS = 512
MIN_BLOCK = 3


class Backend(Protocol):
    """The operations of a device that the timing loops use."""

    graphs: bool

    def synchronize(self) -> None: ...

    def clock(self) -> float:
        """Host time in seconds."""

    def capture(self, calls: Sequence[Call], keep: bool) -> Call:
        """A graph of all calls; with `keep` every result stays alive, so that each call writes memory of its own."""

    def time_each(self, calls: Sequence[Call]) -> list[float]:
        """Device time of every call, between two events around it, each queued behind a busy device."""

    def time_queued(self, calls: Sequence[Call], keep: bool) -> float:
        """Device time of all calls together, queued up behind a busy device so that launch gaps do not count."""

    def mark(self) -> Any:
        """A point of the device's queue, behind everything that was queued before."""

    def wait(self, mark: Any) -> None:
        """Lets the host wait until the device has reached a mark."""

    def between_us(self, start: Any, end: Any) -> float:
        """Device time between two marks that the device has reached."""

    def peak_mib(self, call: Call) -> int:
        """The most memory that a call takes beside what was there before, its results included."""

    def sleep(self, seconds: float) -> None:
        """Lets the host wait, and with it a device that has nothing to do."""


@dataclass(frozen=True)
class Timing:
    """How much to measure. A block is `block` samples of one provider; the providers take turns, `rounds` times.

    A block that would take longer than `block_us` has fewer samples, but at least MIN_BLOCK.
    """

    rounds: int = 20
    block: int = 10
    block_us: float = 20_000.0
    graph_us: float = 400.0
    max_calls: int = 400
    eager_calls: int = 50
    queued_calls: int = 100
    warmup: int = 3

    @classmethod
    def quick(cls) -> Timing:
        return cls(rounds=5, block=5, graph_us=200.0, eager_calls=20, queued_calls=50)


@dataclass(frozen=True)
class Stats:
    """Median and 20th / 80th percentile of per-call times in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    calls_per_sample: int

    @classmethod
    def of(cls, times_us: Sequence[float], calls_per_sample: int = 1) -> Stats:
        if not times_us:
            raise ValueError("times_us: expected at least one sample, got none")
        p20, median, p80 = (percentile(times_us, p) for p in (20, 50, 80))
        return cls(median, p20, p80, len(times_us), calls_per_sample)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of some values, with linear interpolation between the two nearest of them."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def buffer_sets(set_bytes: int, l2_bytes: int, resident: bool) -> int:
    """How many buffer sets of `set_bytes` each to rotate over: one when resident, else more than 3x the L2 in total."""
    if set_bytes <= 0:
        raise ValueError(f"set_bytes: expected a positive number of bytes, got {set_bytes}")
    if resident:
        return 1
    return min(MAX_SETS, L2_FACTOR * l2_bytes // set_bytes + 1)


def time_graphs(backend: Backend, calls: Calls, timing: Timing, keep: bool) -> dict[str, Stats]:
    """Replays one graph per provider, turn by turn. A sample is one replay's device time over the graph's calls."""
    graphs = {name: captured(backend, seq, timing, keep) for name, seq in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in _turns(list(calls), timing.rounds):
        graph = graphs[name]
        # The first replay only refills the L2 with this provider's data.
        times = backend.time_each([graph.replay] * (_block(graph, timing) + 1))[1:]
        samples[name] += [t / graph.calls for t in times]
    return {name: Stats.of(times, graphs[name].calls) for name, times in samples.items()}


def time_queued(backend: Backend, calls: Calls, timing: Timing, keep: bool) -> dict[str, Stats]:
    """Times eager calls queued behind a busy device, turn by turn, where no graph can be captured."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    batches = {name: _batch(seq, timing.queued_calls) for name, seq in calls.items()}
    for batch in batches.values():
        _warm_up(backend, batch, timing)
    for name in _turns(list(calls), timing.rounds * 2):
        samples[name].append(backend.time_queued(batches[name], keep) / len(batches[name]))
    return {name: Stats.of(times, len(batches[name])) for name, times in samples.items()}


def time_eager_event(backend: Backend, calls: Calls, timing: Timing) -> dict[str, Stats]:
    """Device time of single eager calls, each queued behind a busy device, as triton.testing.do_bench reports it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in _turns(list(calls), timing.rounds):
        batch = _batch(calls[name], timing.block)
        samples[name] += backend.time_each(list(batch[: timing.warmup]) + batch)[
            min(timing.warmup, len(batch)) :
        ]
    return {name: Stats.of(times) for name, times in samples.items()}


def time_eager_host(backend: Backend, calls: Calls, timing: Timing) -> dict[str, Stats]:
    """Wall time per call as a host program sees it: back-to-back calls, one synchronization at the end."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    batches = {name: _batch(seq, timing.eager_calls) for name, seq in calls.items()}
    for name in _turns(list(calls), timing.rounds):
        _warm_up(backend, batches[name], timing)
        start = backend.clock()
        for call in batches[name]:
            call()
        backend.synchronize()
        samples[name].append((backend.clock() - start) * 1e6 / len(batches[name]))
    return {name: Stats.of(times, len(batches[name])) for name, times in samples.items()}


@dataclass(frozen=True)
class Graph:
    """What replays a graph, the number of its calls, and about how long a replay takes."""

    replay: Call
    calls: int
    replay_us: float


def captured(backend: Backend, calls: Sequence[Call], timing: Timing, keep: bool) -> Graph:
    """A graph of whole passes over the calls, so long that the gap between two replays is short beside it."""
    _warm_up(backend, calls, timing)
    replay = backend.capture(calls, keep)
    one_pass = percentile(backend.time_each([replay] * (timing.warmup + 3))[timing.warmup :], 50)
    one_pass = max(one_pass, 1e-3)
    passes = math.ceil(timing.graph_us / one_pass)
    passes = max(1, min(passes, timing.max_calls // len(calls)))
    if passes > 1:
        replay = backend.capture(list(calls) * passes, keep)
    return Graph(replay, passes * len(calls), passes * one_pass)


def _block(graph: Graph, timing: Timing) -> int:
    """The samples of a block."""
    return min(timing.block, max(MIN_BLOCK, math.floor(timing.block_us / graph.replay_us)))


def _warm_up(backend: Backend, calls: Sequence[Call], timing: Timing) -> None:
    for call in _batch(calls, timing.warmup)[: timing.warmup]:
        call()
    backend.synchronize()


def _batch(calls: Sequence[Call], at_least: int) -> list[Call]:
    """The calls repeated in order, whole passes only, so that every buffer set is used equally often."""
    return list(calls) * max(1, math.ceil(at_least / len(calls)))


def _turns(names: list[str], rounds: int) -> list[str]:
    """The order of the providers in all rounds; it rotates, so that no provider always follows the same one."""
    order = []
    for turn in range(rounds):
        shift = turn % len(names)
        order += names[shift:] + names[:shift]
    return order
