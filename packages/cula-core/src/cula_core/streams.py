"""Kernels that run beside each other."""

from __future__ import annotations

from collections.abc import Callable

import torch


def side_by_side(device: torch.device, *launches: Callable[[], None]) -> None:
    """Calls what launches kernels of which none reads what another one writes: the last on torch's current stream, the
    others on streams of their own, which the current one then waits for."""
    *others, last = launches
    current = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in others]
    for stream, launch in zip(streams, others):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()
    last()
    for stream in streams:
        current.wait_stream(stream)
