"""Scores of 8-bit integers: the reference, the modules, and the kernels on the CPU under every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lite_int8 import (
    MAX_LSE_ERROR,
    MAX_LSE_ROUNDING_ERROR,
    MAX_OUTPUT_ERROR,
    MAX_ROUNDING_ERROR,
    Results,
    assert_right,
    assert_rounded,
    attention,
    centred,
    double,
    exact_inputs,
    grid_of,
    grids,
    largest,
    launched,
    means_of,
    on_grid,
    per_token,
    shift_of,
    with_offsets,
)
from module_helpers import stand_out
from torch import Tensor

from cula_emulator import mutation
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from cula_testing.lite import Call, Inputs, make_inputs
from liteattention_sm89 import launch, lite_attention, masks, reference
from liteattention_sm89.config import Problem
from liteattention_sm89.module import LiteAttention, SeqParallelLiteAttention, merge


def int8(call: Call, x: Inputs, **changes) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, in the dtype of the inputs."""
    return reference.lite_attention(
        x.q, x.k, x.v, x.read,
        **{
            "threshold": call.threshold, "direction": call.direction, "causal": call.causal, "must_do": x.held,
            "block_n": call.block_n, "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k, "use_int8": True,
        } | changes,
    )  # fmt: skip


def in_double(call: Call) -> Call:
    """The same call in fp64, where no value lies half way between integers."""
    return replace(call, dtype="float64")


# ---- the reference ---------------------------------------------------------------------------------------------------

REFERENCE = [
    Call(150, 200, batch=2, heads=4, heads_k=2, dim=24),
    Call(1, 1, dim=8),
    Call(17, 65, dim=8, causal=True, listed=0.6, threshold=-1.0, direction=-1),
    Call(200, 130, dim=16, causal=True, views=True),
    Call(150, 500, dim=16, listed=0.5, block_n=128, held=True, threshold=-1.0),
    Call(dim=8, lengths=((70, 100), (0, 30), (200, 130), (5, 0), (1, 1))),
    Call(dim=8, lengths=((70, 100), (129, 63), (0, 0)), causal=True, listed=0.7, threshold=-1.0),
]


