"""A sustained load on a device whose clock, power and speed are known exactly."""

import dataclasses

import pytest

from benchmarks.harness import results, sustained
from benchmarks.harness.sustained import Load, Loaded
from benchmarks.harness.timers import Stats, Timing

TIMING = Timing(graph_us=100.0, max_calls=40)
LOAD = Load()


def loads(backend, meter, costs, load=LOAD):
    calls = {name: [backend.call(name, cost)] for name, cost in costs.items()}
    return sustained.time_sustained(backend, calls, TIMING, False, load, meter)


def test_times_are_those_of_chunks(backend, meter):
    """Eleven calls of 9.6 us are a graph, 473 graphs a chunk of 49.95 ms; a second is over in the 21st chunk."""
    found = loads(backend, meter, {"a": 9.6})["a"]
    stats = found.stats
    assert (stats.samples, stats.calls_per_sample) == (21, 473 * 11)
    assert [stats.p20_us, stats.median_us, stats.p80_us] == pytest.approx([9.6] * 3)
    # 21 readings, of which the first is 1599.
    assert found.sm_clock_mhz == 1589
    assert found.power_w == pytest.approx(500.0, rel=0.02)


def test_what_runs_first_is_not_counted(backend):
    """The device slows down after half a second of load, as one does at its limit of power."""
    busy = {"us": 0.0}

    def call():
        cost = 10.0 if busy["us"] < 0.5e6 else 13.0
        busy["us"] += cost
        backend.now_us += cost

    found = sustained.time_sustained(backend, {"a": [call]}, TIMING, False, LOAD, None)["a"]
    assert found.stats.p20_us == found.stats.p80_us == pytest.approx(13.0)
    assert (found.sm_clock_mhz, found.power_w, found.fields()) == (None, None, {})


def test_providers_are_loaded_one_after_the_other_behind_a_pause(backend):
    loads(backend, None, {"a": 10.0, "b": 40.0})
    names = list(dict.fromkeys(backend.log))
    assert names == ["a", "b"] and backend.log == sorted(backend.log)
    pauses = [done for seconds, done in backend.sleeps if seconds == LOAD.pause_s]
    assert len(pauses) == 2
    start = backend.log.index("b")
    # Each has half a second that does not count, and one that does, behind its pause.
    assert (start - pauses[0]) * 10.0 == pytest.approx(1.55e6, rel=0.05)
    assert (len(backend.log) - pauses[1]) * 40.0 == pytest.approx(1.55e6, rel=0.05)


def test_a_call_that_is_longer_than_a_chunk_is_a_chunk(backend, meter):
    found = loads(backend, meter, {"a": 80_000.0})["a"]
    assert found.stats == Stats(80_000.0, 80_000.0, 80_000.0, 13, 1)


def test_the_host_stays_a_few_chunks_ahead(backend):
    """It waits for the mark that has `ahead` chunks behind it, so the queue never runs empty and never grows."""
    marks, waited = [], []

    class Queue:
        def __getattr__(self, name):
            return getattr(backend, name)

        def mark(self):
            marks.append(backend.now_us)
            return len(marks) - 1

        def wait(self, mark):
            waited.append((mark, len(marks) - 1))

        def between_us(self, start, end):
            return marks[end] - marks[start]

    load = dataclasses.replace(LOAD, ahead=3)
    calls = {"a": [backend.call("a", 10.0)]}
    sustained.time_sustained(Queue(), calls, TIMING, False, load, None)
    assert waited == [(last - 3, last) for last in range(3, len(marks))]


def test_a_counter_that_does_not_move_is_not_waited_for_longer_than_the_limit(backend, meter):
    meter.joules = lambda: 7.0
    assert loads(backend, meter, {"a": 10.0})["a"].power_w == 0.0
    polls = [s for s, _ in backend.sleeps if s == sustained.POLL_S]
    assert len(polls) == pytest.approx(2 * LOAD.tick_s / sustained.POLL_S, abs=2)


def test_a_card_that_counts_no_energy_has_a_clock(backend, meter):
    meter.joules = lambda: None
    found = loads(backend, meter, {"a": 9.6})["a"]
    assert found.fields() == {"sm_clock_mhz": 1589}


def test_energy_per_call_is_power_times_time():
    stats = Stats(200.0, 190.0, 210.0, 20, 50)
    assert Loaded(stats, 1512.4, 698.76).fields() == {
        "sm_clock_mhz": 1512,
        "power_w": 698.8,
        "joules_per_call": 0.1398,
    }


def test_rows_say_sustained_and_hold_clock_power_and_energy(loaded_result):
    results.validate(loaded_result)
    assert {r["method"] for r in loaded_result["rows"]} == {"sustained"}
    (ours,) = results.rows_of(loaded_result, provider="ours")
    assert ours["median_us"] == 10.0 and ours["ratio_other"] == 1.5
    assert ours["joules_per_call"] == pytest.approx(500 * 10e-6, rel=0.02)
    assert loaded_result["title"] == "Toy, sustained load"
    assert loaded_result["method"]["load"]["measured_s"] == 1.0
    assert loaded_result["notes"] == [sustained.NOTE]
    assert results.device_method(loaded_result) == "sustained"
