"""The warp of the recurrence that hands out items of work and loads their chunks."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from ...cute.memory import load_tile, repeated, view
from ...cute.types import I32
from ...cute.work import SLOTS, draw, post
from ..config import CHUNK, RecurrenceConfig
from .block import AQK, BLOCK, KH, QG, STAGED_AQK, STAGED_BLOCK, T_PRIME, runs


class Item(NamedTuple):
    """What the loading warp tells the others about an item of work; not valid: there is no more.

    token, batch, length: the tokens to walk through. sequence, row: whose they are, and its state's row, negative for a
    padding slot. segment: its number where sequences are cut; first, last: whether it begins or ends a sequence.
    """

    valid: cutlass.Int32
    token: cutlass.Int32
    batch: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    row: cutlass.Int32
    segment: cutlass.Int32
    first: cutlass.Int32
    last: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32


class Items:
    """Part of `KdaRecurrence`: how its stages are divided up, and what fills them."""

    def divide(self, config: RecurrenceConfig):
        """Elements of 16 bits: which part of a block a stage has, and where v is behind it."""
        self.stages = config.stages
        self.begin, self.end = (KH, AQK) if config.scan else (QG, BLOCK)
        self.squares = (STAGED_AQK if config.scan else STAGED_BLOCK) - T_PRIME
        self.v_at = (T_PRIME + self.squares - self.begin + 511) // 512 * 512
        self.stage = self.v_at + self.tiles * CHUNK * self.config.v_tile
        # Tiles of a head: of a scan also those of M.
        self.columns = self.config.v_tiles * (2 if config.scan else 1)

    @cute.jit
    def clear(self, base: cute.Pointer, tidx):
        """Zeros where T' and Aqk will be: nothing overwrites those above the diagonal."""
        zeros = cute.make_rmem_tensor(8, self.operand)
        zeros.fill(0.0)
        for stage in cutlass.range_constexpr(self.stages):
            first = stage * self.stage + T_PRIME - self.begin
            for unit in cutlass.range(tidx, self.squares // 8, self.threads, unroll=1):
                cute.autovec_copy(zeros, view(base, first + 8 * unit, 8))
        cute.arch.fence_view_async_shared()

    def staged(self, base, offset, shape, major, dtype):
        """Returns a matrix of every stage, as [rows, columns, stage]."""
        return repeated(base + offset, shape, major, dtype, self.stages, self.stage)

    @cute.jit
    def load(
        self,
        ring,
        items,
        base: cute.Pointer,
        item_words: cute.Pointer,
        blocks: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        indices: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        heads_v: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Hands out items and loads their chunks, ahead of everybody."""
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.operand)
        per_head = self.columns // self.tiles
        columns = heads_v * per_head
        parts = cute.ceil_div(tokens, segment_tokens)
        if cutlass.const_expr(self.config.packed):
            count = segments[0, 0] * columns
        else:
            count = batch * parts * columns
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        number = block
        if cutlass.const_expr(self.config.packed):
            number = draw(counter, lane)
        while number < count:
            column = number % columns
            head, tile = column // per_head, column % per_head * self.tiles
            described = self.describe(segments, number // columns, segment_tokens, parts, tokens)
            token, in_batch, length, sequence, segment, part, parts_here, slot = described
            row = sequence
            if cutlass.const_expr(self.config.indexed):
                row = indices[sequence]
            # Of the chunks those whose blocks are there.
            chunks = cute.ceil_div(length, CHUNK)
            skipped = cutlass.min(cutlass.max(first_slot - slot, 0), chunks)
            until = cutlass.min(cutlass.max(first_slot + blocks.shape[0] - slot, 0), chunks)
            token = token + skipped * CHUNK
            length = cutlass.min(length, until * CHUNK) - skipped * CHUNK
            chunks = until - skipped
            slot = slot + skipped - first_slot
            wanted = cutlass.Boolean(True)
            if cutlass.const_expr(self.config.scan):
                # The last segment's map is not needed; the first one starts from the initial state.
                wanted = (
                    (part + 1 < parts_here)
                    & (row >= 0)
                    & ((part > 0) | (tile < self.config.v_tiles))
                )
            if wanted:
                post(
                    items, item_at, item_words,
                    lambda: Item(
                        1, token, in_batch, length, sequence, row, segment, part == 0, part + 1 == parts_here, head,
                        tile,
                    ),
                    lane,
                )  # fmt: skip
                item_at.advance()
                if row < 0:
                    chunks = 0
                for c in cutlass.range(chunks, unroll=1):
                    ring.producer_acquire(at)
                    full = ring.producer_get_barrier(at)
                    with cute.arch.elect_one():
                        self.fetch_block(bulk, blocks[slot + c, head, None], base, at.index, full)
                    for i in cutlass.range_constexpr(self.tiles):
                        sV = self.staged(
                            base,
                            self.v_at + i * CHUNK * self.config.v_tile,
                            (CHUNK, self.config.v_tile),
                            "k",
                            self.dtype,
                        )
                        load_tile(
                            tma_v, mV, token + c * CHUNK, head, in_batch, (tile + i) % self.config.v_tiles,
                            sV[None, None, at.index], full,
                        )  # fmt: skip
                    at.advance()
            if cutlass.const_expr(self.config.packed):
                number = draw(counter, lane)
            else:
                number = number + ctas
        post(items, item_at, item_words, lambda: (0,), lane)

    @cute.jit
    def describe(
        self,
        segments: cute.Tensor,
        number: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        parts: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """(first token, batch, length, sequence, segment, part, parts, slot of the first chunk) of an item."""
        if cutlass.const_expr(self.config.packed):
            row = segments[1 + number, None]
            token, length, sequence, part = row[0], row[1], row[2], row[4]
            start = token - part * segment_tokens
            slot = start // CHUNK + sequence + part * segment_tokens // CHUNK
            segment = start // segment_tokens + sequence + part
            return token, I32(0), length, sequence, segment, part, row[5], slot
        else:
            sequence, part = number // parts, number % parts
            token = part * segment_tokens
            length = cutlass.min(segment_tokens, tokens - token)
            slot = sequence * cute.ceil_div(tokens, CHUNK) + token // CHUNK
            return token, sequence, length, sequence, number, part, parts, slot

    @cute.jit
    def fetch_block(self, bulk, block: cute.Tensor, base: cute.Pointer, stage, barrier):
        """Loads what the recurrence takes of a block."""
        pointer = block.iterator.align(128)
        for source, target, size in runs(self.begin, self.end):
            at = stage * self.stage + target - self.begin
            shared = view(base, at, size, unit=128)
            cute.copy(bulk, view(pointer, source, size), shared, mbar_ptr=barrier)
