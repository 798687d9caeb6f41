"""The two walks of the backward pass: states before every chunk, and the gradients of the states behind it.

With keys and values that have the roots of strengths, as `prepare` writes them for a backward pass:

    forward     z  = Q (r v - kh S)                  S <- diag(decay) S + kg^T z                 keeps S, z
    back        dz = Aqk^T do + kg D    y = Q^T dz   D <- diag(decay) D + qg^T do - kh^T y       keeps D, -y

S is the state before a chunk, D the gradient of the state behind it. As in the forward pass they are transposed, [64 V
x 128 K] in fp32 registers, and every product takes its first operand from registers. What is kept is what products
took: rounded once. Gradients are scaled by a power of two (`scaling`).

Where sequences are cut into segments, a scan walks through these first, on states of which it keeps the last alone:
what a segment adds, A^T forward and B^T back, from zero or from what is given in front of the walk; and forward, from
the identity and with v = 0, the matrix M^T that it applies. Back it applies M itself, so that needs no scan. Of these
maps `delta_rule.kernels.merge` makes what segments start from. A walk whose end alone is wanted keeps nothing either.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from ....cute.memory import by_token, load_tile, repeated, swizzled, view
from ....cute.output import GROUP
from ....cute.schedule import counter_of
from ....cute.types import DTYPES, F32, I32
from ....cute.wgmma import as_operand, fill_identity, issue, mma
from ....cute.widen import read, write
from ....cute.work import ITEM_WORDS, SLOTS, draw, post, receive
from ...config import CHUNK, HEAD_DIM
from ...kernels.block import DECAY, KG, KH, QG, SQUARE, STAGED_AQK, T_PRIME, WIDE
from ...kernels.items import Loader, Stages
from ..config import V_TILE, WalkConfig
from .scaling import scale_of

FIRST_BARRIER = 1  # of the named ones, one for each tile


class Item(NamedTuple):
    """What the loading warp announces. An item that is not valid means that there are no more.

    slot, token, length: of its first chunk and token, and its tokens. sequence: whose they are. segment: its number
    among those of all sequences. begins, ends: whether it is the first and the last one of its sequence on the walk.
    """

    valid: cutlass.Int32
    slot: cutlass.Int32
    token: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    segment: cutlass.Int32
    begins: cutlass.Int32
    ends: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32


class KdaWalk:
    """Persistent CTAs over items of work: (segment or sequence, value head, tiles of V).

    | thread role | warps | work |
    |---|---|---|
    | tile t | 4t ... | state of 64 columns |
    | load | the one behind | next item; blocks by bulk copies, v or do by TMA |

    | shared memory | bytes | slots |
    |---|---|---|
    | block with all of T' and Aqk (forward without qg and Aqk), v or do [64, 64] per tile | 2 stage | config.stages |
    | roots of strengths (forward) | 256 | config.stages |
    | S or D [64 V, 128 K] per tile, if kept | 16,384 tiles | 1 |
    | z or -y [64, 64] per tile, if kept | 8192 tiles | 2 |
    """

    def __init__(self, config: WalkConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.tiles = config.tiles
        # A warpgroup per tile and a warp that loads; registers move between whole warpgroups only.
        self.threads = GROUP * self.tiles + (32 if self.tiles == 1 else GROUP)
        self.stages = Stages(config)
        self.loader = Loader(config, self.stages, None)

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        start: cute.Tensor,
        end: cute.Tensor,
        states: cute.Tensor,
        rows: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        segments: cute.Tensor,
        segment_tokens: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.walk_arguments`; what the config lacks is None."""
        tile = swizzled((CHUNK, V_TILE), "k", self.dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), tile, (CHUNK, V_TILE))
        counter = counter_of(segments, 2 * int(self.config.scan) + int(self.config.back))
        self.kernel(
            blocks, tma_v, mV, v, factors, peaks, start, end, states, rows, maps, starts, segments, counter,
            segment_tokens,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        blocks: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        v: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        start: cute.Tensor,
        end: cute.Tensor,
        states: cute.Tensor,
        rows: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        segment_tokens: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stages = self.stages
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * (stages.count + SLOTS))
        item_words = smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16)
        roots = None
        if cutlass.const_expr(not self.config.back):
            roots = smem.allocate_tensor(
                F32, cute.make_layout((CHUNK, stages.count)), byte_alignment=128
            )
        base = smem.allocate_array(self.operand, stages.count * stages.size, byte_alignment=1024)
        state_base = row_base = None
        if cutlass.const_expr(self.config.keeps):
            state_base = smem.allocate_array(self.operand, self.tiles * WIDE, byte_alignment=1024)
            row_base = smem.allocate_array(
                self.operand, SLOTS * self.tiles * SQUARE, byte_alignment=1024
            )
        thread = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages.count,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, GROUP * self.tiles),
            tx_count=self.config.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * stages.count,
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(thread, GROUP * self.tiles),
            defer_sync=True,
        )
        cute.arch.mbarrier_init_fence()
        stages.clear(base, tidx, self.threads)
        cute.arch.sync_threads()
        if warp_idx >= 4 * self.tiles:
            if cutlass.const_expr(self.tiles > 1):
                cute.arch.setmaxregister_decrease(24)
            if warp_idx == 4 * self.tiles:
                self.load(
                    ring, items, base, roots, item_words, blocks, tma_v, mV, factors, segments, counter, segment_tokens,
                    v.shape[2], v.shape[1], v.shape[0],
                )  # fmt: skip
        else:
            if cutlass.const_expr(self.tiles > 1):
                cute.arch.setmaxregister_increase(240)
            group = warp_idx // 4
            self.walk(
                ring, items, base, roots, state_base, row_base, item_words, peaks, start, end, states, rows, maps,
                starts, group, tidx % GROUP,
            )  # fmt: skip

    # ---- loads ------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        ring,
        items,
        base: cute.Pointer,
        roots,
        item_words: cute.Pointer,
        blocks: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        segment_tokens: cutlass.Int32,
        heads_v: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Announces items to the other warps and loads their chunks, ahead of them."""
        tiles = self.tiles
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.operand)
        per_head = self.loader.columns // tiles
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
            segment = self.loader.segment(
                segments, number // columns, segment_tokens, parts, tokens
            )
            begins, ends = segment.part == 0, segment.part + 1 == segment.parts
            if cutlass.const_expr(self.config.back):
                begins, ends = ends, begins
            chunks = cute.ceil_div(segment.length, CHUNK)
            wanted = cutlass.Boolean(True)
            if cutlass.const_expr(self.config.scan):
                # Nobody needs what the last segment adds, nor the matrix of the first one.
                wanted = (not ends) & ((tile < self.config.v_tiles) | (not begins))
                if not wanted:
                    chunks = 0
            if wanted:
                post(
                    items, item_at, item_words,
                    lambda: Item(
                        valid=1, slot=segment.slot, token=segment.token, length=segment.length,
                        sequence=segment.sequence, segment=segment.number, begins=begins, ends=ends, head=head,
                        tile=tile,
                    ),
                    lane,
                )  # fmt: skip
                item_at.advance()
            for c in cutlass.range(chunks, unroll=1):
                where = chunks - 1 - c if cutlass.const_expr(self.config.back) else c
                ring.producer_acquire(at)
                full = ring.producer_get_barrier(at)
                slot = segment.slot + where
                with cute.arch.elect_one():
                    self.loader.fetch_block(bulk, blocks[slot, head, None], base, at.index, full)
                    if cutlass.const_expr(not self.config.back):
                        self.loader.fetch_roots(factors[slot, head, 0, None], roots, at.index, full)
                for i in cutlass.range_constexpr(tiles):
                    sV = self.stages.matrix(
                        base, self.stages.v_at + i * SQUARE, (CHUNK, V_TILE), "k", self.dtype
                    )
                    load_tile(
                        tma_v, mV, segment.token + where * CHUNK, head, segment.batch,
                        (tile + i) % self.config.v_tiles, sV[None, None, at.index], full,
                    )  # fmt: skip
                at.advance()
            if cutlass.const_expr(self.config.packed):
                number = draw(counter, lane)
            number = number + ctas
        post(items, item_at, item_words, lambda: (0,), lane)

    # ---- the chain --------------------------------------------------------------------------------------------------

    @cute.jit
    def walk(
        self,
        ring,
        items,
        base: cute.Pointer,
        roots,
        state_base: cute.Pointer,
        row_base: cute.Pointer,
        item_words: cute.Pointer,
        peaks: cute.Tensor,
        start: cute.Tensor,
        end: cute.Tensor,
        states: cute.Tensor,
        rows: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        group: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Walks with the states of 64 columns, item after item."""
        back, scan, keeps = self.config.back, self.config.scan, self.config.keeps
        lane = tidx % 32
        mma_k = mma(self.operand, CHUNK, OperandMajorMode.K)
        mma_mn = mma(self.operand, CHUNK, OperandMajorMode.MN)
        mma_s = mma(self.operand, HEAD_DIM, OperandMajorMode.MN)
        part_k, part_mn, part_s = (m.get_slice(tidx) for m in (mma_k, mma_mn, mma_s))
        first = self.second(mma_k, part_k, base, KG if back else KH, (CHUNK, HEAD_DIM), "k")
        last = self.second(mma_s, part_s, base, KH if back else KG, (HEAD_DIM, CHUNK), "mn")
        if cutlass.const_expr(back):
            qg = self.second(mma_s, part_s, base, QG, (HEAD_DIM, CHUNK), "mn")
            aqk = self.turned(mma_mn, part_mn, base, STAGED_AQK)
            inverse, mma_z = self.turned(mma_mn, part_mn, base, T_PRIME), mma_mn
        else:
            inverse, mma_z = (
                self.second(mma_k, part_k, base, T_PRIME, (CHUNK, CHUNK), "panels"),
                mma_k,
            )
        load_v = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma_k
        ).get_slice(tidx)
        v_source = load_v.partition_S(
            self.stages.matrix(base + group * SQUARE, self.stages.v_at, (V_TILE, CHUNK), "mn", self.dtype)
        )  # fmt: skip
        if cutlass.const_expr(keeps):
            state_base, row_base = state_base + group * WIDE, row_base + group * (SLOTS * SQUARE)
            store_rows = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.operand), mma_k
            ).get_slice(tidx)
            store_state = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.operand), mma_s
            ).get_slice(tidx)
            row_slots = repeated(row_base, (V_TILE, CHUNK), "mn", self.operand, SLOTS)
            row_target = store_rows.partition_D(row_slots)
            state_slot = repeated(state_base, (V_TILE, HEAD_DIM), "k", self.operand, 1)
            state_target = store_state.partition_D(state_slot)[None, None, None, 0]
        # Seen as the accumulator sees it, the same for all columns of v: (2 neighbours, 16 pairs) per thread.
        decays = cute.make_tensor(
            cute.recast_ptr((base + (DECAY - self.stages.begin)).align(16), dtype=F32),
            cute.make_layout(
                (V_TILE, HEAD_DIM, self.stages.count), stride=(0, 1, self.stages.size // 2)
            ),
        )
        decays = part_s.partition_C(decays)[(None, 0, None), 0, 0, None]

        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, HEAD_DIM)), F32)
        by_pairs = cute.make_tensor(s.iterator, cute.make_layout((2, 2, HEAD_DIM // 8)))
        x = cute.make_rmem_tensor(mma_k.partition_shape_C((V_TILE, CHUNK)), F32)
        s_a = mma_k.make_fragment_A(mma_k.partition_shape_A((V_TILE, HEAD_DIM)))
        x_a = mma_k.make_fragment_A(mma_k.partition_shape_A((V_TILE, CHUNK)))
        do_a = mma_k.make_fragment_A(mma_k.partition_shape_A((V_TILE, CHUNK)))
        s_kept = cute.make_tensor(s_a.iterator, s.layout)
        x_kept = cute.make_tensor(x_a.iterator, x.layout)
        v = cute.make_rmem_tensor(x.shape, self.dtype)
        decay = cute.make_rmem_tensor((2, HEAD_DIM // 8), F32)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks done so far: which slot of rows is next

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            length, head, column = item.length, item.head, item.tile + group
            chunks = cute.ceil_div(length, CHUNK)
            grown, shrunk = F32(1.0), F32(1.0)
            if cutlass.const_expr(back):
                grown, shrunk = scale_of(peaks[item.sequence, head])
            self.read_start(s, start, starts, item, column, grown, part_s)
            for c in cutlass.range(chunks, unroll=1):
                stage = at.index
                where = chunks - 1 - c if cutlass.const_expr(back) else c
                s_a.store(as_operand(s, s_a).load().to(self.operand))
                ring.consumer_wait(at)
                cute.autovec_copy(decays[None, None, stage], decay)
                for n in cutlass.range_constexpr(HEAD_DIM // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            by_pairs[a, b, n] = by_pairs[a, b, n] * decay[a, n]
                if cutlass.const_expr(back):
                    warpgroup.fence()
                    issue(mma_k, x, s_a, first[None, None, None, stage], True)
                cute.copy(load_v, v_source[None, None, None, stage], load_v.retile(v))
                left = length - where * CHUNK
                if cutlass.const_expr(scan and not back):
                    left = left if column < self.config.v_tiles else I32(0)  # v of M is zero
                self.scale_values(v, x, do_a, roots, stage, grown, left, lane)
                warpgroup.fence()
                if cutlass.const_expr(back):
                    issue(mma_mn, x, do_a, aqk[None, None, None, stage], False)
                    issue(mma_s, s, do_a, qg[None, None, None, stage], False)
                else:
                    issue(mma_k, x, s_a, first[None, None, None, stage], False)
                if cutlass.const_expr(keeps):
                    # Under these products the state goes out, and z or -y of the chunk before.
                    self.keep_state(store_state, s_kept, state_target, group, tidx)
                    if tidx < 32:
                        self.send(
                            view(state_base, 0, WIDE), states[item.slot + where, head, column, None]
                        )
                        if c > 0:
                            slot = item.slot + (
                                where + 1 if cutlass.const_expr(back) else where - 1
                            )
                            self.send(
                                view(row_base, (turn + 1) % SLOTS * SQUARE, SQUARE),
                                rows[slot, head, column, None],
                            )
                        cute.arch.cp_async_bulk_commit_group()
                warpgroup.wait_group(1 if cutlass.const_expr(back) else 0)
                if cutlass.const_expr(not back):
                    x.store(-x.load())
                x_a.store(as_operand(x, x_a).load().to(self.operand))
                warpgroup.fence()
                issue(mma_z, x, x_a, inverse[None, None, None, stage], True)
                warpgroup.wait_group(0)
                if cutlass.const_expr(back):
                    x.store(-x.load())
                x_a.store(as_operand(x, x_a).load().to(self.operand))
                warpgroup.fence()
                issue(mma_s, s, x_a, last[None, None, None, stage], False)
                if cutlass.const_expr(keeps):
                    cute.copy(
                        store_rows,
                        store_rows.retile(x_kept),
                        row_target[None, None, None, turn % SLOTS],
                    )
                warpgroup.wait_group(0)
                # By every thread, for what it has read itself; the pipeline's own release is one lane's for its warp.
                cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(at.index))
                at.advance()
                turn = turn + 1
            if cutlass.const_expr(scan):
                self.write_map(s, maps, item, column, part_s)
            if cutlass.const_expr(keeps):
                if chunks > 0:
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=GROUP)
                    if tidx < 32:
                        slot = item.slot + (I32(0) if cutlass.const_expr(back) else chunks - 1)
                        self.send(
                            view(row_base, (turn + 1) % SLOTS * SQUARE, SQUARE),
                            rows[slot, head, column, None],
                        )
                        cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(self.config.end):
                if item.ends != 0:
                    self.write_state(s, end, item, column, shrunk, part_s)
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        if cutlass.const_expr(keeps):
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    def second(self, tiled_mma, part, base, offset, shape, major):
        """Returns a matrix of the block, in every stage, as the second operand of a product."""
        return tiled_mma.make_fragment_B(
            part.partition_B(self.stages.part(base, offset, shape, major))
        )

    def turned(self, tiled_mma, part, base, offset):
        """Returns the transposed Aqk or T' of every stage as the second operand: the same panels, read by columns."""
        panels = self.stages.part(base, offset, (CHUNK, CHUNK), "panels")
        layout = cute.select(panels.layout, mode=[1, 0, 2])
        return tiled_mma.make_fragment_B(
            part.partition_B(cute.make_tensor(panels.iterator, layout))
        )

    @cute.jit
    def scale_values(
        self, v: cute.Tensor, x: cute.Tensor, do_a: cute.Tensor, roots, stage, grown, left, lane
    ):
        """Sets x to -r v, as an accumulator; or the first operand do_a to do, scaled, with zeros past the end."""
        shape = cute.make_layout((2, 2, CHUNK // 8))
        values = cute.make_tensor(v.iterator, shape)
        if cutlass.const_expr(self.config.packed or self.config.halves > 1):
            if (
                left < CHUNK
            ):  # tokens of the next sequence may hold anything, and 0 * inf is no zero
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            beyond = 8 * n + lane % 4 * 2 + a >= left
                            values[a, b, n] = self.dtype(0.0) if beyond else values[a, b, n]
        if cutlass.const_expr(self.config.back):
            do_a.store((as_operand(v, do_a).load().to(F32) * grown).to(self.operand))
        else:
            x.store(-self.stages.rooted(v, roots, stage, lane).load())

    # ---- results ----------------------------------------------------------------------------------------------------

    @cute.jit
    def keep_state(self, store, kept: cute.Tensor, target: cute.Tensor, group, tidx):
        """Stores the rounded state where the one before it has left."""
        if tidx < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=GROUP)
        cute.copy(store, store.retile(kept), target)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=GROUP)

    @cute.jit
    def send(self, source: cute.Tensor, target: cute.Tensor):
        """Starts a bulk copy from shared memory, by one thread of the warp."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.operand)
        with cute.arch.elect_one():
            whole = view(target.iterator.align(128), 0, cute.size(source))
            cute.copy(bulk, cute.make_tensor(source.iterator.align(128), source.layout), whole)

    def of_caller(self, states, item, column):
        """Returns 64 columns of V of a sequence's state, as [V, K]."""
        state = states[item.sequence, item.head, None, None]
        if not self.config.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return cute.local_tile(state, (V_TILE, HEAD_DIM), (column, 0))

    @cute.jit
    def read_start(self, s: cute.Tensor, start, starts, item, column, grown, part_s):
        """Sets the registers to what an item starts from."""
        s.fill(0.0)
        own = item.begins != 0
        if cutlass.const_expr(self.config.halves > 1):
            if column >= self.config.v_tiles:
                own = cutlass.Boolean(False)
                fill_identity(s, part_s, V_TILE, HEAD_DIM, (column - self.config.v_tiles) * V_TILE)
        if cutlass.const_expr(self.config.split):
            if not own:
                merged = starts[item.segment, item.head, None, None]
                read(
                    part_s.partition_C(cute.local_tile(merged, (V_TILE, HEAD_DIM), (column, 0))), s
                )
        if cutlass.const_expr(self.config.start):
            if own:
                self.read_state(s, start, item, column, grown, part_s)

    @cute.jit
    def read_state(self, s: cute.Tensor, states: cute.Tensor, item, column, grown, part_s):
        read(part_s.partition_C(self.of_caller(states, item, column)), s)
        if cutlass.const_expr(self.config.back):
            s.store(s.load() * grown)

    @cute.jit
    def write_map(self, s: cute.Tensor, maps: cute.Tensor, item, column, part_s):
        own = maps[item.segment, item.head, None, None]
        row = column + 2 * self.config.v_tiles if cutlass.const_expr(self.config.back) else column
        write(s, part_s.partition_C(cute.local_tile(own, (V_TILE, HEAD_DIM), (row, 0))))

    @cute.jit
    def write_state(self, s: cute.Tensor, states: cute.Tensor, item, column, shrunk, part_s):
        if cutlass.const_expr(self.config.back):
            s.store(s.load() * shrunk)
        write(s, part_s.partition_C(self.of_caller(states, item, column)))
