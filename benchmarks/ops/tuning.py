"""Tunes a peer's Triton kernels anew for every setting: their keys leave sizes out and keep the first choice."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Milliseconds that the peer's tuner spends on warming up and on measuring one candidate; its own 25 and 100 would take
# most of a run, because it tunes up to 48 candidates for every setting.
TUNING_MS = {"warmup": 2, "rep": 8}


def forget(kernel: Any) -> Any:
    """Empties the choices of the autotuner inside `kernel`, and returns that autotuner."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    kernel.cache_results = False
    kernel.cache.clear()
    return kernel


def tune_anew(kernel: Any) -> None:
    """Empties the choices of the autotuner inside `kernel`, and makes it choose faster."""
    import triton

    kernel = forget(kernel)
    if not isinstance(kernel.run, _CompiledFirst):
        kernel.do_bench = functools.partial(triton.testing.do_bench, **TUNING_MS)
        kernel.run = _CompiledFirst(kernel)


class _CompiledFirst:
    """Runs an autotuner after compiling its candidates in parallel; alone it compiles one after the other."""

    def __init__(self, tuner: Any) -> None:
        self.tuner, self.tuned_run = tuner, tuner.run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from triton import AsyncCompileMode

        if not self.tuner.cache:
            options = {name: value for name, value in kwargs.items() if name != "warmup"}
            with ThreadPoolExecutor() as pool, AsyncCompileMode(pool):
                self.tuner.warmup(*args, **options)
        return self.tuned_run(*args, **kwargs)
