"""Kernels that run beside each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

_FIRST = -1  # the priority of what others wait for


def side_by_side(device: torch.device, *launches: Callable[[], None]) -> None:
    """Calls what launches kernels of which none reads what another one writes: the last on torch's current stream, the
    others on streams of their own, which the current one then waits for."""
    *others, last = launches
    join = fork(device, *others)
    last()
    join()


def fork(device: torch.device, *launches: Callable[[], None]) -> Callable[[], None]:
    """Calls each launch on a stream of its own, behind what is on torch's current stream so far and before what comes
    there later. Returns what makes the current stream wait for them. Until then it keeps the launches, and so the
    memory that they use."""
    current = torch.cuda.current_stream(device)
    begun = [(torch.cuda.Stream(device, _FIRST), launch) for launch in launches]
    for stream, launch in begun:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()

    def join() -> None:
        for stream, _ in begun:
            current.wait_stream(stream)

    return join
