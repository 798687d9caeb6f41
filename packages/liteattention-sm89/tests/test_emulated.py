"""The compiled kernels on the CPU, under every schedule, with race detection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from cula_testing.lite import DENSE, LISTED, Call, Inputs, Subject, make_inputs, without_unlisted
from liteattention_sm89 import launch, masks, reference

SUBJECT = Subject(launch.forward, reference.lite_attention)


@pytest.fixture
def run(emulated) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """run(call, inputs) launches as `launch.forward` does on a GPU, with guards around and NaN in all it may write."""

    def compiled(config, arch="sm_89"):
        return emulated_kernel(emulated, launch.forward_unit(config, arch))

    def run(call: Call, x: Inputs, arch: str = "sm_89", **changes):
        run.configs = []

        def kernel_for(config, arch):
            run.configs.append(config)
            return lambda *arguments: compiled(config, arch)(*arguments, **changes)

        out, lse, write = SUBJECT.forward(call, x, emulated.empty, kernel_for=kernel_for, arch=arch)
        return out, lse if call.lengths is None else lse[0], write

    run.compiled = compiled
    return run


@pytest.mark.parametrize("call", DENSE + LISTED, ids=str)
def test_numbers(run, call):
    x = make_inputs(call)
    SUBJECT.assert_right(call, x, *run(call, x))


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", [c for c in DENSE + LISTED if c.dim <= 128][::2], ids=str)
def test_numbers_with_two_blocks_of_rows_per_warp(run, call):
    """The kernel of cards with more shared memory."""
    x = make_inputs(call)
    SUBJECT.assert_right(call, x, *run(call, x, arch="sm_90a"))
    assert [config.rows for config in run.configs] == [32]


def test_unlisted_tiles_are_not_read(run):
    call = Call(100, 900, listed=0.2, dim=64, heads=1)
    x = make_inputs(call)
    for clean, poisoned in zip(run(call, x), run(call, without_unlisted(call, x))):
        assert torch.equal(clean, poisoned)


def test_lists_settle(run):
    """Directions in turns: a list shrinks to what both directions keep, and an unchanged list gives the same bits."""
    call = Call(130, 700, listed=1.0, threshold=-1.0, dim=64, heads=1)
    x = make_inputs(call)
    seen = []
    for step in range(6):
        call = replace(call, direction=1 - step % 2 * 2)
        out, lse, write = run(call, x)
        SUBJECT.assert_right(call, x, out, lse, write)
        assert not (write & ~x.read).any(), "a dropped tile came back"
        seen.append((out, lse, x.read))
        x = replace(x, read=write)
    assert 0 < masks.count(x.read).sum() < masks.count(seen[0][2]).sum()
    for later, before in ((5, 3), (4, 2)):
        assert all(map(torch.equal, seen[later], seen[before]))


def test_a_list_may_be_replaced_in_place(run, emulated):
    """A query tile's row is read before it is written, and by nobody else."""
    call = Call(300, 700, listed=0.8, threshold=-1.0, dim=64, batch=2)
    x = make_inputs(call)
    expected = run(call, x)[2]
    own = x.read.clone()
    kernel_arguments = []
    launch.forward(
        x.q, x.k, x.v, torch.empty_like(x.q), torch.empty(2, 2, 300), own, None, own, None, None, 300,
        threshold=call.threshold, direction=1, scale=64**-0.5, causal=False, block_n=64, arch="sm_89",
        kernel_for=lambda config, arch: (
            lambda *a: (kernel_arguments.append(a), run.compiled(config)(*a))
        ),
    )  # fmt: skip
    assert len(kernel_arguments) == 1 and torch.equal(own, expected)


# ---- which waits matter ----------------------------------------------------------------------------------------------


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize(
    "dim, arch, spare",
    [(64, "sm_89", 1), (192, "sm_89", 0), (64, "sm_90a", 1)],
    ids=["base", "q_in_registers", "two_blocks"],
)
def test_every_wait_matters(run, dim, arch, spare):
    """Several steps, and none. spare: waits at the end of a CTA, for a copy that nobody reads."""
    call = Call(128, 448, listed=1.0, dim=dim, heads=1, threshold=-1.0)
    inputs = [make_inputs(c) for c in (call, replace(call, listed=0.0))]
    expected = [run(call, x, arch) for x in inputs]

    def check(options) -> None:
        for x, before in zip(inputs, expected):
            for got, want in zip(run(call, x, arch, **vars(options)), before):
                assert torch.equal(got, want), "another result"

    kernel = run.compiled(run.configs[0], arch)
    report = mutation.run(check, kernel, schedules=mutation.SCHEDULES[:3])
    assert not report.not_reached, str(report)
    assert [m.text for m in report.unnoticed] == spare * ["cp.async.wait_group 0"], str(report)
    once = min(m.executions for m in report.mutants)  # by every thread: in no loop
    assert all(m.executions == once for m in report.unnoticed), str(report)
    assert len(report.noticed) >= 10
