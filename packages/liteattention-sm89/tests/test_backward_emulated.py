"""The compiled kernels of the backward pass on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lite_gradients import EMULATED, LISTS, problem
from torch import Tensor

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from cula_testing.lite.gradients import Backward, Problem, assert_gradients
from liteattention_sm89 import launch

pytestmark = pytest.mark.emulated(seeds=1, concurrent_ctas=2)


@pytest.fixture
def run(emulated) -> Callable[..., tuple[Tensor, ...]]:
    """run(call, problem, how) launches as `launch.backward` does on a GPU, with guards around and NaN in all that it
    may write. `changes` are options of the kernels, or of those called `only`: their `kind` and role."""

    def run(
        call: Backward, p: Problem, how: str, only: str | None = None, **changes
    ) -> tuple[Tensor, ...]:
        guarded: dict[int, Tensor] = {}
        run.kernels = {}

        def kernel(name, bound):
            run.kernels[name] = bound

            def launched(*arguments):
                arguments = [
                    guarded.get(id(a), a) if isinstance(a, Tensor) else a for a in arguments
                ]
                bound(*arguments, **(changes if only in (None, name) else {}))

            return launched

        class Kernels:
            @staticmethod
            def backward(config, arch):
                unit = launch.backward_unit(config, arch)
                return kernel(config.role, emulated_kernel(emulated, unit))

            @staticmethod
            def sums(config, with_dlse, arch):
                unit = launch.sums_unit(without_walk(config), with_dlse, arch)
                bound = emulated_kernel(emulated, unit)

                def launched(*arguments):
                    for workspace in arguments[4:6]:
                        if workspace is not None:
                            guarded[id(workspace)] = emulated.empty(workspace.shape, torch.float32)
                    kernel("sums", bound)(*arguments)

                return launched

            @staticmethod
            def gather(config, arch):
                unit = launch.gather_unit(without_walk(config), arch)
                return kernel("gather", emulated_kernel(emulated, unit))

        x = p.inputs
        gradients = [emulated.empty(t.shape, t.dtype) for t in (x.q, x.k, x.v)]
        launch.backward(
            x.q, x.k, x.v, p.out, rows_of(p.lse), p.dout, rows_of(p.dlse), x.read, x.starts_q, x.starts_k, *x.most,
            *gradients, scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n,
            deterministic=how == "order", kernels=Kernels, arch=call.arch,
        )  # fmt: skip
        wanted = {"atomics": {"sums", "both", "gather"}, "order": {"sums", "keys", "queries"}}
        assert set(run.kernels) == wanted[how]
        return tuple(gradients)

    return run


def without_walk(config):
    """What the kernels that see every row depend on: one of them serves configs that differ in the rest."""
    static = replace(config.problem, causal=False, skip=False, block_n=64)
    return replace(config, problem=static)


def rows_of(rows: Tensor | None) -> Tensor | None:
    """[B, H, S] of packed rows [H, T]."""
    return rows[None] if rows is not None and rows.dim() == 2 else rows


each = pytest.mark.parametrize(
    "call, how", [pytest.param(c, how, id=f"{c}-{how}") for c in EMULATED for how in c.how]
)


@each
def test_numbers(run, call, how):
    p = problem(call)
    assert_gradients(run(call, p, how), p)


@pytest.mark.parametrize("how", LISTS.how)
def test_what_is_not_listed_is_not_read(run, how):
    """NaN in keys, values, queries and gradients of tiles without a pair on the list reaches no gradient."""
    call = replace(LISTS, rows=300, keys=300, listed=0.4, tiles="a cross")
    p = problem(call)
    x, rows, keys = p.inputs, slice(128, 256), slice(64, 128)
    q, k, v, dout, out = (t.clone() for t in (x.q, x.k, x.v, p.dout, p.out))
    for tensor, tokens, poison in (
        (q, rows, math.nan), (dout, rows, math.inf), (out, rows, math.nan), (k, keys, math.inf), (v, keys, math.nan)
    ):  # fmt: skip
        tensor[:, tokens] = poison
    poisoned = replace(p, inputs=replace(x, q=q, k=k, v=v), dout=dout, out=out)
    found = run(call, poisoned, how)
    assert_gradients(found, p)
    assert not found[0][:, rows].any() and not any(t[:, keys].any() for t in found[1:])


@pytest.mark.emulated(schedules="immediate")
def test_the_order_of_time_does_not_matter(run):
    """Without atomics every schedule gives the same bits, and any number of CTAs at a time."""
    call = replace(LISTS, rows=200, heads=2)
    first = run(call, problem(call), "order")
    for mode, seed, ctas in (("random", 1, 1), ("random", 2, 8), ("lazy", 3, 5)):
        options = {"async_mode": mode, "seed": seed, "concurrent_ctas": ctas}
        assert all(map(torch.equal, run(call, problem(call), "order", **options), first))


# ---- which waits matter ----------------------------------------------------------------------------------------------


@pytest.mark.emulated(schedules="immediate", concurrent_ctas=1)
@pytest.mark.parametrize(
    "dim, arch, name, how, waits",
    [
        (64, "sm_89", "both", "atomics", 9),
        (8, "sm_90a", "both", "atomics", 9),
        (64, "sm_89", "queries", "order", 9),
        (64, "sm_89", "gather", "atomics", 1),
    ],
    ids=["eight_warps", "four_warps", "queries", "gather"],
)
def test_every_wait_matters(run, dim, arch, name, how, waits):
    """Several steps, and none."""
    call = replace(LISTS, rows=130, keys=130, dim=dim, arch=arch, tiles="every")
    problems = [problem(c) for c in (call, replace(call, tiles="some", listed=0.0))]

    def check(options) -> None:
        for p in problems:
            assert_gradients(run(call, p, how, name, **vars(options)), p)

    for p in problems:
        run(call, p, how)
    report = mutation.run(check, run.kernels[name], schedules=mutation.SCHEDULES[:3])
    assert not report.unnoticed and not report.not_reached, str(report)
    assert len(report.noticed) == waits


@pytest.mark.emulated(schedules="immediate")
def test_sums_wait_for_nobody(run):
    run(LISTS, problem(LISTS), "atomics")
    ptx = run.kernels["sums"].kernel.ptx
    assert not mutation.synchronisation(ptx)
