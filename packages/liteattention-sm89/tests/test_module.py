"""The modules: calls, settings, token ranges, parts of the keys, errors."""

from __future__ import annotations

import math

import pytest
import torch
from module_helpers import (
    BLOCK_M,
    BLOCK_N,
    LOG2,
    drift,
    drift_chain,
    ladder,
    listed,
    packed,
    qkv,
    run,
    same,
    snapshot,
    stand_out,
)
from torch import Tensor, nn

from liteattention_sm89 import masks, module, reference, state
from liteattention_sm89.module import LiteAttention, SeqParallelLiteAttention, merge

# --- calls -----------------------------------------------------------------------------------------------------------


SHAPES = [
    # batch, queries, keys, heads, key heads, dim
    (1, 1, 1, 1, 1, 8),
    (2, 127, 129, 2, 1, 16),
    (1, 129, 500, 4, 2, 32),
    (2, 500, 127, 3, 1, 16),
    (1, 300, 300, 2, 2, 64),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, queries, keys, heads, heads_kv, dim", SHAPES)
def test_a_chain_of_calls_is_the_reference_with_its_own_masks(
    batch, queries, keys, heads, heads_kv, dim, causal
):
    lite = LiteAttention(threshold=-3.0)
    inputs = qkv(batch, queries, keys, heads, heads_kv, dim)
    tiles_q, tiles_k = -(-queries // BLOCK_M), -(-keys // BLOCK_N)
    mask = masks.full(batch, heads, tiles_q, tiles_k)
    before = 1.0
    for call in range(10):
        direction = 1 if call % 2 == 0 else -1
        assert lite.state.direction == direction
        out, lse = lite(*inputs, return_softmax_lse=True, causal=causal)
        expected = reference.lite_attention(
            *inputs, mask, threshold=-3.0, direction=direction, causal=causal
        )
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        assert torch.equal(lite.read_mask, mask) and torch.equal(lite.write_mask, expected[2])
        assert lite.write_mask.shape == (batch, heads, tiles_q, masks.words(tiles_k))
        assert not (expected[2] & ~mask).any()
        mask = expected[2]
        density = lite.density().item()
        assert 0.0 <= density <= before
        before = density
        inputs = drift(*inputs)


@pytest.mark.parametrize("threshold", [-math.inf, -4.0])
def test_alternating_directions_on_an_unchanged_list_give_identical_outputs(threshold):
    lite, inputs = LiteAttention(threshold=threshold), qkv(2, 300, 450, 2, dim=64)
    for _ in range(4):
        lite(*inputs)
    settled, first = lite.write_mask.clone(), lite(*inputs)
    for _ in range(11):
        assert torch.equal(lite.write_mask, settled)
        assert torch.equal(lite(*inputs), first)
    assert (lite.density() == 1) == (threshold == -math.inf)


def test_a_diagonal_settles_in_two_calls():
    q = torch.randn(1, 4 * BLOCK_M, 1, 128)
    inputs = (q, q + 0.3 * torch.randn_like(q), torch.randn_like(q))
    lite = LiteAttention(threshold=-1.0)
    densities = []
    for _ in range(4):
        lite(*inputs)
        densities.append(lite.density().item())
    tiles_k = 4 * BLOCK_M // BLOCK_N
    assert densities[0] > 0.5
    assert densities[1:] == [BLOCK_M / BLOCK_N / tiles_k] * 3


def test_the_order_of_the_tiles_decides_what_is_kept():
    inputs = ladder(0, -10, -10, 0, -5, 0)
    lite = LiteAttention(threshold=-1.0)
    lite(**inputs)
    assert listed(lite) == [0, 3, 5]
    lite = LiteAttention(threshold=-6.0)
    lite(**inputs)
    assert listed(lite) == [0, 3, 4, 5]
    rising = ladder(-30, -20, -10, 0)
    lite = LiteAttention(threshold=-5.0)
    lite(**rising)
    assert listed(lite) == [0, 1, 2, 3]
    lite(**rising)
    assert listed(lite) == [3]


@pytest.mark.parametrize(
    "threshold, kept",
    [(-math.inf, [[0, 1, 2, 3, 4]] * 3), (0.0, [[0, 1, 4], [4], [4]]), (math.inf, [[0], [0], [0]])],
)
def test_extreme_thresholds(threshold, kept):
    inputs = ladder(0, 1, 1, -9, 2)
    lite, dense = LiteAttention(threshold=threshold), LiteAttention(enable_skipping=False)
    out = lite(**inputs)
    assert torch.equal(out, dense(**inputs))
    seen = [listed(lite)]
    for _ in range(2):
        lite(**inputs)
        seen.append(listed(lite))
    assert seen == kept


def test_without_reversal_every_call_goes_down():
    inputs = ladder(0, -10, -20, -30)
    lite = LiteAttention(threshold=-5.0, reverse_skip_list=False)
    for _ in range(3):
        assert lite.state.direction == -1
        lite(**inputs)
        assert listed(lite) == [0, 1, 2, 3]
    assert lite.read_list.tolist() == lite.write_list.tolist() == [[[[2, 3, -1, 0, 0, 0]]]]


def test_softmax_lse_is_that_of_the_visited_keys():
    lite, inputs = LiteAttention(threshold=-6.0), qkv(1, 200, 300, dim=64, dtype=torch.float64)
    for _ in range(3):
        out, lse = lite(*inputs, return_softmax_lse=True)
        seen = masks.unpack(lite.read_mask, -(-300 // BLOCK_N)).repeat_interleave(BLOCK_M, 2)[
            :, :, :200
        ]
        seen = seen.repeat_interleave(BLOCK_N, 3)[..., :300]
        q, k, v = (x.transpose(1, 2) for x in inputs)
        scores = (q @ k.mT * 64**-0.5).masked_fill(~seen, -math.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(1, 2))
    assert lite.density() < 1


def test_scale_is_passed_on():
    lite, inputs = LiteAttention(enable_skipping=False), qkv(1, 20, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    for scale in (None, 0.1):
        expected = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        torch.testing.assert_close(lite(*inputs, scale=scale), expected.transpose(1, 2))


def test_gradients_are_those_of_the_masked_forward_however_many_calls_follow():
    lite, inputs = LiteAttention(threshold=-4.0), qkv(1, 200, 300, 2, 1, 64)
    for _ in range(2):
        lite(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    mask, dout = lite.write_mask.clone(), torch.randn(1, 200, 2, 64)
    assert lite.density() < 1
    out = lite(*leaves)
    for _ in range(3):
        lite(*drift(*inputs))
    out.backward(dout)
    expected = reference.masked_gradients(*inputs, dout, mask)
    for leaf, gradient in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)


def test_a_call_that_fails_changes_nothing(monkeypatch):
    lite, inputs = LiteAttention(threshold=-3.0), qkv(dim=64)
    lite(*inputs)
    before = snapshot(lite.state)

    def broken(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(module, "lite_attention", broken)
    for arguments in (inputs, qkv(2)):
        with pytest.raises(RuntimeError, match="no kernel"):
            lite(*arguments, must_skip_list=[0, BLOCK_N])
        assert same(snapshot(lite.state), before)


def test_wrong_tensors():
    lite, (q, k, v) = LiteAttention(), qkv()
    with pytest.raises(TypeError, match="query: expected a torch.Tensor, got list"):
        lite([1.0], k, v)
    with pytest.raises(ValueError, match=r"key: expected \[B, S, H, D\], got \[300, 2, 16\]"):
        lite(q, k[0], v)


# --- construction and settings ---------------------------------------------------------------------------------------


def test_defaults():
    lite = LiteAttention()
    assert lite.threshold == -10.0 and lite.enable_skipping and lite.max_batch_size == 2
    assert lite.read_mask is lite.write_mask is lite.read_list is lite.write_list is None
    assert lite.density() == 1 and lite.density_per_head() == 1
    assert "threshold=-10.0" in repr(lite)
    assert "use_int8" not in repr(lite) and "use_int8=True" in repr(LiteAttention(use_int8=True))


@pytest.mark.parametrize("threshold", [0, 0.0, -0.5, -10, -math.inf, math.inf])
def test_legal_thresholds(threshold):
    lite = LiteAttention(threshold=threshold)
    assert lite.threshold == threshold
    lite = LiteAttention()
    lite.threshold = threshold
    assert lite.threshold == threshold
    lite.set_threshold(-3)
    assert lite.threshold == -3.0 and isinstance(lite.threshold, float)


@pytest.mark.parametrize("threshold", [1e-9, 3, 10.0, math.nan])
def test_positive_thresholds_and_nan_are_refused(threshold):
    with pytest.raises(ValueError, match="threshold: expected log2 units, at most 0"):
        LiteAttention(threshold=threshold)
    lite = LiteAttention(threshold=-2)
    for setter in (lite.set_threshold, lambda t: setattr(lite, "threshold", t)):
        with pytest.raises(ValueError, match="threshold"):
            setter(threshold)
    with pytest.raises(ValueError, match="threshold"):
        SeqParallelLiteAttention(2, threshold=threshold)
    assert lite.threshold == -2


@pytest.mark.parametrize("threshold", [True, "-3", torch.tensor(-3.0)])
def test_thresholds_are_numbers(threshold):
    with pytest.raises(TypeError, match="threshold: expected a number"):
        LiteAttention(threshold=threshold)


class Fixed:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold


def test_constructor_errors():
    with pytest.raises(ValueError, match="threshold, config: expected one of the two"):
        LiteAttention(threshold=-1.0, config=Fixed(-2.0))
    for wrong in (1, None, "no"):
        with pytest.raises(
            TypeError, match=f"use_int8: expected a bool, got {type(wrong).__name__}"
        ):
            LiteAttention(use_int8=wrong)
    with pytest.raises(ValueError, match="max_batch_size: expected at least 1, got 0"):
        LiteAttention(max_batch_size=0)
    with pytest.raises(TypeError, match="max_batch_size: expected an int, got bool"):
        LiteAttention(max_batch_size=True)
    for config in (-3.0, [], {"threshold": -3.0}):
        with pytest.raises(TypeError, match="config: expected thresholds or a calibration"):
            LiteAttention(config=config)
    with pytest.raises(ValueError, match="threshold"):
        LiteAttention(config=[Fixed(-2.0), Fixed(2.0)])


def test_a_new_threshold_keeps_the_masks():
    lite, inputs = LiteAttention(threshold=-3.0), qkv(dim=64)
    lite(*inputs)
    before = lite.write_mask.clone()
    lite.set_threshold(-math.inf)
    lite(*inputs)
    assert torch.equal(lite.write_mask, before) and lite.density() < 1


def test_thresholds_by_step():
    inputs = ladder(0, -2, -4, -6)
    lite = LiteAttention(config=[Fixed(-5), Fixed(-3), Fixed(-1)])
    assert lite.threshold == -5.0
    for expected in ([0, 1, 2], [0, 1, 2], [0]):
        lite(**inputs)
        assert listed(lite) == expected
    with pytest.warns(RuntimeWarning, match="step 3 has no threshold of its own, there are 3"):
        lite(**inputs)
    lite.reset_skip_state()
    assert lite.threshold == -5.0
    lite(**inputs)
    assert lite.threshold == -3.0
    # Another shape starts other masks, but it is still the second step; calls without skipping are no steps.
    lite.enable_skip_optimization(False)
    lite(**inputs)
    lite.enable_skip_optimization()
    lite(**ladder(0, -2, -4))
    assert listed(lite) == [0, 1] and lite.threshold == -1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_tile_shape_is_that_of_the_masks(dtype):
    for dim in (32, 64, 128, 256):
        block_m, block_n = LiteAttention.get_tile_shape(dim, dtype)
        lite = LiteAttention()
        lite(*qkv(1, block_m + 1, 33 * block_n, 1, dim=dim, dtype=dtype))
        assert lite.write_mask.shape == (1, 1, 2, 2)
        assert lite.write_list.shape == (1, 1, 2, 33 + 2)
    with pytest.raises(TypeError, match="head_dim"):
        LiteAttention.get_tile_shape(64.0, dtype)
    with pytest.raises(TypeError, match="dtype"):
        LiteAttention.get_tile_shape(64, "bfloat16")


def test_switching_off_computes_everything_and_keeps_the_masks():
    lite, chain = LiteAttention(threshold=-3.0), drift_chain(4)
    run(lite, chain[:2])
    before = snapshot(lite.state)
    lite.enable_skip_optimization(False)
    dense = reference.lite_attention(*chain[2])[0]
    assert torch.equal(lite(*chain[2]), dense)
    lite(*qkv(2, 100))
    assert same(snapshot(lite.state), before)
    lite.enable_skip_optimization()
    assert not torch.equal(lite(*chain[2]), dense)


# --- must do, must skip ----------------------------------------------------------------------------------------------


DO_CASES = [
    ([0, 1], [0]),
    ([0, BLOCK_N], [0]),
    ([0, BLOCK_N + 1], [0, 1]),
    ([BLOCK_N - 1, BLOCK_N + 1], [0, 1]),
    ([70, 71, 300, 301], [1, 4]),
    ([300, 301, 70, 71], [1, 4]),
    ([379, 380], [5]),
    ([0, 380], [0, 1, 2, 3, 4, 5]),
]


@pytest.mark.parametrize("ranges, forced", DO_CASES)
def test_must_do_from_the_first_call(ranges, forced):
    """With a threshold of +inf nothing but the first tile of each pass and the forced ones survives."""
    lite, (q, k, v) = LiteAttention(threshold=math.inf), qkv(1, 100, 380, 1)
    for _ in range(10):
        lite(q, k, v, must_do_list=ranges)
        kept = listed(lite)
        assert set(forced) <= set(kept) <= {0, *forced}
    assert kept == forced


def test_a_late_must_do_brings_tiles_back():
    lite, inputs = LiteAttention(threshold=-1.0), ladder(0, -9, -9, 0, -9)
    lite(**inputs)
    assert listed(lite) == [0, 3]
    lite(**inputs, must_do_list=[BLOCK_N, BLOCK_N + 5])
    assert masks.unpack(lite.read_mask, 5).flatten().tolist() == [True, True, False, True, False]
    assert listed(lite) == [0, 1, 3]
    lite(**inputs, must_do_list=torch.tensor([BLOCK_N, BLOCK_N + 5]))
    assert listed(lite) == [0, 1, 3]
    # Without the ranges the tile is one like the others.
    lite(**inputs)
    assert listed(lite) == [0, 3]


SKIP_CASES = [
    ([0, BLOCK_N], [0]),
    ([0, BLOCK_N + 63], [0]),
    ([1, 2 * BLOCK_N], [1]),
    ([1, BLOCK_N], []),
    ([BLOCK_N, 2 * BLOCK_N, 3 * BLOCK_N, 5 * BLOCK_N], [1, 3, 4]),
    ([5 * BLOCK_N, 380], [5]),
    ([5 * BLOCK_N, 379], []),
    ([BLOCK_N, 380], [1, 2, 3, 4, 5]),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ranges, gone", SKIP_CASES)
def test_must_skip_leaves_no_other_token_out(ranges, gone, late):
    lite, (q, k, v) = LiteAttention(threshold=-math.inf), qkv(1, 200, 380, 2, dtype=torch.float64)
    if late:
        lite(q, k, v)
        lite(q, k, v)
    out = lite(q, k, v, must_skip_list=ranges)
    rest = [n for n in range(6) if n not in gone]
    tokens = torch.cat([torch.arange(380)[n * BLOCK_N : (n + 1) * BLOCK_N] for n in rest])
    expected = LiteAttention(enable_skipping=False)(q, k[:, tokens], v[:, tokens])
    torch.testing.assert_close(out, expected)
    # They stay out, whether or not later calls say so.
    for arguments in ({}, {"must_skip_list": ranges}, {}):
        torch.testing.assert_close(lite(q, k, v, **arguments), expected)
        for mask in (lite.read_mask, lite.write_mask):
            assert masks.unpack(mask, 6).any(2).any(1)[0].nonzero().flatten().tolist() == rest


def test_must_skip_ends_with_a_reset_and_with_another_shape():
    lite, inputs = LiteAttention(threshold=-math.inf), ladder(0, 0, 0)
    lite(**inputs, must_skip_list=[0, BLOCK_N])
    lite.reset_skip_state()
    assert lite.density() == 1
    lite(**inputs)
    assert listed(lite) == [0, 1, 2]
    lite(**inputs, must_skip_list=[0, BLOCK_N])
    lite.reset_skip_state()
    lite(**inputs, must_skip_list=[0, BLOCK_N])
    assert listed(lite) == [1, 2]
    lite(**ladder(0, 0))
    assert listed(lite) == [0, 1]


@pytest.mark.parametrize("enable", [True, False])
def test_the_same_ranges_count_for_every_shape(enable):
    lite = LiteAttention(enable, threshold=-math.inf)
    for batch, keys in ((1, 300), (2, 300), (1, 150), (1, 2 * BLOCK_N)):
        q, k, v = qkv(batch, 150, keys)
        out = lite(q, k, v, must_skip_list=[BLOCK_N, 2 * BLOCK_N])
        rest = [*range(BLOCK_N), *range(2 * BLOCK_N, keys)]
        torch.testing.assert_close(out, LiteAttention(False)(q, k[:, rest], v[:, rest]))
    with pytest.raises(ValueError, match="must_skip_list: .*Sk = 100"):
        lite(*qkv(1, 150, 100), must_skip_list=[BLOCK_N, 2 * BLOCK_N])


@pytest.mark.parametrize("enable", [True, False])
def test_the_device_is_waited_for_only_when_ranges_change(monkeypatch, enable):
    # What waits is the check whether tiles that can be seen are left.
    checks, usual = [], state._reach
    monkeypatch.setattr(state, "_reach", lambda *x: (checks.append(1), usual(*x))[1])
    lite, inputs = LiteAttention(enable, threshold=-3.0), qkv(1, 200, 300)
    for ranges in ([0, BLOCK_N], torch.tensor([BLOCK_N, 2 * BLOCK_N])):
        before = len(checks)
        for _ in range(4):
            lite(*inputs, must_skip_list=ranges)
        assert len(checks) == before + 1


def test_ranges_last_as_long_as_they_are_given_with_skipping_off():
    lite, (q, k, v) = LiteAttention(enable_skipping=False), qkv(1, 200, 300)
    for first in (0, BLOCK_N):
        out = lite(q, k, v, must_skip_list=[first, first + BLOCK_N], must_do_list=[290, 291])
        rest = [x for x in range(300) if not first <= x < first + BLOCK_N]
        torch.testing.assert_close(out, lite(q, k[:, rest], v[:, rest]))
    torch.testing.assert_close(lite(q, k, v), reference.lite_attention(q, k, v)[0])


# --- parts of the keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1], [64, 200], [100, 100, 101]])
def test_merged_parts_are_the_whole(cuts):
    q, k, v = qkv(2, 150, 333, 4, 2, 16, dtype=torch.float64)
    whole = LiteAttention(enable_skipping=False)(q, k, v, return_softmax_lse=True)
    outs, lses = [], []
    for start, end in zip([0, *cuts], [*cuts, 333]):
        if start == end:
            out, lse = torch.zeros_like(q), q.new_full((2, 4, 150), -math.inf)
        else:
            out, lse, _ = reference.lite_attention(q, k[:, start:end], v[:, start:end])
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


def test_merged_parts_of_packed_sequences():
    (q, k, v), packing = packed([100, 50], [80, 120])
    lite = LiteAttention(enable_skipping=False)
    out, lse = lite(q, k, v, **packing, return_softmax_lse=True)
    again, lse_again = merge([out, out], [lse, lse])
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(lse_again, lse + LOG2)


def test_rows_that_saw_nothing_merge_to_zero():
    outs = [torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 1, 4, dtype=torch.float32)]
    blind = torch.tensor([[[-math.inf, -math.inf]]])
    seeing = torch.tensor([[[-math.inf, 3.0]]])
    leaves = [x.clone().requires_grad_() for x in (*outs, blind, seeing)]
    out, lse = merge(leaves[:2], leaves[2:])
    assert out[0, 0].eq(0).all() and out[0, 1].eq(1).all()
    assert lse.tolist() == [[[-math.inf, 3.0]]]
    (out.sum() + lse[0, 0, 1]).backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_merging_is_differentiable():
    q, k, v = (x.requires_grad_() for x in qkv(1, 7, 12, 1, dim=4, dtype=torch.float64))

    def split(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [reference.lite_attention(q, k[:, x], v[:, x]) for x in (slice(5), slice(5, 12))]
        return merge([p[0] for p in parts], [p[1] for p in parts])

    assert torch.autograd.gradcheck(split, (q, k, v))


def test_parts_merge_in_the_dtype_of_the_first():
    out, lse = torch.randn(1, 5, 2, 8).bfloat16(), torch.randn(1, 2, 5)
    merged = merge([out, out], [lse, lse])
    assert merged[0].dtype == torch.bfloat16 and torch.equal(merged[0], out)
    assert merged[1].dtype == torch.float32


def test_parts_that_do_not_merge():
    out, lse = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 5)
    for outs, lses in (([], []), ([out], []), ([out], [lse, lse])):
        with pytest.raises(ValueError, match="outs, lses: expected as many"):
            merge(outs, lses)
    with pytest.raises(ValueError, match="outs: expected"):
        merge([out, out[:, :4]], [lse, lse[..., :4]])
    with pytest.raises(ValueError, match="lses: expected"):
        merge([out], [lse.mT])


def test_every_part_of_the_keys_has_its_own_masks():
    """The merged result of each round is attention over the union of what the parts visited."""
    nodes, part = 3, 4 * BLOCK_N
    attention = SeqParallelLiteAttention(nodes, threshold=-3.0)
    inputs = qkv(2, 200, nodes * part, 4, 2, 64)
    stand_out(*inputs[:2])
    for round_ in range(4):
        q, k, v = inputs
        results, read = [], []
        for node in (n % nodes for n in range(round_, round_ + nodes)):
            keys = slice(node * part, (node + 1) * part)
            results.append(attention(q, k[:, keys], v[:, keys], node, return_softmax_lse=True))
            read.append((node, masks.unpack(attention.lite_attention[node].read_mask, 4)))
        out, lse = merge(*zip(*results))
        visited = torch.cat([bits for _, bits in sorted(read, key=lambda x: x[0])], -1)
        expected = reference.lite_attention(q, k, v, masks.pack(visited))
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse, expected[1])
        inputs = drift(*inputs)
    assert not visited.all()
    attention.reset_skip_state()
    assert all(x.density() == 1 for x in attention.lite_attention)


def test_settings_of_all_parts():
    attention = SeqParallelLiteAttention(
        2, enable_skipping=False, max_batch_size=1, config=Fixed(-7)
    )
    assert [x.threshold for x in attention.lite_attention] == [-7.0, -7.0]
    q, k, v = qkv(1, 64)
    dense = reference.lite_attention(q, k, v)[0]
    assert torch.equal(attention(q, k, v, 1), dense)
    assert attention.lite_attention[1].write_mask is None
    attention.enable_skip_optimization()
    attention.set_threshold(math.inf)
    q, k, v = qkv(1, 64, 200)
    attention(q, k, v, 1, must_skip_list=[0, 64], must_do_list=[64, 128])
    assert attention.lite_attention[0].write_mask is None
    assert masks.unpack(attention.lite_attention[1].write_mask, 4)[0, 0, 0].tolist() == [0, 1, 0, 0]
    names = {name for name, x in attention.named_modules() if isinstance(x, LiteAttention)}
    assert names == {"lite_attention.0", "lite_attention.1"}
    assert len(attention.state_dict()) == 2
    with pytest.raises(ValueError, match="max_batch_size = 1, got 2"):
        attention(*qkv(2), 0)


def test_parts_that_are_not_there():
    attention, inputs = SeqParallelLiteAttention(2), qkv()
    for split_idx in (2, -1):
        with pytest.raises(ValueError, match="split_idx"):
            attention(*inputs, split_idx)
    with pytest.raises(TypeError, match="split_idx: expected an int"):
        attention(*inputs, True)
    with pytest.raises(ValueError, match="num_nodes"):
        SeqParallelLiteAttention(0)
    with pytest.raises(TypeError, match="use_int8: expected a bool, got int"):
        SeqParallelLiteAttention(2, use_int8=1)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_calc_error():
    a, b = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, -2.0])
    error = LiteAttention.calc_error(a, b)
    assert error.keys() == {"Cossim", "L1", "RMSE"}
    assert error["Cossim"] == pytest.approx(1 - 1 / 9)
    assert error["L1"] == pytest.approx(4 / 5)
    assert error["RMSE"] == pytest.approx(math.sqrt(16 / 3))
    zero = torch.zeros(3)
    assert LiteAttention.calc_error(b, b) == {"Cossim": pytest.approx(0), "L1": 0.0, "RMSE": 0.0}
    assert set(LiteAttention.calc_error(zero, zero).values()) == {0.0}
    assert LiteAttention.calc_error(b, zero)["L1"] == math.inf
    assert LiteAttention.calc_error(b, zero)["Cossim"] == 1.0
    assert math.isnan(LiteAttention.calc_error(b * math.nan, b)["L1"])
    fine = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert LiteAttention.calc_error(fine, fine.flip(0))["L1"] == pytest.approx(1e-12, rel=1e-3)
    with pytest.raises(ValueError, match="a: expected the shape of b"):
        LiteAttention.calc_error(a, b[:2])
