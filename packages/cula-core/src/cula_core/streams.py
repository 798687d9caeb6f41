"""Kernels that run beside each other."""

from __future__ import annotations

from collections.abc import Callable

import torch


def side_by_side(device: torch.device, *launches: Callable[[], None]) -> None:
    """Calls what launches kernels of which none reads what another one writes: the last on torch's current stream, the
    others on streams of their own, which the current one then waits for."""
    *others, last = launches
    current = torch.cuda.current_stream(device)
    streams: list[torch.cuda.Stream] = []
    for launch in others:
        stream = _another(device, current, *streams)
        streams.append(stream)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()
    last()
    for stream in streams:
        current.wait_stream(stream)


def _another(device: torch.device, *taken: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream that is none of these. torch has 32 and hands them out in turn, so that its next one may be taken: every
    CUDA graph is captured on one of them, and what is launched on that is behind the rest instead of beside it."""
    stream = torch.cuda.Stream(device)
    while stream in taken:
        stream = torch.cuda.Stream(device)
    return stream