@pytest.mark.parametrize("call", REFERENCE, ids=str)
def test_the_reference_is_attention_of_rounded_queries_and_keys(call):
    x = with_offsets(make_inputs(in_double(call)), 3.0)
    scale = call.dim**-0.5
    q, k = grids(x)
    expected = attention(call, x, q.values, k.values, scale)
    found = int8(call, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    # Both that are rounded matter, and both sizes of groups.
    for other in ((x.q, k.values), (q.values, centred(x))) if call.keys > 1 else ():
        assert relative_rmse(found[0], attention(call, x, *other, scale)[0]) > 1e-5


def test_the_reference_in_other_dtypes():
    call = Call(150, 200, dim=64, batch=2, causal=True)
    for dtype in ("bfloat16", "float16", "float32"):
        x = with_offsets(make_inputs(replace(call, dtype=dtype)), 3.0)
        out, lse, _ = int8(call, x)
        assert (out.dtype, lse.dtype) == (x.q.dtype, torch.float32)
        q, k = grids(x)
        expected = attention(call, x, q.values, k.values, 1 / 8)
        assert relative_rmse(out, expected[0]) < MAX_OUTPUT_ERROR
        assert largest(lse - expected[1]) < 5e-3


@pytest.mark.parametrize("dim", [64, 128])
def test_what_rounding_costs(dim):
    """Little, and no more where channels of the keys have offsets; if they were not centred first it would be much."""
    call = in_double(Call(300, 1000, dim=dim, batch=2, heads=4))
    for offset in (0.0, 30.0):
        x = with_offsets(make_inputs(call), offset)
        exact = int8(call, x, use_int8=False)
        out, lse, _ = int8(call, x)
        assert relative_rmse(out, exact[0]) < MAX_ROUNDING_ERROR
        assert largest(lse - exact[1]) < MAX_LSE_ROUNDING_ERROR
    as_they_are = (on_grid(t, group).values for t, group in ((x.q, 16), (x.k, 64)))
    naive = reference.lite_attention(*as_they_are, x.v)
    assert relative_rmse(naive[0], exact[0]) > 5 * MAX_ROUNDING_ERROR


EXACT = Call(150, 256, dim=64, heads=4, heads_k=2, listed=0.7, threshold=-4.0)


@pytest.mark.parametrize("call", [
    EXACT, replace(EXACT, causal=True, direction=-1, block_n=128, batch=2), replace(EXACT, listed=None, dim=24),
], ids=str)  # fmt: skip
def test_integers_are_not_rounded(call):
    """Then nothing differs from attention, lse included: what the mean of the keys adds is there."""
    x = exact_inputs(in_double(call))
    assert largest(shift_of(x, 1e-4)) > 1
    found, expected = (int8(call, x, use_int8=flag, scale=1e-4) for flag in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("skipping", [False, True])
def test_parts_of_the_keys_merge(skipping):
    """Every part has a mean of its own, which its lse includes."""
    call = in_double(Call(150, 256, dim=64, heads=4, heads_k=2))
    x = exact_inputs(call)
    apart = torch.randint(-30, 31, (1, 1, 2, 64))
    apart[..., 0] = 0
    halves = [side * apart + half for side, half in zip((1, -1), x.k.split(128, 1))]
    x = replace(x, k=torch.cat(halves, 1))
    parts = SeqParallelLiteAttention(2, skipping, -math.inf, use_int8=True)
    found = [
        parts(x.q, k, v, i, scale=1e-4, return_softmax_lse=True)
        for i, (k, v) in enumerate(zip(halves, x.v.split(128, 1)))
    ]
    out, lse = merge(*zip(*found))
    whole = int8(call, x, scale=1e-4)
    exact = int8(call, x, scale=1e-4, use_int8=False)
    for one, other, wanted in zip((out, lse), whole, exact):
        torch.testing.assert_close(other, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-9)
    # What would come out if the means were forgotten.
    lses = [lse - shift_of(replace(x, k=k), 1e-4) for (_, lse), k in zip(found, halves)]
    assert relative_rmse(merge([o for o, _ in found], lses)[0], exact[0]) > 0.1


def test_parts_of_rounded_keys_merge():
    call = in_double(Call(150, 500, dim=64, heads=2))
    x = with_offsets(make_inputs(call), 5.0)
    x.k[:, 200:] += torch.randn(64)
    exact = int8(call, x, use_int8=False)
    parts = SeqParallelLiteAttention(2, threshold=-math.inf, use_int8=True)
    pieces = (t.split((200, 300), 1) for t in (x.k, x.v))
    found = [parts(x.q, *kv, i, return_softmax_lse=True) for i, kv in enumerate(zip(*pieces))]
    out, lse = merge(*zip(*found))
    assert relative_rmse(out, exact[0]) < MAX_ROUNDING_ERROR
    assert largest(lse - exact[1]) < MAX_LSE_ROUNDING_ERROR


def test_zeros_are_zeros():
    """Blocks without a scale: every key counts the same, and nothing is NaN."""
    call = Call(70, 130, dim=64, dtype="float32")
    x = make_inputs(call)
    mean = x.v.mean(1)[:, None].expand(-1, -1, 2, -1)
    x.q[:, 16:32] = 0
    out, lse, _ = int8(call, x)
    torch.testing.assert_close(out[:, 16:32], mean.expand(-1, 16, -1, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, :, 16:32], torch.full((1, 2, 16), math.log(130)))
    assert relative_rmse(out, int8(call, x, use_int8=False)[0]) < MAX_ROUNDING_ERROR
    x.k[:] = x.k[:, :1] * 1.0
    out, lse, _ = int8(call, x)
    torch.testing.assert_close(out, mean.expand_as(out), rtol=1e-4, atol=1e-4)
    exact = int8(call, x, use_int8=False)[1]
    torch.testing.assert_close(lse, exact, rtol=1e-4, atol=1e-4)
    # Only the keys of one tile are zero where they are centred.
    x.k[:, 64:128] = 0
    x.k[:, :64:2], x.k[:, 1:64:2], x.k[:, 128], x.k[:, 129] = 1.5, -1.5, 2.0, -2.0
    assert not means_of(x).any()
    found, wanted = int8(call, x), int8(call, x, use_int8=False)
    assert relative_rmse(found[0], wanted[0]) < MAX_ROUNDING_ERROR and found[1].isfinite().all()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale):
    call = in_double(Call(70, 130, dim=16, listed=0.8, threshold=-1.0))
    x = with_offsets(make_inputs(call), 2.0)
    found = int8(call, x, scale=scale)
    expected = int8(call, replace(x, q=x.q if scale == 0 else -x.q), scale=-scale)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    exact = int8(call, x, scale=scale, use_int8=False)
    assert relative_rmse(found[0], exact[0]) < (MAX_ROUNDING_ERROR if scale else 1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_a_cpu_call_without_keys(packed):
    q, k = torch.randn(1, 20, 2, 16), torch.randn(1, 0, 1, 16)
    starts = [torch.tensor([0, 7, 20]), torch.tensor([0, 0, 0])]
    more = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]} if packed else {}
    out, lse, write = lite_attention(q, k, k, use_int8=True, **more)
    assert not out.any() and (lse == -math.inf).all() and write.numel() == 0


