"""Whole backward passes of the gated delta rule in the emulator, against the oracle in fp64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule.backward.config import PeaksConfig
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_core.reference.kda_backward import chunk_kda_backward
from cula_emulator import mutation, resources
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90.gated.backward import launch, ops, plan
from cula_lightning_sm90.gated.backward.call import BackwardCall, Gradients
from cula_lightning_sm90.gated.backward.config import (
    ChunkConfig,
    GradientsConfig,
    PrepareConfig,
)
from cula_lightning_sm90.gated.backward.kernels.prepare import BLOCKS_PER_MP
from cula_testing.comparing import relative_rmse, same
from cula_testing.compiled import assert_closed, emulated_kernel, report
from cula_testing.machine_code import assert_ctas_fit, label
from cula_testing.repeating import Repeated
from cula_testing.tensors import one_thread

# Of results in 16 bits, which round by 1.7e-3, and of initial states; of numbers of tokens, among which the largest may
# stand alone and round by 3.9e-3 in 16 bits.
BOUNDS = {"dq": 2e-3, "dk": 2e-3, "dv": 2e-3, "dh0": 1e-3}
OF_NUMBERS = {torch.bfloat16: 4e-3, torch.float32: 1e-3}


@dataclass(frozen=True)
class Problem:
    """lengths: of the rows of a dense batch, or of packed sequences. heads: of keys and of values. kind: of decays."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    kind: str
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.float32
    states: bool = True
    v_first: bool = False
    l2norm: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    operand: str = "float16"


PROBLEMS = {
    "mixed": Problem((130, 130), (1, 1), "mixed", beta_sigmoid=True),
    "resets": Problem((64,), (2, 2), "resets", states=False, l2norm=False, dtype=torch.float16),
    "packed": Problem(
        (70, 0, 1, 65), (1, 2), "moderate", packed=True, v_first=True, gate_dtype=torch.bfloat16, beta_sigmoid=True,
        neg_eigval=True,
    ),
}  # fmt: skip


