"""The warp of the recurrence that chooses the CTA's items of work and loads their chunks."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from ...cute.memory import EVICT_FIRST, load_tile, repeated, view
from ...cute.types import DTYPES, F32, I32
from ...cute.work import SLOTS, draw, post
from ..config import CHUNK, COMES_ON, GOES_ON, RecurrenceConfig
from .block import AQK, BLOCK, KH, QG, STAGED_AQK, STAGED_BLOCK, T_PRIME, runs
from .states import States


class Item(NamedTuple):
    """What the loading warp announces about an item of work. An item that is not valid means that there are no more.

    token, length: the tokens to walk through. chunk: number of the first one's in its sequence. sequence, row, target:
    whose they are, and the rows of its initial and its final state, negative for padding. segment: its number where
    sequences are cut. first: 1 where it begins a sequence, 2 where it does from zero, else 0. last: whether it ends
    one.
    """

    valid: cutlass.Int32
    token: cutlass.Int32
    chunk: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    row: cutlass.Int32
    target: cutlass.Int32
    segment: cutlass.Int32
    first: cutlass.Int32
    last: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32


class Segment(NamedTuple):
    """Where the tokens of an item are: token, length and sequence as in `Item`; batch: where dense ones lie.

    number: of the segment among those of all sequences; part, parts: among those of its sequence. slot: of its first
    chunk among the blocks.
    """

    token: cutlass.Int32
    batch: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    number: cutlass.Int32
    part: cutlass.Int32
    parts: cutlass.Int32
    slot: cutlass.Int32


class Stages:
    """How the recurrence's stages lie in shared memory: a part of a block, and behind it v of every tile.

    Sizes and offsets are in elements of 16 bits. begin, end: the part of a block that a stage has. size: of a stage.
    v_at: where v begins in it.
    """

    def __init__(self, config: RecurrenceConfig):
        self.config, self.count = config, config.stages
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.begin, self.end = (KH, AQK) if config.narrow else (QG, BLOCK)
        self.squares = (STAGED_AQK if config.narrow else STAGED_BLOCK) - T_PRIME
        self.v_at = (T_PRIME + self.squares - self.begin + 511) // 512 * 512
        self.size = self.v_at + config.tiles * CHUNK * config.v_tile

    @cute.jit
    def clear(self, base: cute.Pointer, tidx, threads: cutlass.Constexpr):
        """Writes zeros where T' and Aqk will be: nothing overwrites those above the diagonal."""
        zeros = cute.make_rmem_tensor(8, self.operand)
        zeros.fill(0.0)
        for stage in cutlass.range_constexpr(self.count):
            first = stage * self.size + T_PRIME - self.begin
            for unit in cutlass.range(tidx, self.squares // 8, threads, unroll=1):
                cute.autovec_copy(zeros, view(base, first + 8 * unit, 8))
        cute.arch.fence_view_async_shared()

    @cute.jit
    def rooted(self, v: cute.Tensor, roots: cute.Tensor, stage, lane):
        """Returns r v in fp32, of v^T [v_tile, 64] in the order of an accumulator. roots [64, stage]: r of tokens."""
        shape = cute.make_layout((2, 2, CHUNK // 8))
        values, found = cute.make_tensor(v.iterator, shape), cute.make_rmem_tensor(shape, F32)
        pair = cute.make_rmem_tensor(2, F32)
        for n in cutlass.range_constexpr(CHUNK // 8):
            own = view(roots[None, stage].iterator, 8 * n + lane % 4 * 2, 2)
            cute.autovec_copy(own, pair)
            for a in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(2):
                    found[a, b, n] = pair[a] * values[a, b, n].to(F32)
        return cute.make_tensor(found.iterator, v.layout)

    def matrix(self, base, offset, shape, major, dtype):
        """Returns a matrix of every stage, as [rows, columns, stage]."""
        return repeated(base + offset, shape, major, dtype, self.count, self.size)

    def part(self, base, offset, shape, major):
        """Returns the matrix of the block that begins at `offset` there, of every stage."""
        return self.matrix(base, offset - self.begin, shape, major, self.operand)


class Loader:
    """The warp that chooses the CTA's items of work, and loads their chunks into the stages."""

    def __init__(self, config: RecurrenceConfig, stages: Stages, states: States):
        self.config, self.stages, self.states = config, stages, states
        self.columns = config.v_tiles * config.halves  # tiles of a head

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
        targets: cute.Tensor,
        fresh: cute.Tensor,
        factors: cute.Tensor,
        roots: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        null_slot: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        heads_v: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Announces items to the other warps and loads their chunks, ahead of them. factors, roots: of rooted blocks,
        in global memory, and where every stage has the roots."""
        tiles = self.config.tiles
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.stages.operand)
        per_head = self.columns // tiles
        columns = heads_v * per_head
        parts = cute.ceil_div(tokens, segment_tokens)
        if cutlass.const_expr(self.config.packed):
            count = segments[0, 0] * columns
        else:
            count = batch * parts * columns
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        number = block
        while number < count:
            column = number % columns
            head, tile = column // per_head, column % per_head * tiles
            segment = self.segment(segments, number // columns, segment_tokens, parts, tokens)
            row, target, begins = self.states.rows_of(
                segment.sequence, indices, targets, fresh, null_slot
            )
            # Only the chunks whose blocks this piece of the call has.
            chunks = cute.ceil_div(segment.length, CHUNK)
            skipped = cutlass.min(cutlass.max(first_slot - segment.slot, 0), chunks)
            until = cutlass.max(first_slot + blocks.shape[0] - segment.slot, 0)
            until = cutlass.min(until, chunks)
            token = segment.token + skipped * CHUNK
            length = cutlass.min(segment.length, until * CHUNK) - skipped * CHUNK
            chunks = until - skipped
            slot = segment.slot + skipped - first_slot
            wanted = cutlass.Boolean(True)
            if cutlass.const_expr(self.config.scan):
                # The last segment's map is needed by others alone; the first one starts from the initial state, unless
                # that is not known yet.
                more = segment.part + 1 < segment.parts
                matrix = segment.part > 0
                if cutlass.const_expr(self.config.fresh):
                    bits = I32(fresh[segment.sequence])
                    more = more | ((bits & GOES_ON) != 0)
                    matrix = matrix | ((bits & COMES_ON) != 0)
                wanted = more & (row >= 0) & (matrix | (tile < self.config.v_tiles))
            if wanted:
                post(
                    items, item_at, item_words,
                    lambda: Item(
                        valid=1, token=token, chunk=segment.part * segment_tokens // CHUNK + skipped, length=length,
                        sequence=segment.sequence, row=row, target=target, segment=segment.number,
                        first=cutlass.select_(segment.part == 0, begins, I32(0)),
                        last=segment.part + 1 == segment.parts, head=head, tile=tile,
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
                        if cutlass.const_expr(self.config.rooted):
                            self.fetch_roots(
                                factors[slot + c, head, 0, None], roots, at.index, full
                            )
                    self.fetch_values(
                        tma_v,
                        mV,
                        token + c * CHUNK,
                        head,
                        segment.batch,
                        tile,
                        base,
                        at.index,
                        full,
                    )
                    at.advance()
            if cutlass.const_expr(self.config.packed):
                number = draw(counter, lane)
            number = number + ctas
        post(items, item_at, item_words, lambda: (0,), lane)

    @cute.jit
    def fetch_values(self, tma_v, mV, token, head, batch, tile, base: cute.Pointer, stage, full):
        """Loads v of a chunk."""
        for i in cutlass.range_constexpr(self.config.tiles):
            sV = self.stages.matrix(
                base,
                self.stages.v_at + i * CHUNK * self.config.v_tile,
                (CHUNK, self.config.v_tile),
                "k",
                self.stages.dtype,
            )
            load_tile(
                tma_v, mV, token, head, batch, (tile + i) % self.config.v_tiles, sV[None, None, stage], full,
                EVICT_FIRST if self.config.beside else None,
            )  # fmt: skip

    @cute.jit
    def segment(
        self,
        segments: cute.Tensor,
        number: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        parts: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """Returns the whole segment of an item of work, with chunks that belong to another piece of the call."""
        if cutlass.const_expr(self.config.packed):
            row = segments[1 + number, None]
            token, length, sequence, part = row[0], row[1], row[2], row[4]
            start = token - part * segment_tokens
            slot = start // CHUNK + sequence + part * segment_tokens // CHUNK
            numbered = start // segment_tokens + sequence + part
            return Segment(token, I32(0), length, sequence, numbered, part, row[5], slot)
        else:
            sequence, part = number // parts, number % parts
            token = part * segment_tokens
            length = cutlass.min(segment_tokens, tokens - token)
            slot = sequence * cute.ceil_div(tokens, CHUNK) + token // CHUNK
            return Segment(token, sequence, length, sequence, number, part, parts, slot)

    @cute.jit
    def fetch_roots(self, source: cute.Tensor, roots: cute.Tensor, stage, barrier):
        """Loads the roots of a chunk's strengths, of which every stage has [64]."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        cute.copy(
            bulk, view(source.iterator.align(16), 0, CHUNK), roots[None, stage], mbar_ptr=barrier
        )

    @cute.jit
    def fetch_block(self, bulk, block: cute.Tensor, base: cute.Pointer, stage, barrier):
        """Loads the part of a block that a stage has."""
        pointer = block.iterator.align(128)
        for source, target, size in runs(self.stages.begin, self.stages.end):
            at = stage * self.stages.size + target - self.stages.begin
            shared = view(base, at, size, unit=128)
            cute.copy(bulk, view(pointer, source, size), shared, mbar_ptr=barrier)