# ---- the modules -----------------------------------------------------------------------------------------------------


def test_a_module_rounds_in_every_call():
    x = [with_offsets(make_inputs(in_double(Call(200, 500, dim=64))), 2.0) for _ in range(4)]
    lite, plain = (LiteAttention(threshold=-3.0, use_int8=flag) for flag in (True, False))
    assert lite.use_int8 is True and plain.use_int8 is LiteAttention().use_int8 is False
    mask = masks.full(1, 2, 2, 8)
    for call, (q, k, v) in enumerate((y.q, y.k, y.v) for y in x):
        if call == 0:
            stand_out(q, k)
        expected = lite_attention(
            q, k, v, mask, threshold=-3.0, direction=1 - call % 2 * 2, use_int8=True
        )
        found = lite(q, k, v, return_softmax_lse=True)
        assert all(map(torch.equal, (*found, lite.write_mask), expected))
        assert not torch.equal(found[0], plain(q, k, v))
        mask = expected[2]
    assert masks.density(mask, 8) < 1
    lite.enable_skip_optimization(False)
    dense = lite_attention(q, k, v, threshold=None, use_int8=True)
    assert all(map(torch.equal, lite(q, k, v, return_softmax_lse=True), dense[:2]))


def test_a_module_that_rounds_does_not_train():
    lite = LiteAttention(use_int8=True)
    x = [t.requires_grad_() for t in torch.randn(3, 1, 40, 1, 16)]
    with pytest.raises(ValueError, match="use_int8: expected False where a gradient is wanted"):
        lite(*x)
    assert lite.write_mask is None and lite.state.step == 0
    with torch.no_grad():
        lite(*x)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(emulated) -> Callable[..., Results]:
    """run(call, inputs) launches as `launch.forward` does on a GPU; guards and NaN around all that is written, also
    between the kernels. `changes` are options of the attention kernel."""

    def run(call: Call, x: Inputs, arch: str = "sm_89", scale: float | None = None, **changes):
        def kernel_for(config, arch):
            run.kernel = emulated_kernel(emulated, launch.forward_unit(config, arch))
            run.config = config
            return lambda *arguments: run.kernel(*arguments, **changes)

        def means_for(problem, arch):
            def guarded(k, means, *rest):
                own = emulated.empty(means.shape, means.dtype)
                averager(emulated, problem)(k, own, *rest)
                means.copy_(own)

            return guarded

        def quantize_for(problem, of_keys, arch):
            def guarded(x, means, *written_and_rest):
                written = written_and_rest[:3]
                own = [t if t is None else emulated.empty(t.shape, t.dtype) for t in written]
                quantizer(emulated, problem, of_keys)(x, means, *own, *written_and_rest[3:])
                for target, result in zip(written, own):
                    if target is not None:
                        target.view(torch.int16).copy_(result.view(torch.int16))

            return guarded

        return launched(
            call, x, emulated.empty, scale=scale, kernel_for=kernel_for, means_for=means_for,
            quantize_for=quantize_for, arch=arch,
        )  # fmt: skip

    return run


