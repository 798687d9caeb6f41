"""Plans: what is cut, into what, and that nothing but shapes decides."""

from __future__ import annotations

import itertools

import pytest
from delta_rule_targets import BLACKWELL, HOPPER

from cula_core.delta_rule.config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    MAX_GRID_Z,
    MIN_SEGMENT_CHUNKS,
    TRIANGLE,
    chunk_slots,
    workspace_bytes,
)
from cula_core.delta_rule.plan import CostModel, Plan, plan

SMS = 132


def planned(
    tokens: int,
    heads: int,
    batch: int = 1,
    sequences: int | None = None,
    workspace: int | None = None,
    wanted: str = "auto",
    longest: int | None = None,
    target=HOPPER,
) -> Plan:
    if workspace is None:
        workspace = workspace_bytes(batch, tokens, heads, sequences)
    return plan(target, batch, tokens, heads, sequences, SMS, workspace, wanted, longest)


@pytest.mark.parametrize(
    ("heads", "tokens"), list(itertools.product((1, 4, 16, 64), (2048, 5000, 65536)))
)
def test_segments_are_whole_chunks_and_long_enough(heads, tokens):
    spread = planned(tokens, heads, wanted="on")
    assert spread.split
    assert spread.segment_tokens % CHUNK == 0
    assert spread.segment_tokens >= MIN_SEGMENT_CHUNKS * CHUNK
    assert spread.segments == -(-tokens // spread.segment_tokens) >= 2


@pytest.mark.parametrize("heads, multiprocessors", [(1, 132), (64, 132), (8, 78)])
@pytest.mark.parametrize("batch", [1, 7])
def test_a_given_length_of_segments_is_that_of_every_call(batch, heads, multiprocessors):
    for tokens, sequences in ((4096, None), (9000, None), (65536, None), (9000, 3), (65536, 100)):
        if sequences is not None and batch > 1:
            continue
        room = workspace_bytes(batch, tokens, heads, sequences)
        spread = plan(
            HOPPER, batch, tokens, heads, sequences, multiprocessors, room, segment_tokens=4096
        )
        if sequences is None and tokens <= 4096:
            assert not spread.split and spread.segments == batch
        elif sequences is None:
            assert (spread.segment_tokens, spread.segments) == (4096, batch * -(-tokens // 4096))
        else:
            assert (spread.segment_tokens, spread.segments) == (4096, tokens // 4096 + sequences)
    known = plan(HOPPER, 1, 9000, heads, 3, multiprocessors, room, "auto", 4096, 4096)
    assert not known.split


@pytest.mark.parametrize("wanted", ["auto", "on", "off"])
def test_short_sequences_stay_whole(wanted):
    assert not planned(2 * MIN_SEGMENT_CHUNKS * CHUNK - CHUNK, 1, wanted=wanted).split
    assert not planned(100_000, 4, wanted="off").split


def test_lengths_of_packed_sequences_decide_where_they_are_known():
    total, count = 32_768, 8
    unknown, known = (planned(total, 8, sequences=count, longest=n) for n in (None, total // count))
    assert unknown.split
    assert not known.split
    one_long = planned(total + 1024, 8, sequences=2, longest=total)
    assert one_long.split
    # However the tokens are packed, no sequence has more segments than are counted.
    assert one_long.segments == (total + 1024) // one_long.segment_tokens + 2


@pytest.mark.parametrize("chunks", [1, 3, 7, 64])
def test_a_small_workspace_means_pieces(chunks):
    heads, tokens = 4, 64 * CHUNK
    spread = planned(tokens, heads, workspace=chunks * heads * BLOCK_BYTES + 100)
    assert spread.piece_slots == chunks
    assert spread.pieces == -(-64 // chunks)
    if chunks < 64:
        assert not spread.split


def test_one_launch_takes_no_more_chunks_than_a_grid_has():
    tokens = (MAX_GRID_Z + 10) * CHUNK
    spread = planned(tokens, 1)
    assert spread.pieces == 2
    assert spread.piece_slots <= MAX_GRID_Z


@pytest.mark.parametrize(
    ("batch", "heads", "tiles"), [(1, 64, 1), (1, 66, 1), (1, 67, 2), (2, 64, 2), (2, 33, 1)]
)
def test_a_head_has_two_ctas_while_all_fit_on_the_card(batch, heads, tiles):
    assert planned(512, heads, batch).tiles == tiles


def test_the_workspace_is_a_block_per_chunk_and_head():
    assert workspace_bytes(2, 100, 3) == 2 * 2 * 3 * BLOCK_BYTES
    # Packed: any lengths that make up the tokens have at most T // 64 + N chunks.
    assert workspace_bytes(1, 200, 1, sequences=5) == (3 + 5) * BLOCK_BYTES
    assert BLOCK_BYTES == 2 * (3 * 64 * 128 + 2 * (64 * 64 - 6 * 16 * 16)) + 4 * 128


def test_more_parts_shorten_the_chain_and_lengthen_the_merge():
    model = CostModel(HOPPER.costs, HOPPER.v_tiles, 4, SMS)
    costs = [model.cut_us(1024, 1024, parts) for parts in (2, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert model.whole_us(1024, 1024) > costs[-1]
    assert model.cut_us(32, 32, 2) > model.whole_us(32, 32)


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 64), (2, 64), (4, 96)])
def test_a_cta_has_all_columns_where_a_head_has_one_tile(batch, heads):
    assert planned(512, heads, batch, target=BLACKWELL).tiles == 1


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: target.distribution)
def test_a_stage_is_a_block_and_v(target):
    tiles = target.v_tiles
    forward = target.recurrence_config("bfloat16", tiles=tiles)
    scan = target.recurrence_config("bfloat16", tiles=tiles, scan=True)
    assert forward.stage_bytes == BLOCK_BYTES + 2 * CHUNK * HEAD_DIM
    # Without qg and the triangle of Aqk.
    assert forward.stage_bytes - scan.stage_bytes == 2 * (CHUNK * HEAD_DIM + TRIANGLE)
    assert (forward.stages, scan.stages) == (target.stages, target.scan_stages)
    assert forward.v_tiles == tiles == HEAD_DIM // forward.v_tile


def beside(tokens, heads, batch=1, sequences=None, longest=None, multiprocessors=SMS, **more):
    room = workspace_bytes(batch, tokens, heads, sequences)
    facts = {"beside": "on"} | more
    return plan(
        HOPPER, batch, tokens, heads, sequences, multiprocessors, room, longest=longest, **facts
    )


@pytest.mark.parametrize("heads, multiprocessors", [(1, 132), (8, 132), (64, 132), (64, 4), (3, 2)])
@pytest.mark.parametrize(
    "tokens, sequences", [(100, None), (16384, None), (5000, 3), (70_000, 900)]
)
def test_kernels_beside_each_other_share_the_multiprocessors(
    tokens, sequences, heads, multiprocessors
):
    spread = beside(tokens, heads, sequences=sequences, multiprocessors=multiprocessors)
    way, slots = spread.beside, chunk_slots(1, tokens, sequences)
    assert way.ctas + way.prepare_ctas == multiprocessors and way.prepare_ctas > 0
    assert way.ctas == way.machines * HOPPER.v_tiles // spread.tiles
    # All steps, and no machine without one; no chain goes over more than one border.
    assert way.machines == -(-slots * heads // way.share)
    longest = tokens if sequences is None else tokens - sequences + 1
    assert way.share >= -(-longest // CHUNK)
    assert not spread.split and spread.pieces == 1


def test_known_lengths_allow_more_machines():
    unknown, known = (beside(32_768, 16, sequences=16, longest=n) for n in (None, 2048))
    assert unknown.beside.share >= 512 > known.beside.share >= 33
    assert known.beside.machines > unknown.beside.machines


@pytest.mark.parametrize(
    "more",
    [{"beside": "off"}, {"segment_tokens": 2048}, {"intracard_cp": "on"}, {"maps": (2, 1)}],
)
def test_kernels_follow_each_other_where_they_have_to(more):
    assert beside(16_384, 64, **more).beside is None


def test_a_card_of_one_multiprocessor_has_one_kernel_at_a_time():
    assert beside(4096, 4, multiprocessors=1).beside is None
    assert beside(4096, 4, multiprocessors=2).beside.machines == 1


@pytest.mark.parametrize("heads, tokens", [(64, 16_384), (48, 5000), (24, 8192), (2, 3000)])
def test_no_other_number_of_machines_would_be_faster(heads, tokens):
    costs, chunks = HOPPER.costs.beside, -(-tokens // CHUNK)
    steps = chunks * heads
    found = CostModel(HOPPER.costs, HOPPER.v_tiles, heads, SMS).beside(chunks, chunks, 1)
    for tiles, step_us in costs.step_us.items():
        each = HOPPER.v_tiles // tiles
        for machines in range(1, (SMS - 1) // each + 1):
            share = max(chunks, -(-steps // machines))
            if -(-steps // share) < machines or (tiles < HOPPER.v_tiles and share > chunks):
                continue
            walk = share * step_us + heads / machines * costs.chain_us
            prepare = steps * costs.prepare_us / (SMS - machines * each)
            time = costs.start_us[tiles] + (walk**8 + prepare**8) ** 0.125
            assert time > 0.995 * found[0]


def test_a_small_card_has_one_kernel_at_a_time_unless_told():
    for multiprocessors, found in ((99, False), (100, True)):
        spread = beside(16_384, 64, beside="auto", multiprocessors=multiprocessors)
        assert (spread.beside is not None) == found
    assert beside(16_384, 64, multiprocessors=78).beside is not None


def test_several_pieces_and_other_architectures_have_one_kernel_at_a_time():
    room = 10 * BLOCK_BYTES
    assert plan(HOPPER, 1, 4096, 1, None, SMS, room, beside="on").beside is None
    room = workspace_bytes(1, 4096, 1)
    assert plan(BLACKWELL, 1, 4096, 1, None, SMS, room, beside="on").beside is None


def test_auto_takes_the_faster_way_of_the_model():
    model = CostModel(HOPPER.costs, HOPPER.v_tiles, 64, SMS)
    for tokens in (64, 1024, 4096, 16_384):
        chunks = tokens // CHUNK
        wins = model.beside(chunks, chunks, 1)[0] <= model.apart_us(chunks, chunks, 1)
        assert (beside(tokens, 64, beside="auto").beside is not None) == wins
