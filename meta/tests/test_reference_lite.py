"""Skip-list attention against a row-by-row walk in Python floats and against plain softmax attention."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cula.reference import lite_attention
from cula.reference.lite import pack_tiles, tile_grid, unpack_tiles

INF = math.inf
TOL = dict(rtol=1e-10, atol=1e-10)


def draw(seed, batch, rows, keys, heads, kv_heads, dim=4, dim_v=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim_v)
    return tuple(
        2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


def attend(q, k, v, read=None, *, block_m=128, block_n=64, **options):
    """The reference with bool masks, those that list everything included."""
    if read is None:
        grid = tile_grid(q.shape[1], k.shape[1], block_m, block_n)
        read = torch.ones(q.shape[0], q.shape[2], *grid, dtype=torch.bool)
    return lite_attention(q, k, v, read, block_m=block_m, block_n=block_n, **options)


def walk(q, k, read, threshold, direction, scale, block_m, block_n, must_do=None):
    """The write mask by the definition: one query tile after the other, tile by tile, row by row."""
    batch, rows, heads, _ = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    write = torch.zeros_like(read)
    for b in range(batch):
        for h in range(heads):
            raw = (q[b, :, h] @ k[b, :, h // group].T).tolist()
            for m in range(read.shape[2]):
                tile_rows = range(m * block_m, min((m + 1) * block_m, rows))
                running = dict.fromkeys(tile_rows, -INF)
                first = True
                order = range(read.shape[3]) if direction == 1 else reversed(range(read.shape[3]))
                for n in order:
                    if not read[b, h, m, n]:
                        continue
                    keep = first or (must_do is not None and bool(must_do[n]))
                    for r in tile_rows:
                        best = max(raw[r][n * block_n : min((n + 1) * block_n, keys)])
                        both_empty = best == -INF and running[r] == -INF
                        if (
                            not both_empty
                            and (best - running[r]) * scale * math.log2(math.e) > threshold
                        ):
                            keep = True
                        running[r] = max(running[r], best)
                    write[b, h, m, n] = keep
                    first = False
    return write


def plain(q, k, v, scale, columns=None):
    """Dense softmax attention; columns bool `[B, H, Sq, Sk]` says which keys each query may see."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * scale
    if columns is not None:
        scores = torch.where(columns, scores, -INF)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    lse = scores.amax(-1) + weights.sum(-1).log()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(group, 2)), lse


def columns_of(read, rows, keys, block_m, block_n):
    return read.repeat_interleave(block_m, 2)[:, :, :rows].repeat_interleave(block_n, 3)[..., :keys]


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    keys=st.integers(1, 30),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    blocks=st.sampled_from([(4, 4), (8, 4), (4, 8), (16, 5)]),
    threshold=st.sampled_from([-INF, -10.0, -2.0, 0.0, INF]),
    direction=st.sampled_from([1, -1]),
    density=st.sampled_from([0.3, 0.8, 1.0]),
    forced=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