def averager(emulated, problem: Problem):
    return emulated_kernel(emulated, launch.means_unit(problem, "sm_89"))


def quantizer(emulated, problem: Problem, of_keys: bool):
    return emulated_kernel(emulated, launch.quantize_unit(problem, of_keys, "sm_89"))


DENSE = Call(130, 200, heads=4, heads_k=2)
TILES_OF_128 = Call(
    130, 250, dim=64, dtype="float16", causal=True, listed=0.7, block_n=128, direction=-1, held=True, threshold=-1.0
)  # fmt: skip
PACKED = Call(
    dim=72, causal=True, listed=0.8, threshold=-1.0, index_dtype="int64",
    lengths=((70, 100), (0, 30), (150, 130), (5, 0)),
)  # fmt: skip
WIDEST = Call(70, 250, dim=256, heads=1, listed=0.8, threshold=-1.0)
# Of rows per warp, on sm_90a.
TWO_BLOCKS = Call(
    130, 300, listed=0.6, threshold=-2.0, direction=-1, batch=2, heads=1, views=True
)  # fmt: skip
EMULATED = [
    (DENSE, "sm_89"),
    (TILES_OF_128, "sm_89"),
    (PACKED, "sm_89"),
    (WIDEST, "sm_89"),
    (Call(70, 130, dim=192, heads=1, listed=0.8, threshold=-1.0, on_device=True), "sm_89"),
    (TWO_BLOCKS, "sm_90a"),
    (Call(100, 130, dim=64, causal=True), "sm_90a"),
    (Call(dim=96, lengths=((129, 70), (3, 0), (40, 64))), "sm_90a"),
]  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("call, arch", [pytest.param(*c, id=f"{c[1]}-{c[0]}") for c in EMULATED])
def test_numbers(run, call, arch):
    x = with_offsets(make_inputs(call), 3.0)
    assert_right(call, x, run(call, x, arch))
    assert run.config.rows == (16 if arch == "sm_89" else 32)


@pytest.mark.emulated(schedules="random", seeds=1)
def test_a_call_from_end_to_end(run):
    """End to end, beside the reference and beside exact attention."""
    x = with_offsets(make_inputs(DENSE), 3.0)
    got = run(DENSE, x)
    for flag, error, lse_error in (
        (True, MAX_OUTPUT_ERROR, 5e-3),
        (False, MAX_ROUNDING_ERROR, MAX_LSE_ROUNDING_ERROR),
    ):
        out, lse, _ = int8(DENSE, double(x), use_int8=flag)
        assert relative_rmse(got.out, out) < error and largest(got.lse - lse) < lse_error


