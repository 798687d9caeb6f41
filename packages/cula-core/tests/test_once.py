"""A result is computed once, whoever asks."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cula_core.once import once


def test_results_are_kept_by_their_arguments():
    asked: list[tuple] = []

    @once
    def double(*numbers: int) -> list[int]:
        asked.append(numbers)
        return [2 * n for n in numbers]

    first = double(1, 2)
    assert first == [2, 4] and double(1, 2) is first and double(2, 1) == [4, 2]
    assert asked == [(1, 2), (2, 1)] and double.__name__ == "double"


def test_threads_wait_for_the_first_of_the_same_arguments_and_not_for_others():
    started, release = threading.Event(), threading.Event()
    computed: list[str] = []

    @once
    def slow(name: str) -> object:
        computed.append(name)
        if name == "slow":
            started.set()
            assert release.wait(60)
        return object()

    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(slow("slow"))) for _ in range(3)]
    threads[0].start()
    assert started.wait(60)
    for thread in threads[1:]:
        thread.start()
    other = slow("other")
    assert not results and slow("other") is other
    release.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3 and len(set(map(id, results))) == 1
    assert computed == ["slow", "other"]


def test_a_call_that_raises_keeps_nothing():
    calls = 0

    @once
    def fails_once() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("not yet")
        return calls

    with pytest.raises(RuntimeError, match="^not yet$"):
        fails_once()
    assert fails_once() == fails_once() == 2


FORK = """
import os, threading, warnings
from cula_core.once import once
warnings.simplefilter("ignore")  # a process with threads forks on purpose
inside, leave, parent = threading.Event(), threading.Event(), os.getpid()

@once
def slow(value):
    if os.getpid() == parent:
        inside.set()
        leave.wait(60)
    return value + os.getpid()

thread = threading.Thread(target=slow, args=(1,))
thread.start()
inside.wait(60)
child = os.fork()
if child == 0:
    os._exit(0 if slow(1) == 1 + os.getpid() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
leave.set()
thread.join()
print(slow(1) == 1 + parent)
"""


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["0", "True"]
