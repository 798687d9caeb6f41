"""A world of processes that serves many tests: starting one takes longer than most of what runs in it.

A case is a function of an importable module and its arguments. Every rank runs it, and a failure comes back as the text
of its traceback.
"""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Once for all processes: functional collectives import the compiler, which takes longer than most worlds live.
_IMPORTED = ["torch._dynamo", "torch.distributed.device_mesh", "cula.distributed", "cula.lightning"]


class World:
    """`ranks` processes with a process group; `with World(..) as run: run(function, *arguments)`.

    backend: "gloo" on CPUs, or "nccl" with a GPU for each rank. folder: an empty one, for the rendezvous. seconds: how
    long a case may take; a rank waits for the others half of it. detail: over gloo, messages of other sizes are told,
    not waited for.
    """

    def __init__(
        self, ranks: int, backend: str, folder: Path, seconds: int = 100, detail: bool = True
    ) -> None:
        self._ranks, self._backend, self._folder, self._seconds = ranks, backend, folder, seconds
        self._detail = detail
        self._starts = 0
        self._processes: list[Any] = []

    def __enter__(self) -> Callable[..., list[Any]]:
        self._start()
        return self._run

    def __exit__(self, *_: object) -> None:
        # They wait for a case. To end by themselves would take them seconds.
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        self._results = context.Queue()
        self._cases = [context.SimpleQueue() for _ in range(self._ranks)]
        facts = (self._ranks, self._backend, store, self._seconds, self._detail)
        self._processes = [
            context.Process(target=_serve, args=(r, *facts, cases, self._results), daemon=True)
            for r, cases in enumerate(self._cases)
        ]
        for process in self._processes:
            process.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank. AssertionError with the tracebacks of ranks that failed.

        Behind a failure ranks wait for each other, so that the next case gets a new world.
        """
        if not self._processes:
            self._start()
        for cases in self._cases:
            cases.put((function, arguments))
        found: dict[int, Any] = {}
        failures = []
        end = time.monotonic() + self._seconds
        while len(found) + len(failures) < self._ranks and time.monotonic() < end:
            try:
                rank, failure, value = self._results.get(timeout=1)
            except queue.Empty:
                if any(process.exitcode is not None for process in self._processes):
                    failures.append("a process has ended")
                    break
                continue
            if failure is None:
                found[rank] = value
            else:
                failures.append(f"rank {rank}: {failure}")
                end = min(end, time.monotonic() + 5)
        if len(found) < self._ranks:
            self.__exit__()
            raise AssertionError("\n".join(failures) or f"no result after {self._seconds} s")
        return [found[rank] for rank in range(self._ranks)]


def _serve(
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    seconds: int,
    detail: bool,
    cases: Any,
    results: Any,
) -> None:
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        if detail:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=seconds // 2),
    )  # fmt: skip
    while True:
        function, arguments = cases.get()
        try:
            results.put((rank, None, function(*arguments)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
