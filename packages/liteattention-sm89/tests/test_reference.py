"""The plain torch implementation against the rule written out token by token, in Python floats."""

from __future__ import annotations

import math
import random
from operator import mul

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liteattention_sm89 import reference
from liteattention_sm89.reference import lite_attention, masked_gradients

KEEP = settings(deadline=None, derandomize=True, max_examples=25)
LOG2E = 1 / math.log(2)
SIZES = (1, 63, 64, 65, 130, 200, 257)
THRESHOLDS = (-math.inf, -10.0, -2.0, 0.0, math.inf)
F64 = torch.float64


def literal(q, k, v, lists, threshold, direction, scale, causal, forced, block_m, block_n):
    """One sequence: q [Sq][Hq][D], k and v [Sk][Hkv][D]; lists[h][m] and forced[h][m]: sets of key tiles.

    Returns out [Sq][Hq][DV], lse [Hq][Sq], the kept sets, and which keys entered each row: [Hq][Sq] lists.
    """
    rows, keys, heads = len(q), len(k), len(lists)
    width = len(v[0][0]) if keys else 0
    out = [[[0.0] * width for _ in range(heads)] for _ in range(rows)]
    lse = [[-math.inf] * rows for _ in range(heads)]
    kept = [[set() for _ in tiles] for tiles in lists]
    entered = [[[] for _ in range(rows)] for _ in range(heads)]
    for h in range(heads):
        source = h // (heads // len(k[0])) if keys else 0
        for m, tiles in enumerate(lists[h]):
            members = range(m * block_m, min((m + 1) * block_m, rows))
            seen = {i: [] for i in members}
            first = True
            for n in sorted(tiles, reverse=direction < 0):
                end = min((n + 1) * block_n, keys)
                visible = {
                    i: range(n * block_n, min(end, i + keys - rows + 1) if causal else end)
                    for i in members
                }
                if not any(visible.values()):
                    continue
                keep = first or n in forced[h][m]
                first = False
                for i, columns in visible.items():
                    row = q[i][h]
                    new = [scale * sum(map(mul, row, k[j][source])) for j in columns]
                    if new:
                        before = max(seen[i], default=-math.inf)
                        keep = keep or (max(new) - before) * LOG2E > threshold
                    seen[i] += new
                    entered[h][i] += columns
                if keep:
                    kept[h][m].add(n)
            for i in members:
                if not seen[i]:
                    continue
                top = max(seen[i])
                weights = [math.exp(s - top) for s in seen[i]]
                total = math.fsum(weights)
                lse[h][i] = top + math.log(total)
                values = [v[j][source] for j in entered[h][i]]
                for d in range(width):
                    column = [value[d] for value in values]
                    out[i][h][d] = math.fsum(map(mul, weights, column)) / total
    return out, lse, kept, entered


