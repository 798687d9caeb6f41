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
                    for workspace in filter(lambda given: given is not None, arguments[4:7]):
                        guarded[id(workspace)] = emulated.empty(workspace.shape, torch.float32)
                kernel(*(guarded.get(id(a), a) for a in arguments), **(changes if main else {}))

            return launched

        x = p.inputs
        found = [emulated.empty(t.shape, t.dtype) for t in (x.q, x.k, x.v)]
        launch.backward(
            x.q, x.k, x.v, p.out, per_row(p.lse), p.dout, per_row(p.dlse), x.read, x.starts_q, x.starts_k,
            *x.most, *found,
            scale=call.dim**-0.5, causal=call.causal, block_n=call.block_n, deterministic="order" in call.how,
            kernels=kernels, ordered_from=ordered_from, multiprocessors=multiprocessors, apart="order" in call.how,
        )  # fmt: skip
        return tuple(found)

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


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", [
    PACKED, replace(PACKED, causal=True, dim=64, listed=0.7, dlse=True), replace(PACKED, listed=0.7, how=("order",)),
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
@pytest.mark.parametrize("how", ["atomics", "order"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, ((64, 70), (3, 128), (130, 190))], ids=str)
def test_scores_far_below_zero(run, monkeypatch, lengths, causal, how):
    """What lies behind the last key has scores of zero, and no part in a gradient."""
    call = replace(PACKED, rows=64, keys=70, lengths=lengths, causal=causal, how=(how,))

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


@pytest.mark.parametrize("block_n, listed, deterministic, apart", [
    (64, False, False, False), (64, True, False, True), (128, True, False, False), (64, False, True, True),
    (128, True, True, True),
])  # fmt: skip
def test_which_gradients_of_q_have_a_kernel_of_their_own(block_n, listed, deterministic, apart):
    """Those that must not depend on time, and those of lists of 64 keys."""
    configs = []

    def kernels(config):
        configs.append(config)
        return lambda *arguments: None

    q, k, v, out, dout, *gradients = (torch.empty(1, 256, 2, 64).bfloat16() for _ in range(8))
    mask = torch.ones(1, 2, 2, 1, dtype=torch.int32) if listed else None
    launch.backward(
        q, k, v, out, torch.empty(1, 2, 256), dout, None, mask, None, None, 256, 256, *gradients,
        scale=1.0, causal=False, block_n=block_n, deterministic=deterministic, kernels=kernels, multiprocessors=1,
    )  # fmt: skip
    kinds = [type(config).__name__ for config in configs]
    assert kinds == ["SumsConfig", "BackwardConfig", "QueriesConfig" if apart else "ConvertConfig"]
    assert configs[0].with_acc is not apart and configs[1].keys_only is apart


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