@pytest.mark.emulated(seeds=1)
def test_integers_are_not_rounded_by_the_kernels(run):
    """Beside attention itself: what is centred comes back in lse, and fragments of integers are where they belong."""
    for rows, direction in ((70, 1), (2, -1)):
        call = replace(WIDEST, rows=rows, direction=direction, threshold=-0.5, listed=1.0)
        x = exact_inputs(call)
        got = run(call, x, scale=1e-4)
        assert torch.equal(got.q.values, x.q.double()) and torch.equal(got.k.values, centred(x))
        out, lse, write = int8(call, double(x), scale=1e-4, use_int8=False)
        assert relative_rmse(got.out, out) < MAX_OUTPUT_ERROR
        assert largest(got.lse - lse) < MAX_LSE_ERROR and largest(shift_of(x, 1e-4)) > 1
        assert torch.equal(got.write, write)
    assert not torch.equal(write, x.read)


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("rows", [1, 33, 100])
def test_rows_behind_the_end_keep_nothing(run, rows):
    """Their integers are those of the last row, and so is their scale."""
    call = replace(WIDEST, rows=rows, listed=1.0, threshold=-1.0)
    x = make_inputs(call)
    x.q[..., 0] = 8
    x.k[:, :64, :, 0] = 20
    got = run(call, x)
    assert_right(call, x, got)
    assert got.write.tolist() == [[[[1]]]]


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize(
    "coarse", [slice(0, 64), slice(64, 128), slice(16, 32)], ids=["first", "second", "group"]
)
def test_every_group_of_rows_is_judged_with_its_scale(run, coarse):
    """All rows have the same scores; those with a coarse scale have 32 times smaller integers."""
    call = replace(TWO_BLOCKS, rows=128, batch=1, listed=1.0, direction=1)
    x = make_inputs(call)
    x.q.zero_()
    x.k.zero_()
    x.q[..., 0], x.k[:, :64, :, 0] = 2, 20
    x.q[:, coarse, :, 1] = 64
    got = run(call, x, "sm_90a")
    assert_right(call, x, got)
    assert got.write.tolist() == [[[[1]]]]


@pytest.mark.emulated(schedules="immediate")
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(run, sign):
    """All products are 127 * 127 or less than nothing by as much: the sums of 256 still fit."""
    call = replace(WIDEST, threshold=-1.0, direction=sign)
    x = make_inputs(call)
    signs = torch.where(torch.rand(256) < 0.5, -0.75, 0.75)
    q = (signs * sign).expand_as(x.q)
    k = signs * torch.tensor([1.0, -1.0]).repeat(125)[:, None, None]
    x = replace(x, q=q.bfloat16(), k=k[None].bfloat16())
    scale = 3 / (256 * 0.75**2)
    got = run(call, x, scale=scale)
    assert (got.q.integers.abs() == 127).all() and (got.k.integers.abs() == 127).all()
    assert_right(call, x, got, scale)
    # Half of the visited keys have the score 3, the others -3.
    seen = masks.unpack(x.read, 4)[0, 0, 0].repeat_interleave(64)[:250]
    log = math.log(seen.sum() / 2 * (math.exp(3) + math.exp(-3)))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, log), rtol=1e-4, atol=1e-4)


@pytest.mark.emulated(schedules="immediate")
def test_zeros_are_zeros_to_the_kernels(run):
    x = make_inputs(DENSE)
    mean = x.v.float().mean(1)[:, None].repeat_interleave(2, 2)
    flat = replace(x, q=x.q.clone(), k=x.k.clone())
    flat.q[:, 16:32] = 0
    got = run(DENSE, flat)
    assert_right(DENSE, flat, got)
    torch.testing.assert_close(
        got.out[:, 16:32].float(), mean.expand(-1, 16, -1, -1), rtol=1e-2, atol=1e-3
    )
    torch.testing.assert_close(got.lse[:, :, 16:32], torch.full((1, 4, 16), math.log(200)))
    # Keys without a difference, one tile of them and all.
    flat.k[:, 64:128] = flat.k[:, :64] = 0
    flat.k[:, 128::2], flat.k[:, 129::2] = 1.5, -1.5
    assert not means_of(flat).any()
    assert_right(DENSE, flat, run(DENSE, flat))
    flat.k[:] = x.k[:, :1]
    got = run(DENSE, flat)
    assert_right(DENSE, flat, got)
    torch.testing.assert_close(got.out.float(), mean.expand_as(got.out), rtol=1e-2, atol=1e-3)


@pytest.mark.emulated(schedules="immediate")
def test_a_call_without_keys(run):
    call = replace(DENSE, keys=0)
    x = make_inputs(call)
    got = run(call, x)
    assert not got.out.any() and (got.lse == -math.inf).all()


