"""The backward pass on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hopper_gradients import CALLS, LISTS, PACKED, per_row, problem
from torch import Tensor

from cula_emulator import mutation
from cula_testing.compiled import emulated_kernel
from cula_testing.lite import Inputs, gradients, make_inputs
from cula_testing.lite.gradients import Backward, Problem, assert_gradients
from liteattention_sm89 import reference
from liteattention_sm90 import launch
from liteattention_sm90.config import BackwardConfig, SumsConfig


@pytest.fixture
def run(emulated) -> Callable[..., tuple[Tensor, ...]]:
    """run(call, problem) launches as `launch.backward` does on a GPU, with guards around and NaN in all that it may
    write. `changes` are options of `LiteBackward`, which `run.kernel` is afterwards."""

    def run(call: Backward, p: Problem, ordered_from: int = 1000, **changes) -> tuple[Tensor, ...]:
        guarded: dict[int, Tensor] = {}

        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            main = isinstance(config, BackwardConfig)
            if main:
                run.kernel = kernel

            def launched(*arguments):
                if isinstance(config, SumsConfig):
                    for workspace in arguments[4:7]:
                        guarded[id(workspace)] = emulated.empty(workspace.shape, torch.float32)
                kernel(*(guarded.get(id(a), a) for a in arguments), **(changes if main else {}))

            return launched

        x = p.inputs
        found = [emulated.empty(t.shape, t.dtype) for t in (x.q, x.k, x.v)]
        launch.backward(
            x.q, x.k, x.v, p.out, per_row(p.lse), p.dout, per_row(p.dlse), x.read, x.starts_q, x.starts_k,
            *x.most, *found,
            scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n, deterministic=False, kernels=kernels,
            ordered_from=ordered_from,
        )  # fmt: skip
        return tuple(found)

    return run


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(run, call):
    p = problem(call)
    assert_gradients(run(call, p), p)


@pytest.mark.parametrize("call", [c for c in CALLS if c.listed is not None][::2], ids=str)
def test_numbers_where_what_many_list_comes_first(run, call):
    p = problem(call)
    assert_gradients(run(call, p, ordered_from=1), p)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", [
    PACKED, replace(PACKED, causal=True, dim=64, listed=0.7, dlse=True),
], ids=str)  # fmt: skip
def test_sequences_do_not_meet(run, call):
    """NaN in all of one reaches no other, and nothing is written behind the last one."""
    call = replace(call, lengths=((100, 170), (130, 200), (70, 65)))
    p = problem(call)
    want, x = run(call, p), p.inputs
    rows, keys = (slice(*starts[1:3].tolist()) for starts in (x.starts_q, x.starts_k))
    # The last sequence is none any more, but for its tokens.

    def spoiled(tensor: Tensor, tokens: slice) -> Tensor:
        spoiled = tensor.clone()
        spoiled[:, tokens.start :] = math.nan
        return spoiled

    fewer = {
        "q": spoiled(x.q, rows), "k": spoiled(x.k, keys), "v": spoiled(x.v, keys), "starts_q": x.starts_q[:-1],
        "starts_k": x.starts_k[:-1], "read": None if x.read is None else x.read[:-1].contiguous(),
    }  # fmt: skip
    found = run(
        call,
        replace(
            p, inputs=replace(x, **fewer), out=spoiled(p.out, rows), dout=spoiled(p.dout, rows),
            lse=spoiled(p.lse, rows), dlse=None if p.dlse is None else spoiled(p.dlse, rows),
        ),
    )  # fmt: skip
    for got, expected, tokens in zip(found, want, (rows, keys, keys)):
        assert torch.equal(got[:, : tokens.start], expected[:, : tokens.start])
        assert got[:, tokens.stop :].isnan().all()


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, ((64, 70), (3, 128), (130, 190))], ids=str)
def test_scores_far_below_zero(run, monkeypatch, lengths, causal):
    """What lies behind the last key has scores of zero, and no part in a gradient."""
    call = replace(PACKED, rows=64, keys=70, lengths=lengths, causal=causal)

    def inputs(call: Backward) -> Inputs:
        x = make_inputs(call)
        q, k = (t + shift for t, shift in ((x.q, 4), (x.k, -4)))
        return replace(x, q=q, k=k)

    monkeypatch.setattr(gradients, "make_inputs", inputs)
    p = gradients.make_problem(call, reference)
    assert p.lse.max() < -90  # exp(90) is infinite
    for got, want in zip(run(call, p), p.wanted, strict=True):
        # What all keys have in common cancels, and leaves what rounds off.
        assert (got.double() - want).norm() < 3e-2 * want.norm()


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
