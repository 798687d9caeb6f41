"""Counts of a call of KDA prefill, by hand."""

import pytest

from benchmarks.ops.kda.problem import setting
from benchmarks.ops.kda.work import H200, busiest, work


def test_work_of_a_small_call_by_hand():
    # 8 chunks x 64 heads. q, k and gates of a chunk 16,384 bytes each, beta 128, a block 59,904; v and o 16,384 each.
    w = work(setting(512), H200)
    assert (w.chunk_heads, w.tiles, w.parts, w.packed) == (512, 1, 1, False)
    assert w.prepare_bytes == 512 * (3 * 16_384 + 128 + 59_904) == 55_902_208
    # Final states of 65,536 bytes.
    assert w.walk_bytes == 512 * (59_904 + 2 * 16_384) + 64 * 65_536 == 51_642_368
    # 128 CTAs of one tile fit on 132 multiprocessors: a sequence each.
    assert (w.walk_chunks, w.scan_bytes, w.scan_chunks) == (8, 0, 0)


def test_work_of_a_cut_call_by_hand():
    # 4 segments of 16 chunks, 4 heads: all but the last are scanned, the first one's V columns alone.
    w = work(setting(4096, heads=4), H200)
    assert (w.chunk_heads, w.parts, w.walk_chunks, w.scan_chunks) == (256, 4, 16, 16)
    # kh, kg, T' without what lies above its diagonal, decay, v; maps of 64 KB in one half or two.
    scanned = 2 * 16_384 + 5_120 + 512 + 16_384
    assert w.scan_bytes == 4 * (48 * scanned + 5 * 65_536)
    # Starts of all segments, and final states.
    assert w.walk_bytes == 256 * 92_672 + 65_536 * 4 * (4 + 1)


def test_features_change_bytes():
    plain, gva, fp32, state = (
        work(setting(4096, feature=f), H200) for f in (None, "gva", "fp32gate", "state")
    )
    heads = plain.chunk_heads
    assert plain.prepare_bytes - gva.prepare_bytes == heads * 2 * 16_384 * 3 // 4
    assert fp32.prepare_bytes - plain.prepare_bytes == heads * 16_384
    assert state.walk_bytes - plain.walk_bytes == 64 * 65_536


def test_packed_sequences_count_their_own_chunks():
    w = work(setting(4096, sequences=10), H200)  # 410 tokens each or 409: 7 chunks
    assert w.packed and w.chunk_heads == 10 * 7 * 64
    # 640 items, both tiles each, on 132 CTAs: 5 at most.
    assert (w.tiles, w.walk_chunks) == (2, 35)


@pytest.mark.parametrize(
    "items, ctas, most",
    [
        ([], 3, 0),
        ([5], 3, 5),
        ([4, 4, 4, 4], 3, 8),
        ([1, 1, 1, 1, 4], 2, 4),
        ([3, 3, 2, 2, 2], 2, 7),
    ],
)
def test_items_go_longest_first_to_who_is_free(items, ctas, most):
    assert busiest(items, ctas) == most