@pytest.mark.emulated(schedules="immediate")
def test_values_of_unlisted_tiles_are_not_read(run):
    """Their keys only enter the mean of all."""
    x = with_offsets(make_inputs(WIDEST), 1.0)
    x.read.fill_(0b0101)
    poisoned = replace(x, v=x.v.clone())
    poisoned.v[:, 64:128] = poisoned.v[:, 192:] = math.nan
    clean, found = run(WIDEST, x), run(WIDEST, poisoned)
    assert all(torch.equal(getattr(clean, n), getattr(found, n)) for n in ("out", "lse", "write"))


@pytest.mark.emulated(schedules="immediate")
def test_every_wait_matters(run):
    """Several steps, and none."""
    call = replace(TILES_OF_128, rows=128, keys=448, heads=1, causal=True, listed=1.0)
    inputs = [make_inputs(c) for c in (call, replace(call, listed=0.0))]
    expected = [run(call, x) for x in inputs]

    def check(options) -> None:
        for x, before in zip(inputs, expected):
            got = run(call, x, **vars(options))
            for name in ("out", "lse", "write"):
                assert torch.equal(getattr(got, name), getattr(before, name)), "another result"

    report = mutation.run(check, run.kernel, schedules=mutation.SCHEDULES[:3])
    assert not report.unnoticed and not report.not_reached, str(report)
    assert len(report.noticed) >= 10


# ---- the kernel of the keys' means -----------------------------------------------------------------------------------


def average(emulated, k: Tensor, starts: Tensor | None = None, **changes) -> Tensor:
    index = "int32" if starts is None else str(starts.dtype).removeprefix("torch.")
    dtype = str(k.dtype).removeprefix("torch.")
    problem = Problem(dtype, k.shape[3], packed=starts is not None, index_dtype=index)
    sequences = k.shape[0] if starts is None else len(starts) - 1
    means = emulated.empty((sequences, *k.shape[2:]), torch.float32)
    averager(emulated, problem)(k, means, starts, sequences, **changes)
    return means


