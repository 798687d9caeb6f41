"""Timing loops on a device whose clock is known exactly."""

import random

import pytest

from benchmarks.harness import timers
from benchmarks.harness.timers import Stats, Timing, buffer_sets, percentile

TIMING = Timing(rounds=4, block=5, graph_us=100.0, max_calls=40, eager_calls=12, queued_calls=9)


def calls(backend, sets=3, **costs):
    return {
        name: [backend.call(f"{name}{i}", cost) for i in range(sets)]
        for name, cost in costs.items()
    }


def test_percentile_interpolates_between_order_statistics():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 20) == pytest.approx(1.8)
    assert percentile(values, 50) == 3.0
    assert percentile(values, 80) == pytest.approx(4.2)
    assert percentile(values, 100) == 5.0
    assert percentile([7.0], 80) == 7.0


def test_stats_ignore_the_order_and_the_size_of_an_outlier():
    times = [float(i) for i in range(1, 101)]
    expected = Stats(pytest.approx(50.5), pytest.approx(20.8), pytest.approx(80.2), 100, 1)
    random.shuffle(times)
    assert Stats.of(times) == expected
    assert Stats.of([t if t < 100 else 1e9 for t in times]) == expected


@pytest.mark.parametrize(
    ("block_us", "samples"), [(1000.0, 5), (600.0, 5), (599.0, 4), (360.0, 3), (1.0, 3)]
)
def test_blocks_of_long_replays_are_shorter(backend, block_us, samples):
    """A replay is one pass of three calls of 40 us."""
    timing = Timing(rounds=4, block=5, graph_us=100.0, max_calls=40, block_us=block_us)
    stats = timers.time_graphs(backend, calls(backend, a=40.0), timing, keep=True)
    assert stats["a"] == Stats(40.0, 40.0, 40.0, 4 * samples, 3)
    few = Timing(rounds=4, block=2, graph_us=100.0, block_us=1.0)
    assert timers.time_graphs(backend, calls(backend, a=40.0), few, True)["a"].samples == 4 * 2


def test_stats_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="times_us"):
        Stats.of([])


@pytest.mark.parametrize(
    ("set_bytes", "resident", "expected"),
    [
        (100, False, 4),
        (101, False, 3),
        (301, False, 1),
        (300, False, 2),
        (1, True, 1),
        (400, True, 1),
    ],
)
def test_rotating_sets_exceed_three_times_the_l2(set_bytes, resident, expected):
    assert buffer_sets(set_bytes, 100, resident) == expected
    if not resident:
        assert expected * set_bytes > 300


def test_tiny_sets_are_bounded_and_empty_ones_refused():
    assert buffer_sets(1, 10**9, False) == timers.MAX_SETS
    with pytest.raises(ValueError, match="set_bytes"):
        buffer_sets(0, 100, False)


def test_graph_time_is_per_call_and_graphs_are_long_whole_passes(backend):
    stats = timers.time_graphs(backend, calls(backend, a=10.0, b=40.0), TIMING, keep=True)
    assert stats["a"] == Stats(10.0, 10.0, 10.0, 20, 12)
    assert stats["b"] == Stats(40.0, 40.0, 40.0, 20, 3)
    assert backend.captured == [(3, True), (12, True), (3, True)]


def test_graph_length_is_bounded(backend):
    stats = timers.time_graphs(backend, calls(backend, a=0.01), TIMING, keep=False)
    assert stats["a"].calls_per_sample == 39
    assert all(not keep for _, keep in backend.captured)


def test_every_buffer_set_is_used_equally_often_inside_a_graph(backend):
    timers.time_graphs(backend, calls(backend, a=10.0), TIMING, keep=True)
    backend.log.clear()
    backend.time_each([backend.capture([backend.call(f"a{i}", 1.0) for i in range(3)] * 4, True)])
    assert {name: backend.log.count(name) for name in set(backend.log)} == {
        "a0": 4,
        "a1": 4,
        "a2": 4,
    }


def test_providers_take_turns_and_the_order_turns_too():
    order = timers._turns(["a", "b", "c"], 3)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_drift_hits_all_providers_alike(backend):
    """The clock slows down by half during the run; interleaving keeps the ratio of two equal providers at one."""
    state = {"calls": 0}

    def drifting():
        state["calls"] += 1
        backend.now_us += 10.0 * (1 + state["calls"] / 2000)

    stats = timers.time_graphs(
        backend, {"a": [drifting], "b": [drifting]}, Timing(rounds=20, block=5), keep=False
    )
    assert stats["a"].median_us / stats["b"].median_us == pytest.approx(1.0, abs=0.02)


def test_eager_host_time_is_wall_time_over_calls(backend):
    stats = timers.time_eager_host(backend, calls(backend, a=3.0), TIMING)
    assert stats["a"].median_us == pytest.approx(3.0)
    assert stats["a"].calls_per_sample == 12
    assert stats["a"].samples == 4


def test_eager_host_counts_the_final_synchronization(backend):
    def synchronize():
        backend.now_us += 24.0

    backend.synchronize = synchronize
    assert timers.time_eager_host(backend, calls(backend, a=3.0), TIMING)[
        "a"
    ].median_us == pytest.approx(5.0)


def test_eager_event_times_single_calls_after_a_warm_up(backend):
    first = {"seen": False}

    def slow_once():
        backend.now_us += 4.0 if first["seen"] else 1000.0
        first["seen"] = True

    stats = timers.time_eager_event(backend, {"a": [slow_once]}, TIMING)
    assert stats["a"] == Stats(4.0, 4.0, 4.0, 20, 1)


def test_queued_time_is_per_call_over_whole_passes(backend):
    stats = timers.time_queued(backend, calls(backend, sets=4, a=5.0), TIMING, keep=True)
    assert stats["a"] == Stats(5.0, 5.0, 5.0, 8, 12)
