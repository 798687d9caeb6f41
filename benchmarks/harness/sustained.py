"""Times a provider under a load that lasts: the clock that a card holds at its limit of power is below that of a burst.

The host queues replays of one graph, a few chunks ahead of the device, so that the device never waits. The power is the
difference of two readings of the card's energy counter, over the time between them.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.harness.timers import Backend, Call, Calls, Graph, Stats, Timing, captured

NOTE = (
    "sustained: one provider at a time, back to back, after a pause. Power and energy are those of the whole card, "
    "what it uses when idle included; joules_per_call is power_w times median_us."
)
POLL_S = 0.001


@dataclass(frozen=True)
class Load:
    """How long a load lasts. The card is idle for `pause_s`, then busy for `warm_s` that do not count.

    The host keeps `ahead` chunks of `chunk_us` queued. Reading the energy counter waits for its next step, `tick_s` at
    most, which is shorter than what is queued.
    """

    pause_s: float = 1.0
    warm_s: float = 0.5
    measured_s: float = 1.0
    chunk_us: float = 50_000.0
    ahead: int = 4
    tick_s: float = 0.1


class Meter(Protocol):
    """What a card tells of itself while it works."""

    def sm_clock_mhz(self) -> float: ...

    def joules(self) -> float | None:
        """A counter of energy that moves in steps, None where there is none."""


@dataclass(frozen=True)
class Loaded:
    """Times per call, a sample per chunk, and median clock and mean power meanwhile, None where nothing tells them."""

    stats: Stats
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def fields(self) -> dict[str, float]:
        """The fields of a row that only a sustained load has, as far as they are known."""
        found: dict[str, float] = {}
        if self.sm_clock_mhz is not None:
            found["sm_clock_mhz"] = round(self.sm_clock_mhz)
        if self.power_w is not None:
            found["power_w"] = round(self.power_w, 1)
            found["joules_per_call"] = float(f"{self.power_w * self.stats.median_us * 1e-6:.4g}")
        return found


def time_sustained(
    backend: Backend, calls: Calls, timing: Timing, keep: bool, load: Load, meter: Meter | None
) -> dict[str, Loaded]:
    """Loads the device with one provider after the other, each after the same pause."""
    return {
        name: _loaded(backend, captured(backend, sequence, timing, keep), load, meter)
        for name, sequence in calls.items()
    }


def _loaded(backend: Backend, graph: Graph, load: Load, meter: Meter | None) -> Loaded:
    replays = max(1, round(load.chunk_us / graph.replay_us))
    backend.synchronize()
    backend.sleep(load.pause_s)
    marks = [backend.mark()]
    start = backend.clock()
    while backend.clock() - start < load.warm_s:
        _queue(backend, graph.replay, replays, marks, load.ahead)
    first, clocks = len(marks) - 1, []
    began = _tick(backend, meter, load.tick_s) if meter else None
    start = backend.clock()
    while backend.clock() - start < load.measured_s:
        _queue(backend, graph.replay, replays, marks, load.ahead)
        if meter:
            clocks.append(meter.sm_clock_mhz())
    ended = _tick(backend, meter, load.tick_s) if meter else None
    backend.synchronize()
    count = replays * graph.calls
    times = [backend.between_us(a, b) / count for a, b in itertools.pairwise(marks[first:])]
    return Loaded(
        Stats.of(times, count),
        statistics.median(clocks) if clocks else None,
        None if began is None or ended is None else (ended[1] - began[1]) / (ended[0] - began[0]),
    )


def _queue(backend: Backend, replay: Call, replays: int, marks: list[Any], ahead: int) -> None:
    """Queues a chunk with a mark behind it, and waits until no more than `ahead` chunks are left to run."""
    for _ in range(replays):
        replay()
    marks.append(backend.mark())
    if len(marks) > ahead:
        backend.wait(marks[-ahead - 1])


def _tick(backend: Backend, meter: Meter, limit_s: float) -> tuple[float, float] | None:
    """Host time and joules right after the counter moved, or after the limit where it does not move; None without."""
    start, before = backend.clock(), meter.joules()
    while True:
        backend.sleep(POLL_S)
        now, joules = backend.clock(), meter.joules()
        if joules is None:
            return None
        if joules != before or now - start > limit_s:
            return now, joules