@pytest.mark.emulated
@pytest.mark.parametrize("dim, starts", [
    (128, None), (72, [0, 70, 70, 400, 401]), (256, None), (64, [0, 401]), (8, None),
], ids=["D128", "D72-packed", "D256", "D64-packed", "D8"])  # fmt: skip
def test_means(emulated, dim, starts):
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    batch = 2 if starts is None else 1
    x = make_inputs(Call(1, 401, batch=batch, heads=2, heads_k=2, dim=dim, views=True))
    x = with_offsets(x, 30.0)
    expected = means_of(replace(x, starts_k=starts))
    means = average(emulated, x.k, starts)
    torch.testing.assert_close(means.double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.emulated(schedules="immediate")
def test_the_mean_of_a_sequence_does_not_depend_on_others(emulated):
    k = torch.randn(1, 700, 1, 64).bfloat16()
    alone = average(emulated, k[:, 130:531])
    k[:, :130] = k[:, 531:] = math.nan
    found = average(emulated, k, torch.tensor([0, 130, 531, 700]))
    assert torch.equal(found[1], alone[0]) and found[::2].isnan().all()


@pytest.mark.emulated(schedules="immediate")
def test_the_barrier_of_the_means_matters(emulated):
    k = torch.randn(1, 300, 1, 64).bfloat16()
    expected = average(emulated, k)

    def check(options) -> None:
        assert torch.equal(average(emulated, k, **vars(options)), expected), "another result"

    report = mutation.run(check, averager(emulated, Problem("bfloat16", 64)))
    assert len(report.noticed) == 1 and not report.unnoticed and not report.not_reached, str(report)


# ---- the kernel that rounds ------------------------------------------------------------------------------------------


def quantize(
    emulated, x: Tensor, means: Tensor, of_keys: bool, starts: Tensor | None = None, **changes
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(integers, scales, shifts with a scale of 0.25), as the launcher asks for them."""
    batch, tokens, heads, dim = x.shape
    group, period = (64, 64) if of_keys else (16, 128)
    slots, sequences, longest = -(-tokens // period), batch, tokens
    if starts is not None:
        sequences = len(starts) - 1
        slots, longest = tokens // period + sequences, starts.diff().max().item()
    width = next(w for w in (64, 128, 192, 256) if w >= dim)
    integers = emulated.empty((batch, tokens, heads, width // 2), x.dtype)
    scales = emulated.empty((batch, heads, slots * (period // group)), torch.float32)
    shifts = None if of_keys else emulated.empty((batch, heads, tokens), torch.float32)
    index = "int32" if starts is None else str(starts.dtype).removeprefix("torch.")
    problem = Problem(
        str(x.dtype).removeprefix("torch."), dim, packed=starts is not None, index_dtype=index
    )
    kernel = quantizer(emulated, problem, of_keys)
    kernel(
        x, means, integers, scales, shifts, starts, 0.25, -(-longest // 64), sequences, **changes
    )
    return integers, scales, shifts


@pytest.mark.emulated
@pytest.mark.parametrize("dim, starts", [
    (128, None), (72, [0, 70, 70, 220, 225]), (256, None),
], ids=["D128", "D72-packed", "D256"])  # fmt: skip
def test_rounding(emulated, dim, starts):
    """Any means, strides and heads; ties to even, where 127 is the largest magnitude."""
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int64)
    batch = 2 if starts is None else 1
    inputs = make_inputs(Call(225, 225, batch=batch, heads=4, heads_k=2, dim=dim, views=True))
    means = torch.randn(batch if starts is None else len(starts) - 1, 2, dim)
    lengths = None if starts is None else starts.diff()
    for x, of_keys in ((inputs.q, False), (inputs.k, True)):
        group = 64 if of_keys else 16
        x[:, :64] = torch.randint(-252, 253, x[:, :64].shape) / 2
        x[:, :64:16, :, 0] = 127
        integers, scales, shifts = quantize(emulated, x, means, of_keys, starts)
        grid = grid_of(integers, scales, dim, group, 64 if of_keys else 128, starts)
        exact = x.float()
        if of_keys:
            exact = exact - per_token(means, lengths)
        else:
            mean = per_token(means, lengths).double().repeat_interleave(2, 2)
            shift = 0.25 * (exact.double() * mean).sum(-1)
            torch.testing.assert_close(shifts.double(), shift.mT, rtol=1e-5, atol=1e-5 * dim**0.5)
            assert torch.equal(grid.integers[:, :64], x[:, :64].double().round())
        assert_rounded(grid, exact, group, starts)


@pytest.mark.emulated(schedules="immediate")
def test_sizes_next_to_nothing_and_huge(emulated):
    """Every group has its own scale, and groups and heads do not mix."""
    x = torch.randn(1, 100, 3, 128)
    for number, size in enumerate((0.0, 1e-30, 1e-14, 1.0, 1e30)):
        x[:, 16 * number : 16 * number + 16, 1] *= size
    for of_keys in (False, True):
        y = x.bfloat16()
        if of_keys:
            y[:, 64:] = y[:, :36]
            y[:, :64, 1] *= 1e-12
        integers, scales, _ = quantize(emulated, y, torch.zeros(1, 3, 128), of_keys)
        grid = grid_of(integers, scales, 128, *((64, 64) if of_keys else (16, 128)), None)
        kept = y.double().abs() > 1e-12
        small = grid.values - y.double()
        assert (small.abs() <= grid.scales[..., None] * 0.501 + 1e-15).all() and kept.any()
        assert (grid.scales > 0).all() and grid.values.isfinite().all()


@pytest.mark.emulated(schedules="immediate")
def test_the_barrier_of_the_kernel_that_rounds_matters(emulated):
    x = torch.randn(1, 200, 2, 64).bfloat16()
    means = x.float().mean(1)
    expected = quantize(emulated, x, means, True)

    def check(options) -> None:
        got = quantize(emulated, x, means, True, **vars(options))
        for one, other in zip(got[:2], expected):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "another result"

    problem = Problem("bfloat16", 64)
    report = mutation.run(check, quantizer(emulated, problem, True))
    assert len(report.noticed) == 1 and not report.unnoticed and not report.not_reached, str(report)
    assert not mutation.synchronisation(quantizer(emulated, problem, False).kernel.ptx)
