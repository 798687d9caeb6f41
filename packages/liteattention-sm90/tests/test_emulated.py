"""The compiled kernel on the CPU, under every schedule, with race detection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cula_testing.compiled import emulated_kernel
from cula_testing.lite import DENSE, LISTED, Call, Inputs, Subject, make_inputs
from liteattention_sm89 import launch as host
from liteattention_sm89 import reference
from liteattention_sm90 import launch

SUBJECT = Subject(launch.forward, reference.lite_attention)
# The kernels of the host package, whose lists are read and written by these.
HOST = Subject(host.forward, reference.lite_attention)
SERVED = [c for c in DENSE + LISTED if c.lengths is None and c.dim <= 128]


@pytest.fixture
def run(emulated):
    def run(call: Call, x: Inputs, ctas: int = 1, **changes):
        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            return lambda *given: kernel(*given, **changes)

        return SUBJECT.forward(call, x, emulated.empty, kernels=kernels, multiprocessors=ctas)

    return run


@pytest.fixture
def run_host(emulated):
    def kernel_for(config, arch):
        return emulated_kernel(emulated, host.forward_unit(config, arch))

    def run(call: Call, x: Inputs):
        return HOST.forward(call, x, emulated.empty, kernel_for=kernel_for, arch="sm_90a")

    return run


@pytest.mark.parametrize("call", SERVED, ids=str)
def test_numbers(run, call):
    x = make_inputs(call)
    SUBJECT.assert_right(call, x, *run(call, x))


def with_whole_scores(call: Call) -> Inputs:
    """Inputs whose products are small integers, which no order of a sum rounds; every other tile of keys is zero."""
    x = make_inputs(call)
    q, k = (t.mul(1.5).round().clamp(-3, 3) for t in (x.q, x.k))
    k[:, torch.arange(call.keys) // call.block_n % 2 == 1] = 0
    return replace(x, q=q, k=k)


WHOLE = [
    Call(140, 330, dim=64, listed=0.8, threshold=-2.0),
    Call(140, 330, dim=64, listed=0.8, threshold=-1.0, direction=-1, causal=True),
    Call(140, 500, dim=64, listed=0.9, threshold=0.0, block_n=128, held=True, heads=1),
]


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", WHOLE, ids=str)
def test_lists_are_those_of_the_host_package(run, run_host, call):
    x = with_whole_scores(call)
    ours, theirs = run(call, x), run_host(call, x)
    SUBJECT.assert_right(call, x, *ours)
    assert torch.equal(ours[2], theirs[2])
    assert not torch.equal(ours[2], x.read), "nothing was dropped"


@pytest.mark.emulated(schedules="immediate")
def test_kernels_may_change_between_calls(run, run_host):
    """A list passes from one package's kernel to the other's, in directions by turns."""
    call = Call(130, 500, dim=64, heads=1, listed=1.0, threshold=-1.0)
    x = with_whole_scores(call)
    for step in range(4):
        call = replace(call, direction=1 - step % 2 * 2)
        mine, other = (run, run_host) if step % 2 else (run_host, run)
        got, beside = mine(call, x), other(call, x)
        SUBJECT.assert_right(call, x, *got)
        assert torch.equal(got[2], beside[2])
        x = replace(x, read=got[2])
