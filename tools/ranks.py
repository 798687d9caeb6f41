"""A world of processes that serves many tests: starting one takes longer than most of what runs in it.

A case is a function of an importable module and its arguments. Every rank runs it, and a failure comes back as the text
of its traceback.
"""

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_SECONDS = 100
# Once for all processes: functional collectives import the compiler, which takes longer than most worlds live.
_IMPORTED = ["torch._dynamo", "torch.distributed.device_mesh", "cula.distributed", "cula.lightning"]


class World:
    """`ranks` processes with a process group; `with World(..) as run: run(function, *arguments)`.

    backend: "gloo" on CPUs, or "nccl" with a GPU for each rank. folder: an empty one, for the rendezvous.
    """

    def __init__(self, ranks: int, backend: str, folder: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._cases = [context.SimpleQueue() for _ in range(ranks)]
        self._results = context.Queue()
        facts = (ranks, backend, str(folder / "store"))
        self._processes = [
            context.Process(target=_serve, args=(r, *facts, cases, self._results), daemon=True)
            for r, cases in enumerate(self._cases)
        ]

    def __enter__(self) -> Callable[..., list[Any]]:
        for process in self._processes:
            process.start()
        return self._run

    def __exit__(self, *_: object) -> None:
        for (
            process
        ) in self._processes:  # they wait for a case; to end by themselves takes them seconds
            process.kill()
            process.join()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank. AssertionError with the traceback of a rank that failed."""
        for cases in self._cases:
            cases.put((function, arguments))
        found = [self._result() for _ in self._processes]
        failures = [f"rank {rank}: {failure}" for rank, failure, _ in found if failure]
        assert not failures, "\n".join(failures)
        return [value for _, _, value in sorted(found, key=lambda one: one[0])]

    def _result(self) -> tuple[int, str | None, Any]:
        for _ in range(_SECONDS):
            try:
                return self._results.get(timeout=1)
            except queue.Empty:
                ended = [p.exitcode for p in self._processes if p.exitcode is not None]
                assert not ended, f"ranks have ended with {ended}"
        raise AssertionError(f"no result after {_SECONDS} s")


def _serve(rank: int, ranks: int, backend: str, store: str, cases: Any, results: Any) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # messages of different sizes are told, not waited for
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=_SECONDS // 2),
    )  # fmt: skip
    while True:
        function, arguments = cases.get()
        try:
            results.put((rank, None, function(*arguments)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
