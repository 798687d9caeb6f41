"""The CUDA backend of the timing loops, and green contexts, which run work on a part of the card's multiprocessors.

A green context is a set of multiprocessors with streams of its own. A probe kernel, launched eagerly and through a
graph, records the multiprocessor of each of its programs, and so proves that work stays inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

# Enough for the host to queue one call of the slowest peer (Triton launcher, ~30 us) at 2 GHz, twice over.
SLEEP_CYCLES_PER_CALL = 120_000
GREEN_GRANULARITY = 8


class PlaceError(RuntimeError):
    """The driver cannot give the wanted part of the card, or work did not stay in it."""


@dataclass(frozen=True)
class Place:
    """The part of the card in use. Graphs are captured on `stream`; None is any stream of the whole card."""

    sms: int
    sms_seen: int | None
    strategy: str
    graphs: bool = True
    stream: Any = None

    def describe(self) -> dict[str, Any]:
        return {
            "sms": self.sms,
            "sms_seen": self.sms_seen,
            "strategy": self.strategy,
            "graphs": self.graphs,
        }


class CudaBackend:
    """Implements `timers.Backend` on the current device and stream."""

    def __init__(self, place: Place | None = None) -> None:
        self.graphs = place is None or place.graphs
        self.stream = None if place is None else place.stream

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def clock(self) -> float:
        return time.perf_counter()

    def capture(self, calls: Sequence[Call], keep: bool) -> Call:
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=self.stream):
            for call in calls:
                if keep:
                    results.append(call())
                else:
                    call()

        def replay(_results: list[Any] = results) -> None:
            graph.replay()

        return replay

    def peak_mib(self, call: Call) -> int:
        call()  # what is compiled, tuned or kept stays
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) >> 20

    def time_each(self, calls: Sequence[Call]) -> list[float]:
        spans = []
        for call in calls:
            span = _Span()
            # The device is busy while the host prepares the call, so that the span does not contain that gap.
            torch.cuda._sleep(SLEEP_CYCLES_PER_CALL)
            with span:
                call()
            spans.append(span)
        self.synchronize()
        return [span.microseconds() for span in spans]

    def time_queued(self, calls: Sequence[Call], keep: bool) -> float:
        self.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES_PER_CALL * len(calls))
        results, span = [], _Span()
        with span:
            for call in calls:
                if keep:
                    results.append(call())
                else:
                    call()
        self.synchronize()
        return span.microseconds()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between_us(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e3

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _Span:
    """Two timed events around the work queued inside the `with` block."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def __enter__(self) -> None:
        self.start.record()

    def __exit__(self, *exc: object) -> None:
        self.end.record()

    def microseconds(self) -> float:
        return self.start.elapsed_time(self.end) * 1e3


@contextmanager
def whole_card() -> Iterator[Place]:
    yield Place(torch.cuda.get_device_properties(0).multi_processor_count, None, "whole card")


@contextmanager
def green(num_sms: int) -> Iterator[Place]:
    """Runs the block on at least `num_sms` multiprocessors (the driver rounds up to a multiple of 8) and no more.

    PlaceError says why when the driver or torch cannot do it, or when the probe sees work outside.
    """
    torch.cuda.init()
    with ExitStack() as stack:
        place = _enter_green(num_sms, stack)
        yield place
        # A library may have made the context of the whole card current again, which would spoil everything since then.
        if (seen := _sms_seen(lambda call: call())) > _rounded(num_sms):
            raise PlaceError(
                f"work left the green context during the run: {seen} multiprocessors seen at its end"
            )


def _rounded(num_sms: int) -> int:
    return -(-num_sms // GREEN_GRANULARITY) * GREEN_GRANULARITY


def _enter_green(num_sms: int, stack: ExitStack) -> Place:
    limit, reasons = _rounded(num_sms), []
    for name, strategy in (("stream", _green_stream), ("current context", _green_current)):
        trial = ExitStack()
        try:
            stream = trial.enter_context(strategy(num_sms))
            seen = _sms_seen(lambda call: call())
        except (AttributeError, RuntimeError, TypeError) as error:
            trial.close()
            reasons.append(f"{name}: {error}")
            continue
        if seen <= limit:
            stack.enter_context(trial)
            return Place(
                num_sms, seen, f"green context, {name}", _graph_stays(stream, limit), stream
            )
        trial.close()
        reasons.append(f"{name}: work ran on {seen} multiprocessors")
    raise PlaceError(f"no green context of {num_sms} multiprocessors: {'; '.join(reasons)}")


@contextmanager
def _green_stream(num_sms: int) -> Iterator[Any]:
    from torch.cuda.green_contexts import GreenContext

    context: Any = GreenContext.create(num_sms=num_sms, device_id=torch.cuda.current_device())
    stream = context.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield stream
        torch.cuda.synchronize()


@contextmanager
def _green_current(num_sms: int) -> Iterator[Any]:
    from torch.cuda.green_contexts import GreenContext

    context: Any = GreenContext.create(num_sms=num_sms, device_id=torch.cuda.current_device())
    torch.cuda.synchronize()
    context.set_context()
    try:
        yield torch.cuda.current_stream()
    finally:
        torch.cuda.synchronize()
        context.pop_context()


def _sms_seen(run: Callable[[Call], Any]) -> int:
    """The number of multiprocessors that a full grid ran on, when `run` launches it."""
    from benchmarks.harness.smid import record_smid

    programs = 32 * torch.cuda.get_device_properties(0).multi_processor_count
    ids = torch.full((programs,), -1, dtype=torch.int32, device="cuda")
    record_smid(ids)
    ids.fill_(-1)
    run(lambda: record_smid(ids))
    torch.cuda.synchronize()
    seen = set(ids.tolist())
    if -1 in seen:
        raise RuntimeError("the probe kernel did not run")
    return len(seen)


def _graph_stays(stream: Any, limit: int) -> bool:
    """Whether a graph captured on `stream` and replayed there keeps to the green context."""
    backend = CudaBackend(Place(limit, None, "probe", True, stream))
    try:
        return _sms_seen(lambda call: backend.capture([call], keep=False)()) <= limit
    except RuntimeError:
        torch.cuda.synchronize()
        return False


def place_of(op: Any) -> AbstractContextManager[Place]:
    """The part of the card that an op runs on."""
    return op.place() if op.place is not None else whole_card()