@settings(max_examples=80, deadline=None)
def test_output_and_mask(
    seed, rows, keys, heads, blocks, threshold, direction, density, forced, scale
):
    q, k, v = draw(seed, 2, rows, keys, *heads)
    grid = -(-rows // blocks[0]), -(-keys // blocks[1])
    generator = torch.Generator().manual_seed(seed)
    read = torch.rand(2, heads[0], *grid, generator=generator) < density
    must_do = torch.rand(grid[1], generator=generator) < 0.2 if forced else None
    out, lse, write = attend(
        q,
        k,
        v,
        read,
        threshold=threshold,
        direction=direction,
        scale=scale,
        must_do=must_do,
        block_m=blocks[0],
        block_n=blocks[1],
    )
    factor = 0.5 if scale is None else scale
    assert torch.equal(write, walk(q, k, read, threshold, direction, factor, *blocks, must_do))
    assert not (write & ~read).any()
    columns = columns_of(read, rows, keys, *blocks)
    expected, expected_lse = plain(q, k, v, factor, columns)
    seen = columns.any(-1)
    out, expected = out.transpose(1, 2), expected.transpose(1, 2)
    torch.testing.assert_close(out[seen], expected[seen], **TOL)
    torch.testing.assert_close(lse[seen], expected_lse[seen], **TOL)
    assert (out[~seen] == 0).all() and (lse[~seen] == -INF).all()
    assert out.shape[-1] == 3 and lse.shape == (2, heads[0], rows)


@pytest.mark.parametrize("direction", [1, -1])
def test_threshold_at_its_ends(direction):
    q, k, v = draw(0, 1, 20, 30, 2, 2)
    options = dict(block_m=8, block_n=4, direction=direction)
    expected, lse = plain(q, k, v, 0.5)
    for threshold in (-INF, 0.0, INF):
        out, actual_lse, _ = attend(q, k, v, threshold=threshold, **options)
        torch.testing.assert_close(out, expected, **TOL)
        torch.testing.assert_close(actual_lse, lse, **TOL)
    everything = attend(q, k, v, threshold=-INF, **options)[2]
    assert everything.shape == (1, 2, 3, 8) and everything.all()
    first = attend(q, k, v, threshold=INF, **options)[2]
    assert first[..., 0 if direction == 1 else -1].all() and first.sum() == 6


def test_the_comparison_is_strict_and_in_log2_units():
    """Keys in descending order, one per tile: score gaps of exactly 3 log2 units after the first."""
    unit = math.log(2)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, -3.0, -3.0], dtype=torch.float64).view(1, 3, 1, 1)
    options = dict(scale=unit, block_m=1, block_n=1)
    for threshold, expected in ((-3.0001, [True, True, True]), (-2.9999, [True, False, False])):
        assert attend(q, k, k, threshold=threshold, **options)[2].flatten().tolist() == expected
    even = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    assert attend(q, even, even, threshold=0.0, **options)[2].flatten().tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_rows_that_have_seen_nothing_do_not_keep_a_tile():
    """-inf minus -inf is NaN, which is not above any threshold; a finite score after -inf always keeps."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-INF, -INF, 1.0, -INF], dtype=torch.float64).view(1, 4, 1, 1)
    v = torch.arange(4.0, dtype=torch.float64).view(1, 4, 1, 1)
    out, lse, write = attend(q, k, v, threshold=-INF, scale=1.0, block_m=1, block_n=1)
    assert write.flatten().tolist() == [True, False, True, False]
    assert out.item() == 2.0 and lse.item() == pytest.approx(1.0, abs=1e-15)


def test_a_moving_maximum_needs_both_directions():
    """A diagonal pattern of N tiles settles in two calls: (N + 1) / 2N of the tiles, then 1 / N."""
    tiles, block = 8, 4
    x = 10 * torch.eye(tiles, dtype=torch.float64).repeat_interleave(block, 0)[None, :, None]
    read, densities = None, []
    for call in range(4):
        _, _, read = attend(
            x, x, x, read, direction=-1 if call % 2 else 1, block_m=block, block_n=block
        )
        densities.append(read.double().mean().item())
    assert densities == [9 / 16, 1 / 8, 1 / 8, 1 / 8]
    assert torch.equal(read[0, 0], torch.eye(tiles, dtype=torch.bool))


@given(seed=st.integers(0, 2**31), threshold=st.sampled_from([-6.0, -2.0, 0.0]))
@settings(max_examples=25, deadline=None)
def test_lists_only_shrink_never_empty_and_never_lose_a_forced_tile(seed, threshold):
    q, k, v = draw(seed, 1, 20, 40, 2, 1)
    must_do = torch.zeros(10, dtype=torch.bool)
    must_do[[3, 7]] = True
    read = torch.ones(1, 2, 3, 10, dtype=torch.bool)
    for call in range(6):
        options = dict(
            threshold=threshold,
            direction=-1 if call % 2 else 1,
            must_do=must_do,
            block_m=8,
            block_n=4,
        )
        _, _, write = attend(q, k, v, read, **options)
        assert not (write & ~read).any()
        assert write.any(-1).all() and write[..., [3, 7]].all()
        read = write


def test_a_forced_tile_does_not_come_back():
    q, k, v = draw(1, 1, 4, 16, 1, 1)
    read = torch.tensor([True, False, True, False]).view(1, 1, 1, 4)
    write = attend(
        q, k, v, read, must_do=torch.ones(4, dtype=torch.bool), threshold=INF, block_m=4, block_n=4
    )[2]
    assert torch.equal(write, read)


@pytest.mark.parametrize("direction", [1, -1])
def test_skipped_mass_is_bounded_by_the_threshold(direction):
    """Every dropped key weighs at most 2^threshold of its row's heaviest key."""
    q, k, v = draw(2, 1, 64, 64, 1, 1, dim=8)
    diagonal = torch.eye(8, dtype=torch.float64).repeat_interleave(8, 0)[None, :, None]
    q, k = 5 * diagonal + 0.1 * q, 5 * diagonal + 0.1 * k
    options = dict(block_m=8, block_n=8)
    _, lse, write = attend(q, k, v, threshold=-8.0, direction=direction, **options)
    out, kept_lse, _ = attend(q, k, v, write, **options)
    columns = columns_of(write, 64, 64, **options)
    dropped = (~columns).sum(-1)
    assert dropped.sum() == 28 * 8 * 8
    assert (1 - torch.exp(kept_lse - lse) <= dropped * 2.0**-8).all()
    torch.testing.assert_close(out, plain(q, k, v, 8**-0.5, columns)[0], **TOL)


