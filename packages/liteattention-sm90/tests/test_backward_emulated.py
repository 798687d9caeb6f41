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

ORDER = [replace(call, how=("order",)) for call in CALLS]
MAIN = (BackwardConfig, QueriesConfig)


@pytest.fixture
def run(emulated) -> Callable[..., tuple[Tensor, ...]]:
    """run(call, problem) launches as `launch.backward` does on a GPU, with guards around and NaN in all that it may
    write. `changes` are options of a `changed` kernel of gradients; `run.kernels` are these afterwards, by their
    configs' types."""

    def run(
        call: Backward, p: Problem, ordered_from: int | None = None, multiprocessors: int = 2,
        changed: type | tuple[type, ...] = BackwardConfig, **changes,
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
            kernels=kernels, ordered_from=ordered_from, multiprocessors=multiprocessors,
        )  # fmt: skip
        return tuple(gradients)

    return run


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(run, call):
    p = problem(call)
    assert_gradients(run(call, p), p)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", ORDER, ids=str)
def test_numbers_of_the_deterministic_pair(run, call):
    p = problem(call)
    assert_gradients(run(call, p), p)


@pytest.mark.parametrize(
    "call",
    [c for c in CALLS if c.listed is not None][::2]
    + [c for c in ORDER if c.listed is not None][1::2],
    ids=str,
)
def test_numbers_where_what_many_list_comes_first(run, call):
    p = problem(call)
    assert_gradients(run(call, p, ordered_from=1), p)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("call", [ORDER[2], ORDER[4], ORDER[5], ORDER[-3]], ids=str)
def test_the_same_bits_whatever_the_timing(run, call):
    """Under every schedule, with any number of CTAs, and in whatever order these draw."""
    p = problem(call)
    first = run(call, p)
    for number, options in enumerate(mutation.SCHEDULES):
        how = {"multiprocessors": 1 + number % 3, "ordered_from": 1 if number % 2 else None}
        again = run(call, p, **how, changed=MAIN, **vars(options))
        assert all(map(torch.equal, first, again)), options


@pytest.mark.parametrize("how", ["atomics", "order"])
@pytest.mark.parametrize("block_n", [64, 128])
def test_what_is_not_listed_is_not_read(run, block_n, how):
    """NaN or infinity in tiles without a pair on the list reaches no gradient."""
    call = replace(
        LISTS, rows=300, keys=300, tiles="a cross", listed=0.6, block_n=block_n, how=(how,)
    )
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


# What may be left out of each kernel. The emulator keeps shared memory longer than its CTA, so that nobody need wait
# for what leaves it last. Where both warpgroups read each dS, who may overwrite the one before the last knows that the
# last one is complete. And keys of the last step but two are only free when somebody has read the flags of the one
# after it, whose place those of the end take.
LAST, IMPLIED = "cp.async.bulk.wait_group 0", "mbarrier.try_wait.parity.shared.b64 P1,"
UNNOTICED = {
    ("atomics", BackwardConfig, 64): ["cp.async.bulk.commit_group", LAST, LAST],
    ("atomics", BackwardConfig, 128): ["cp.async.bulk.commit_group", LAST, LAST, IMPLIED],
    ("order", BackwardConfig, 64): ["cp.async.bulk.commit_group", LAST],
    ("order", BackwardConfig, 128): ["cp.async.bulk.commit_group", LAST],
    ("order", QueriesConfig, 64): [LAST, IMPLIED],
    ("order", QueriesConfig, 128): [LAST, IMPLIED],
}


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("how, kind, dim", UNNOTICED)
def test_every_wait_matters(run, how, kind, dim):
    calls = [replace(LISTS, rows=200, keys=230, heads=2, dim=dim, listed=0.7, how=(how,))]
    if (
        how == "order"
    ):  # several steps of a query tile, and first steps with and without hidden keys
        calls = [replace(calls[0], causal=True, keys=keys) for keys in (430, 100)]
    problems = [problem(call) for call in calls]

    def results(**changes):
        return [
            gradient
            for call, p in zip(calls, problems)
            for gradient in run(call, p, multiprocessors=1, changed=kind, **changes)
        ]

    want = results()

    def check(changes):
        for a, b in zip(results(**vars(changes)), want):
            assert torch.equal(a, b), "another result"

    report = mutation.run(check, run.kernels[kind], schedules=mutation.SCHEDULES[:3])
    unnoticed = sorted(m.text.split(" [")[0] for m in report.unnoticed)
    assert unnoticed == UNNOTICED[how, kind, dim], str(report)
    assert not report.not_reached or how == "atomics", str(report)
