"""The CUDA backend on a stand-in for torch.cuda, and how a green context is entered, proved and left."""

import gc
import weakref
from contextlib import contextmanager

import pytest

from benchmarks.harness import gpu


class Driver:
    """Answers the probe with `seen` multiprocessors, one per question, and counts open contexts."""

    def __init__(self, monkeypatch, seen, stream_error=None, graph_error=None):
        self.seen, self.open = list(seen), 0
        self.stream_error, self.graph_error = stream_error, graph_error
        monkeypatch.setattr(gpu.torch.cuda, "init", lambda: None)
        monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(gpu, "_sms_seen", self.probe)
        monkeypatch.setattr(gpu, "_green_stream", self.stream)
        monkeypatch.setattr(gpu, "_green_current", self.current)
        monkeypatch.setattr(gpu.CudaBackend, "capture", lambda backend, *_, **__: self.capture())

    def probe(self, run):
        run(lambda: None)
        return self.seen.pop(0)

    def capture(self):
        if self.graph_error:
            raise self.graph_error
        return lambda: None

    @contextmanager
    def stream(self, num_sms):
        if self.stream_error:
            raise self.stream_error
        self.open += 1
        yield "a stream"
        self.open -= 1

    @contextmanager
    def current(self, num_sms):
        self.open += 1
        yield "the default stream"
        self.open -= 1


def test_work_that_stays_inside_is_accepted(monkeypatch):
    driver = Driver(monkeypatch, [80, 80, 80])
    with gpu.green(78) as place:
        assert driver.open == 1
        assert place == gpu.Place(78, 80, "green context, stream", True, "a stream")
    assert driver.open == 0 and driver.seen == []


def test_a_torch_without_green_streams_falls_back_to_the_current_context(monkeypatch):
    driver = Driver(monkeypatch, [80, 80, 80], stream_error=AttributeError("no Stream"))
    with gpu.green(80) as place:
        assert place.strategy == "green context, current context"
    assert driver.open == 0


def test_a_graph_that_leaves_the_context_is_not_used(monkeypatch):
    Driver(monkeypatch, [80, 132, 80])
    with gpu.green(80) as place:
        assert place.graphs is False
        assert gpu.CudaBackend(place).graphs is False


def test_a_graph_that_cannot_be_captured_is_not_used(monkeypatch):
    Driver(monkeypatch, [80, 80], graph_error=RuntimeError("default stream"))
    with gpu.green(80) as place:
        assert place.graphs is False


def test_work_outside_is_refused_with_every_reason(monkeypatch):
    driver = Driver(monkeypatch, [132, 96])
    with pytest.raises(
        gpu.PlaceError, match="stream: work ran on 132 .*; current context: work ran on 96"
    ):
        with gpu.green(80):
            raise AssertionError("must not be entered")
    assert driver.open == 0


def test_work_that_leaves_during_the_run_spoils_it(monkeypatch):
    Driver(monkeypatch, [80, 80, 132])
    with pytest.raises(gpu.PlaceError, match="left the green context"):
        with gpu.green(80):
            pass


def test_an_error_inside_the_block_is_not_hidden(monkeypatch):
    Driver(monkeypatch, [80, 80])
    with pytest.raises(KeyError, match="mine"):
        with gpu.green(80):
            raise KeyError("mine")


def test_the_whole_card_is_used_where_an_op_asks_for_no_part(monkeypatch, toy):
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(gpu.torch.cuda, "get_device_properties", lambda device: properties)
    with gpu.place_of(toy) as place:
        assert place.describe() == {
            "sms": 132,
            "sms_seen": None,
            "strategy": "whole card",
            "graphs": True,
        }
        assert gpu.CudaBackend(place).stream is None


class Device:
    """A stand-in for torch.cuda whose work runs at once, 3 us per call, and whose sleep is 1 cycle per nanosecond."""

    def __init__(self, monkeypatch):
        self.now_us, self.streams, self.recording, self.waited = 0.0, [], None, []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = device.now_us

            def synchronize(self):
                device.waited.append(self.time)

            def elapsed_time(self, end):
                return (end.time - self.time) / 1e3

        class Graph:
            def replay(self):
                device.now_us += 3.0 * self.calls

        @contextmanager
        def graph(graph, stream):
            device.streams.append(stream)
            before = device.now_us
            yield
            graph.calls, device.now_us = (device.now_us - before) / 3.0, before

        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "synchronize": lambda: None,
            "_sleep": lambda cycles: setattr(device, "now_us", device.now_us + cycles / 1e3),
        }.items():
            monkeypatch.setattr(gpu.torch.cuda, name, value)

    def work(self):
        self.now_us += 3.0
        return Result()


class Result:
    """Something a call returns that can be watched."""


def test_backend_times_calls_between_events(monkeypatch):
    device = Device(monkeypatch)
    assert gpu.CudaBackend().time_each([device.work] * 3) == pytest.approx([3.0, 3.0, 3.0])


def test_queued_calls_are_timed_together_without_the_sleep_before_them(monkeypatch):
    device = Device(monkeypatch)
    assert gpu.CudaBackend().time_queued([device.work] * 5, keep=True) == pytest.approx(15.0)
    assert device.now_us > 5 * 100


def test_marks_tell_device_time_and_can_be_waited_for(monkeypatch):
    device, backend = Device(monkeypatch), gpu.CudaBackend()
    device.work()
    start = backend.mark()
    device.work()
    device.work()
    end = backend.mark()
    backend.wait(start)
    assert backend.between_us(start, end) == pytest.approx(6.0)
    assert device.waited == [3.0]


def test_the_host_sleeps(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu.time, "sleep", asked.append)
    gpu.CudaBackend().sleep(0.5)
    assert asked == [0.5]


def test_graphs_are_captured_on_the_stream_of_their_place(monkeypatch):
    device = Device(monkeypatch)
    replay = gpu.CudaBackend(gpu.Place(80, 80, "s", True, "green")).capture([device.work] * 4, True)
    assert device.streams == ["green"] and device.now_us == 0.0
    replay()
    assert device.now_us == pytest.approx(12.0)


@pytest.mark.parametrize("keep", [True, False])
def test_kept_results_live_as_long_as_the_graph(monkeypatch, keep):
    device, watched = Device(monkeypatch), []

    def work():
        result = device.work()
        watched.append(weakref.ref(result))
        return result

    replay = gpu.CudaBackend().capture([work] * 3, keep)
    gc.collect()
    assert [ref() is not None for ref in watched] == [keep] * 3
    del replay
    gc.collect()
    assert all(ref() is None for ref in watched)
