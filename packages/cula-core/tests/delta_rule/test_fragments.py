"""Where units lie in shared memory: the emulator runs every placing alike, a GPU does not."""

from __future__ import annotations

import pytest

from cula_core.delta_rule.config import CHUNK
from cula_core.delta_rule.kernels.block import WIDE
from cula_core.delta_rule.kernels.fragments import (
    LINE,
    OF_WARP,
    ROUNDS,
    SUB,
    UNIT,
    place_in_line,
    place_in_triangle,
    place_of,
    place_of_unit,
    unit_of_triangle,
)

LANES = range(32)
BANKS = 8  # of 16 bytes


def test_every_unit_has_its_own_place():
    own = [
        place_of_unit(place_of(pair, unit), m, r)
        for pair in range(8)
        for unit in range(4)
        for m in (0, 1)
        for r in (0, 1)
    ]
    assert sorted(own) == list(range(OF_WARP))
    assert sorted(place_in_line(lane, j) for lane in LANES for j in range(ROUNDS)) == sorted(own)


@pytest.mark.parametrize("j", range(ROUNDS))
def test_both_ways_to_a_unit_meet(j):
    """What a lane takes of a line is found where the owner of that token and unit looks for it."""
    for lane in LANES:
        token, unit = lane // LINE + 4 * j, lane % LINE
        assert place_in_line(lane, j) == place_of(token // 2, unit) + LINE * (token % 2)


@pytest.mark.parametrize("x", range(LINE))
def test_places_can_be_turned(x):
    assert all(place_of(n, u ^ x) == place_of(n, u) ^ x for n in range(8) for u in range(LINE))


@pytest.mark.parametrize("first", range(0, 32, BANKS))
def test_own_units_fall_on_all_banks(first):
    """8 lanes in a row access 16 bytes each: unit lane % 4 of token pair lane // 4."""
    places = [place_of(lane // 4, lane % 4) for lane in LANES[first : first + BANKS]]
    assert {place % BANKS for place in places} == set(range(BANKS))


@pytest.mark.parametrize("unit", range(LINE))
def test_rows_of_ldmatrix_fall_on_all_banks(unit):
    assert {place_of(pair, unit) % BANKS for pair in range(8)} == set(range(BANKS))


@pytest.mark.parametrize("j", range(ROUNDS))
@pytest.mark.parametrize("first", range(0, 32, BANKS))
def test_lanes_that_share_a_row_share_a_line(first, j):
    """An asynchronous copy of 8 lanes is one access if it stays within 128 bytes of shared memory."""
    places = [place_in_line(lane, j) for lane in LANES[first : first + BANKS]]
    assert {place // LINE for place in places} == {first // LINE + 4 * j} and len(
        set(places)
    ) == LINE


def test_a_line_is_half_a_row_of_a_wide_matrix():
    assert LINE * UNIT * 2 * CHUNK == WIDE


def test_units_of_a_triangle_are_found_by_number():
    """The lower triangle of 16 x 16 sub-blocks, a unit after the other; every row has those of its panel and before."""
    units = [
        (row, column) for row in range(CHUNK) for column in range(0, row // SUB * SUB + SUB, UNIT)
    ]
    at = [int(unit_of_triangle(*unit)) for unit in units]
    assert sorted(at) == list(range(0, UNIT * len(units), UNIT))
    for unit, place in zip(units, at):
        assert tuple(map(int, place_in_triangle(place // UNIT))) == unit