def called(problem: Problem) -> BackwardCall:
    """Returns the call of a problem, with gradients as small as their dtype allows."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch, tokens = (
        (1, sum(problem.lengths)) if problem.packed else (len(problem.lengths), problem.lengths[0])
    )
    heads_k, heads = problem.heads
    size = 1.0 if problem.l2norm else HEAD_DIM**-0.5
    small = 1e-5 if problem.dtype == torch.bfloat16 else 0.1
    q, k = (size * random(batch, tokens, heads_k, HEAD_DIM) for _ in range(2))
    v, do = (random(batch, tokens, heads, HEAD_DIM) for _ in range(2))
    u = torch.rand(batch, tokens, heads, generator=generator)
    g = {
        "mixed": torch.where(u < 0.5, -4.95, -1e-4), "moderate": -0.2 * u,
        "resets": torch.where(u < 0.1, -1e4, -0.1 * u), "weak": -1e-4 * u,
    }[problem.kind]  # fmt: skip
    beta = random(batch, tokens, heads)
    count = len(problem.lengths)
    initial, dht = (random(count, heads, HEAD_DIM, HEAD_DIM) for _ in range(2))
    cu_seqlens = None
    if problem.packed:
        starts = torch.tensor((0, *problem.lengths)).cumsum(0)
        cu_seqlens = starts.int()
    return BackwardCall(
        *(x.to(problem.dtype) for x in (q, k, v)), g.to(problem.gate_dtype),
        (beta if problem.beta_sigmoid else beta.sigmoid()).to(problem.gate_dtype),
        initial if problem.states else None, cu_seqlens, (small * do).to(problem.dtype),
        3 * small * dht if problem.states else None, scale=0.2, l2norm=problem.l2norm,
        beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval, state_v_first=problem.v_first,
        operand=problem.operand,
    )  # fmt: skip


def expected(call: BackwardCall) -> Gradients:
    """Returns the gradients in fp64, of KDA with the same decay in all channels."""
    wide = call.g.double()[..., None].expand(-1, -1, -1, HEAD_DIM)
    with one_thread():
        found = chunk_kda_backward(
            call.q, call.k, call.v, wide, call.beta, None, None, call.initial_state, call.cu_seqlens, call.do, call.dht,
            scale=call.scale, gate="log", lower_bound=0.0, l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid,
            neg_eigval=call.neg_eigval, state_v_first=call.state_v_first, dtype=torch.float64,
        )  # fmt: skip
    return Gradients(found.dq, found.dk, found.dv, found.dg.sum(-1), found.dbeta, found.dh0)


def run(call: BackwardCall, emulated, multiprocessors: int = 3, **options) -> Gradients:
    """Runs the kernels as they run on a GPU."""
    found = Gradients(
        *(emulated.empty(x.shape, x.dtype) for x in call[:5]),
        None
        if call.initial_state is None
        else emulated.empty(call.initial_state.shape, torch.float32),
    )

    def kernels(config):
        return partial(emulated_kernel(emulated, launch.unit(config)))

    options = {"kernels": kernels, **options}
    launch.run(call, found, multiprocessors=multiprocessors, **options)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients(emulated, name):
    """Of every input, worst head."""
    call = called(PROBLEMS[name])
    assert_right(run(call, emulated), call)


@pytest.mark.emulated(schedules="immediate")
def test_gradients_of_segments(emulated):
    """Sequences of four segments, of two, of one and of none; what a segment begins with matters to its end."""
    problem = replace(PROBLEMS["packed"], lengths=(70, 0, 1, 200), kind="weak", v_first=False)
    call = called(problem)._replace(segment_tokens=CHUNK)
    cut, whole = run(call, emulated), run(call._replace(segment_tokens=0), emulated)
    assert_right(cut, call)
    assert not same(cut.dv, whole.dv)


def assert_right(found: Gradients, call: BackwardCall) -> None:
    """Holds the worst head of every gradient against the oracle."""
    exact = expected(call)
    of_numbers = OF_NUMBERS[call.g.dtype]
    for which, bound in {**BOUNDS, "dg": of_numbers, "dbeta": of_numbers}.items():
        if getattr(found, which) is not None:
            sides = (
                getattr(side, which).unbind(1 if which == "dh0" else 2) for side in (found, exact)
            )
            for head, (own, right) in enumerate(zip(*sides)):
                error = relative_rmse(own, right)
                assert error <= bound, f"{which} of head {head}: {error:.1e}"


@pytest.mark.emulated(schedules="immediate")
def test_neighbours_that_are_broken(emulated):
    """Whatever another sequence holds, the first one has the same bits."""
    call, length = called(PROBLEMS["packed"]), PROBLEMS["packed"].lengths[0]
    before = run(call, emulated)
    for x in (call.q, call.k, call.v, call.g, call.beta, call.do):
        x[:, length:] = float("nan")
    after = run(call, emulated)
    for one, other in zip(before[:5], after[:5]):
        assert same(one[:, :length], other[:, :length])
    assert same(before.dh0[0], after.dh0[0])


@pytest.mark.emulated(schedules="immediate")
def test_groups_of_heads(emulated, monkeypatch):
    """Heads that are done one after the other have the same bits, by a limit of memory and without one."""
    call = called(PROBLEMS["resets"])
    assert heads_of_groups(call, multiprocessors=3) == [2]
    together, limited = run(call, emulated), run(call, emulated, scratch=0)
    monkeypatch.setattr(plan, "LEAST", 1)
    assert heads_of_groups(call, multiprocessors=3) == [1, 1]
    for one, *others in zip(together, limited, run(call, emulated)):
        assert one is None or all(same(one, other) for other in others)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("segment_tokens, scratch", [(0, None), (0, 0), (CHUNK, None)])
def test_in_two_steps(emulated, monkeypatch, segment_tokens, scratch):
    """What stands in front of sequences comes first, by the gradients behind them that are known then; everything else
    follows by others, much larger ones, with the bits of a call that is given those. With little scratch heads are done
    one after the other, and nothing is kept in between; else chunks are prepared once."""
    call = called(replace(PROBLEMS["packed"], heads=(2, 2), v_first=False))._replace(
        segment_tokens=segment_tokens
    )
    assert call.dht is not None
    early, late = 0.5 * call.dht, 1e4 * call.dht
    peaks = []

    def kernels(config):
        peaks.extend([config] if isinstance(config, PeaksConfig) else [])
        return partial(emulated_kernel(emulated, launch.unit(config)))

    for way in (launch.run, launch.run_front):
        own = partial(way, multiprocessors=3, kernels=kernels, scratch=scratch)
        monkeypatch.setattr(launch, way.__name__, own)
    with poisoned_memory():
        begun, beforehand = (ops._backward.begin(call._replace(dht=None)) for _ in range(2))
        front, found = begun.front(early), begun.finish(late)
        beforehand.prepare()
        again = beforehand.finish(late)
    assert len(peaks) == 2 * (scratch is None)
    monkeypatch.undo()
    assert same(front, run(call._replace(dht=early), emulated).dh0)
    right = run(call._replace(dht=late), emulated)
    for own, other, once in zip(found, right, again, strict=True):
        assert same(own, other) and same(own, once)


def heads_of_groups(call: BackwardCall, multiprocessors: int) -> list[int]:
    """Returns how many value heads the first kernel gets in each of its launches, without any kernel."""
    heads: list[int] = []

    def kernels(config):
        first = isinstance(config, PrepareConfig)
        return lambda q, k, g, beta, *rest: heads.append(beta.shape[2]) if first else None

    found = Gradients(*map(torch.empty_like, call[:5]), None)
    launch.run(call, found, multiprocessors=multiprocessors, kernels=kernels)
    return heads


@pytest.mark.parametrize(
    "batch, tokens, heads, sequences, groups",
    [
        (1, 4096, (64, 64), None, [32, 32]),
        (1, 16_384, (64, 64), None, [32, 32]),
        (1, 4032, (64, 64), None, [64]),  # small
        (1, 16_384, (32, 32), None, [32]),  # walks of 16 heads leave half of the card idle
        (1, 16_384, (16, 32), None, [32]),
        (1, 32_768, (16, 16), None, [16]),
        (2, 8192, (32, 32), None, [16, 16]),
        (2, 8192, (16, 32), None, [16, 16]),
        (1, 8192, (2, 64), None, [32, 32]),
        (1, 8192, (1, 64), None, [64]),  # all have the same head of q and k
        (1, 8192, (3, 96), None, [64, 32]),
        (1, 8192, (64, 64), 10, [64]),  # packed
        (1, 65_536, (64, 64), None, [32] * 2),  # more than three GiB
        (1, 262_144, (64, 64), None, [16] * 4),  # more than twelve
    ],
)
def test_groups_by_default(monkeypatch, batch, tokens, heads, sequences, groups):
    """On a card of 132 multiprocessors. A limit that a user sets comes first."""
    monkeypatch.delenv("CULA_SCRATCH_LIMIT", raising=False)

    def empty(of: int, *inner: int) -> Tensor:
        return torch.empty(batch, tokens, of, *inner, device="meta")

    q, k, v, do = (empty(of, HEAD_DIM) for of in (*heads[:1] * 2, *heads[1:] * 2))
    cu_seqlens = None if sequences is None else torch.zeros(sequences + 1, dtype=torch.int32)
    call = called(PROBLEMS["resets"])._replace(
        q=q, k=k, v=v, do=do, g=empty(heads[1]), beta=empty(heads[1]), cu_seqlens=cu_seqlens
    )
    assert heads_of_groups(call, 132) == groups
    monkeypatch.setenv("CULA_SCRATCH_LIMIT", str(1 << 40))
    assert heads_of_groups(call, 132) == [heads[1]]


def test_other_cards_are_full_of_fewer_heads():
    shape = {"batch": 1, "tokens": 16_384, "packed": False}
    least = {
        count: next(
            heads
            for heads in range(2, 257, 2)
            if plan.groups(heads_k=heads, heads=heads, multiprocessors=count, **shape) == 2
        )
        for count in (78, 114, 132)
    }
    assert least == {78: 38, 114: 56, 132: 64}


def chunk_facts(config: ChunkConfig) -> tuple:
    """Returns what a kernel of chunks has of products and waits in its code."""
    if isinstance(config, PrepareConfig):
        return 0, 0
    # Both groups: do z^T or y z^T, and Aqk or M. The first: S and dA; the second: S, D, dM, and both turned. Each waits
    # once for the former, the first twice for the latter and the second three times.
    return 16 + (8 + 4) + (8 + 8 + 4 + 4 + 4), 1 + 2 + 3


OTHER = {"operand": "bfloat16", "l2norm": False, "neg_eigval": True, "index_dtype": "int64"}
CONFIGS = [
    PrepareConfig("bfloat16", "float32", "bfloat16", beta_sigmoid=True),
    PrepareConfig("bfloat16", "bfloat16", "float32", **OTHER),
    GradientsConfig("bfloat16", "float32", "bfloat16", beta_sigmoid=True),
    GradientsConfig("float16", "float32", "float32", grouped=True, index_dtype="int32"),
    GradientsConfig("bfloat16", "bfloat16", "float32", **OTHER),
]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_machine_code(config):
    """Nothing is spilled, products are not serialized, and each of them is there once."""
    kernel = report(launch.unit(config)).kernel
    walked = isinstance(config, GradientsConfig)
    wanted = (
        ("HGMMA", "UTMALDG", "UBLKCP", "STSM", "USETMAXREG")
        if walked
        else ("HMMA", "LDSM", "LDGSTS")
    )
    resources.check(kernel, expect=wanted)
    assert not kernel.warnings
    assert (kernel.count("LDL"), kernel.count("STL")) == (0, 0)
    assert (kernel.count("HGMMA"), kernel.count("WARPGROUP.DEPBAR")) == chunk_facts(config)
    assert_ctas_fit(kernel, 1 if walked else BLOCKS_PER_MP)


def test_the_keys_of_kernels_hold_every_source_that_makes_them():
    for config in (CONFIGS[0], CONFIGS[2]):
        assert_closed(launch.unit(config))


# ---- which waits matter ----------------------------------------------------------------------------------------------

# What goes unnoticed of the gradients, and why:
# - Products are waited for together.
# - The emulator asks for no fence between reads of inputs and copies that overwrite these, and takes a later fence of
#   another thread for that of the writer of dA and dM.
# - It lets a warp of a product read no row of the first operand but its own 16, where the results will be.
UNNOTICED = Counter(
    {
        "wgmma.commit_group.sync.aligned": 7,
        "fence.proxy.async.shared::cta": 4,
        "bar.sync 2": 1,
    }
)


@pytest.fixture
def mutate(emulated) -> Callable[..., mutation.Report]:
    """mutate(problem, kind) skips waits of the kernel whose config is of a kind, one by one; all work is one CTA's."""

    def make(problem: Problem, kind: type[ChunkConfig]) -> mutation.Report:
        mutated = []

        def kernels(config):
            kernel = emulated_kernel(emulated, launch.unit(config))
            if not isinstance(config, kind):
                return partial(kernel)
            mutated.append(Repeated(kernel))
            return mutated[-1]

        with poisoned_memory():
            run(called(problem), emulated, 1, kernels=kernels)
        (kernel,) = mutated
        report = mutation.run(kernel.check, kernel, schedules=mutation.SCHEDULES[:3])
        assert not report.not_reached, str(report)
        return report

    return make


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_of_the_chunks_matters(mutate):
    report = mutate(replace(PROBLEMS["mixed"], lengths=(70,)), PrepareConfig)
    assert report.noticed and not report.unnoticed, str(report)


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("name, tokens", [("mixed", 130), ("packed", 70)])
def test_every_wait_of_the_gradients_matters(mutate, name, tokens):
    """Three chunks of one value head, and two chunks of two that share their keys."""
    report = mutate(replace(PROBLEMS[name], lengths=(tokens,)), GradientsConfig)
    assert mutation.opcodes(report.unnoticed) == UNNOTICED, str(report)
