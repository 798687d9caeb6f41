"""Whole backward passes in the emulator, against the oracle in fp64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.backward.config import (
    PeaksConfig,
    WalkConfig,
    heads_at_once,
    scratch_bytes,
)
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, PrepareConfig, chunk_slots
from cula_core.reference.kda_backward import Gradients, chunk_kda_backward
from cula_cp_sm90.arch import TARGET
from cula_cp_sm90.backward import launch, ops
from cula_cp_sm90.backward.call import BackwardCall
from cula_cp_sm90.backward.ops import prepared
from cula_emulator import mutation
from cula_emulator.memory import poisoned_memory
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import emulated_kernel
from cula_testing.kda.problems import Problem, make_problem
from cula_testing.kda.problems import assert_right as assert_outputs
from cula_testing.kda.running import Run, compiler
from cula_testing.repeating import Repeated
from cula_testing.tensors import one_thread

# Of results in 16 bits, which round by up to 1.7e-3; of parameters and states.
BOUNDS = {
    "dq": 2e-3, "dk": 2e-3, "dv": 2e-3, "dg": 2.1e-3, "dbeta": 2.2e-3, "dA_log": 3e-3, "ddt_bias": 3e-3, "dh0": 1e-3,
}  # fmt: skip
PROBLEMS = {
    "shared keys": make_problem((65,), (2, 4), kind="moderate"),
    "mixed": make_problem((130, 130), (2, 2), kind="mixed"),
    "packed": make_problem((70, 0, 1, 65), (2, 2), packed=True, strength="doubled"),
}
ROUNDINGS = 2.5e-3  # between a call with segments and one without, whose sums of many tokens cancel
# Sequences of up to four segments, of one, and of none; what a segment begins with matters to its end.
CUT = {
    "cut, dense": make_problem((140, 140), (1, 1), kind="near_zero", v_first=True, final=None),
    "cut, packed": make_problem(
        (70, 0, 1, 200), (2, 2), kind="near_zero", packed=True, strength="doubled"
    ),
}
# With a card that has a CTA for every item, and with one that has few.
MULTIPROCESSORS = {"cut, dense": 132, "cut, packed": 3}
ALL = PROBLEMS | CUT


def called(problem: Problem) -> BackwardCall:
    """Returns the call of a problem, with small gradients."""
    generator = torch.Generator().manual_seed(1)
    x, count = problem.given, len(problem.lengths)
    do = 1e-5 * torch.randn(x["v"].shape, generator=generator)
    dht = 3e-5 * torch.randn(count, x["v"].shape[2], HEAD_DIM, HEAD_DIM, generator=generator)
    cu_seqlens = problem.cu_seqlens(torch.int64) if problem.packed else None
    return BackwardCall(
        **x, initial_state=problem.initial[:count].contiguous(),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.int(), cu_seqlens_cpu=cu_seqlens, do=do.to(x["v"].dtype),
        dht=dht if problem.final else None, bounded=problem.bounded, state_v_first=problem.v_first,
        operand=problem.operand, **problem.options,
    )  # fmt: skip


@cache
def expected(name: str) -> Gradients:
    """Returns the gradients in fp64."""
    call = called(ALL[name])
    options = {
        n: getattr(call, n)
        for n in (
            "scale",
            "gate",
            "lower_bound",
            "l2norm",
            "beta_sigmoid",
            "neg_eigval",
            "state_v_first",
        )
    }
    with one_thread():
        return chunk_kda_backward(*call[:9], call.do, call.dht, **options, dtype=torch.float64)


def run(
    problem: Problem,
    emulated,
    multiprocessors: int = 3,
    segment_tokens: int = 0,
    kept: dict[str, Tensor] | None = None,
    dht: Tensor | None = None,
    **options,
) -> Gradients:
    """Runs the kernels as they run on a GPU. dht: other gradients of final states."""
    call = called(problem)._replace(segment_tokens=segment_tokens, **kept or {})
    ready = prepared(call if dht is None else call._replace(dht=dht))
    found = Gradients(*(emulated.empty(x.shape, x.dtype) for x in ready[:8]))

    def kernels(config):
        return partial(emulated_kernel(emulated, launch.unit(config, "sm_90a")))

    options = {"kernels": kernels, **options}
    launch.run(ready, found, multiprocessors=multiprocessors, **options)
    return found


def kept_by_the_forward(problem: Problem, emulated, segment_chunks: int) -> dict[str, Tensor]:
    """Runs a forward pass on blocks for a backward pass, and returns these and the factors of tokens."""
    batch, tokens, heads = problem.given["v"].shape[:3]
    slots = chunk_slots(batch, tokens, len(problem.lengths) if problem.packed else None)
    factors = emulated.empty((slots, heads, 4, CHUNK), torch.float32)
    forward = Run(TARGET, problem, emulated.empty, segment_chunks=segment_chunks, multiprocessors=3)
    with poisoned_memory():
        blocks = forward.launch(compiler(emulated, TARGET, "sm_90a"), factors)
    assert_outputs(problem, forward.outcome())
    return {"blocks": blocks, "factors": factors}


def split(problem: Problem, name: str, x: Tensor) -> list[Tensor]:
    """Returns a gradient by value heads."""
    heads = problem.given["v"].shape[2]
    if name in ("dq", "dk"):
        return list(x.unbind(2))
    if name in ("dA_log", "ddt_bias"):
        return list(x.view(heads, -1))
    return list(x.unbind(1 if name == "dh0" else 2))


def assert_right(found: Gradients, name: str) -> None:
    """Holds the worst head of every gradient against the oracle."""
    problem, exact = ALL[name], expected(name)
    for which, bound in BOUNDS.items():
        pairs = (split(problem, which, getattr(side, which)) for side in (found, exact))
        for head, (own, right) in enumerate(zip(*pairs)):
            error = relative_rmse(own, right)
            assert error <= bound, f"{which} of head {head}: {error:.1e}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients(emulated, name):
    """Of every input, worst head."""
    assert_right(run(PROBLEMS[name], emulated), name)


@pytest.mark.parametrize("name, segment_chunks", [("mixed", 0), ("packed", 0), ("cut, packed", 1)])
def test_what_the_forward_keeps(emulated, name, segment_chunks):
    """Outputs and final states are right, and gradients have the same bits as without what was kept; also where heads
    are done one after the other."""
    problem, cut = ALL[name], CHUNK * segment_chunks
    kept = kept_by_the_forward(problem, emulated, segment_chunks)
    found = run(problem, emulated, segment_tokens=cut, kept=kept)
    again = run(problem, emulated, segment_tokens=cut)
    assert all(map(same, found, again))
    in_groups = run(problem, emulated, segment_tokens=cut, kept=kept, scratch=0)
    for which in BOUNDS:
        pair = getattr(found, which), getattr(in_groups, which)
        # Sums of parameters' parts are torch's, whose order on a CPU depends on the number of heads.
        assert relative_rmse(*pair) <= 1e-6 if which in ("dA_log", "ddt_bias") else same(*pair), (
            which
        )


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize(
    "name, segment_chunks, scratch",
    [("packed", 0, None), ("packed", 0, 0), ("cut, packed", 1, None)],
)
def test_in_two_steps(emulated, monkeypatch, name, segment_chunks, scratch):
    """What stands in front of sequences comes first, by the gradients behind them that are known then; everything else
    follows by others, much larger ones, with the bits of a call that is given those. With little scratch heads are done
    one after the other, and nothing is kept in between."""
    problem, cut = ALL[name], CHUNK * segment_chunks
    call = called(problem)._replace(segment_tokens=cut)
    assert call.dht is not None
    early, late = 0.5 * call.dht, 1e4 * call.dht
    kept = []

    def kernels(config):
        kept.extend([config] if isinstance(config, PeaksConfig) else [])
        return partial(emulated_kernel(emulated, launch.unit(config, "sm_90a")))

    for way in (launch.run, launch.run_front):
        own = partial(way, multiprocessors=3, kernels=kernels, scratch=scratch)
        monkeypatch.setattr(launch, way.__name__, own)
    with poisoned_memory():
        begun = ops._backward.begin(call._replace(dht=None))
        front = begun.front(early)
        assert not kept
        found = begun.finish(late)
    assert len(kept) == (scratch is None)
    with poisoned_memory():
        beforehand = ops._backward.begin(call._replace(dht=None))
        beforehand.prepare()
        assert all(map(same, beforehand.finish(late), found))
    assert len(kept) == 2 * (scratch is None)
    assert same(front, run(problem, emulated, dht=early, segment_tokens=cut).dh0)
    right = run(problem, emulated, dht=late, segment_tokens=cut)
    for which, own, other in zip(BOUNDS, found, right, strict=True):
        if which in ("dA_log", "ddt_bias") and scratch == 0:  # as in test_what_the_forward_keeps
            assert relative_rmse(own, other) <= 1e-6
        else:
            assert same(own, other.to(own.dtype).view(own.shape)), which
    # Without a first step it is an ordinary call.
    whole = ops._backward.begin(call._replace(dht=None)).finish(late)
    assert all(map(same, whole, found))


@pytest.mark.parametrize("name", CUT)
def test_gradients_of_segments(emulated, name):
    """Of every input, worst head. What sequences of several segments get is that of whole ones but for roundings, and
    others get the same bits."""
    problem, count = CUT[name], MULTIPROCESSORS[name]
    cut, whole = (run(problem, emulated, count, segment_tokens=n) for n in (CHUNK, 0))
    assert_right(cut, name)
    for which in BOUNDS:
        error = relative_rmse(*(getattr(side, which) for side in (cut, whole)))
        assert 0 < error <= ROUNDINGS, f"{which}: {error:.1e}"
    for n in (n for n, length in enumerate(problem.lengths) if length <= CHUNK):
        for which in ("dq", "dk", "dv", "dg", "dbeta"):
            pair = (problem.tokens(getattr(side, which), n) for side in (cut, whole))
            assert same(*pair), f"{which} of sequence {n}"
        assert same(cut.dh0[n], whole.dh0[n])


@pytest.mark.emulated(schedules="immediate")
def test_a_negative_strength_is_not_taken_for_another(emulated):
    """On a GPU nobody reads it back: gradients of its sequence and head are no numbers, and others are as before."""
    problem = make_problem((65, 70), (2, 2), packed=True)
    calm = run(problem, emulated)
    problem.given["beta"][0, 64, 1] = -0.5
    found = run(problem, emulated)
    for name in ("dq", "dk", "dv", "dg"):
        own, before = getattr(found, name), getattr(calm, name)
        assert own[0, :65, 1].isnan().any(), name
        assert same(own[0, :65, 0], before[0, :65, 0]) and same(own[0, 65:], before[0, 65:]), name


def test_groups_of_heads(emulated):
    """Heads that are done one after the other have the same bits."""
    for problem in (PROBLEMS["packed"], PROBLEMS["shared keys"]):
        together, apart = run(problem, emulated), run(problem, emulated, scratch=0)
        for name, one, other in zip(Gradients._fields, together, apart):
            assert same(one, other), name


def test_how_many_heads_at_once():
    """Groups are as few as the scratch allows, and equal; unless it was chosen, of 32 heads at least or as many as
    12 GiB hold, and no fewer than 16."""
    assert heads_at_once(256, 64, 1 << 40) == 64
    assert heads_at_once(256, 64, scratch_bytes(256, 63)) == 32
    assert heads_at_once(256, 64, scratch_bytes(256, 9)) == 8
    assert heads_at_once(256, 64, 0) == 1
    assert heads_at_once(256, 48, scratch_bytes(256, 14), multiple=3) == 12
    assert heads_at_once(256, 64, 0, multiple=64) == 64
    assert scratch_bytes(256, 64) < 3 << 30 < scratch_bytes(512, 64)
    assert scratch_bytes(2500, 32) < 12 << 30 < scratch_bytes(2600, 32)
    assert [heads_at_once(slots, 64) for slots in (256, 512, 2500, 4096)] == [64, 32, 32, 16]
    assert heads_at_once(4096, 40) == 14
    assert heads_at_once(4096, 8) == 8
    assert heads_at_once(4096, 48, multiple=3) == 18
    assert [heads_at_once(slots, 64, groups=2) for slots in (64, 256, 512, 4096)] == [32] * 3 + [16]
    assert heads_at_once(64, 96, multiple=32, groups=2) == 64
    assert heads_at_once(64, 64, multiple=64, groups=2) == 64
    assert heads_at_once(64, 64, 1 << 40, groups=2) == 64


@pytest.mark.parametrize("tokens, groups", [(4096, [64]), (16_384, [64]), (32_768, [32, 32])])
def test_groups_by_default(monkeypatch, tokens, groups):
    """Nothing but memory divides heads."""
    monkeypatch.delenv("CULA_SCRATCH_LIMIT", raising=False)
    heads = []

    def kernels(config):
        first = isinstance(config, PrepareConfig)
        return lambda q, k, g, *rest: heads.append(g.shape[2]) if first else None

    def wide() -> Tensor:
        return torch.empty(1, tokens, 64, HEAD_DIM, device="meta")

    call = called(PROBLEMS["mixed"])._replace(
        q=wide(), k=wide(), v=wide(), g=wide(), do=wide(), beta=wide()[..., 0], A_log=None, dt_bias=None,
        initial_state=None, dht=None,
    )  # fmt: skip
    found = Gradients(*map(torch.empty_like, call[:5]), None, None, None)
    launch.run(call, found, multiprocessors=132, kernels=kernels)
    assert heads == groups


# ---- which waits matter ----------------------------------------------------------------------------------------------

# What goes unnoticed of a walk, and why: the emulator keeps memory longer than its CTA, so nobody need wait for the
# last rows, which are a group of copies of their own. Forward, the fence behind the first state comes before T' is
# read, so that zeros in it need none. Back, one wait is for two groups of products.
UNNOTICED = {
    back: Counter({"cp.async.bulk.commit_group": 1, "cp.async.bulk.wait_group 0": 1, other: 1})
    for back, other in (
        (False, "fence.proxy.async.shared::cta"),
        (True, "wgmma.commit_group.sync.aligned"),
    )
}

UNNOTICED_OF_SCAN = {False: Counter(), True: Counter({"wgmma.commit_group.sync.aligned": 1})}


@pytest.fixture
def mutate(emulated) -> Callable[..., mutation.Report]:
    """mutate(problem, back, scan, **options) skips waits of one kernel of a call, one by one; all work is one CTA's.
    front: of a call for initial states alone."""

    def make(
        problem: Problem, back: bool, scan: bool, front: bool = False, **options
    ) -> mutation.Report:
        found = []

        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config, "sm_90a"))
            wanted = isinstance(config, WalkConfig) and (config.back, config.scan) == (back, scan)
            if not wanted:
                return partial(kernel)
            found.append(Repeated(kernel))
            return found[-1]

        with poisoned_memory():
            if front:
                ready = prepared(called(problem))
                dh0 = emulated.empty(ready.initial_state.shape, torch.float32)
                launch.run_front(ready, dh0, multiprocessors=1, kernels=kernels)
            else:
                run(problem, emulated, 1, kernels=kernels, **options)
        (walk,) = found
        report = mutation.run(walk.check, walk, schedules=mutation.SCHEDULES[:3])
        assert not report.not_reached, str(report)
        return report

    return make


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("back", UNNOTICED)
def test_every_wait_of_a_walk_matters(mutate, back):
    """One CTA with more items and chunks than there are slots for; those without a chunk come last."""
    problem = make_problem((130, 0, 70, 1, 0), (1, 1), packed=True, strength="doubled")
    report = mutate(problem, back, scan=False)
    assert mutation.opcodes(report.unnoticed) == UNNOTICED[back], str(report)


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_a_walk_that_keeps_nothing_matters(mutate):
    problem = make_problem((130, 0, 70, 1, 0), (1, 1), packed=True, strength="doubled")
    report = mutate(problem, back=True, scan=False, front=True)
    assert mutation.opcodes(report.unnoticed) == UNNOTICED_OF_SCAN[True], str(report)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("back", UNNOTICED)
def test_every_wait_of_a_scan_matters(mutate, back):
    """More segments of one chunk than there are slots for."""
    problem = make_problem((300, 1), (1, 1), kind="near_zero", packed=True, strength="doubled")
    report = mutate(problem, back, scan=True, segment_tokens=CHUNK)
    assert mutation.opcodes(report.unnoticed) == UNNOTICED_OF_SCAN[back], str(report)
