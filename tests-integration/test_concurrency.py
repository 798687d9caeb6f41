"""Public functions from several threads on streams of their own, and for a million calls."""

from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from call_samples import SAMPLES, outcome

from cula_testing.shortcuts import long_way

pytestmark = pytest.mark.gpu

THREADS, CALLS, MILLION = 4, 6, 1_000_000
# Of these a server calls one after the other. They write to no argument but states.
SERVED = (
    "linear_attention_decode-plain",
    "delta_rule_decode-plain",
    "delta_rule_decode-fused",
    "lightning_attn_fwd_varlen-pool",
    "chunk_gated_delta_rule-engine",
    "chunk_kda-engine",
    "lite_attention-dense",
)


def given(name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return SAMPLES[name][1](torch.device("cuda"))


@pytest.mark.parametrize("name", SAMPLES)
def test_threads_on_streams_of_their_own(name):
    """All begin at once; every call has its own inputs, and the results that it has alone, bit for bit."""
    function, _ = SAMPLES[name]
    seeds = range(THREADS * CALLS)
    with torch.no_grad():
        expected = [outcome(long_way(function), given(name, seed)) for seed in seeds]
        inputs = [given(name, seed) for seed in seeds]
        torch.cuda.synchronize()
    start = threading.Barrier(THREADS)

    def work(thread: int) -> list[list[torch.Tensor]]:
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [outcome(function, inputs[seed]) for seed in seeds[thread::THREADS]]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    for seed in seeds:
        for x, right in zip(results[seed % THREADS][seed // THREADS], expected[seed], strict=True):
            torch.testing.assert_close(x, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", SAMPLES)
def test_tensors_on_another_device_than_the_current_one(name):
    """Results and all that is written to, bit for bit, by the long way and the short one."""
    function, make = SAMPLES[name]
    with torch.no_grad():
        for seed in range(4):
            found = []
            for device in (0, 1):
                torch.manual_seed(seed)
                arguments = make(torch.device("cpu"))
                arguments = {one: moved(x, device) for one, x in arguments.items()}
                assert torch.cuda.current_device() == 0
                found.append([x.cpu() for x in outcome(function, arguments)])
            for x, right in zip(*found, strict=True):
                torch.testing.assert_close(x, right, rtol=0, atol=0, equal_nan=True)


def moved(x: Any, device: int) -> Any:
    """An argument on a GPU, tuples with all that is in them."""
    if isinstance(x, torch.Tensor):
        there = x.detach().to(f"cuda:{device}")
        return torch.nn.Parameter(there) if isinstance(x, torch.nn.Parameter) else there
    if isinstance(x, tuple):
        return type(x)._make(moved(item, device) for item in x)
    return x


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_million_calls_leave_no_memory_behind():
    calls = [(SAMPLES[name][0], given(name, 0)) for name in SERVED]
    with torch.no_grad():

        def rounds(count: int) -> tuple[int, int]:
            """Returns the bytes of the device and of the host that are taken behind so many calls."""
            for function, arguments in itertools.islice(itertools.cycle(calls), count):
                function(**arguments)
            torch.cuda.synchronize()
            gc.collect()
            return torch.cuda.memory_allocated(), resident_bytes()

        before = rounds(MILLION // 10)
        after = rounds(MILLION - MILLION // 10)
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 << 20
