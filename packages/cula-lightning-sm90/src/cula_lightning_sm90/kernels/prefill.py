"""Linear attention with a scalar decay, chunk by chunk, on Hopper: TMA loads, wgmma, the state in registers.

Per sequence and value head, over chunks of 64 tokens (docs/lightning-prefill.md derives it), with G the running sum of
log2 decays inside the chunk and L the chunk's length:

    P    = scale (q k^T)_ij 2^(G_i - G_j), j <= i              weights' warpgroup
    o^T  = scale 2^G_i (S^T q^T) + v^T P^T                     one warpgroup per 64 columns of v
    S^T  = 2^G_L S^T + (2^(G_L - G_j) v_j)^T k

Against time (`Problem.reverse`) chunks and segments come in the opposite order, P is taken where j >= i with the decay
between the two, and the weights of o and v change places: 2^(G_L - G_i) and 2^G_j.

The state is transposed, S^T [64 V x K] in fp32, and every product takes it, or v, as the A operand from registers: it
never touches shared memory. All exponents are differences <= 0 formed before the exponential.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import by_token, load_tile, swizzled
from cula_core.cute.output import GROUP
from cula_core.cute.schedule import counter_of
from cula_core.cute.types import F32, I32
from cula_core.cute.work import ITEM_WORDS, SLOTS, draw, post

from ..config import CHUNK, V_TILE, Config
from .gates import Gates, PairedGates
from .layout import GATE_SLOTS, PAIR_SLOTS, TABLE, Item, Layout
from .tiles import Tiles
from .weights import Weights


def set_registers(wanted, threads):
    """Raises or lowers the number of registers per thread from what every thread has at launch."""
    if wanted > 65536 // threads:
        cute.arch.setmaxregister_increase(wanted)
    else:
        cute.arch.setmaxregister_decrease(wanted)


class LightningPrefill(Layout):
    """One pass over the items of work: (segment, value head, tiles of V).

    | thread role | warps | work |
    |---|---|---|
    | weights | 0-3 | decay tables, intra-chunk products P, one chunk ahead of the tiles |
    | tile t | 4 + 4t ... | state and output of 64 columns of v |
    | load | first of the last four | next item, TMA loads |
    | gates | second of the last four | reads per-token log decays, sums them up |

    | shared memory | bytes | slots |
    |---|---|---|
    | q, k [64, K], v [64, 64] per tile, as much for dots | 2 * 64 * (2K + 64 tiles), or + 128 tiles | config.stages |
    | P [64, 64] | 8192 | 2 |
    | weights of o and v, total decay | 528 | 2 |
    | sums of gates up to a token, and behind it | 512 | 4 |
    | gates of 16 bytes of heads, where CTAs are paired | 1024 | 8 |
    | o [64, 64] per tile | 8192 tiles | 2 |
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.weights, self.tile = Weights(config), Tiles(config)
        self.gates = PairedGates(config) if config.paired else Gates(config)
        self.loader = 4 + 4 * self.tiles  # warp index
        # Threads that hear of every item.
        self.listeners = GROUP * (1 + self.tiles) + 32 * self.gate

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        dot_with: cute.Tensor,
        dots: cute.Tensor,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        segments: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        null_slot: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        piece_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.fake_arguments`; what the problem lacks is None."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        square = swizzled((CHUNK, V_TILE), "k", self.dtype)
        tma_q, mQ, tma_o, mO = None, None, None, None
        wide = (swizzled((CHUNK, self.dim_k), "k", self.dtype), (CHUNK, self.dim_k))
        both, parts = load, 1
        if cutlass.const_expr(self.config.shared):
            both, parts = cpasync.CopyBulkTensorTileG2SMulticastOp(), 2
        if cutlass.const_expr(self.forward):
            tma_q, mQ = cpasync.make_tiled_tma_atom(both, by_token(q), *wide, num_multicast=parts)
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), square, (CHUNK, V_TILE))
        tma_k, mK = cpasync.make_tiled_tma_atom(both, by_token(k), *wide, num_multicast=parts)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), square, (CHUNK, V_TILE))
        tma_x, mX = None, None
        if cutlass.const_expr(self.dots):
            tma_x, mX = cpasync.make_tiled_tma_atom(
                load, by_token(dot_with), square, (CHUNK, V_TILE)
            )
        tma_g = None
        if cutlass.const_expr(self.config.paired):
            tma_g, g = self.gates.make_tma(g)
        counter = counter_of(segments, int(self.config.split and self.forward))
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_x, mX, tma_o, mO, dots, tma_g, g, out, head_decay, initial, indices,
            fresh, final, checkpoints, checkpoint_rows, checkpoint_offsets, segments, counter, states, decays, scale,
            decay_factor, null_slot, segment_tokens, piece_tokens, checkpoint_every,
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.follows,
            cluster=(2, 1, 1) if self.config.paired or self.config.shared else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        dots: cute.Tensor,
        tma_g: cute.CopyAtom,
        g: cute.Tensor,
        out: cute.Tensor,
        head_decay: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        null_slot: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        piece_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(
            cutlass.Int64, 2 * (self.stages + 2 * SLOTS + GATE_SLOTS + PAIR_SLOTS)
        )
        base = smem.allocate_array(self.dtype, self.stages * self.stage, byte_alignment=1024)
        p_base, o_base = None, None
        if cutlass.const_expr(self.forward):
            p_base = smem.allocate_array(self.dtype, SLOTS * CHUNK * CHUNK, byte_alignment=1024)
            o_size = self.tiles * SLOTS * CHUNK * V_TILE
            o_base = smem.allocate_array(self.dtype, o_size, byte_alignment=1024)
        # Per slot: weights of o, weights of v, total decay.
        tables = smem.allocate_array(F32, SLOTS * TABLE, byte_alignment=16)
        norms = smem.allocate_array(F32, SLOTS * GROUP, byte_alignment=16)
        gate_sums = smem.allocate_array(F32, GATE_SLOTS * 2 * CHUNK, byte_alignment=16)
        item_words = smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16)
        thread = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(
                thread, 4 * (1 + self.tiles) * (1 + self.config.shared)
            ),
            tx_count=self.config.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1 + self.config.shared, 1, 1)),
            defer_sync=True,
        )
        weights = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * self.stages,
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 4),
            consumer_group=pipeline.CooperativeGroup(
                thread, 4 * self.tiles * (1 + (self.config.shared and self.forward))
            ),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * (self.stages + SLOTS),
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(thread, self.listeners),
            defer_sync=True,
        )
        gates = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * (self.stages + 2 * SLOTS),
            num_stages=GATE_SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 32),
            consumer_group=pipeline.CooperativeGroup(thread, 4),
            defer_sync=True,
        )
        pair, pair_base = None, None
        if cutlass.const_expr(self.config.paired):
            pair_base = self.gates.allocate(smem)
            pair = self.gates.make_pipeline(barriers + 2 * (self.stages + 2 * SLOTS + GATE_SLOTS))
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.config.paired or self.config.shared):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(self.config.prescan):
            cute.arch.griddepcontrol_launch_dependents()

        registers = self.config.registers
        if warp_idx >= self.loader:
            cute.arch.setmaxregister_decrease(registers[2])
            if warp_idx == self.loader:
                self.load(
                    ring, items, base, item_words, tma_q, mQ, tma_k, mK, tma_v, mV, tma_x, mX, indices, fresh, segments,
                    counter, head_decay, decay_factor, null_slot, segment_tokens, piece_tokens, out.shape[2],
                    out.shape[1], out.shape[0],
                )  # fmt: skip
            if cutlass.const_expr(self.gate):
                if warp_idx == self.loader + 1:
                    self.gates.run(
                        items, gates, pair, item_words, gate_sums, pair_base, tma_g, g, head_decay, decay_factor
                    )  # fmt: skip
        elif warp_idx < 4:
            set_registers(registers[0], self.config.threads)
            self.weights.run(
                ring, weights, items, gates, base, gate_sums, p_base, tables, norms, item_words, head_decay, decays,
                scale, decay_factor, tidx,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(registers[1])
            tile, thread_idx = warp_idx // 4 - 1, tidx % GROUP
            if cutlass.const_expr(self.forward):
                self.tile.attend(
                    ring, weights, items, base, p_base, o_base, tables, item_words, tma_o, mO, out, dots,
                    initial, final, checkpoints, checkpoint_rows, checkpoint_offsets, states, decays, head_decay,
                    decay_factor, segment_tokens, piece_tokens, checkpoint_every, tile, thread_idx,
                )  # fmt: skip
            else:
                self.tile.scan(
                    ring,
                    weights,
                    items,
                    base,
                    tables,
                    item_words,
                    initial,
                    states,
                    tile,
                    thread_idx,
                )

        if cutlass.const_expr(self.config.shared):  # nobody leaves while the other may send to it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---- items of work ----------------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        ring,
        items,
        base: cute.Pointer,
        item_words: cute.Pointer,
        tma_q,
        mQ: cute.Tensor,
        tma_k,
        mK: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        tma_x,
        mX: cute.Tensor,
        indices: cute.Tensor,
        fresh: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        head_decay: cute.Tensor,
        decay_factor: cutlass.Float32,
        null_slot: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        piece_tokens: cutlass.Int32,
        heads_v: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Announces items to the other warps and loads their chunks, ahead of them."""
        if cutlass.const_expr(self.problem.packed):  # the segment table is there
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        sQ = self.staged(base, 0, (CHUNK, self.dim_k), "k") if self.forward else None
        sK = self.staged(base, self.k_at, (CHUNK, self.dim_k), "k")
        group, group_v = heads_v // mK.shape[2], heads_v // mV.shape[2]
        group_x = heads_v // mX.shape[2] if self.dots else 1
        per_head = self.v_tiles // self.tiles
        columns = heads_v * per_head
        if cutlass.const_expr(self.problem.packed):
            count = segments[0, 0] * columns
        else:
            parts = cute.ceil_div(tokens, segment_tokens)
            if cutlass.const_expr(not self.forward):
                parts = (parts - 1) * self.pieces_of(segment_tokens, piece_tokens)
            count = batch * parts * columns
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        number = block
        while number < count:
            column, token, in_batch, length, sequence, slot, part, parts_here = self.describe(
                segments, number, columns, per_head, segment_tokens, piece_tokens, tokens
            )
            head, tile = column // per_head, column % per_head
            head_k, head_v = head // group, head // group_v
            row = sequence
            if cutlass.const_expr(self.problem.indexed):
                row = indices[sequence]
                row = cutlass.select_(row == null_slot, I32(-1), row)
            begins = I32(1)
            if cutlass.const_expr(self.problem.fresh):
                begins = I32(fresh[sequence])
            wanted = cutlass.Boolean(True)
            if cutlass.const_expr(self.config.ends):
                wanted = part + 1 == parts_here
            if cutlass.const_expr(not self.forward):
                wanted = (part + 1 < parts_here) & (row >= 0)
                if wanted:
                    since = self.first_that_counts(head_decay, head, decay_factor, segment_tokens)
                    if cutlass.const_expr(self.reverse):
                        # The first tokens of a segment count. A piece behind the last token is still summed up: zero.
                        reach = segment_tokens - since
                        if cutlass.const_expr(self.pieces):
                            reach = reach - token % segment_tokens
                        wanted = reach > 0
                        length = cutlass.max(cutlass.min(length, reach), 0)
                    else:
                        place = part % self.pieces_of(segment_tokens, piece_tokens) * piece_tokens
                        unneeded = cutlass.min(cutlass.max(since - place, 0), length)
                        token, length = token + unneeded, length - unneeded
                if cutlass.const_expr(self.problem.in_place):
                    wanted = wanted & ((length > 0) | (part == 0))
                elif cutlass.const_expr(not self.reverse):
                    wanted = wanted & (length > 0)
            if wanted:
                post(
                    items, item_at, item_words,
                    lambda: Item(
                        1, token, in_batch, length, sequence, slot, part, parts_here, head, tile * self.tiles, row,
                        begins,
                    ),
                    lane,
                )  # fmt: skip
                item_at.advance()
                chunks = cute.ceil_div(length, CHUNK)
                if row < 0:
                    chunks = 0
                for c in cutlass.range(chunks, unroll=1):
                    ring.producer_acquire(at)
                    full = ring.producer_get_barrier(at)
                    first = token + self.place(c, chunks) * CHUNK
                    for tma, whole, ring_of in ((tma_q, mQ, sQ),) * self.forward + (
                        (tma_k, mK, sK),
                    ):
                        load_tile(
                            tma, whole, first, head_k, in_batch, 0, ring_of[None, None, at.index], full,
                            paired=self.config.shared,
                        )  # fmt: skip
                    for i in cutlass.range_constexpr(self.tiles):
                        sV = self.staged(base, self.v_at + i * CHUNK * V_TILE, (CHUNK, V_TILE), "k")
                        load_tile(
                            tma_v,
                            mV,
                            first,
                            head_v,
                            in_batch,
                            tile * self.tiles + i,
                            sV[None, None, at.index],
                            full,
                        )
                        if cutlass.const_expr(self.dots):
                            at_x = self.dots_at + i * CHUNK * V_TILE
                            sX = self.staged(base, at_x, (CHUNK, V_TILE), "k")
                            load_tile(
                                tma_x, mX, first, head // group_x, in_batch, tile * self.tiles + i,
                                sX[None, None, at.index], full,
                            )  # fmt: skip
                    at.advance()
            if cutlass.const_expr(self.problem.packed):
                number = draw(counter, lane)
            number = number + ctas
        post(items, item_at, item_words, lambda: (0,), lane)

    @cute.jit
    def describe(
        self,
        segments: cute.Tensor,
        number: cutlass.Int32,
        columns: cutlass.Int32,
        per_head: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        piece_tokens: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """Returns (column, first token, batch, length, sequence, slot, part, parts) of an item.

        Against time parts, and the slots of a sequence, are counted from its end.
        Parts are segments, or pieces of them in a prescan of pieces: there those of a head follow each other, so that
        the pieces of heads that do not forget go to many CTAs.
        """
        if cutlass.const_expr(self.problem.packed):
            row = segments[1 + number // columns, None]
            slot, part, parts = row[3], row[4], row[5]
            if cutlass.const_expr(self.reverse):
                slot, part = slot + parts - 1 - 2 * part, parts - 1 - part
            return number % columns, row[0], I32(0), row[1], row[2], slot, part, parts
        else:
            parts = cute.ceil_div(tokens, segment_tokens)
            if cutlass.const_expr(self.forward or not self.pieces):
                listed = parts if self.forward else parts - 1
                segment, column = number // columns, number % columns
                sequence, part = segment // listed, segment % listed
                token = self.place(part, parts) * segment_tokens
                length = cutlass.min(segment_tokens, tokens - token)
                return (
                    column,
                    token,
                    sequence,
                    length,
                    sequence,
                    sequence * parts + part,
                    part,
                    parts,
                )
            else:
                pieces = self.pieces_of(segment_tokens, piece_tokens)
                listed = (parts - 1) * pieces
                tile, part = number % per_head, number // per_head % listed
                head = number // per_head // listed
                sequence, head = head // (columns // per_head), head % (columns // per_head)
                place = part % pieces * piece_tokens
                token = self.place(part // pieces, parts) * segment_tokens + place
                length = cutlass.min(piece_tokens, segment_tokens - place)
                if cutlass.const_expr(self.reverse):
                    token = token - place + (segment_tokens - place - length)
                    length = cutlass.min(length, tokens - token)
                slot = sequence * parts * pieces + part
                column = head * per_head + tile
                return column, token, sequence, length, sequence, slot, part, listed + 1
