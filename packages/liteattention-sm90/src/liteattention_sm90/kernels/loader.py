"""The warps that load, store and make lists."""

import functools
import operator

import cutlass
import cutlass.cute as cute

from cula_core.cute.memory import load_tile
from cula_core.cute.types import F32, I32
from cula_core.cute.warp import prefix_sum
from cula_core.cute.work import draw

from ..config import BLOCK_M, NUMBERS, STAGES, STEP, UNIT, ForwardConfig
from .packed import row_in, rows_in, sequence_of, token
from .shared import KEYS, QUERIES, copy_out, lowest
from .steps import END, FIRST, MASK, NONE, ROUNDS, SLOT, Steps

# Where the loading warp is in its list, in registers: the round of words, those not empty, the word's number and the
# word; and in its stream: steps so far, query tiles so far, and units, head and batch of the step before. Packed keys
# have their first token in the place of a batch, and their number behind it.
ROUND, FILLED, NUMBER, WORD = range(4)
STEPS, TILES, LAST_A, LAST_B, LAST_HEAD, LAST_BATCH, LAST_LENGTH = range(7)


class Loader(Steps):
    """Warps of the loading warpgroup."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        self.votes_count = config.skip
        self.columns = config.width // UNIT
        self.bytes = 2 * STEP * config.width

    # ---- loading ----------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, shared, tma_q, mQ, tma_k, mK, tma_v, mV, direction):
        """Turns lists into a stream of steps, and loads what they need."""
        lane = cute.arch.lane_idx()
        length_q, length_k = mQ.shape[0], mK.shape[0]
        group = mQ.shape[2] // mK.shape[2]
        at = cute.make_rmem_tensor(LAST_LENGTH if self.config.packed is None else 7, I32)
        at.fill(0)
        bits = cute.make_rmem_tensor(ROUNDS, I32)
        inside = cute.make_rmem_tensor(4, I32)
        place = self.next_place(shared, at[TILES], bits, lane)
        while place.valid != 0:
            tile, head, batch = place.tile, place.head, place.batch
            queries, keys = self.sequences_of(place, length_q, length_k)
            reach, clear = self.reach(tile, queries[1], keys[1])
            tiles = cute.ceil_div(reach, self.per_tile * UNIT)
            head_k = head // group
            self.wait(shared, "q_free", at[TILES], free=True)
            if cutlass.const_expr(self.votes_count):
                self.wait(shared, "votes_free", at[TILES], free=True)
            slot = at[TILES] % STAGES
            if lane == 0:
                self.tell(self.places(shared), slot, place)
                cute.arch.mbarrier_arrive_and_expect_tx(
                    self.barrier(shared, "q_full", slot), self.bytes
                )
            flags = I32(FIRST)
            if cutlass.const_expr(self.config.skip):
                for i in cutlass.range_constexpr(4):
                    inside[i] = I32(0)
                inside[ROUND] = I32(-1)
                unit = self.next_tile(inside, bits, tiles, direction)
                while unit >= 0:
                    other = I32(NONE)
                    if cutlass.const_expr(self.per_tile == 1):
                        other = self.next_tile(inside, bits, tiles, direction)
                    else:
                        unit = 2 * unit
                        other = unit + 1
                    self.step(
                        shared, at, unit, other, flags, clear, slot, head_k, batch, keys, tma_k, mK, tma_v, mV,
                        lane,
                    )  # fmt: skip
                    if flags != 0:
                        self.load_queries(shared, tma_q, mQ, tile, head, batch, queries, slot)
                    flags = I32(0)
                    unit = self.next_tile(inside, bits, tiles, direction)
            else:
                for i in cutlass.range(tiles, unroll=1):
                    unit = 2 * (tiles - 1 - i)
                    self.step(
                        shared, at, unit, unit + 1, flags, clear, slot, head_k, batch, keys, tma_k, mK, tma_v, mV,
                        lane,
                    )  # fmt: skip
                    if flags != 0:
                        self.load_queries(shared, tma_q, mQ, tile, head, batch, queries, slot)
                    flags = I32(0)
            at[TILES] = at[TILES] + 1
            place = self.next_place(shared, at[TILES], bits, lane)
        # The end: no keys, and a query tile that is none.
        stage, slot = at[STEPS] % STAGES, at[TILES] % STAGES
        self.wait(shared, "k_free", at[STEPS], free=True)
        self.wait(shared, "q_free", at[TILES], free=True)
        if cutlass.const_expr(self.votes_count):
            self.wait(shared, "votes_free", at[TILES], free=True)
        if lane == 0:
            self.tell(self.places(shared), slot, self.nowhere)
            words = self.records(shared)
            words[2, stage] = END + (slot << SLOT)
            cute.arch.mbarrier_arrive(self.barrier(shared, "k_full", stage))
        if at[STEPS] > 0:
            self.load_values(shared, at, tma_v, mV, lane)

    @cute.jit
    def next_place(self, shared, count, bits: cute.Tensor, lane):
        """Returns the next query tile that has a list, and leaves the list in `bits`."""
        self.wait(shared, "list_full", STAGES * count)
        words = self.waiting(shared)
        place = self.kind(*(words[i, 0] for i in range(len(self.kind._fields))))
        if cutlass.const_expr(self.config.skip):
            for i in cutlass.range_constexpr(ROUNDS):
                bits[i] = words[self.place_words + 32 * i + lane, 0]
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(self.barrier(shared, "list_free", 0))
        return place

    @cute.jit
    def tell(self, words: cute.Tensor, slot, place):
        """Writes a `Place` for other warps."""
        for i in cutlass.range_constexpr(len(place)):
            words[i, slot] = place[i]

    @cute.jit
    def step(
        self, shared, at: cute.Tensor, unit, other, flags, clear, slot, head_k, batch, keys, tma_k, mK, tma_v, mV, lane
    ):  # fmt: skip
        """Loads the keys of a step, and the values of the step before."""
        stage = at[STEPS] % STAGES
        self.wait(shared, "k_free", at[STEPS], free=True)
        end = UNIT * (cutlass.max(unit, other) + 1)
        mask = (other < 0) | (end > clear)
        if lane == 0:
            words = self.records(shared)
            words[0, stage] = unit
            words[1, stage] = other
            words[2, stage] = flags + (I32(MASK) if mask else I32(0)) + (slot << SLOT)
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.barrier(shared, "k_full", stage), self.bytes
            )
        full = self.barrier(shared, "k_full", stage)
        present = unit if other < 0 else other
        self.load_units(
            tma_k, mK, shared, shared.k, stage, unit, present, head_k, batch, keys, full
        )
        if at[STEPS] > 0:
            self.load_values(shared, at, tma_v, mV, lane)
        at[STEPS] = at[STEPS] + 1
        at[LAST_A] = unit
        at[LAST_B] = present
        at[LAST_HEAD] = head_k
        at[LAST_BATCH] = batch
        if cutlass.const_expr(self.config.packed is not None):
            at[LAST_BATCH], at[LAST_LENGTH] = keys

    @cute.jit
    def load_values(self, shared, at: cute.Tensor, tma_v, mV, lane):
        """Loads the values of the step before."""
        before = at[STEPS] - 1
        stage = before % STAGES
        self.wait(shared, "v_free", before, free=True)
        full = self.barrier(shared, "v_full", stage)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        keys = None, None
        if cutlass.const_expr(self.config.packed is not None):
            keys = at[LAST_BATCH], at[LAST_LENGTH]
        self.load_units(
            tma_v, mV, shared, shared.v, stage, at[LAST_A], at[LAST_B], at[LAST_HEAD], at[LAST_BATCH], keys, full
        )  # fmt: skip

    @cute.jit
    def load_units(self, tma, whole, shared, base, stage, unit, other, head, batch, keys, full):
        """Loads two units of 64 keys."""
        for column in cutlass.range_constexpr(self.columns):
            for half in cutlass.range_constexpr(2):
                box = self.box(base, 2 * (stage * self.columns + column) + half)
                row, place = row_in((other if half else unit) * UNIT, batch, *keys)
                load_tile(tma, whole, row, head, place, column, box, full)

    @cute.jit
    def load_queries(self, shared, tma_q, mQ, tile, head, batch, queries, slot):
        full = self.barrier(shared, "q_full", slot)
        for half in cutlass.range_constexpr(2):
            for column in cutlass.range_constexpr(self.columns):
                box = self.box(shared.q, (2 * slot + half) * self.columns + column)
                row, place = row_in(tile * BLOCK_M + half * UNIT, batch, *queries)
                load_tile(tma_q, mQ, row, head, place, column, box, full)

    @cute.jit
    def next_tile(self, inside: cute.Tensor, bits: cute.Tensor, tiles, direction):
        """Returns the next listed tile, NONE behind the last one; every lane has the same."""
        while (inside[WORD] == 0) & (inside[ROUND] < ROUNDS):
            words = bits[0]
            for i in cutlass.range_constexpr(1, ROUNDS):
                words = bits[i] if inside[ROUND] == i else words
            if inside[FILLED] == 0:
                inside[ROUND] = inside[ROUND] + 1
                words = bits[0]
                for i in cutlass.range_constexpr(1, ROUNDS):
                    words = bits[i] if inside[ROUND] == i else words
                if inside[ROUND] < ROUNDS:
                    inside[FILLED] = I32(cute.arch.vote_ballot_sync(words != 0))
            else:
                lane = lowest(inside[FILLED])
                inside[FILLED] = inside[FILLED] & (inside[FILLED] - 1)
                inside[NUMBER] = 32 * inside[ROUND] + lane
                inside[WORD] = I32(cute.arch.shuffle_sync(words, lane))
        found = I32(NONE)
        if inside[WORD] != 0:
            found = self.tile_of(inside[NUMBER], lowest(inside[WORD]), tiles, direction)
            inside[WORD] = inside[WORD] & (inside[WORD] - 1)
        return found

    # ---- looking ahead ----------------------------------------------------------------------------------------------

    @cute.jit
    def look_ahead(
        self, shared, mQ, mK, out: cute.Tensor, lse: cute.Tensor, read: cute.Tensor, write: cute.Tensor,
        work: cute.Tensor, direction, starts_q: cute.Tensor, starts_k: cute.Tensor, longest,
    ):  # fmt: skip
        """Draws query tiles and reads their lists, one ahead of the loading warp; stores what empty ones have.

        longest: the most query rows of a packed sequence.
        """
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        length_q, length_k, heads = mQ.shape[0], mK.shape[0], mQ.shape[2]
        batches = mQ.shape[3]
        if cutlass.const_expr(self.config.packed is not None):
            length_q, batches = longest, starts_q.shape[0] - 1
        query_tiles = cute.ceil_div(length_q, BLOCK_M)
        total = query_tiles * heads * batches
        words = self.waiting(shared)
        bits = cute.make_rmem_tensor(ROUNDS, I32)
        count, number = I32(0), I32(block)
        while number < total:
            at = number
            if cutlass.const_expr(self.config.ordered):
                at = work[NUMBERS + number]
            tile, head, batch = self.place(at, heads, query_tiles)
            queries = sequence_of(batch, starts_q, length_q)
            keys = sequence_of(batch, starts_k, length_k)
            reach, _ = self.reach(tile, queries[1], keys[1])
            tiles = cute.ceil_div(reach, self.per_tile * UNIT)
            if cutlass.const_expr(self.config.packed is not None):
                tiles = tiles if tile * BLOCK_M < queries[1] else I32(0)
            listed = tiles
            if cutlass.const_expr(self.config.skip):
                row = read[batch, head, tile, None]
                listed = I32(0)
                for i in cutlass.range_constexpr(ROUNDS):
                    bits[i] = self.word(row, tiles, direction, 32 * i + lane)
                    listed = listed + cute.arch.popc(bits[i])
                listed = cute.arch.warp_reduction_sum(listed)
            if listed == 0:
                self.nothing(out, lse, write, tile, head, batch, queries, lane)
            else:
                place = I32(1), tile, head, batch, listed
                if cutlass.const_expr(self.config.packed is not None):
                    place = *place, *queries, *keys
                self.post(shared, words, self.kind(*place), bits, lane)
                count = count + 1
                # Nothing is drawn before there is room: another CTA may come to it earlier.
                self.wait(shared, "list_free", STAGES * (count - 1))
            number = draw(work, lane) + ctas
        self.post(shared, words, self.nowhere, bits, lane)

    @cute.jit
    def post(self, shared, words: cute.Tensor, place, bits: cute.Tensor, lane):
        """Hands a query tile and its list to the loading warp."""
        if lane == 0:
            self.tell(words, 0, place)
        if cutlass.const_expr(self.config.skip):
            for i in cutlass.range_constexpr(ROUNDS):
                words[self.place_words + 32 * i + lane, 0] = bits[i]
        cute.arch.mbarrier_arrive(self.barrier(shared, "list_full", 0))

    @cute.jit
    def nothing(
        self, out: cute.Tensor, lse: cute.Tensor, write: cute.Tensor, tile, head, batch, queries, lane
    ):  # fmt: skip
        """Stores the results of a query tile that sees no key, or has no rows: `out`, and what else there is."""
        first, length_q = tile * BLOCK_M, out.shape[1]
        if cutlass.const_expr(self.config.packed is not None):
            length_q = queries[1]
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        units = self.config.head_dim // 8
        rows = cutlass.min(BLOCK_M, length_q - first)
        for i in cutlass.range(lane, rows * units, 32, unroll=1):
            place, at = token(first + i // units, batch, queries[0])
            row = out[place, at, head, None]
            cute.autovec_copy(zeros, cute.local_tile(row, (8,), (i % units,)))
        if cutlass.const_expr(lse is not None):
            for i in cutlass.range(lane, rows, 32, unroll=1):
                place, at = token(first + i, batch, queries[0])
                lse[place, head, at] = -F32.inf
        if cutlass.const_expr(write is not None):
            for word in cutlass.range(lane, write.shape[3], 32, unroll=1):
                write[batch, head, tile, word] = I32(0)

    # ---- storing ----------------------------------------------------------------------------------------------------

    @cute.jit
    def store(self, shared, tma_o, mO, length_q):
        """Sends outputs away, and frees the queries whose place they take."""
        lane, words = cute.arch.lane_idx(), self.places(shared)
        count, valid = I32(0), I32(1)
        while valid != 0:
            slot = count % STAGES
            self.wait(shared, "o_full", count)
            valid = words[0, slot]
            if valid != 0:
                tile, head, batch = words[1, slot], words[2, slot], words[3, slot]
                queries = self.sequence(words, slot, QUERIES, length_q)
                rows = rows_in(mO, head, batch, *queries)
                rows = cute.domain_offset((tile * BLOCK_M, 0), rows)
                for half in cutlass.range_constexpr(2):
                    for column in cutlass.range_constexpr(self.columns):
                        box = self.box(shared.q, (2 * slot + half) * self.columns + column)
                        target = cute.local_tile(rows, (UNIT, UNIT), (half, column))
                        copy_out(tma_o, box, target)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(self.barrier(shared, "q_free", slot))
                count = count + 1
        cute.arch.cp_async_bulk_wait_group(0)

    # ---- the list ---------------------------------------------------------------------------------------------------

    @cute.jit
    def write(
        self, shared, read: cute.Tensor, must_do: cute.Tensor, write: cute.Tensor, direction, mQ, mK
    ):
        """Makes lists for the next call: of visited tiles those that a warp voted for, the first, and the held ones."""
        lane, words = cute.arch.lane_idx(), self.places(shared)
        votes = self.votes(shared)
        count, valid = I32(0), I32(1)
        while valid != 0:
            slot = count % STAGES
            self.wait(shared, "votes_full", count)
            valid = words[0, slot]
            if valid != 0:
                tile, head, batch, listed = (words[i, slot] for i in range(1, 5))
                _, length_q = self.sequence(words, slot, QUERIES, mQ.shape[0])
                _, length_k = self.sequence(words, slot, KEYS, mK.shape[0])
                reach, _ = self.reach(tile, length_q, length_k)
                tiles = cute.ceil_div(reach, self.per_tile * UNIT)
                row, target = read[batch, head, tile, None], write[batch, head, tile, None]
                visits = cute.round_up(listed, 2 // self.per_tile)
                so_far = I32(0)
                number_of = cute.ceil_div(tiles, 32)
                for first in cutlass.range(0, write.shape[3], 32, unroll=1):
                    number = first + lane
                    bits = self.word(row, tiles, direction, number)
                    own = cute.arch.popc(bits)
                    visit = so_far + prefix_sum(own, lane) - own
                    so_far = so_far + cute.arch.warp_reduction_sum(own)
                    held = I32(0)
                    if cutlass.const_expr(self.config.must_do):
                        held = self.word(must_do[batch, head, tile, None], tiles, direction, number)
                    kept = I32(0)
                    while bits != 0:
                        low = bits & -bits
                        wanted = self.voted(votes, slot, visit, visits) | I32(visit == 0)
                        wanted = wanted | I32((held & low) != 0)
                        kept = kept | (low if wanted != 0 else I32(0))
                        bits = bits ^ low
                        visit = visit + 1
                    at = number
                    if direction < 0:
                        kept = cute.arch.brev(kept)
                        at = number_of - 1 - number if number < number_of else number
                    if number < write.shape[3]:
                        target[at] = kept
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(self.barrier(shared, "votes_free", slot))
                count = count + 1

    def voted(self, votes, slot, visit, visits):
        """Returns 1 if any warp voted for a visit; the last one of 32, or of all, is in the lowest bit."""
        bit = cutlass.min((visit >> 5) * 32 + 32, visits) - 1 - visit
        words = [votes[visit >> 5, w, slot] for w in range(8)]
        return (functools.reduce(operator.or_, words) >> bit) & 1
