"""What is remembered between calls: for how long, for whom, and how it is saved."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from module_helpers import (
    BLOCK_N,
    drift,
    drift_chain,
    ladder,
    listed,
    packed,
    qkv,
    run,
    same,
    snapshot,
)
from torch import Tensor, nn

from liteattention_sm89 import masks, state
from liteattention_sm89.module import LiteAttention, SkipState

# --- whose masks -----------------------------------------------------------------------------------------------------


def test_a_fork_goes_its_own_way():
    lite, chain = LiteAttention(threshold=-3.0), drift_chain(4)
    run(lite, chain[:1])
    branch, twin = lite.state.fork(), copy.deepcopy(lite)
    kept = snapshot(branch)
    outs = run(lite, chain[1:])
    assert not same(snapshot(lite.state), kept) and same(snapshot(branch), kept)
    assert all(map(torch.equal, run(lite, chain[1:], state=branch), outs))
    assert all(map(torch.equal, run(twin, chain[1:]), outs))
    assert same(snapshot(branch), snapshot(lite.state))


@pytest.mark.parametrize("modules", [1, 2])
def test_two_states_do_not_touch_each_other(modules):
    """Those of two modules, or of the two branches of guidance of one."""
    a, b = drift_chain(4), drift_chain(4)
    alone = [run(LiteAttention(threshold=-3.0), chain) for chain in (a, b)]
    first = LiteAttention(threshold=-3.0)
    second = LiteAttention(threshold=-3.0) if modules == 2 else first
    other = SkipState() if modules == 1 else None
    for i in range(4):
        assert torch.equal(first(*a[i]), alone[0][i])
        assert torch.equal(second(*b[i], state=other), alone[1][i])


OTHER_CALLS = {
    "larger batch": {"batch": 2},
    "queries": {"queries": 301},
    "keys": {"keys": 299},
    "heads": {"heads": 4},
    "key heads": {"heads_kv": 1},
    "head dim": {"dim": 32},
    "dtype": {"dtype": torch.bfloat16},
    "causal": {"causal": True},
}


def call(*modules: LiteAttention, causal: bool = False, **shape) -> list[Tensor]:
    inputs = qkv(**{"dim": 64} | shape)
    return [lite(*inputs, causal=causal) for lite in modules]


@pytest.mark.parametrize("change", OTHER_CALLS)
def test_another_key_starts_from_full_masks(change):
    lite = LiteAttention(threshold=-3.0)
    for arguments in ({}, OTHER_CALLS[change], {}):
        fresh = LiteAttention(threshold=-3.0)
        assert torch.equal(*call(lite, fresh, **arguments))
        assert lite.state.direction == -1 and same(snapshot(lite.state), snapshot(fresh.state))
        call(lite, **arguments)
    assert lite.density() < 1


@pytest.mark.parametrize("batches", [(2, 1, 2), (3, 1, 3)])
def test_the_batch_grows_and_shrinks(batches):
    lite = LiteAttention(threshold=-3.0, max_batch_size=3)
    for batch in batches:
        chain = drift_chain(3, batch=batch)
        fresh = LiteAttention(threshold=-3.0, max_batch_size=3)
        for inputs in chain:
            assert torch.equal(lite(*inputs), fresh(*inputs))
            for view in (lite.read_mask, lite.write_mask, lite.read_list, lite.write_list):
                assert view.shape[0] == batch


@pytest.mark.parametrize("enable", [True, False])
def test_a_batch_over_the_maximum_is_refused_in_every_call(enable):
    lite, inputs = LiteAttention(enable, threshold=-3.0), qkv(2)
    for _ in range(2):
        with pytest.raises(ValueError, match="at most max_batch_size = 2, got 3"):
            lite(*qkv(3))
        lite(*inputs)
        before = snapshot(lite.state)
    with pytest.raises(ValueError, match="at most max_batch_size = 2, got 3"):
        lite(*qkv(3))
    assert same(snapshot(lite.state), before)


def test_buffers_are_allocated_once_per_key():
    lite, chain = LiteAttention(threshold=-3.0), drift_chain(5)

    def addresses() -> set[int]:
        return {lite.read_mask.data_ptr(), lite.write_mask.data_ptr()}

    lite(*chain[0])
    first, write = addresses(), lite.write_mask.data_ptr()
    assert len(first) == 2
    for inputs in chain[1:]:
        lite(*inputs)
        assert addresses() == first
    lite.reset_skip_state()
    lite(*chain[0])
    # The first call after a reset reads and writes where the very first one did.
    assert addresses() == first and lite.write_mask.data_ptr() == write


def test_grouped_heads_have_masks_of_their_own():
    q, k, v = qkv(1, 200, 300, heads=4, heads_kv=2, dim=64)
    lite, wide = LiteAttention(threshold=-3.0), LiteAttention(threshold=-3.0)
    for _ in range(3):
        repeated = (x.repeat_interleave(2, 2) for x in (k, v))
        assert torch.equal(lite(q, k, v), wide(q, *repeated))
        assert lite.write_mask.shape[1] == 4
        assert torch.equal(lite.write_mask, wide.write_mask)
    assert lite.density_per_head().unique().numel() > 1


def test_calls_inside_and_outside_of_inference_mode():
    lite, plain, chain = (
        LiteAttention(threshold=-3.0),
        LiteAttention(threshold=-3.0),
        drift_chain(5),
    )
    for i, inputs in enumerate(chain):
        with torch.inference_mode(i % 2 == 0):
            out = lite(*inputs)
            lite.state.fork()
        assert torch.equal(out, plain(*inputs))
    with torch.inference_mode():
        loaded = LiteAttention(threshold=-3.0)
        loaded.load_state_dict(lite.state_dict())
    assert torch.equal(loaded(*chain[0]), lite(*chain[0]))
    loaded.reset_skip_state()


# --- ranges that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_skipping_everything_is_refused(causal, enable):
    # The first query tile of a causal call sees the first two key tiles only.
    ranges = [0, 2 * BLOCK_N] if causal else [0, 100, 100, 300]
    lite, inputs = LiteAttention(enable, threshold=-3.0), qkv(1, 300)
    for _ in range(2):
        before = snapshot(lite.state)
        with pytest.raises(ValueError, match="must_skip_list: it leaves a query tile without any"):
            lite(*inputs, causal=causal, must_skip_list=ranges)
        assert same(snapshot(lite.state), before)
        lite(*inputs, causal=causal)
    lite(*inputs, causal=causal, must_skip_list=[0, BLOCK_N])


def test_skipping_the_last_tile_that_is_left_is_refused():
    lite, inputs = LiteAttention(threshold=-1.0), ladder(-9, 0, -9)
    lite(**inputs)
    lite(**inputs)
    assert listed(lite) == [1]
    before = snapshot(lite.state)
    with pytest.raises(ValueError, match="leaves a query tile without any key tile"):
        lite(**inputs, must_skip_list=[BLOCK_N, 2 * BLOCK_N])
    assert same(snapshot(lite.state), before)
    # A range that is to be computed at the same time makes room for it.
    lite(**inputs, must_skip_list=[BLOCK_N, 2 * BLOCK_N], must_do_list=[0, 1])
    assert listed(lite) == [0]


def test_causal_rows_that_see_nothing_are_not_left_without_tiles_by_a_range():
    lite, (q, k, v) = LiteAttention(threshold=-3.0), qkv(1, 400, 130)
    out, lse = lite(q, k, v, causal=True, must_skip_list=[128, 130], return_softmax_lse=True)
    assert (out[:, :270] == 0).all() and (lse[..., :270] == -math.inf).all()
    assert out.isfinite().all() and (lite.write_mask[:, :, :2] == 0).all()


def test_both_lists():
    lite, inputs = LiteAttention(threshold=math.inf), ladder(0, 0, 0, 0)
    with pytest.raises(ValueError, match="must_do_list, must_skip_list: .* share tokens"):
        lite(**inputs, must_do_list=[10, 20], must_skip_list=[0, BLOCK_N])
    lite(**inputs, must_do_list=[10, BLOCK_N], must_skip_list=[BLOCK_N, 2 * BLOCK_N])
    assert listed(lite) == [0]


BAD_RANGES = [
    ([1, 2, 3], ValueError, "even number of entries"),
    ([-1, 2], ValueError, "0 <= start < end <= Sk = 300"),
    ([5, 5], ValueError, "0 <= start < end"),
    ([6, 5], ValueError, "0 <= start < end"),
    ([0, 301], ValueError, "0 <= start < end"),
    ([0.0, 5.0], TypeError, "entry 0.0"),
    (torch.tensor([0.0, 5.0]), TypeError, "entry 0.0"),
    ([[0, 5]], TypeError, "entry"),
    (7, TypeError, "int"),
    ("05", TypeError, "str"),
    (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "on the CPU, got meta"),
]


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("name", ["must_do_list", "must_skip_list"])
@pytest.mark.parametrize("ranges, error, text", BAD_RANGES)
def test_wrong_ranges_are_refused_in_every_call(ranges, error, text, name, enable):
    lite, inputs = LiteAttention(enable), qkv()
    for _ in range(2):
        with pytest.raises(error, match=f"{name}: .*{text}"):
            lite(*inputs, **{name: ranges})
        lite(*inputs, **{name: []})


# --- resetting -------------------------------------------------------------------------------------------------------


def test_reset_starts_again():
    lite, chain = LiteAttention(threshold=-3.0), drift_chain(3)
    outs = run(lite, chain)
    assert lite.density() < 1 and lite.state.direction == -1
    lite.reset_skip_state()
    assert lite.density() == 1 and lite.state.direction == 1
    assert lite.read_mask is lite.write_mask is lite.read_list is None
    assert all(map(torch.equal, run(lite, chain), outs))
    LiteAttention().reset_skip_state()


@pytest.mark.parametrize("rows", [1, [1], range(1, 2), [0, 1]])
def test_some_rows_are_reset(rows):
    lite, chain = LiteAttention(threshold=-3.0, max_batch_size=3), drift_chain(3, batch=3)
    run(lite, chain)
    before, direction = lite.write_mask.clone(), lite.state.direction
    lite.state.reset(rows)
    for row in range(3):
        chosen = row in ([rows] if isinstance(rows, int) else list(rows))
        wanted = masks.full(1, 2, 3, 5)[0] if chosen else before[row]
        assert torch.equal(lite.write_mask[row], wanted)
    assert lite.state.direction == direction
    lite(*chain[0])


def test_rows_that_cannot_be_reset():
    lite = LiteAttention()
    lite.state.reset([0])
    lite(*qkv(2))
    for rows in (2, [0, -1]):
        with pytest.raises(ValueError, match="batch: expected rows below 2"):
            lite.state.reset(rows)
    for rows in ([True], ["0"]):
        with pytest.raises(TypeError, match="batch: expected ints"):
            lite.state.reset(rows)


# --- density and lists -----------------------------------------------------------------------------------------------


def test_density_falls_until_the_reset():
    lite, chain = LiteAttention(threshold=-2.0, max_batch_size=2), drift_chain(8, batch=2)
    seen = []
    for inputs in chain:
        lite(*inputs)
        listed_tiles = masks.unpack(lite.write_mask, 5)
        assert lite.density().dtype == torch.float32 and lite.density().shape == ()
        torch.testing.assert_close(lite.density(), listed_tiles.float().mean())
        torch.testing.assert_close(lite.density_per_head(), listed_tiles.float().mean((2, 3)))
        seen.append(lite.density().item())
    assert all(1 >= a >= b > 0 for a, b in zip(seen, seen[1:])) and seen[-1] < seen[0]
    lite.reset_skip_state()
    assert lite.density() == 1 and (lite.density_per_head() == 1).all()


def test_causal_density_counts_what_can_be_seen():
    lite, inputs = LiteAttention(threshold=-math.inf), qkv(1, 512, heads=1)
    lite(*inputs, causal=True)
    assert lite.density() == 1
    assert masks.density(lite.write_mask, 8) < 0.7
    lite.state.reset([0])
    assert lite.density() == 1


def test_lists_in_the_format_of_lite_attention():
    lite, inputs = LiteAttention(threshold=-3.0), qkv(1, 300, dim=64)
    for call in range(4):
        lite(*inputs)
        down = call % 2 == 1
        for lists, mask, descending in (
            (lite.write_list, lite.write_mask, down),
            (lite.read_list, lite.read_mask, not down),
        ):
            assert lists.dtype == torch.int16 and lists.shape == (1, 2, 3, 5 + 2)
            assert torch.equal(masks.from_ranges(lists, 5, descending=descending), mask)
        if call == 0:
            assert (lite.read_list[..., :3] == torch.tensor([2, 4, -1])).all()
        assert torch.equal(lite.state.to_ranges(), lite.write_list)
    assert SkipState().to_ranges() is None


# --- packed sequences ------------------------------------------------------------------------------------------------


LENGTHS_Q, LENGTHS_K = [200, 0, 129, 60], [150, 40, 300, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_the_sequences_one_by_one(causal):
    (q, k, v), packing = packed(LENGTHS_Q, LENGTHS_K, causal=causal)
    together = LiteAttention(threshold=-3.0, max_batch_size=4)
    apart = [LiteAttention(threshold=-3.0) for _ in LENGTHS_Q]
    for _ in range(4):
        out, lse = together(q, k, v, **packing, return_softmax_lse=True)
        listed_tiles = visible = 0
        for n, lite in enumerate(apart):
            rows = slice(*packing["cu_seqlens_q"][n : n + 2].tolist())
            keys = slice(*packing["cu_seqlens_k"][n : n + 2].tolist())
            one = lite(q[:, rows], k[:, keys], v[:, keys], causal=causal, return_softmax_lse=True)
            torch.testing.assert_close(out[:, rows], one[0])
            torch.testing.assert_close(lse[:, rows], one[1][0])
            tiles_q, tiles_k = lite.state.key.tiles_q, lite.state.key.tiles_k
            mine = masks.unpack(together.write_mask[n], -(-300 // BLOCK_N))
            assert mine.sum() == mine[:, :tiles_q, :tiles_k].sum()
            assert torch.equal(
                mine[:, :tiles_q, :tiles_k], masks.unpack(lite.write_mask, tiles_k)[0]
            )
            reach = masks.unpack(state._reach(lite.state.key, None, None), tiles_k)
            listed_tiles, visible = listed_tiles + mine.sum(), visible + 2 * reach.sum()
        torch.testing.assert_close(together.density(), listed_tiles / visible)
        q, k, v = drift(q, k, v)
    assert together.density() < 1


def test_a_packed_sequence_of_another_length_starts_again():
    lite = LiteAttention(threshold=math.inf, max_batch_size=3)
    inputs, packing = packed([100, 200, 50], [100, 300, 200])
    for _ in range(2):
        lite(*inputs, **packing)
    inputs, packing = packed([100, 200, 50], [200, 300, 200])
    branch = lite.state.fork()
    lite(*inputs, **packing)
    counts = masks.count(lite.read_mask)[:, :, 0]
    assert (counts[0] == 5).all() and (counts[1:] == 1).all()
    # The tile that the others still visit is the last one of a descending pass.
    lite(*inputs, **packing, must_skip_list=[2 * BLOCK_N, 3 * BLOCK_N], state=branch)
    inputs, packing = packed([100, 200, 50], [250, 300, 200])
    lite(*inputs, **packing, must_skip_list=[2 * BLOCK_N, 3 * BLOCK_N], state=branch)
    assert masks.unpack(branch.read, 5)[0, :, 0].tolist() == [[True, True, False, True, True]] * 2


def test_packed_arguments_come_together():
    lite = LiteAttention()
    (q, k, v), packing = packed([100, 100], [100, 100])
    for name in packing:
        with pytest.raises(ValueError, match="expected all or none"):
            lite(q, k, v, **{x: y for x, y in packing.items() if x != name})
    with pytest.raises(TypeError, match="cu_seqlens_k: expected a torch.Tensor, got list"):
        lite(q, k, v, **packing | {"cu_seqlens_k": [0, 100, 200]})
    lite(q, k, v, **packing)
    with pytest.raises(ValueError, match="at most max_batch_size = 1, got 2"):
        LiteAttention(max_batch_size=1)(q, k, v, **packing)


def test_packed_ranges_count_from_the_start_of_each_sequence():
    lite = LiteAttention(threshold=-math.inf, max_batch_size=3)
    inputs, packing = packed([100, 200, 50], [100, 300, 200])
    lite(*inputs, **packing, must_skip_list=[0, BLOCK_N])
    assert not masks.unpack(lite.read_mask, 5)[..., 0].any()
    assert masks.count(lite.write_mask)[:, 0, 0].tolist() == [1, 4, 3]
    with pytest.raises(ValueError, match="leaves a query tile without any key tile"):
        lite(*inputs, **packing, must_skip_list=[0, 2 * BLOCK_N])


# --- saving ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, **arguments) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.attention = LiteAttention(threshold=-3.0, **arguments)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_saved_model_continues_bit_by_bit(calls):
    chain = drift_chain(7)
    block, other = Block(), Block()
    run(block.attention, chain[:calls])
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(isinstance(x, Tensor) for x in saved.values())
    other.load_state_dict(saved)
    assert torch.equal(other.attention.density(), block.attention.density())
    assert same(snapshot(other.attention.state), snapshot(block.attention.state))
    for inputs in chain[calls:]:
        assert torch.equal(block.attention(*inputs), other.attention(*inputs))
        assert same(snapshot(block.attention.state), snapshot(other.attention.state))


def test_a_state_goes_back_to_what_was_saved():
    lite, chain = LiteAttention(threshold=-3.0), drift_chain(6)
    run(lite, chain[:2])
    saved = lite.state.state_dict()
    outs = run(lite, chain[2:5])
    addresses = {lite.read_mask.data_ptr(), lite.write_mask.data_ptr()}
    lite.state.load_state_dict(saved)
    assert all(map(torch.equal, run(lite, chain[2:5]), outs))
    assert {lite.read_mask.data_ptr(), lite.write_mask.data_ptr()} == addresses
    lite.state.load_state_dict(SkipState().state_dict())
    assert lite.density() == 1 and lite.state.direction == 1


def test_a_packed_state_is_saved_with_its_lengths():
    (inputs, packing), fresh = packed([100, 200], [100, 300]), LiteAttention(threshold=-3.0)
    lite = LiteAttention(threshold=-3.0)
    lite(*inputs, **packing)
    fresh.load_state_dict(lite.state_dict())
    assert torch.equal(fresh.density(), lite.density())
    assert torch.equal(fresh(*inputs, **packing), lite(*inputs, **packing))
    assert torch.equal(fresh.read_mask, lite.read_mask)


@pytest.mark.parametrize("change", OTHER_CALLS)
def test_masks_of_another_shape_do_not_load(change):
    lite, other = LiteAttention(threshold=-3.0), LiteAttention(threshold=-3.0)
    call(lite)
    call(other, **OTHER_CALLS[change])
    before = snapshot(lite.state)
    with pytest.raises(ValueError, match="state: expected masks of"):
        lite.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="state: expected masks of"):
        lite.state.load_state_dict(other.state.state_dict())
    assert same(snapshot(lite.state), before)


def test_loaded_masks_that_do_not_fit_the_first_call_are_dropped():
    lite, other = LiteAttention(threshold=-3.0), LiteAttention(threshold=-3.0)
    lite(*qkv(dim=64))
    other.load_state_dict(lite.state_dict())
    inputs = qkv(2)
    assert torch.equal(other(*inputs), LiteAttention()(*inputs))
    assert other.state.direction == -1


def test_weights_without_a_skip_state_load():
    block = Block()
    run(block.attention, drift_chain(2))
    before = snapshot(block.attention.state)
    weights = {name: x for name, x in block.state_dict().items() if "linear" in name}
    assert block.load_state_dict(weights).missing_keys == []
    assert same(snapshot(block.attention.state), before)
    with pytest.raises(RuntimeError, match="linear.bias"):
        block.load_state_dict({"linear.weight": weights["linear.weight"]})


def test_states_that_do_not_load():
    lite = LiteAttention(threshold=-3.0)
    lite(*qkv())
    good, before = lite.state.state_dict(), snapshot(lite.state)
    wrong = [
        {name: x for name, x in good.items() if name != "direction"},
        good | {"alternate": False},
        good | {"mask": good["mask"][:, :1]},
        good | {"mask": None},
        good | {"read": good["read"].long()},
        good | {"key": {"batch": 1}},
        good | {"key": good["key"] | {"dtype": "complicated"}},
    ]
    for entries in wrong:
        with pytest.raises(ValueError, match="state: expected"):
            lite.state.load_state_dict(entries)
    for data in (
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(3),
        "state",
        lite.get_extra_state()[:-4],
    ):
        with pytest.raises(ValueError, match="state: expected"):
            lite.set_extra_state(data)
    assert same(snapshot(lite.state), before)
    with pytest.raises(ValueError, match="alternate"):
        LiteAttention(reverse_skip_list=False).load_state_dict(lite.state_dict())
