"""The compiled kernel on the CPU, under every schedule, with race detection."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cula_testing.compiled import emulated_kernel
from cula_testing.lite import DENSE, LISTED, Call, Inputs, Subject, make_inputs
from liteattention_sm89 import launch as host
from liteattention_sm89 import masks, reference
from liteattention_sm90 import launch
from liteattention_sm90.config import CLASSES, NUMBERS, OrderConfig

SUBJECT = Subject(launch.forward, reference.lite_attention)
# The kernels of the host package, whose lists are read and written by these.
HOST = Subject(host.forward, reference.lite_attention)
SERVED = [c for c in DENSE + LISTED if c.dim <= 128]


@pytest.fixture
def run(emulated):
    def run(call: Call, x: Inputs, **options):
        def kernels(config):
            return emulated_kernel(emulated, launch.unit(config))

        out, lse, write = SUBJECT.forward(
            call, x, emulated.empty, kernels=kernels, **{"multiprocessors": 1, **options}
        )
        return out, lse if call.lengths is None else lse[0], write

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


@pytest.mark.parametrize("call", [c for c in SERVED if c.listed is not None][::3], ids=str)
def test_numbers_where_long_lists_come_first(run, call):
    x = make_inputs(call)
    SUBJECT.assert_right(call, x, *run(call, x, multiprocessors=3, ordered_from=1))


BETWEEN = Call(dim=64, lengths=((100, 170), (130, 200), (70, 65)), heads=2)
LISTS = replace(BETWEEN, listed=0.8, threshold=-1.0)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("call", [
    BETWEEN,
    replace(BETWEEN, causal=True, dim=96, index_dtype="int64"),
    LISTS,
    replace(LISTS, causal=True, direction=-1, dim=128, dtype="float16", block_n=128),
], ids=str)  # fmt: skip
def test_sequences_do_not_meet(run, call):
    """NaN in all of one reaches no other, and nothing is written behind the last one."""
    x = make_inputs(call)
    want = run(call, x)
    rows, keys = (slice(*starts[1:3].tolist()) for starts in (x.starts_q, x.starts_k))
    q, k, v = (t.clone() for t in (x.q, x.k, x.v))
    q[:, rows], k[:, keys], v[:, keys] = math.nan, math.nan, math.nan
    # The last sequence is none any more, but for its tokens.
    q[:, rows.stop :], k[:, keys.stop :], v[:, keys.stop :] = math.nan, math.nan, math.nan
    read = None if x.read is None else x.read[:-1]
    starts = {"starts_q": x.starts_q[:-1], "starts_k": x.starts_k[:-1]}
    out, lse, write = run(call, replace(x, q=q, k=k, v=v, read=read, **starts))
    assert torch.equal(out[:, : rows.start], want[0][:, : rows.start])
    assert torch.equal(lse[:, : rows.start], want[1][:, : rows.start])
    assert out[:, rows.stop :].isnan().all() and lse[:, rows.stop :].isnan().all()
    assert write is None or torch.equal(write[0], want[2][0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_n", [64, 128])
def test_order(emulated, causal, block_n):
    """Classes one after the other, and within each query tiles as they are drawn without an order."""
    rows, keys, heads, batch = 1100, 4500, 130, 2
    shape = batch, heads, -(-rows // 128), -(-keys // block_n)
    generator = torch.Generator().manual_seed(0)
    bits = (
        torch.rand(shape, generator=generator)
        < torch.rand((*shape[:3], 1), generator=generator) ** 6
    )
    seen = torch.tensor(True)
    if causal:  # what a query tile does not see does not count
        last = (torch.arange(shape[2]) * 128 + 127).clamp(max=rows - 1) + keys - rows
        seen = torch.arange(shape[3]) * block_n <= last[:, None]
    lengths = (bits & seen).sum(-1)
    if causal:
        lengths = lengths.flip(2)  # the last query tiles of a head come first
    total = lengths.numel()
    work = torch.zeros(NUMBERS + total + CLASSES * -(-total // 32), dtype=torch.int32)
    kernel = emulated_kernel(emulated, launch.unit(OrderConfig(causal, block_n)))
    kernel(masks.pack(bits), work, None, None, rows, keys, 1)
    classes = sum((8 * lengths.flatten() * 4**c < 3 * shape[3]).int() for c in range(CLASSES - 1))
    assert classes.unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(work[NUMBERS:][:total].long(), classes.argsort(stable=True))


@pytest.mark.parametrize("causal", [False, True])
def test_order_of_packed_sequences(emulated, causal):
    """What lies behind the end of a sequence counts as an empty list."""
    lengths = torch.tensor([(1100, 4500), (0, 40), (129, 600), (400, 0), (1280, 6000)])
    starts = [F.pad(column.cumsum(0), (1, 0)).int() for column in lengths.T]
    heads, block_n, (rows, keys) = 40, 64, lengths.amax(0).tolist()
    shape = len(lengths), heads, -(-rows // 128), -(-keys // block_n)
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand((*shape[:3], 1), generator=generator) ** 6
    bits = torch.rand(shape, generator=generator) < shares
    own, behind = (lengths[:, i, None] for i in range(2))
    first = torch.arange(shape[2]) * 128
    reach = behind.expand(-1, shape[2])
    if causal:
        reach = ((first + 128).minimum(own) + behind - own).clamp(min=0)
    reach = reach.where(first < own, 0)
    seen = torch.arange(shape[3]) * block_n < reach[..., None]
    counts = (bits & seen[:, None]).sum(-1)
    if causal:
        counts = counts.flip(2)
    total = counts.numel()
    work = torch.zeros(NUMBERS + total + CLASSES * -(-total // 32), dtype=torch.int32)
    kernel = emulated_kernel(emulated, launch.unit(OrderConfig(causal, block_n, packed="int32")))
    kernel(masks.pack(bits), work, *starts, rows, keys, 1)
    classes = sum((8 * counts.flatten() * 4**c < 3 * shape[3]).int() for c in range(CLASSES - 1))
    assert classes.unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(work[NUMBERS:][:total].long(), classes.argsort(stable=True))


@pytest.mark.parametrize("block_n", [64, 128])
def test_order_of_keys(emulated, block_n):
    """As of query tiles, by those of all heads of a group that list any of 128 keys."""
    rows, keys, heads, batch, group = 4500, 1100, 12, 2, 3
    tiles = -(-keys // block_n)
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand((batch, heads // group, 1, tiles, 1), generator=generator) ** 6
    bits = torch.rand((batch, heads // group, group, tiles, 36), generator=generator) < shares
    pairs = (
        bits
        if block_n == 128
        else nn.functional.pad(bits, (0, 0, 0, tiles % 2)).unflatten(3, (-1, 2)).any(4)
    )
    lengths = pairs.sum((2, 4)).flatten()
    total = lengths.numel()
    work = torch.zeros(NUMBERS + total + CLASSES * -(-total // 32), dtype=torch.int32)
    kernel = emulated_kernel(emulated, launch.unit(OrderConfig(False, block_n, True)))
    kernel(masks.pack(bits.flatten(1, 2)), work, None, None, rows, keys, group)
    classes = sum((8 * lengths * 4**c < 3 * 36 * group).int() for c in range(CLASSES - 1))
    assert classes.unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(work[NUMBERS:][:total].long(), classes.argsort(stable=True))


@pytest.mark.parametrize("listed", [None, 1.0])
def test_origins_of_one_warp_move(run, listed):
    """Products, and waits for them, are for all warps of a warpgroup alike; what moves origins is not."""
    call = Call(128, 600, dim=64, heads=1, listed=listed, threshold=-2.0)
    x = make_inputs(call)
    q, k = torch.zeros_like(x.q), torch.ones_like(x.k)
    q[:, 16:32] = 1.0  # the rows of one warp; those of others have scores of zero
    k *= (torch.arange(call.keys) // 128 + 1)[:, None, None]
    if listed is None:  # keys are visited from the last one on
        k = k.flip(1)
    x = replace(x, q=q, k=k)
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
