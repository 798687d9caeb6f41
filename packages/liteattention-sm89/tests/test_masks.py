"""Bitmasks, token ranges and LiteAttention's lists against plain loops over tiles."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cula_testing.tensors import unsynchronised
from liteattention_sm89 import masks

SIZES = (1, 31, 32, 33, 64, 200)
KEEP = settings(deadline=None, derandomize=True, max_examples=60)
DIRECTIONS = pytest.mark.parametrize("descending", [False, True])

Row = list[int]


def words_of(row: Row) -> list[int]:
    """The signed 32-bit words of a row of 0 and 1."""
    found = []
    for first in range(0, len(row), 32):
        word = sum(bit << i for i, bit in enumerate(row[first : first + 32]))
        found.append(word - (1 << 32) if word >> 31 else word)
    return found


def mask_of(*rows: Row) -> Tensor:
    return torch.tensor([words_of(row) for row in rows], dtype=torch.int32)


def bits_of(*rows: Row) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def int16(*rows: Row) -> Tensor:
    return torch.tensor(rows, dtype=torch.int16)


def write_list(row: Row, descending: bool) -> Row:
    """What a pass in this direction writes when it keeps exactly the tiles of `row`."""
    tiles = len(row)
    order = range(tiles - 1, -1, -1) if descending else range(tiles)
    entries, keeping = [], False
    for tile in order:
        if bool(row[tile]) != keeping:
            entries.append(tile)
            keeping = not keeping
    if keeping:
        entries.append(-1 if descending else tiles)
    return [len(entries), *entries] + [0] * (tiles + 1 - len(entries))


def read_list(entries: Row, step: int) -> Row:
    """The tiles that the next pass, in direction `step`, visits: pairs from the tail, both ends moved by one step."""
    visited, i = [], entries[0]
    while i > 0:
        tile, end = entries[i] + step, entries[i - 1] + step
        while tile != end:
            visited.append(tile)
            tile += step
        i -= 2
    return visited


def patterns(tiles: int) -> dict[str, Row]:
    rng = random.Random(tiles)
    return {
        "empty": [0] * tiles,
        "full": [1] * tiles,
        "even": [1 - n % 2 for n in range(tiles)],
        "odd": [n % 2 for n in range(tiles)],
        "first": [int(n == 0) for n in range(tiles)],
        "last": [int(n == tiles - 1) for n in range(tiles)],
        "middle": [int(tiles // 3 <= n < tiles - tiles // 3) for n in range(tiles)],
        "runs": [int(n // 5 % 3 != 1) for n in range(tiles)],
        "random": [rng.randrange(2) for _ in range(tiles)],
    }


CASES = [
    pytest.param(row, id=f"{tiles}-{name}")
    for tiles in SIZES
    for name, row in patterns(tiles).items()
]


@st.composite
def rows_of_tiles(draw) -> list[Row]:
    """One to four rows of the same number of tiles."""
    tiles = draw(st.one_of(st.sampled_from(SIZES), st.integers(1, 130)))
    numbers = draw(st.lists(st.integers(0, 2**tiles - 1), min_size=1, max_size=4))
    return [[number >> n & 1 for n in range(tiles)] for number in numbers]


# Words


@pytest.mark.parametrize("tiles", range(131))
def test_words_hold_the_tiles(tiles):
    assert 32 * (masks.words(tiles) - 1) < tiles <= 32 * masks.words(tiles)


@pytest.mark.parametrize("tiles", SIZES)
def test_full_lists_every_tile_and_nothing_behind(tiles):
    mask = masks.full(2, 3, 4, tiles)
    assert mask.shape == (2, 3, 4, masks.words(tiles))
    assert mask.dtype == torch.int32 and mask.is_contiguous() and mask.device.type == "cpu"
    expected = words_of([1] * tiles)
    assert all(row == expected for row in mask.reshape(-1, mask.shape[-1]).tolist())
    # Rows must not share memory: kernels write into masks.
    mask[0, 0, 0] = 0
    assert (mask == 0).all(-1).sum() == 1


def test_full_follows_the_device():
    assert masks.full(1, 2, 3, 40, torch.device("meta")).device.type == "meta"
    assert masks.full(1, 2, 3, 40, "meta").shape == (1, 2, 3, 2)


@pytest.mark.parametrize("row", CASES)
def test_pack_and_unpack_a_pattern(row):
    mask = masks.pack(bits_of(row, row))
    assert mask.dtype == torch.int32 and mask.is_contiguous()
    assert mask.tolist() == [words_of(row)] * 2
    bits = masks.unpack(mask, len(row))
    assert bits.dtype == torch.bool and bits.is_contiguous()
    assert bits.tolist() == [[bool(bit) for bit in row]] * 2


@KEEP
@given(rows_of_tiles())
def test_pack_and_unpack_round_trip(rows):
    bits = bits_of(*rows)
    mask = masks.pack(bits)
    assert torch.equal(mask, mask_of(*rows))
    assert torch.equal(masks.unpack(mask, bits.shape[-1]), bits)


def test_bit_31_is_the_sign():
    assert masks.pack(bits_of([0] * 31 + [1])).tolist() == [[-(2**31)]]
    assert masks.pack(bits_of([1] * 32)).tolist() == [[-1]]
    assert masks.pack(bits_of([1] * 31)).tolist() == [[2**31 - 1]]
    assert masks.unpack(torch.tensor([-(2**31)], dtype=torch.int32), 32).tolist() == (
        [False] * 31 + [True]
    )


@pytest.mark.parametrize("lead", [(), (5,), (2, 3, 4), (0, 2), (2, 0, 3)])
@pytest.mark.parametrize("tiles", [0, 1, 33])
def test_any_leading_dimensions(lead, tiles):
    bits = torch.rand(*lead, tiles) < 0.5
    mask = masks.pack(bits)
    assert mask.shape == (*lead, masks.words(tiles))
    assert torch.equal(masks.unpack(mask, tiles), bits)
    assert torch.equal(masks.count(mask), bits.sum(-1))
    assert 0 <= masks.density(mask, tiles) <= 1
    for descending in (False, True):
        lists = masks.to_ranges(mask, tiles, descending)
        assert lists.shape == (*lead, tiles + 2)
        assert torch.equal(masks.from_ranges(lists, tiles, descending), mask)


def test_views_are_accepted():
    bits = torch.rand(6, 70, 5).lt(0.5).transpose(1, 2)[::2]
    mask = masks.pack(bits)
    assert torch.equal(masks.unpack(mask, 70), bits)
    spread = torch.full((3, 5, 2 * mask.shape[-1]), -1, dtype=torch.int32)
    view = spread[..., ::2].copy_(mask)
    assert not view.is_contiguous()
    assert torch.equal(masks.unpack(view, 70), bits)
    assert torch.equal(masks.count(view), bits.sum(-1))
    assert torch.equal(masks.transpose(view, 5, 70), masks.transpose(mask, 5, 70))
    lists = masks.to_ranges(view, 70).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(masks.from_ranges(lists, 70), mask)


# Counting


def test_count_against_python():
    rng = random.Random(7)
    words = [[0, -1, 1, -(2**31), 2**31 - 1, 0x55555555, -0x55555556, -2]]
    words += [[rng.randrange(-(2**31), 2**31) for _ in range(8)] for _ in range(40)]
    counted = masks.count(torch.tensor(words, dtype=torch.int32))
    assert counted.dtype == torch.int64
    expected = [sum(bin(word & 0xFFFFFFFF).count("1") for word in row) for row in words]
    assert counted.tolist() == expected


@KEEP
@given(rows_of_tiles())
def test_count_and_density(rows):
    tiles, mask = len(rows[0]), mask_of(*rows)
    assert masks.count(mask).tolist() == [sum(row) for row in rows]
    density = masks.density(mask, tiles)
    assert density.dtype == torch.float32 and density.dim() == 0
    assert 0 <= density <= 1
    assert density.item() == pytest.approx(sum(map(sum, rows)) / (tiles * len(rows)), rel=1e-6)


@pytest.mark.parametrize("tiles", SIZES)
def test_density_is_exact_at_its_ends(tiles):
    for rows in (1, 3, 7, 41):
        mask = masks.full(rows, 1, 1, tiles)
        assert masks.density(mask, tiles).item() == 1.0
        assert masks.density(torch.zeros_like(mask), tiles).item() == 0.0


def test_density_of_nothing_is_zero():
    assert masks.density(torch.empty(0, 2, 3, 1, dtype=torch.int32), 5).item() == 0.0
    assert masks.density(masks.full(1, 1, 2, 0), 0).item() == 0.0


def test_bits_behind_the_tiles_do_not_count():
    dirty = torch.full((3, 2), -1, dtype=torch.int32)
    assert masks.density(dirty, 33).item() == 1.0
    assert masks.unpack(dirty, 33).shape == (3, 33)
    assert torch.equal(
        masks.transpose(dirty, 3, 33), masks.transpose(masks.full(1, 1, 3, 33)[0, 0], 3, 33)
    )
    assert masks.to_ranges(dirty, 33)[0, :4].tolist() == [2, 0, 33, 0]
    assert masks.to_ranges(dirty, 33, descending=True)[0, :4].tolist() == [2, 32, -1, 0]
    assert masks.count(dirty).tolist() == [64] * 3


# Transposition


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
@pytest.mark.parametrize("tiles", [1, 31, 32, 65])
def test_transpose_against_a_loop(rows, tiles):
    rng = random.Random(1000 * rows + tiles)
    tables = [[[rng.randrange(2) for _ in range(tiles)] for _ in range(rows)] for _ in range(6)]
    mask = torch.stack([mask_of(*table) for table in tables]).unflatten(0, (2, 3))
    turned = masks.transpose(mask, rows, tiles)
    assert turned.shape == (2, 3, tiles, masks.words(rows))
    assert turned.dtype == torch.int32 and turned.is_contiguous()
    for table, found in zip(tables, turned.flatten(0, 1).tolist()):
        for n in range(tiles):
            assert found[n] == words_of([table[m][n] for m in range(rows)])
    assert torch.equal(masks.transpose(turned, tiles, rows), mask)


# Token ranges


def tiles_by_token(ranges: Row, keys: int, block: int, inward: bool) -> Row:
    inside = [any(s <= t < e for s, e in zip(ranges[::2], ranges[1::2])) for t in range(keys)]
    quantifier = all if inward else any
    return [int(quantifier(inside[n : n + block])) for n in range(0, keys, block)]


@st.composite
def token_ranges(draw) -> tuple[Row, int, int]:
    block = draw(st.sampled_from((1, 3, 64, 128)))
    keys = draw(st.integers(1, 40 * block if block < 64 else 5 * block))
    edge = st.one_of(st.integers(0, keys), st.integers(0, keys // block).map(lambda n: n * block))
    ranges: Row = []
    for _ in range(draw(st.integers(0, 4))):
        start, end = sorted((draw(edge), draw(st.one_of(edge, st.just(keys)))))
        if start < end:
            ranges += [start, end]
    return ranges, keys, block


@KEEP
@given(token_ranges(), st.booleans())
@example(([0, 30, 30, 64], 64, 64), True)
@example(([40, 128, 0, 41], 130, 64), True)
def test_tiles_of_tokens_against_a_loop(problem, inward):
    ranges, keys, block = problem
    words = masks.tiles_of_tokens(ranges, keys, block, inward)
    assert words.dtype == torch.int32 and words.shape == (masks.words(-(-keys // block)),)
    assert words.tolist() == words_of(tiles_by_token(ranges, keys, block, inward))


@pytest.mark.parametrize(
    "ranges, keys, outward, inward",
    [
        ([], 200, [], []),
        ([0, 200], 200, [0, 1, 2, 3], [0, 1, 2, 3]),
        ([64, 128], 200, [1], [1]),
        # Inside one tile.
        ([70, 100], 200, [1], []),
        ([64, 127], 200, [1], []),
        ([65, 128], 200, [1], []),
        ([63, 64], 200, [0], []),
        # Across a border.
        ([63, 65], 200, [0, 1], []),
        ([10, 150], 200, [0, 1, 2], [1]),
        # Touching, overlapping, nested and out of order: one range each.
        ([0, 30, 30, 64], 200, [0], [0]),
        ([0, 40, 30, 64], 200, [0], [0]),
        ([0, 128, 10, 20], 200, [0, 1], [0, 1]),
        ([100, 128, 64, 100], 200, [1], [1]),
        # A gap of one token leaves the tile uncovered.
        ([0, 30, 31, 64], 200, [0], []),
        # The last tile holds tokens 192 to 199.
        ([192, 200], 200, [3], [3]),
        ([193, 200], 200, [3], []),
        ([192, 199], 200, [3], []),
        ([130, 200], 200, [2, 3], [3]),
        ([0, 1], 1, [0], [0]),
    ],
)
def test_tiles_of_tokens_rounds(ranges, keys, outward, inward):
    for expected, flag in ((outward, False), (inward, True)):
        row = [int(n in expected) for n in range(-(-keys // 64))]
        assert masks.tiles_of_tokens(ranges, keys, 64, flag).tolist() == words_of(row)


def test_tiles_of_tokens_fills_many_words():
    tiles = 100
    assert masks.tiles_of_tokens([0, 64 * tiles], 64 * tiles, 64, True).tolist() == words_of(
        [1] * tiles
    )
    row = [int(31 <= n < 65) for n in range(tiles)]
    words = masks.tiles_of_tokens([31 * 64, 65 * 64], 64 * tiles, 64, inward=False)
    assert words.tolist() == words_of(row)


def test_tiles_of_tokens_takes_tensors_and_tuples():
    expected = masks.tiles_of_tokens([0, 70, 130, 200], 200, 64, False)
    for dtype in (torch.int16, torch.int32, torch.int64):
        ranges = torch.tensor([0, 70, 130, 200], dtype=dtype)
        assert torch.equal(masks.tiles_of_tokens(ranges, 200, 64, False), expected)
    assert torch.equal(masks.tiles_of_tokens((0, 70, 130, 200), 200, 64, False), expected)
    assert torch.equal(masks.tiles_of_tokens(iter((0, 70, 130, 200)), 200, 64, False), expected)
    assert masks.tiles_of_tokens([0, 70], 200, 64, False, device="meta").device.type == "meta"
    assert masks.tiles_of_tokens([], 0, 64, True).shape == (0,)


def test_tiles_of_tokens_broadcast_over_a_mask():
    mask = masks.full(2, 3, 4, 40)
    dropped = mask & ~masks.tiles_of_tokens([0, 64 * 33], 64 * 40, 64, inward=True)
    assert masks.count(dropped).unique().tolist() == [7]


# LiteAttention's lists


@DIRECTIONS
@pytest.mark.parametrize("row", CASES)
def test_lists_of_a_pattern(row, descending):
    lists = masks.to_ranges(mask_of(row), len(row), descending)
    assert lists.dtype == torch.int16 and lists.is_contiguous()
    assert lists.tolist() == [write_list(row, descending)]
    assert torch.equal(masks.from_ranges(lists, len(row), descending), mask_of(row))


@KEEP
@given(rows_of_tiles(), st.booleans())
def test_lists_round_trip(rows, descending):
    tiles, mask = len(rows[0]), mask_of(*rows)
    lists = masks.to_ranges(mask, tiles, descending)
    assert lists.tolist() == [write_list(row, descending) for row in rows]
    assert torch.equal(masks.from_ranges(lists, tiles, descending), mask)
    # The next pass reads the list against the direction it was written in and meets every tile once.
    step = 1 if descending else -1
    for row, entries in zip(rows, lists.tolist()):
        listed = [n for n, bit in enumerate(row) if bit]
        assert read_list(entries, step) == listed[::step]


def test_lists_as_a_kernel_writes_them():
    assert masks.to_ranges(masks.full(1, 1, 1, 31), 31)[..., :3].flatten().tolist() == [2, 0, 31]
    first = masks.to_ranges(masks.full(1, 2, 3, 31), 31, descending=True)
    assert first.shape == (1, 2, 3, 33)
    assert (first[..., :3] == int16([2, 30, -1])).all() and not first[..., 3:].any()
    rows = [0, 1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]
    assert masks.to_ranges(mask_of(*rows), 8).tolist() == [
        [6, 1, 3, 5, 6, 7, 8, 0, 0, 0],
        [2, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert masks.to_ranges(mask_of(*rows), 8, descending=True).tolist() == [
        [6, 7, 6, 5, 4, 2, 0, 0, 0, 0],
        [2, 0, -1, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_ranges_that_touch_are_read_and_merged():
    ascending = int16([4, 1, 3, 3, 5, 0, 0, 0])
    assert torch.equal(masks.from_ranges(ascending, 6), mask_of([0, 1, 1, 1, 1, 0]))
    descending = int16([6, 5, 3, 3, 2, 2, -1, 0])
    mask = masks.from_ranges(descending, 6, descending=True)
    assert torch.equal(mask, mask_of([1] * 6))
    assert masks.to_ranges(mask, 6, True).tolist() == [[2, 5, -1, 0, 0, 0, 0, 0]]


@DIRECTIONS
def test_what_lies_behind_the_entries_is_ignored(descending):
    rows = [0, 1, 1, 0, 0, 1, 0], [0] * 7, [1] * 7
    lists = masks.to_ranges(mask_of(*rows), 7, descending)
    for junk in (-(2**15), -1, 3, 7, 2**15 - 1):
        for row in lists:
            row[1 + int(row[0]) :] = junk
        assert torch.equal(masks.from_ranges(lists, 7, descending), mask_of(*rows))


@DIRECTIONS
@pytest.mark.parametrize("tiles", [1, 33, 64])
def test_alternating_calls_keep_a_list(tiles, descending):
    rows = list(patterns(tiles).values())
    mask = mask_of(*rows)
    for _ in range(10):
        mask = masks.from_ranges(masks.to_ranges(mask, tiles, descending), tiles, descending)
        assert torch.equal(mask, mask_of(*rows))
        descending = not descending


@DIRECTIONS
def test_the_longest_lists_fit_int16(descending):
    tiles = 32766
    row = [1 - n % 2 for n in range(tiles)]
    lists = masks.to_ranges(mask_of(row), tiles, descending)
    assert lists.shape == (1, tiles + 2) and lists.tolist() == [write_list(row, descending)]
    assert torch.equal(masks.from_ranges(lists, tiles, descending), mask_of(row))
    full = masks.to_ranges(masks.full(1, 1, 1, tiles), tiles, descending).flatten()
    assert full[:3].tolist() == ([2, tiles - 1, -1] if descending else [2, 0, tiles])


@pytest.mark.parametrize(
    "entries",
    [
        [1, 0, 0, 0, 0, 0],  # odd
        [3, 0, 1, 2, 0, 0],
        [-2, 0, 1, 0, 0, 0],
        [6, 0, 1, 2, 3, 4],  # more entries than the row holds
        [2, 2, 2, 0, 0, 0],  # empty
        [2, 3, 1, 0, 0, 0],  # the other direction
        [2, 0, 5, 0, 0, 0],  # past the tiles
        [2, -1, 2, 0, 0, 0],
        [4, 0, 2, 1, 3, 0],  # overlap
        [4, 2, 3, 0, 1, 0],  # out of order
        [4, 0, 1, 3, 3, 0],
    ],
)
def test_foreign_lists_are_refused(entries):
    good = [2, 0, 4, 0, 0, 0]
    with pytest.raises(ValueError, match=r"lists: expected .* ascending pass over 4 tiles, got"):
        masks.from_ranges(int16(good, entries), 4)
    # The same row as a descending pass would write it.
    mirrored = [entries[0], *(3 - entry for entry in entries[1:])]
    with pytest.raises(ValueError, match=r"lists: expected .* descending pass over 4 tiles, got"):
        masks.from_ranges(int16([2, 3, -1, 0, 0, 0], mirrored), 4, descending=True)


def test_the_message_shows_the_first_wrong_row():
    lists = int16([2, 0, 4, 0, 0, 0], [2, 3, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"got \[2, 3, 1, 0, 0, 0\]"):
        masks.from_ranges(lists, 4)


@DIRECTIONS
def test_lists_of_the_other_direction_are_refused(descending):
    lists = masks.to_ranges(masks.full(1, 2, 3, 40), 40, descending)
    with pytest.raises(ValueError, match="lists"):
        masks.from_ranges(lists, 40, not descending)


# Errors


MASK = torch.zeros(2, 3, 4, 2, dtype=torch.int32)
LISTS = torch.zeros(2, 3, 4, 42, dtype=torch.int16)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: masks.words(-1), ValueError, "tiles: .*not negative, got -1"),
        (lambda: masks.words(2.0), TypeError, "tiles: expected an int, got float"),
        (lambda: masks.words(True), TypeError, "tiles: expected an int, got bool"),
        (lambda: masks.full(-1, 1, 1, 1), ValueError, "batch"),
        (lambda: masks.full(1, "2", 1, 1), TypeError, "heads"),
        (lambda: masks.full(1, 1, -1, 1), ValueError, "Mt"),
        (lambda: masks.full(1, 1, 1, 1.5), TypeError, "Nt"),
        (lambda: masks.pack([True]), TypeError, "bits: expected a torch.Tensor, got list"),
        (lambda: masks.pack(MASK), TypeError, "bits: expected bool, got int32"),
        (lambda: masks.pack(torch.tensor(True)), ValueError, "bits: .*dimension"),
        (lambda: masks.unpack(MASK.bool(), 40), TypeError, "mask: expected int32, got bool"),
        (lambda: masks.unpack(MASK.long(), 40), TypeError, "mask: expected int32, got int64"),
        (lambda: masks.unpack(None, 40), TypeError, "mask: expected a torch.Tensor"),
        (lambda: masks.unpack(MASK, 32), ValueError, "mask: expected 1 words .* Nt = 32"),
        (lambda: masks.unpack(MASK, 65), ValueError, "mask: expected 3 words .* Nt = 65"),
        (lambda: masks.unpack(MASK, -1), ValueError, "Nt"),
        (lambda: masks.unpack(MASK, None), TypeError, "Nt"),
        (lambda: masks.count(MASK.short()), TypeError, "mask: expected int32, got int16"),
        (lambda: masks.count(MASK[0, 0, 0, 0]), ValueError, "mask: .*dimension"),
        (lambda: masks.density(MASK.float(), 40), TypeError, "mask: expected int32, got float32"),
        (lambda: masks.density(MASK, 70), ValueError, "mask: expected 3 words"),
        (lambda: masks.transpose(MASK.byte(), 4, 40), TypeError, "mask: expected int32"),
        (lambda: masks.transpose(MASK, 5, 40), ValueError, "mask: .*Mt = 5 rows"),
        (lambda: masks.transpose(MASK[0, 0, 0], 4, 40), ValueError, "mask: .*Mt = 4 rows"),
        (lambda: masks.transpose(MASK, 4, 30), ValueError, "mask: expected 1 words"),
        (lambda: masks.transpose(MASK, 4.0, 40), TypeError, "Mt"),
        (lambda: masks.to_ranges(MASK.bool(), 40), TypeError, "mask: expected int32"),
        (lambda: masks.to_ranges(MASK, 30), ValueError, "mask: expected 1 words"),
        (lambda: masks.to_ranges(MASK, 32768), ValueError, "Nt: expected at most 32766"),
        (lambda: masks.to_ranges(MASK, 32767), ValueError, "Nt: expected at most 32766"),
        (lambda: masks.to_ranges(MASK, 40, 1), TypeError, "descending: expected a bool"),
        (lambda: masks.from_ranges(LISTS.int(), 40), TypeError, "lists: expected int16, got int32"),
        (lambda: masks.from_ranges([0], 40), TypeError, "lists: expected a torch.Tensor"),
        (lambda: masks.from_ranges(LISTS, 41), ValueError, "lists: .*Nt = 41"),
        (lambda: masks.from_ranges(LISTS, 39), ValueError, "lists: .*Nt = 39"),
        (lambda: masks.from_ranges(LISTS, 32768), ValueError, "Nt: expected at most 32766"),
        (lambda: masks.from_ranges(LISTS, 40, None), TypeError, "descending: expected a bool"),
    ],
)
def test_wrong_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "ranges, error, message",
    [
        ([0], ValueError, r"ranges: expected an even number of entries.*got \[0\]"),
        ([0, 64, 100], ValueError, "ranges: expected an even number"),
        ([-1, 64], ValueError, r"ranges: expected 0 <= start < end <= Sk = 200, got \[-1, 64\]"),
        ([0, -64], ValueError, "ranges"),
        ([64, 64], ValueError, r"got \[64, 64\]"),
        ([0, 64, 128, 100], ValueError, r"got \[128, 100\]"),
        ([0, 201], ValueError, r"got \[0, 201\]"),
        ([200, 201], ValueError, "ranges"),
        ([[0, 64]], TypeError, "ranges: expected a flat list"),
        ([0.0, 64.0], TypeError, "ranges: expected a flat list"),
        ([False, True], TypeError, "ranges: expected a flat list"),
        ([None, 3], TypeError, "ranges: expected a flat list"),
        ([torch.tensor(0.5), 64], TypeError, "ranges: expected a flat list"),
        ("0 64", TypeError, "ranges: expected a flat list .*got str"),
        (None, TypeError, "ranges: expected a flat list .*got NoneType"),
        (7, TypeError, "ranges: expected a flat list .*got int"),
        (torch.tensor([0.0, 64.0]), TypeError, "ranges: expected integers, got a float32 tensor"),
        (
            torch.tensor([[0, 64]]),
            ValueError,
            r"ranges: expected a flat list, got a tensor \[1, 2\]",
        ),
        (torch.tensor([0, 64, 65]), ValueError, "ranges: expected an even number"),
    ],
)
@pytest.mark.parametrize("inward", [False, True])
def test_wrong_token_ranges_are_named(ranges, error, message, inward):
    with pytest.raises(error, match=message):
        masks.tiles_of_tokens(ranges, 200, 64, inward)


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((-1, 64, True), ValueError, "Sk"),
        ((200.0, 64, True), TypeError, "Sk"),
        ((200, 0, True), ValueError, "block_n: expected at least 1, got 0"),
        ((200, -64, True), ValueError, "block_n"),
        ((200, None, True), TypeError, "block_n"),
        ((200, 64, 1), TypeError, "inward: expected a bool, got int"),
    ],
)
def test_wrong_extents_are_named(sizes, error, message):
    with pytest.raises(error, match=message):
        masks.tiles_of_tokens([], *sizes)


# Devices


def everything(bits: Tensor) -> list[Tensor]:
    """What the functions that do not read the device return for bool [..., Mt, Nt]."""
    Mt, Nt = bits.shape[-2:]
    mask = masks.pack(bits)
    return [
        mask,
        masks.full(2, 3, Mt, Nt, bits.device),
        masks.unpack(mask, Nt),
        masks.count(mask),
        masks.density(mask, Nt),
        masks.transpose(mask, Mt, Nt),
        masks.to_ranges(mask, Nt),
        masks.to_ranges(mask, Nt, descending=True),
    ]


def test_nothing_reads_the_values_on_the_host():
    # A fake tensor has no values: reading one raises.
    with FakeTensorMode():
        fake = everything(torch.empty(2, 3, 5, 70, dtype=torch.bool))
    real = everything(torch.zeros(2, 3, 5, 70, dtype=torch.bool))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_traced_sizes_stay_symbolic():
    first, second = torch.rand(2, 3, 5, 70) < 0.5, torch.rand(4, 6, 9, 133) < 0.5
    traced = make_fx(everything, tracing_mode="symbolic")(first)
    for a, b in zip(traced(second), everything(second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", SIZES)
def test_a_gpu_gives_the_same_and_is_not_waited_for(tiles):
    bits = torch.rand(2, 3, 37, tiles) < 0.5
    expected, moved = everything(bits), bits.cuda()
    everything(moved)
    with unsynchronised():
        found = everything(moved)
    for a, b in zip(found, expected, strict=True):
        assert a.is_cuda and torch.equal(a.cpu(), b)
    for lists, descending in ((found[-2], False), (found[-1], True)):
        assert torch.equal(masks.from_ranges(lists, tiles, descending).cpu(), expected[0])
    words = masks.tiles_of_tokens([0, 64 * tiles], 64 * tiles, 64, True, device="cuda")
    assert words.is_cuda and torch.equal(words.cpu(), masks.full(1, 1, 1, tiles).flatten())
