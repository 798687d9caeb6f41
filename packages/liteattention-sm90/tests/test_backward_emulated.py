"""The backward pass on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hopper_gradients import CALLS, LISTS, problem
from torch import Tensor

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from cula_testing.lite.gradients import Backward, Problem, assert_gradients
from liteattention_sm90 import launch
from liteattention_sm90.config import BackwardConfig, QueriesConfig, SumsConfig

DETERMINISTIC = [replace(call, how=("order",)) for call in CALLS]


@pytest.fixture
def run(emulated) -> Callable[..., tuple[Tensor, ...]]:
    """run(call, problem) launches as `launch.backward` does on a GPU, with guards around and NaN in all that it may
    write. `changes` are options of a `changed` kernel of gradients; `run.kernels` are these afterwards, by their
    configs' types."""

    def run(
        call: Backward, p: Problem, ordered_from: int = 10000, changed: type = BackwardConfig, **changes
    ) -> tuple[Tensor, ...]:  # fmt: skip
        guarded: dict[int, Tensor] = {}
        run.kernels = {}

        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            main = isinstance(config, changed)
            run.kernels[type(config)] = kernel

            def launched(*arguments):
                if isinstance(config, SumsConfig):
                    for workspace in filter(lambda given: given is not None, arguments[4:]):
                        guarded[id(workspace)] = emulated.empty(workspace.shape, torch.float32)
                kernel(*(guarded.get(id(a), a) for a in arguments), **(changes if main else {}))

            return launched

        x = p.inputs
        gradients = [emulated.empty(t.shape, t.dtype) for t in (x.q, x.k, x.v)]
        launch.backward(
            x.q, x.k, x.v, p.out, p.lse, p.dout, p.dlse, x.read, None, None, *x.most, *gradients,
            scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n, deterministic="order" in call.how,
            kernels=kernels, ordered_from=ordered_from, multiprocessors=2,
        )  # fmt: skip
        return tuple(gradients)

    return run


@pytest.mark.parametrize("call", CALLS + DETERMINISTIC, ids=str)
def test_numbers(run, call):
    p = problem(call)
    assert_gradients(run(call, p), p)


@pytest.mark.parametrize("call", [c for c in CALLS if c.listed is not None][::2], ids=str)
def test_numbers_where_what_many_list_comes_first(run, call):
    p = problem(call)
    assert_gradients(run(call, p, ordered_from=1), p)


@pytest.mark.parametrize("block_n", [64, 128])
def test_what_is_not_listed_is_not_read(run, block_n):
    """NaN or infinity in tiles without a pair on the list reaches no gradient."""
    call = replace(LISTS, rows=300, keys=300, tiles="a cross", listed=0.6, block_n=block_n)
    p = problem(call)
    x, rows, keys = p.inputs, slice(128, 256), slice(block_n, 2 * block_n)
    q, k, v, dout, out = (t.clone() for t in (x.q, x.k, x.v, p.dout, p.out))
    for tensor, tokens, poison in (
        (q, rows, math.nan), (dout, rows, math.inf), (out, rows, math.nan), (k, keys, math.inf), (v, keys, math.nan)
    ):  # fmt: skip
        tensor[:, tokens] = poison
    assert not p.wanted[0][:, rows].any() and not p.wanted[1][:, keys].any()
    found = run(call, replace(p, inputs=replace(x, q=q, k=k, v=v), dout=dout, out=out))
    assert_gradients(found, p)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("dim", [64, 128])
def test_every_wait_matters(run, dim):
    call = replace(LISTS, rows=200, keys=230, heads=2, dim=dim, listed=0.7)
    p = problem(call)
    want = run(call, p)

    def check(changes):
        for a, b in zip(run(call, p, **vars(changes)), want):
            assert torch.equal(a, b), "another result"

    report = mutation.run(check, run.kernel, schedules=mutation.SCHEDULES[:3])
    # The emulator keeps shared memory longer than its CTA, so that nobody need wait for what leaves it last. And where
    # both warpgroups read each dS, who may overwrite the one before the last knows that the last one is complete.
    unnoticed = sorted(m.text.split(" [")[0] for m in report.unnoticed)
    last, implied = "cp.async.bulk.wait_group 0", "mbarrier.try_wait.parity.shared.b64 P1,"
    expected = ["cp.async.bulk.commit_group", last, last] + [implied] * (dim > 64)
    assert unnoticed == expected, str(report)