def test_lse_of_disjoint_lists_merges_to_the_whole():
    q, k, v = draw(3, 2, 10, 21, 2, 1)
    options = dict(block_m=4, block_n=4)
    left = torch.rand(2, 2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    (a, lse_a, _), (b, lse_b, _) = (attend(q, k, v, mask, **options) for mask in (left, ~left))
    total = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(x - total).transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    expected, lse = plain(q, k, v, 0.5)
    torch.testing.assert_close(weight_a * a + weight_b * b, expected, **TOL)
    torch.testing.assert_close(total, lse, **TOL)


def test_gradients_with_an_empty_row():
    q, k, v = (x.requires_grad_() for x in draw(4, 1, 6, 7, 2, 1))
    read = torch.rand(1, 2, 2, 3, generator=torch.Generator().manual_seed(5)) < 0.6
    read[0, 0, 1] = False

    def fn(q, k, v):
        out, lse, _ = attend(q, k, v, read, block_m=4, block_n=3)
        return out, lse.masked_fill(lse == -INF, 0)

    assert torch.autograd.gradcheck(fn, (q, k, v))
    grads = torch.autograd.grad(fn(q, k, v)[0].sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in grads) and (grads[0][0, 4:, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    """Scores, softmax and sums are fp32; only the output is rounded to the input's dtype."""
    q, k, v = (x.to(dtype) for x in draw(5, 1, 40, 70, 2, 2, dim=32))
    out, lse, _ = attend(q, k, v, block_m=16, block_n=16)
    expected, expected_lse = plain(q.double(), k.double(), v.double(), 32**-0.5)
    roundoff = torch.finfo(dtype).eps / 2
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert ((out.double() - expected).abs() <= 1.01 * roundoff * expected.abs() + 1e-5).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(rows, keys):
    q, k, v = draw(6, 1, rows, keys, 2, 1)
    out, lse, write = attend(q, k, v)
    assert out.shape == (1, rows, 2, 3) and lse.shape == (1, 2, rows)
    assert (out == 0).all() and (lse == -INF).all()
    assert write.shape == (1, 2, -(-rows // 128), -(-keys // 64))


@pytest.mark.parametrize("tiles", [0, 1, 31, 32, 33, 70])
def test_words_of_tiles(tiles):
    bits = torch.rand(2, 3, tiles) < 0.5
    words = pack_tiles(bits)
    assert words.dtype == torch.int32 and words.shape == (2, 3, -(-tiles // 32))
    for n in range(tiles):
        assert torch.equal((words[..., n // 32] >> n % 32) & 1, bits[..., n].int())
    assert torch.equal(unpack_tiles(words, tiles), bits)


def test_masks_in_words_are_those_in_bool():
    q, k, v = draw(7, 2, 20, 150, 2, 1)
    read, held = torch.rand(2, 2, 3, 38) < 0.6, torch.rand(2, 1, 1, 38) < 0.3
    options = dict(threshold=-1.0, direction=-1, block_m=8, block_n=4)
    for must_do in (None, held):
        out, lse, write = lite_attention(q, k, v, read, must_do=must_do, **options)
        words = None if must_do is None else pack_tiles(must_do)
        for a, b in ((pack_tiles(read), words), (read, words), (pack_tiles(read), must_do)):
            found = lite_attention(q, k, v, a, must_do=b, **options)
            expected = write if a.dtype == torch.bool else pack_tiles(write)
            assert all(map(torch.equal, found, (out, lse, expected)))
    # Without a list, all tiles are visited, and the result has words.
    full = torch.ones_like(read)
    expected = lite_attention(q, k, v, pack_tiles(full), **options)
    assert all(map(torch.equal, lite_attention(q, k, v, **options), expected))


@pytest.mark.parametrize(("rows", "keys"), [(13, 13), (9, 20), (20, 9)])
@pytest.mark.parametrize("direction", [1, -1])
def test_causal(rows, keys, direction):
    q, k, v = draw(8, 1, rows, keys, 2, 1)
    read = torch.rand(1, 2, *tile_grid(rows, keys, 4, 4)) < 0.8
    options = dict(threshold=-1.0, direction=direction, block_m=4, block_n=4)
    out, lse, write = lite_attention(q, k, v, read, causal=True, **options)
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
    columns = columns_of(read, rows, keys, 4, 4) & seen
    expected, expected_lse = plain(q, k, v, 0.5, columns)
    some = columns.any(-1)
    torch.testing.assert_close(out.transpose(1, 2)[some], expected.transpose(1, 2)[some], **TOL)
    torch.testing.assert_close(lse[some], expected_lse[some], **TOL)
    assert (out.transpose(1, 2)[~some] == 0).all() and (lse[~some] == -INF).all()
    visible = columns_of(read, rows, keys, 4, 4) & seen
    visible = torch.nn.functional.pad(visible, (0, -keys % 4, 0, -rows % 4))
    visible = visible.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).any(5).any(3)
    assert not (write & ~visible).any()
    first = visible if direction == 1 else visible.flip(-1)
    kept = write if direction == 1 else write.flip(-1)
    assert (kept | (first.cumsum(-1) != 1) | ~first).all()  # the first visible tile stays


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["max", "length"])
def test_packed_sequences_are_attended_one_by_one(causal, mode):
    starts_q, starts_k = torch.tensor([0, 9, 9, 20]), torch.tensor([0, 5, 12, 30])
    q, k, v = (x.requires_grad_() for x in draw(9, 1, 20, 30, 4, 2))
    grid = tile_grid(12, 18, 4, 4)
    read, held = torch.rand(3, 4, *grid) < 0.8, torch.rand(3, 1, 1, grid[1]) < 0.3
    options = dict(
        threshold=-1.0, threshold_mode=mode, direction=-1, causal=causal, block_m=4, block_n=4
    )
    out, lse, write = lite_attention(
        q, k, v, read, must_do=held, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=12, max_seqlen_k=18,
        **options,
    )  # fmt: skip
    assert lse.shape == (4, 20) and write.shape == read.shape
    expected = torch.zeros_like(write)
    if mode == "length":
        options |= {"threshold": min(0.0, -1.0 - math.log2(18)), "threshold_mode": "max"}
    for n in range(3):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        own = tile_grid(rows.stop - rows.start, keys.stop - keys.start, 4, 4)
        one = lite_attention(
            q[:, rows], k[:, keys], v[:, keys], read[n : n + 1, :, : own[0], : own[1]],
            must_do=held[n : n + 1, ..., : own[1]], **options,
        )  # fmt: skip
        torch.testing.assert_close(out[:, rows], one[0], **TOL)
        torch.testing.assert_close(lse[:, rows], one[1][0], **TOL)
        expected[n, :, : own[0], : own[1]] = one[2][0]
    assert torch.equal(write, expected)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() and x.any() for x in grads)


def test_dense_attention_directions_on_the_device_and_given_memory():
    q, k, v = draw(10, 2, 11, 14, 2, 1)
    out, lse, write = lite_attention(q, k, v, threshold=None)
    expected, expected_lse = plain(q, k, v, 0.5)
    torch.testing.assert_close(out, expected, **TOL)
    torch.testing.assert_close(lse, expected_lse, **TOL)
    assert write is None
    options = dict(threshold=-1.0, block_m=4, block_n=4, deterministic=True)
    for direction in (1, -1):
        wanted = lite_attention(q, k, v, direction=direction, **options)
        place = torch.full_like(out, math.nan)
        step = torch.tensor([direction], dtype=torch.int32)
        found = lite_attention(q, k, v, direction=step, out=place, **options)
        assert found[0] is place and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", ["use_int8", "grad_mask"])
def test_what_the_reference_leaves_to_kernels_is_named(name):
    q, k, v = draw(11, 1, 4, 4, 1, 1)
    value = True if name == "use_int8" else torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=rf"^{name}: expected .*liteattention-sm89.*'cula\[sm89\]'"
    ):
        lite_attention(q, k, v, **{name: value})