def words_of(sets, key_tiles) -> Tensor:
    """int32 [..., W] of nested lists of sets, bit by bit."""
    if isinstance(sets, list):
        rows = [words_of(each, key_tiles) for each in sets]
        return torch.stack(rows) if rows else torch.zeros(0, -(-key_tiles // 32), dtype=torch.int32)
    words = [0] * -(-key_tiles // 32)
    for n in sets:
        words[n // 32] |= 1 << n % 32
    return torch.tensor([w - (1 << 32 if w >> 31 else 0) for w in words], dtype=torch.int32)


def grid(rows, keys, block_m, block_n) -> tuple[int, int]:
    return -(-rows // block_m), -(-keys // block_n)


def random_sets(shape, key_tiles, density, rng):
    """Nested lists of sets; every eighth or so is empty."""
    if shape:
        return [random_sets(shape[1:], key_tiles, density, rng) for _ in range(shape[0])]
    if rng.random() < 0.12:
        return set()
    return {n for n in range(key_tiles) if rng.random() < density}


def make(rows, keys, heads=2, heads_k=1, dim=4, dim_v=3, batch=1, seed=0, gain=2.5, dtype=F64):
    """q, k, v; the gain spreads the scores over some tens of log2 units."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    q, k = gain * normal(batch, rows, heads, dim), normal(batch, keys, heads_k, dim)
    return q.to(dtype), k.to(dtype), normal(batch, keys, heads_k, dim_v).to(dtype)


def literal_batch(q, k, v, sets, threshold, direction, scale, causal, forced, block_m, block_n):
    """`literal` for every batch entry, with tensors."""
    key_tiles = grid(1, k.shape[1], block_m, block_n)[1]
    results = [
        literal(
            *(x[b].tolist() for x in (q, k, v)),
            *(sets[b], threshold, direction, scale, causal, forced[b], block_m, block_n),
        )
        for b in range(q.shape[0])
    ]
    out = torch.tensor([r[0] for r in results], dtype=F64).view(*q.shape[:3], v.shape[-1])
    lse = torch.tensor([r[1] for r in results], dtype=F64).view(*q.shape[:1], q.shape[2], -1)
    return out, lse, words_of([r[2] for r in results], key_tiles), [r[3] for r in results]


def everything(batch, heads, rows, keys, block_m, block_n):
    query_tiles, key_tiles = grid(rows, keys, block_m, block_n)
    row = [set(range(key_tiles)) for _ in range(query_tiles)]
    return [[row for _ in range(heads)] for _ in range(batch)]


def nothing(sets):
    return [nothing(each) if isinstance(each, list) else set() for each in sets]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11, equal_nan=False)


def bits_of(mask: Tensor) -> Tensor:
    """bool [..., 32 W], without the package's own tools."""
    return (mask[..., None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(-2).bool()


def is_subset(inner: Tensor, outer: Tensor) -> bool:
    return bool((inner & ~outer == 0).all())


# --- against the loops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("rows", SIZES)
def test_is_the_rule_written_out(rows, keys):
    """Every pair of lengths, causal and not, with options that differ from pair to pair."""
    rng = random.Random(1000 * rows + keys)
    for causal in (False, True):
        block_m, block_n = rng.choice([(128, 64), (128, 128), (16, 64), (128, 8), (48, 4)])
        heads, heads_k = rng.choice([(1, 1), (2, 1)])
        q, k, v = make(rows, keys, heads, heads_k, seed=rows + keys)
        query_tiles, key_tiles = grid(rows, keys, block_m, block_n)
        sets = random_sets((1, heads, query_tiles), key_tiles, rng.choice([0.3, 0.8, 1.0]), rng)
        forced = random_sets((1, heads, query_tiles), key_tiles, rng.choice([0.0, 0.2]), rng)
        options = dict(threshold=rng.choice(THRESHOLDS), direction=rng.choice([1, -1]))
        options |= dict(causal=causal, scale=rng.choice([0.5, 0.37]))
        blocks = dict(block_m=block_m, block_n=block_n)
        read, must_do = words_of(sets, key_tiles), words_of(forced, key_tiles)
        before = read.clone()
        out, lse, write = lite_attention(q, k, v, read, must_do=must_do, **options, **blocks)
        expected = literal_batch(q, k, v, sets, forced=forced, **options, **blocks)
        assert_near(out, expected[0])
        assert_near(lse, expected[1])
        assert torch.equal(write, expected[2])
        assert is_subset(write, read) and torch.equal(read, before)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("lengths", [(40, 70), (37, 37), (50, 33)])
def test_thresholds_directions_and_heads(lengths, threshold, direction):
    """Two batch entries, grouped heads, many tiles: more than one word per row, and its sign bit."""
    rows, keys = lengths
    q, k, v = make(rows, keys, heads=4, heads_k=2, batch=2, seed=3)
    blocks = dict(block_m=16, block_n=1)
    rng = random.Random(rows)
    sets = random_sets((2, 4, grid(rows, keys, 16, 1)[0]), keys, 0.9, rng)
    sets[0][0][0] = set(range(keys))
    read = words_of(sets, keys)
    assert read.shape[-1] > 1 and (read < 0).any()
    for causal in (False, True):
        options = dict(threshold=threshold, direction=direction, causal=causal)
        out, lse, write = lite_attention(q, k, v, read, **options, **blocks)
        expected = literal_batch(
            q, k, v, sets, scale=0.5, forced=nothing(sets), **options, **blocks
        )
        assert_near(out, expected[0])
        assert_near(lse, expected[1])
        assert torch.equal(write, expected[2])


@pytest.mark.parametrize("block_n", [64, 128])
def test_no_mask_lists_everything(block_n):
    rows, keys = 257, 200
    q, k, v = make(rows, keys)
    sets = everything(1, 2, rows, keys, 128, block_n)
    for causal in (False, True):
        options = dict(causal=causal, threshold=-2.0, block_n=block_n)
        default = lite_attention(q, k, v, **options)
        listed = lite_attention(q, k, v, words_of(sets, grid(1, keys, 1, block_n)[1]), **options)
        for one, other in zip(default, listed):
            assert torch.equal(one, other)
        assert default[2].dtype == torch.int32 and default[2].is_contiguous()


def test_the_defaults_of_the_signature():
    q, k, v = make(130, 130)
    named = dict(threshold=-10.0, direction=1, scale=0.5, causal=False, block_m=128, block_n=64)
    for one, other in zip(lite_attention(q, k, v), lite_attention(q, k, v, **named)):
        assert torch.equal(one, other)


def test_must_do_broadcasts():
    q, k, v = make(40, 60, heads=2, batch=2)
    options = dict(block_m=16, block_n=4, threshold=math.inf)
    key_tiles = 15
    words = words_of({2, 5, 14}, key_tiles)
    write = lite_attention(q, k, v, must_do=words, **options)[2]
    assert torch.equal(
        bits_of(write)[..., :key_tiles].nonzero()[:4, -1], torch.tensor([0, 2, 5, 14])
    )
    full = words.expand(2, 2, 3, 1)
    assert torch.equal(write, lite_attention(q, k, v, must_do=full, **options)[2])
    per_head = torch.stack([words, torch.zeros_like(words)])[:, None]
    mixed = lite_attention(q, k, v, must_do=per_head, **options)[2]
    assert torch.equal(mixed[:, 0], write[:, 0]) and (mixed[:, 1] == 1).all()
    # It keeps what is visited, and cannot list again what was dropped.
    read = torch.full((2, 2, 3, 1), 0b110, dtype=torch.int32)
    assert (lite_attention(q, k, v, read, must_do=words, **options)[2] == 0b110).all()
    descending = lite_attention(q, k, v, read, direction=-1, **options)[2]
    assert (descending == 0b100).all()


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_thresholds(causal, direction):
    q, k, v = make(100, 120, heads=2)
    rng = random.Random(5)
    read = words_of(random_sets((1, 2, 7), 15, 0.6, rng), 15)
    options = dict(block_m=16, block_n=8, causal=causal, direction=direction)
    listed = lite_attention(q, k, v, read, threshold=-math.inf, **options)[2]
    if not causal:
        assert torch.equal(listed, read)
    only = bits_of(lite_attention(q, k, v, read, threshold=math.inf, **options)[2])
    bits = bits_of(listed)
    visited = bits if direction > 0 else bits.flip(-1)
    first = visited & (visited.cumsum(-1) == 1)
    assert torch.equal(only, first if direction > 0 else first.flip(-1))
    assert torch.equal(only.any(-1), bits.any(-1)) and not bits.any(-1).all()


@pytest.mark.parametrize("direction", [1, -1])
def test_the_comparison_is_strict_and_in_log2_units(direction):
    """One row, scores 0, 3 and 1 in log2 units, one key per tile."""
    q = torch.ones(1, 1, 1, 1, dtype=F64)
    k = torch.tensor([0.0, 3.0, 1.0], dtype=F64).view(1, 3, 1, 1)
    options = dict(scale=1 / LOG2E, block_n=1, direction=direction)

    def keeps(threshold):
        return lite_attention(q, k, k, threshold=threshold, **options)[2].item()

    # Rounding of the scale: margins are within 1e-12 of -2, -1 and 2, 3.
    near = 1e-9
    if direction > 0:
        # Margins: (first), 3, -2.
        assert [keeps(t) for t in (-2 - near, -2 + near, 0, 3 - near, 3 + near)] == [7, 3, 3, 3, 1]
    else:
        # Margins: -3, 2, (first).
        assert [keeps(t) for t in (-3 - near, -3 + near, 0, 2 - near, 2 + near)] == [7, 6, 6, 6, 4]
    equal = torch.zeros_like(k)
    assert lite_attention(q, equal, k, threshold=0.0, **options)[2].item() == (
        1 if direction > 0 else 4
    )


def test_a_row_keeps_a_tile_for_all_and_padding_rows_for_none():
    """Five rows in tiles of four: only one row's maximum lies in the second key tile."""
    q = torch.zeros(1, 5, 1, 1, dtype=F64)
    q[0, 2] = 1
    k = torch.tensor([0.0, 1.0, 0.0], dtype=F64).view(1, 3, 1, 1)
    write = lite_attention(q, k, k, threshold=0.0, block_m=4, block_n=1)[2]
    assert write.flatten().tolist() == [0b011, 0b001]


# --- causal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (20, 33), (33, 20), (65, 1), (1, 65)])
def test_causal_lists_what_some_row_sees(rows, keys):
    block_m, block_n = 8, 4
    q, k, v = make(rows, keys)
    for direction in (1, -1):
        options = dict(causal=True, direction=direction, block_m=block_m, block_n=block_n)
        out, lse, write = lite_attention(q, k, v, threshold=-math.inf, **options)
        for m in range(grid(rows, keys, block_m, block_n)[0]):
            last = min((m + 1) * block_m, rows) - 1 + keys - rows
            seen = {n for n in range(-(-keys // block_n)) if n * block_n <= last}
            assert torch.equal(write[0, 0, m], words_of(seen, -(-keys // block_n)))
        blind = torch.arange(rows) + keys - rows < 0
        assert (out[0, blind] == 0).all() and (lse[0, :, blind] == -math.inf).all()
        assert lse[0, :, ~blind].isfinite().all() and (blind.any() == (rows > keys))
        visible = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
        dense = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible, enable_gqa=True
        ).transpose(1, 2)
        assert_near(out[:, ~blind], dense[:, ~blind])


def test_causal_row_may_see_nothing_of_what_is_listed():
    """Only the diagonal tile is listed, and its first rows see none of its keys."""
    q, k, v = make(8, 8)
    read = torch.full((1, 2, 1, 1), 0b10, dtype=torch.int32)
    out, lse, write = lite_attention(q, k, v, read, causal=True, block_m=8, block_n=4)
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -math.inf).all()
    assert lse[..., 4:].isfinite().all() and torch.equal(write, read)
    assert_near(out[:, 4], v[:, 4].expand(-1, 2, -1))


# --- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(130, 257, 4, 2), (64, 64, 3, 1), (1, 200, 2, 2)])
def test_everything_listed_is_plain_attention(shape):
    rows, keys, heads, heads_k = shape
    q, k, v = (
        x.requires_grad_() for x in make(rows, keys, heads, heads_k, dim=8, dim_v=8, batch=2)
    )
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    for causal in (False, True):
        visible = torch.ones(rows, keys, dtype=torch.bool)
        visible = visible.tril(keys - rows) if causal else visible
        expected = F.scaled_dot_product_attention(
            qt, kt, vt, attn_mask=visible, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        out, lse, _ = lite_attention(q, k, v, scale=0.3, causal=causal)
        assert_near(out, expected)
        scores = 0.3 * qt @ kt.repeat_interleave(heads // heads_k, 1).mT
        assert_near(lse, scores.masked_fill(~visible, -math.inf).logsumexp(-1))
        dout = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad(expected, (q, k, v), dout)
        explicit = masked_gradients(q, k, v, dout, scale=0.3, causal=causal)
        for grads in (torch.autograd.grad(out, (q, k, v), dout), explicit):
            for actual, one in zip(grads, wanted):
                assert_near(actual, one)


def naive_attention(q, k, v, entered, scale) -> tuple[Tensor, Tensor]:
    """Softmax over a bool mask made from the keys that entered each row of the loops; rows without any are left out."""
    visible = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool)
    for b, heads in enumerate(entered):
        for h, rows in enumerate(heads):
            for i, columns in enumerate(rows):
                visible[b, h, i, columns] = True
    group = q.shape[2] // k.shape[2]
    key, value = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scores = scale * q.transpose(1, 2) @ key.mT
    sees = visible.any(-1)
    weights = torch.zeros_like(scores)
    lse = torch.full(scores.shape[:-1], -math.inf, dtype=F64)
    chosen = scores[sees].masked_fill(~visible[sees], -math.inf)
    weights[sees] = chosen.softmax(-1)
    lse[sees] = chosen.logsumexp(-1)
    return (weights @ value).transpose(1, 2), lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(65, 130), (64, 64), (130, 63)])
@pytest.mark.parametrize("density", [0.0, 0.25, 0.6, 1.0])
def test_gradients_are_those_of_the_masked_softmax(lengths, density, causal):
    rows, keys = lengths
    block_m, block_n = 16, 8
    q, k, v = (x.requires_grad_() for x in make(rows, keys, 4, 2, batch=2, seed=rows, gain=1.0))
    rng = random.Random(rows)
    query_tiles, key_tiles = grid(rows, keys, block_m, block_n)
    sets = random_sets((2, 4, query_tiles), key_tiles, density, rng)
    read = words_of(sets, key_tiles)
    options = dict(scale=0.4, causal=causal, block_m=block_m, block_n=block_n)
    out, lse, _ = lite_attention(q, k, v, read, **options)
    loops = literal_batch(
        *(x.detach() for x in (q, k, v)),
        *(sets, -10.0, 1, 0.4, causal, nothing(sets), block_m, block_n),
    )
    wanted_out, wanted_lse = naive_attention(q, k, v, loops[3], 0.4)
    assert_near(out, wanted_out)
    assert_near(wanted_out.detach(), loops[0])
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn(out.shape, generator=generator, dtype=F64)
    dlse = torch.randn(lse.shape, generator=generator, dtype=F64)
    sees = lse.isfinite()
    assert torch.equal(sees, wanted_lse.isfinite()) and not sees.all()

    def gradients(out, lse):
        return torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)

    wanted = gradients(wanted_out, wanted_lse)
    explicit = masked_gradients(q, k, v, dout, read, dlse=dlse, **options)
    given = masked_gradients(
        q, k, v, dout, read, out=out.detach(), lse=lse.detach(), dlse=dlse, **options
    )
    for actual in (gradients(out, lse), explicit, given):
        for one, other in zip(actual, wanted):
            assert_near(one, other)
        assert (actual[0].transpose(1, 2)[~sees] == 0).all()
    plain = torch.autograd.grad(wanted_out, (q, k, v), dout)
    for one, other in zip(masked_gradients(q, k, v, dout, read, **options), plain):
        assert_near(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal):
    """A blind row, an empty query tile, a partial tile of each kind, grouped heads; out and lse together."""
    q, k, v = (x.requires_grad_() for x in make(6, 5, 2, 1, dim=3, dim_v=2, gain=1.0))
    read = words_of([[[{0, 2}, set(), {1}], [{0, 1, 2}, {2}, {0, 1}]]], 3)

    def outputs(q, k, v):
        out, lse, _ = lite_attention(q, k, v, read, causal=causal, block_m=2, block_n=2)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(outputs, (q, k, v))


def test_rows_that_see_nothing_pass_on_no_gradient():
    """Whatever arrives there, NaN included, as it does from the merge of two parts that are both empty."""
    q, k, v = (x.requires_grad_() for x in make(8, 4))
    read = words_of([[[{0, 1}, {0}, set(), {1}]] * 2], 2)
    out, lse, _ = lite_attention(q, k, v, read, causal=True, block_m=2, block_n=2)
    # Rows 0 to 3 come before the first key, rows 4 and 5 list nothing, row 6 sees one key of tile 1, row 7 all.
    sees = torch.tensor([False] * 6 + [True] * 2)
    assert (lse.isfinite() == sees).all() and (out[:, ~sees] == 0).all()
    for bad in (math.nan, math.inf):
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        dout[:, ~sees], dlse[..., ~sees] = bad, bad
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
        explicit = masked_gradients(
            q, k, v, dout, read, dlse=dlse, causal=True, block_m=2, block_n=2
        )
        for one, other in zip(grads, explicit):
            assert one.isfinite().all() and one.any()
            assert_near(other, one)
        assert (grads[0][:, ~sees] == 0).all() and (grads[1][:, :2] == 0).all()


def test_gradients_of_a_wider_forward_leave_terms_out():
    """With out and lse of the dense forward, two complementary masks share its gradient between them."""
    q, k, v = make(40, 56, 4, 2, batch=2, gain=1.0)
    options = dict(block_m=16, block_n=8)
    out, lse, _ = lite_attention(q, k, v, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    dense = masked_gradients(q, k, v, dout, **options)
    sets = random_sets((2, 4, 3), 7, 0.5, random.Random(1))
    rest = [[[set(range(7)) - tiles for tiles in head] for head in batch] for batch in sets]
    parts = [
        masked_gradients(q, k, v, dout, words_of(each, 7), out=out, lse=lse, **options)
        for each in (sets, rest)
    ]
    for one, other, whole in zip(*parts, dense):
        assert_near(one + other, whole)
    # Other tiles than the forward's: halves of its query tiles and key tiles.
    halves = [[[t for tiles in head for t in [tiles] * 2] for head in batch] for batch in sets]
    halves = [
        [[{2 * n + i for n in tiles for i in (0, 1)} for tiles in head] for head in batch]
        for batch in halves
    ]
    mask = words_of(halves, 14)[:, :, :5]
    finer = masked_gradients(q, k, v, dout, mask, out=out, lse=lse, block_m=8, block_n=4)
    for one, other in zip(finer, parts[0]):
        assert_near(one, other)


# --- packed -----------------------------------------------------------------------------------------------------------

PACKINGS = [
    ([5, 0, 17, 1, 40], [9, 4, 0, 33, 40]),
    ([0, 3], [0, 2]),
    ([130, 64], [65, 200]),
    ([0], [5]),
    ([7], [0]),
    ([], []),
    ([0, 0], [0, 0]),
]


def cumulative(lengths, dtype) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("slack", [None, 30])
def test_packed_is_one_by_one(packing, causal, index_dtype, slack):
    lengths_q, lengths_k = packing
    block_m, block_n = 8, 4
    q, k, v = (x.requires_grad_() for x in make(sum(lengths_q), sum(lengths_k), 4, 2, seed=4))
    starts_q, starts_k = (cumulative(each, index_dtype) for each in packing)
    extent_q, extent_k = (max(each, default=0) + (slack or 0) for each in packing)
    query_tiles, key_tiles = grid(extent_q, extent_k, block_m, block_n)
    rng = random.Random(len(lengths_q))
    # The lists go on behind the end of a sequence; nothing is there to be visited.
    shape = (len(lengths_q), 4, query_tiles)
    read = words_of(random_sets(shape, key_tiles, 0.8, rng), key_tiles)
    read = read.reshape(*shape, -(-key_tiles // 32))
    must_do = words_of({1, 3} & set(range(key_tiles)), key_tiles)
    options = dict(causal=causal, threshold=-2.0, direction=-1, block_m=block_m, block_n=block_n)
    packed = dict(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    if slack is not None:
        packed |= dict(max_seqlen_q=extent_q, max_seqlen_k=extent_k)
    out, lse, write = lite_attention(q, k, v, read, must_do=must_do, **packed, **options)
    assert out.shape == (1, sum(lengths_q), 4, 3) and lse.shape == (4, sum(lengths_q))
    assert write.shape == read.shape and is_subset(write, read)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=F64)
    packed |= dict(causal=causal, block_m=block_m, block_n=block_n)
    explicit = masked_gradients(q, k, v, dout, read, **packed)
    given = masked_gradients(q, k, v, dout, read, out=out.detach(), lse=lse.detach(), **packed)
    wanted = [torch.zeros_like(x) for x in (q, k, v)]
    for n in range(len(lengths_q)):
        rows, keys = slice(*starts_q.tolist()[n : n + 2]), slice(*starts_k.tolist()[n : n + 2])
        tiles_m, tiles_n = grid(lengths_q[n], lengths_k[n], block_m, block_n)
        own = bits_of(read[n : n + 1, :, :tiles_m])[..., :tiles_n]
        own = words_of(
            [[[set(t.nonzero().flatten().tolist()) for t in h] for h in b] for b in own], tiles_n
        )
        own = own.view(1, 4, tiles_m, -(-tiles_n // 32))
        forced = words_of({1, 3} & set(range(tiles_n)), tiles_n)
        one = [x.detach()[:, s].requires_grad_() for x, s in ((q, rows), (k, keys), (v, keys))]
        alone = lite_attention(*one, own, must_do=forced, **options)
        assert torch.equal(out[:, rows], alone[0])
        assert torch.equal(lse[:, rows], alone[1][0])
        # The same words, and none elsewhere.
        expected = torch.zeros_like(write[n])
        expected[:, :tiles_m, : alone[2].shape[-1]] = alone[2][0]
        assert torch.equal(write[n], expected)
        if lengths_q[n]:
            grads = torch.autograd.grad(alone[0], one, dout[:, rows])
            for total, part, s in zip(wanted, grads, (rows, keys, keys)):
                total[:, s] = part
    results = [explicit, given]
    if sum(lengths_q):
        results.append(torch.autograd.grad(out, (q, k, v), dout))
    for result in results:
        for one, other in zip(result, wanted):
            assert_near(one, other)


@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 70), (70, 0)])
def test_empty_lengths(rows, keys):
    q, k, v = make(rows, keys, heads=2, batch=3)
    for causal in (False, True):
        out, lse, write = lite_attention(q, k, v, causal=causal, block_m=16)
        assert out.shape == (3, rows, 2, 3) and (out == 0).all()
        assert lse.shape == (3, 2, rows) and (lse == -math.inf).all()
        query_tiles, key_tiles = grid(rows, keys, 16, 64)
        assert write.shape == (3, 2, query_tiles, -(-key_tiles // 32)) and (write == 0).all()
        for grad, x in zip(masked_gradients(q, k, v, out, causal=causal, block_m=16), (q, k, v)):
            assert grad.shape == x.shape and (grad == 0).all()


def test_empty_batch():
    q, k, v = make(20, 30, batch=0)
    out, lse, write = lite_attention(q, k, v)
    assert out.shape == (0, 20, 2, 3) and lse.shape == (0, 2, 20) and write.shape == (0, 2, 1, 1)
    for grad, x in zip(masked_gradients(q, k, v, out), (q, k, v)):
        assert grad.shape == x.shape


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def calls(draw):
    """Inputs, a read mask and block sizes of a small call."""
    rows, keys = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    block_m, block_n = draw(st.sampled_from([4, 16, 128])), draw(st.sampled_from([1, 8, 64]))
    heads, heads_k = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    seed = draw(st.integers(0, 2**32 - 1))
    query_tiles, key_tiles = grid(rows, keys, block_m, block_n)
    density = draw(st.sampled_from([0.2, 0.7, 1.0]))
    sets = random_sets((2, heads, query_tiles), key_tiles, density, random.Random(seed))
    tensors = make(
        rows, keys, heads, heads_k, batch=2, seed=seed, gain=draw(st.sampled_from([0.5, 4.0]))
    )
    fixed = dict(causal=draw(st.booleans()), block_m=block_m, block_n=block_n)
    return tensors, words_of(sets, key_tiles), fixed


DIRECTION = st.sampled_from([1, -1])
THRESHOLD = st.one_of(st.sampled_from(THRESHOLDS), st.floats(-12, 3))


@KEEP
@given(calls(), THRESHOLD, THRESHOLD, DIRECTION)
def test_output_does_not_depend_on_what_is_kept(call, one, other, direction):
    (q, k, v), read, fixed = call
    every = torch.full_like(read[0, 0, 0], -1)
    first = lite_attention(q, k, v, read, threshold=one, direction=direction, **fixed)
    second = lite_attention(
        q, k, v, read, threshold=other, direction=-direction, must_do=every, **fixed
    )
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert is_subset(first[2], read) and is_subset(first[2], second[2])
    assert torch.equal((first[2] != 0).any(-1), (second[2] != 0).any(-1))
    # A higher threshold keeps a subset.
    low, high = min(one, other), max(one, other)
    more, fewer = (
        lite_attention(q, k, v, read, threshold=t, direction=direction, **fixed)[2]
        for t in (low, high)
    )
    assert is_subset(fewer, more)


@KEEP
@given(calls(), THRESHOLD, DIRECTION)
def test_an_unchanged_input_settles_after_both_directions(call, threshold, direction):
    """Over a subset the running maximum is lower, so that a third pass keeps all that the first two kept."""
    (q, k, v), mask, fixed = call
    masks = []
    for step in range(4):
        turn = direction * (-1) ** step
        mask = lite_attention(q, k, v, mask, threshold=threshold, direction=turn, **fixed)[2]
        masks.append(mask)
    assert torch.equal(masks[1], masks[2]) and torch.equal(masks[2], masks[3])


@KEEP
@given(calls(), st.integers(1, 59), DIRECTION)
def test_parts_merge_by_lse(call, cut, direction):
    """Attention over two disjoint sets of tiles, joined by their lse, is attention over both."""
    (q, k, v), read, fixed = call
    chosen = torch.full_like(read, (1 << cut % 31) - 1)
    whole_out, whole_lse, _ = lite_attention(q, k, v, read, direction=direction, **fixed)
    parts = [
        lite_attention(q, k, v, read & m, direction=direction, **fixed) for m in (chosen, ~chosen)
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    assert_near(lse, whole_lse)
    safe = lse.masked_fill(lse == -math.inf, 0)
    shares = [torch.exp(part[1] - safe).transpose(1, 2)[..., None] for part in parts]
    assert_near(shares[0] * parts[0][0] + shares[1] * parts[1][0], whole_out)


@pytest.mark.parametrize("causal", [False, True])
def test_lists_shrink_over_ten_alternating_calls(causal):
    """Inputs that drift; no list gains a tile or loses the last, and the loops agree on every call."""
    rows, keys, block_m, block_n = 48, 60, 8, 4
    sets = everything(1, 2, rows, keys, block_m, block_n)
    mask = words_of(sets, 15)
    settings_ = dict(causal=causal, block_m=block_m, block_n=block_n, threshold=-1.0)
    sizes = []
    for step in range(10):
        q, k, v = (
            x + 0.2 * y for x, y in zip(make(rows, keys, seed=8), make(rows, keys, seed=9 + step))
        )
        options = settings_ | dict(direction=1 - 2 * (step % 2))
        out, lse, write = lite_attention(q, k, v, mask, **options)
        expected = literal_batch(q, k, v, sets, scale=0.5, forced=nothing(sets), **options)
        assert_near(out, expected[0])
        assert torch.equal(write, expected[2]) and is_subset(write, mask)
        assert (write != 0).any(-1).all() and out.isfinite().all()
        mask = write
        sets = [
            [[set(row.nonzero().flatten().tolist()) for row in head] for head in batch]
            for batch in bits_of(mask)
        ]
        sizes.append(bits_of(mask).sum().item())
    assert sizes[-1] < sizes[0] < 2 * 6 * 15 and sizes == sorted(sizes, reverse=True)


def test_a_diagonal_pattern_takes_both_directions():
    """Query tile m needs key tile m only: the first pass keeps what lies before it, the second drops that."""
    tiles, block = 8, 4
    directions = torch.eye(tiles, dtype=F64).repeat_interleave(block, 0)
    q = 30 * directions[None, :, None]
    k = directions[None, :, None]
    v = torch.ones_like(k)
    options = dict(scale=1.0, threshold=-10.0, block_m=block, block_n=block)
    first = lite_attention(q, k, v, **options)[2]
    assert first.flatten().tolist() == [(2 << m) - 1 for m in range(tiles)]
    second = lite_attention(q, k, v, first, direction=-1, **options)[2]
    assert second.flatten().tolist() == [1 << m for m in range(tiles)]
    assert torch.equal(lite_attention(q, k, v, second, **options)[2], second)


def test_tiles_that_are_not_listed_may_hold_anything():
    q, k, v = make(40, 40, heads=2)
    read = torch.full((1, 2, 3, 1), 0b10101, dtype=torch.int32)
    options = dict(block_m=16, block_n=8)
    dirty = [k.clone(), v.clone()]
    for x, value in zip(dirty, (math.nan, math.inf)):
        x[:, 8:16], x[:, 24:32] = value, math.nan
    clean, poisoned = ([x.requires_grad_() for x in (q.clone(), *each)] for each in ((k, v), dirty))
    dout = torch.ones(1, 40, 2, 3, dtype=F64)
    results = []
    for tensors in (clean, poisoned):
        out, lse, write = lite_attention(*tensors, read, **options)
        grads = torch.autograd.grad(out, tensors, dout)
        results.append(
            [out, lse, write, *grads, *masked_gradients(*tensors, dout, read, **options)]
        )
    for one, other in zip(*results):
        assert torch.equal(one, other)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = make(130, 200, 4, 2, dim=8, gain=1.0, dtype=dtype)
    out, lse, write = lite_attention(q, k, v)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.dtype == dtype and lse.dtype == work and write.dtype == torch.int32
    exact = lite_attention(q.double(), k.double(), v.double())
    near = {
        torch.float64: 0.0,
        torch.float32: 2e-6,
        torch.bfloat16: 2.0**-7,
        torch.float16: 2.0**-10,
    }
    torch.testing.assert_close(out.double(), exact[0], rtol=near[dtype], atol=near[dtype])
    torch.testing.assert_close(lse.double(), exact[1], rtol=2e-6, atol=2e-6)
    dout = torch.ones_like(out)
    exact = masked_gradients(q.double(), k.double(), v.double(), dout.double())
    for grad, x, wanted in zip(masked_gradients(q, k, v, dout), (q, k, v), exact):
        assert grad.dtype == dtype and grad.shape == x.shape and grad.is_contiguous()
        torch.testing.assert_close(
            grad.double(), wanted, rtol=2 * near[dtype], atol=2 * near[dtype]
        )


def test_strided_inputs_are_left_alone():
    q, k, v = make(40, 50, 4, 2, dim=8, dim_v=8)
    # Heads before tokens in memory, and every other token of a longer tensor.
    views = [torch.stack([x, x + 1], 2).transpose(1, 3).contiguous() for x in (q, k, v)]
    views = [x.transpose(1, 3)[:, :, 0] for x in views]
    fused = torch.cat([k, v], -1)
    options = dict(block_m=16, block_n=8)
    plain = lite_attention(q, k, v, **options)
    dout = torch.ones_like(plain[0])
    expected = masked_gradients(q, k, v, dout, **options)
    for tensors in (views, (q, fused[..., :8], fused[..., 8:])):
        before = [x.clone() for x in tensors]
        for one, other in zip(lite_attention(*tensors, **options), plain):
            assert torch.equal(one, other) and one.is_contiguous()
        for one, other in zip(masked_gradients(*tensors, dout, **options), expected):
            assert torch.equal(one, other)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before))


def test_nothing_is_read_back_to_the_host():
    """Fake tensors have no values: any read-back of data would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = make(40, 50, 4, 2)
    read = torch.full((1, 4, 3, 1), -1, dtype=torch.int32)
    with FakeTensorMode() as mode:
        q, k, v, read = (mode.from_tensor(x) for x in (q, k, v, read))
        for causal in (False, True):
            options = dict(causal=causal, block_m=16, block_n=8)
            out, lse, write = lite_attention(q, k, v, read, must_do=read[0, 0, 0], **options)
            grads = masked_gradients(q, k, v, out, read, out=out, lse=lse, **options)
    assert out.shape == (1, 40, 4, 3) and lse.shape == (1, 4, 40) and write.shape == read.shape
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_scores_of_one_query_tile_at_a_time(monkeypatch):
    """No tensor of a call without autograd has the rows of two query tiles and all keys."""
    q, k, v = make(64, 96, 2, 1)
    seen = []
    scores = reference._scores

    def watched(*args):
        seen.append(scores(*args))
        return seen[-1]

    monkeypatch.setattr(reference, "_scores", watched)
    lite_attention(q, k, v, block_m=16)
    assert [x.shape for x in seen] == [(1, 2, 16, 96)] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(causal):
    q, k, v = make(130, 257, 4, 2, batch=2)
    sets = random_sets((2, 4, 2), 5, 0.7, random.Random(2))
    read, must_do = words_of(sets, 5), words_of({3}, 5)
    starts = cumulative([100, 0, 30], torch.int32), cumulative([57, 100, 100], torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for packed in (False, True):
        masks = {} if packed else dict(read_mask=read)
        tensors = [x[:1] if packed else x for x in (q, k, v)]
        masks |= dict(must_do=words_of({1}, 2) if packed else must_do)
        masks |= dict(zip(names, starts)) if packed else {}
        options = dict(causal=causal, threshold=-2.0)
        expected = lite_attention(*tensors, **masks, **options)
        there = {name: x.cuda() for name, x in masks.items()}
        actual = lite_attention(*(x.cuda() for x in tensors), **there, **options)
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-11)
        masks.pop("must_do"), there.pop("must_do")
        mask, mask_there = masks.pop("read_mask", None), there.pop("read_mask", None)
        dout = torch.ones_like(expected[0])
        wanted = masked_gradients(*tensors, dout, mask, causal=causal, **masks)
        grads = masked_gradients(
            *(x.cuda() for x in (*tensors, dout)), mask_there, causal=causal, **there
        )
        for one, other in zip(grads, wanted):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-11)
