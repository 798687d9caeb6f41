"""The recurrence on Hopper: it computes what needs the state, chunk after chunk, 64 columns of v at a time.

With the state S [K, V] before a chunk, and what `prepare` has written of it:

    x   = v - kh S        u = T' x        o = qg S + Aqk u        S <- diag(decay) S + kg^T u

The state is transposed, S^T [64 V x 128 K] in fp32, and every product takes its first operand from registers, so that
neither it nor x and u ever touch shared memory:

    x^T = v^T - S^T kh^T        o^T = S^T qg^T        u^T = x^T T'^T
    S^T <- S^T decay + u^T kg   o^T += u^T Aqk^T

A scan walks through a segment on a state of K + V columns, of which the first V start from zero and the last K from the
identity, with v = 0: they end as what the segment adds to a state, and as the matrix M that it applies to one.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import EVICT_FIRST, by_token, repeated, swizzled
from cula_core.cute.output import GROUP, OutputTiles
from cula_core.cute.schedule import counter_of
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import as_operand, fill_identity, issue, mma
from cula_core.cute.widen import read, write
from cula_core.cute.work import ITEM_WORDS, SLOTS, receive
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, RecurrenceConfig
from cula_core.delta_rule.kernels.block import DECAY, KG, KH, QG, SQUARE, STAGED_AQK, T_PRIME
from cula_core.delta_rule.kernels.flags import carried_flag, counter_at
from cula_core.delta_rule.kernels.items import Item, Loader, Stages
from cula_core.delta_rule.kernels.machines import PARTS, MachineLoader
from cula_core.delta_rule.kernels.states import States

from ..arch import TARGET

V_TILE = TARGET.v_tile
BARRIER_TILE = 1
# By tiles: of a thread of a tile, and of the others, where registers move between warpgroups.
REGISTERS = {1: (256, 64), 2: (240, 24)}


class KdaRecurrence:
    """Persistent CTAs over items of work: (segment or sequence, value head, tiles of V).

    | thread role | warps | work |
    |---|---|---|
    | tile t | 4t ... | state and outputs of 64 columns |
    | load | the one behind | next item; blocks by bulk copies, v by TMA |
    | beside: give up, watch | two more | blocks that are done with; flags of those that are there |

    | shared memory | bytes | slots |
    |---|---|---|
    | block with all of T' and Aqk (in a scan without qg and Aqk), v [64, 64] per tile | 2 stage | config.stages |
    | roots of strengths, of rooted blocks | 256 | config.stages |
    | o [64, 64] per tile | 8192 tiles | 2 |
    """

    def __init__(self, config: RecurrenceConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.tiles = config.tiles
        # A warpgroup per tile and warps that load; registers move between whole warpgroups only.
        self.whole = self.tiles > 1 or config.beside
        self.threads = GROUP * self.tiles + (GROUP if self.whole else 32)
        self.outputs = OutputTiles(self.dtype, BARRIER_TILE, EVICT_FIRST if config.beside else None)
        self.stages = Stages(config)
        self.states = States(config, self)
        kind = MachineLoader if config.beside else Loader
        self.loader = kind(config, self.stages, self.states)

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.recurrence_arguments`; what the config lacks is None."""
        self.start(
            blocks, v, out, initial, indices, targets, fresh, final, checkpoints, checkpoint_rows, checkpoint_offsets,
            maps, starts, factors, segments, None, None, None, null_slot, checkpoint_every, segment_tokens,
            first_slot, cutlass.Int32(0), ctas, stream,
        )  # fmt: skip

    @cute.jit
    def start(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        cu_seqlens: cute.Tensor,
        flags: cute.Tensor,
        carried: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        share: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel. cu_seqlens, flags, carried, share: of one beside the kernel that prepares its chunks."""
        tile = swizzled((CHUNK, V_TILE), "k", self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), tile, (CHUNK, V_TILE))
        tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), tile, (CHUNK, V_TILE))
        counter = counter_of(segments, int(not self.config.scan))
        self.kernel(
            blocks, tma_v, mV, tma_o, mO, out, initial, indices, targets, fresh, final, checkpoints, checkpoint_rows,
            checkpoint_offsets, maps, starts, factors, segments, counter, cu_seqlens, flags, carried, null_slot,
            checkpoint_every, segment_tokens, first_slot, share,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=self.config.beside,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        blocks: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        cu_seqlens: cute.Tensor,
        flags: cute.Tensor,
        carried: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        share: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * (self.stages.count + SLOTS))
        base = smem.allocate_array(
            self.operand, self.stages.count * self.stages.size, byte_alignment=1024
        )
        o_base = None
        if cutlass.const_expr(not self.config.scan):
            o_base = smem.allocate_array(
                self.dtype, SLOTS * self.tiles * SQUARE, byte_alignment=1024
            )
        item_words = smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16)
        roots = None
        if cutlass.const_expr(self.config.rooted):
            layout = cute.make_layout((CHUNK, self.stages.count))
            roots = smem.allocate_tensor(F32, layout, byte_alignment=128)
        thread = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages.count,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, GROUP * self.tiles),
            tx_count=self.config.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * self.stages.count,
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(thread, GROUP * self.tiles),
            defer_sync=True,
        )
        parts = None
        if cutlass.const_expr(self.config.beside):
            count = PARTS * self.stages.count
            parts = smem.allocate_array(cutlass.Int64, 2 * count)
            if tidx == 0:
                for i in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(parts + i, 1)
                    cute.arch.mbarrier_init(parts + count + i, GROUP * self.tiles)
            # A machine waits for the one before it, which has to be there by then.
            ticket = smem.allocate_tensor(I32, cute.make_layout(1), byte_alignment=4)
            there = smem.allocate_tensor(I32, cute.make_layout(2), byte_alignment=4)
            if tidx == 0:
                there[0], there[1] = I32(0), I32(0)
                machines = self.machines()
                tickets = counter_at(flags, machines, share, 1)
                ticket[0] = cute.arch.atomic_add(tickets.llvm_ptr, I32(1))
        cute.arch.mbarrier_init_fence()
        self.stages.clear(base, tidx, self.threads)
        cute.arch.sync_threads()
        if warp_idx >= 4 * self.tiles:
            if cutlass.const_expr(self.whole):
                cute.arch.setmaxregister_decrease(REGISTERS[self.tiles][1])
            if cutlass.const_expr(self.config.beside):
                if warp_idx == 4 * self.tiles:
                    self.loader.load_machine(
                        parts, items, base, item_words, blocks, tma_v, mV, indices, targets, fresh, cu_seqlens, flags,
                        there, null_slot, self.machines(), ticket[0], share, out.shape[1],
                    )  # fmt: skip
                if warp_idx == 4 * self.tiles + 2:
                    self.loader.watch(
                        there, blocks, cu_seqlens, flags, self.machines(), ticket[0], share, out.shape[1]
                    )  # fmt: skip
                if cutlass.const_expr(self.loader.gives_up):
                    if warp_idx == 4 * self.tiles + 1:
                        self.loader.give_up(
                            there, blocks, indices, targets, fresh, cu_seqlens, null_slot, ticket[0], share,
                            out.shape[1],
                        )  # fmt: skip
            if cutlass.const_expr(not self.config.beside):
                if warp_idx == 4 * self.tiles:
                    self.loader.load(
                    ring, items, base, item_words, blocks, tma_v, mV, indices, targets, fresh, factors, roots, segments,
                    counter, null_slot, segment_tokens, first_slot, out.shape[2], out.shape[1], out.shape[0],
                )  # fmt: skip
        else:
            if cutlass.const_expr(self.whole):
                cute.arch.setmaxregister_increase(REGISTERS[self.tiles][0])
            self.walk(
                parts if self.config.beside else ring, items, base, o_base, roots, item_words, tma_o, mO, out, initial,
                final, checkpoints, checkpoint_rows, checkpoint_offsets, checkpoint_every, maps, starts, flags, carried,
                share, warp_idx // 4, tidx % GROUP,
            )  # fmt: skip

    # ---- the chain --------------------------------------------------------------------------------------------------

    @cute.jit
    def walk(
        self,
        ring,
        items,
        base: cute.Pointer,
        o_base: cute.Pointer,
        roots: cute.Tensor,
        item_words: cute.Pointer,
        tma_o,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        checkpoint_every: cutlass.Int32,
        maps: cute.Tensor,
        starts: cute.Tensor,
        flags: cute.Tensor,
        carried: cute.Tensor,
        share: cutlass.Int32,
        group: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Computes the states and outputs of 64 columns, item after item."""
        scan = self.config.scan
        lane = tidx % 32
        mma_x = mma(self.operand, CHUNK, OperandMajorMode.K)
        mma_s = mma(self.operand, HEAD_DIM, OperandMajorMode.MN)
        part_x, part_s = mma_x.get_slice(tidx), mma_s.get_slice(tidx)
        kh = self.second(mma_x, part_x, base, KH, (CHUNK, HEAD_DIM), "k")
        tt = self.second(mma_x, part_x, base, T_PRIME, (CHUNK, CHUNK), "panels")
        kg = self.second(mma_s, part_s, base, KG, (HEAD_DIM, CHUNK), "mn")
        load_v = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma_x
        ).get_slice(tidx)
        sV = self.stages.matrix(
            base + group * SQUARE, self.stages.v_at, (V_TILE, CHUNK), "mn", self.dtype
        )
        v_source = load_v.partition_S(sV)
        # Seen as the accumulator sees it, the same for all columns of v: (2 neighbours, 16 pairs) per thread.
        decays = cute.make_tensor(
            cute.recast_ptr((base + (DECAY - self.stages.begin)).align(16), dtype=F32),
            cute.make_layout(
                (V_TILE, HEAD_DIM, self.stages.count), stride=(0, 1, self.stages.size // 2)
            ),
        )
        decays = part_s.partition_C(decays)[(None, 0, None), 0, 0, None]
        if cutlass.const_expr(not scan):
            qg = self.second(mma_x, part_x, base, QG, (CHUNK, HEAD_DIM), "k")
            aqk = self.second(mma_x, part_x, base, STAGED_AQK, (CHUNK, CHUNK), "panels")
            store_o = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_x
            ).get_slice(tidx)
            own_o = o_base + group * (SLOTS * SQUARE)
            sO = repeated(own_o, (CHUNK, V_TILE), "k", self.dtype, SLOTS)
            tOsO = store_o.partition_D(repeated(own_o, (V_TILE, CHUNK), "mn", self.dtype, SLOTS))
            o = cute.make_rmem_tensor(mma_x.partition_shape_C((V_TILE, CHUNK)), F32)

        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, HEAD_DIM)), F32)
        by_pairs = cute.make_tensor(s.iterator, cute.make_layout((2, 2, HEAD_DIM // 8)))
        x = cute.make_rmem_tensor(mma_x.partition_shape_C((V_TILE, CHUNK)), F32)
        s_a = mma_x.make_fragment_A(mma_x.partition_shape_A((V_TILE, HEAD_DIM)))
        x_a = mma_x.make_fragment_A(mma_x.partition_shape_A((V_TILE, CHUNK)))
        v = cute.make_rmem_tensor(x.shape, self.dtype)
        decay = cute.make_rmem_tensor((2, HEAD_DIM // 8), F32)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks sent so far: which output slot is next

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            token, length, head = item.token, item.length, item.head
            batch = I32(0) if cutlass.const_expr(self.config.packed) else item.sequence
            column = item.tile + group
            chunks = cute.ceil_div(length, CHUNK)
            if item.row < 0:
                chunks = 0
                if cutlass.const_expr(not scan):
                    self.outputs.clear(out, batch, token, length, head, column, tidx)
            if cutlass.const_expr(self.config.beside):
                if item.chunk == 0:
                    self.states.start(s, initial, starts, item, column, part_s)
                else:
                    before = item.segment - 1
                    flag = carried_flag(flags, self.machines(), share, before, column)
                    there = cute.arch.load(flag, I32, sem="acquire", scope="gpu")
                    while there == 0:
                        there = cute.arch.load(flag, I32, sem="acquire", scope="gpu")
                    self.read_state(s, carried[before, 0, None, None], column, part_s)
            else:
                self.states.start(s, initial, starts, item, column, part_s)
            if cutlass.const_expr(not scan):
                rows = cute.domain_offset((token, 0), mO[None, None, head, batch])
                gO = cute.local_tile(rows, (CHUNK, V_TILE), (None, column))
            if cutlass.const_expr(self.config.checkpoints is not None):
                due = self.states.first_kept(item, checkpoint_offsets, checkpoint_every)
            if cutlass.const_expr(self.config.beside):
                if chunks > 0:
                    self.load(ring, at, load_v, v_source, v, decays, decay, length, column, lane)
            for c in cutlass.range(chunks, unroll=1):
                stage = at.index
                s_a.store(as_operand(s, s_a).load().to(self.operand))
                left = length - c * CHUNK
                if cutlass.const_expr(not self.config.beside):
                    self.load(ring, at, load_v, v_source, v, decays, decay, left, column, lane)
                for n in cutlass.range_constexpr(HEAD_DIM // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            by_pairs[a, b, n] = by_pairs[a, b, n] * decay[a, n]
                warpgroup.fence()
                issue(mma_x, x, s_a, kh[None, None, None, stage], True)
                if cutlass.const_expr(scan):
                    warpgroup.wait_group(0)
                else:
                    self.come(ring, 1, at)
                    if cutlass.const_expr(self.config.beside):
                        warpgroup.fence()
                    issue(mma_x, o, s_a, qg[None, None, None, stage], True)
                    if cutlass.const_expr(not self.config.beside):
                        if c > 0:
                            self.outputs.send(tma_o, gO, sO, c - 1, turn - 1, group, tidx)
                    warpgroup.wait_group(1)
                    self.go(ring, 0, at)
                if cutlass.const_expr(self.config.rooted):
                    x.store(self.stages.rooted(v, roots, stage, lane).load() - x.load())
                else:
                    x.store(v.load().to(F32) - x.load())
                x_a.store(as_operand(x, x_a).load().to(self.operand))
                warpgroup.fence()
                issue(mma_x, x, x_a, tt[None, None, None, stage], True)
                self.come(ring, 2, at)
                warpgroup.wait_group(0)
                self.go(ring, 1, at)
                x_a.store(as_operand(x, x_a).load().to(self.operand))
                warpgroup.fence()
                issue(mma_s, s, x_a, kg[None, None, None, stage], False)
                if cutlass.const_expr(not scan):
                    issue(mma_x, o, x_a, aqk[None, None, None, stage], False)
                if cutlass.const_expr(self.config.beside):
                    # While these products run, the longest ones. Where the memory is the limit, as without parts, it
                    # would be wrong to wait for the next chunk before this one's stage is free.
                    if c > 0:
                        self.outputs.send(tma_o, gO, sO, c - 1, turn - 1, group, tidx)
                    if left > CHUNK:
                        then = at.clone()
                        then.advance()
                        behind = left - CHUNK
                        self.load(
                            ring, then, load_v, v_source, v, decays, decay, behind, column, lane
                        )
                warpgroup.wait_group(0)
                # By every thread, for what it has read itself; the pipeline's own release is one lane's for its warp.
                if cutlass.const_expr(self.config.beside):
                    self.go(ring, 2, at)
                else:
                    cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(at.index))
                at.advance()
                if cutlass.const_expr(not scan):
                    self.outputs.store(store_o, o, tOsO[None, None, None, turn % SLOTS])
                    turn = turn + 1
                if cutlass.const_expr(self.config.checkpoints is not None):
                    due = self.states.keep(
                        s, checkpoints, checkpoint_rows, checkpoint_every, due, item, c, out.shape[1], column, part_s
                    )  # fmt: skip
            if cutlass.const_expr(scan):
                self.write_state(s, maps[item.segment, head, None, None], column, part_s)
            else:
                if chunks > 0:
                    self.outputs.finish(
                        tma_o, gO, sO, out, batch, token, length, head, column, chunks, turn - 1, group, tidx
                    )  # fmt: skip
                if cutlass.const_expr(self.config.final_state):
                    self.states.save(s, final, item, column, part_s)
                if cutlass.const_expr(self.config.beside):
                    if item.last == 0:
                        own = carried[item.segment, 0, None, None]
                        self.write_state(s, own, column, part_s)
                        cute.arch.fence_acq_rel_gpu()
                        cute.arch.barrier(barrier_id=BARRIER_TILE + group, number_of_threads=GROUP)
                        if tidx == 0:
                            flag = carried_flag(flags, self.machines(), share, item.segment, column)
                            cute.arch.store(flag, I32(1), sem="release", scope="gpu")
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        if cutlass.const_expr(not scan):
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    def machines(self):
        """Returns how many machines there are: CTAs that have all columns of v together."""
        ctas, _, _ = cute.arch.grid_dim()
        return ctas // (self.config.v_tiles // self.tiles)

    @cute.jit
    def come(self, ring, part: cutlass.Constexpr, at):
        """Waits for a part of a stage; without parts for all of it in front of the first one."""
        if cutlass.const_expr(self.config.beside):
            cute.arch.mbarrier_wait(ring + part * self.stages.count + at.index, at.phase)
        elif cutlass.const_expr(part == 0):
            ring.consumer_wait(at)

    @cute.jit
    def go(self, ring, part: cutlass.Constexpr, at):
        """Frees a part of a stage, of what this thread has read there."""
        if cutlass.const_expr(self.config.beside):
            cute.arch.mbarrier_arrive(ring + (PARTS + part) * self.stages.count + at.index)

    def second(self, tiled_mma, part, base, offset, shape, major):
        """Returns a matrix of the block, in every stage, as the second operand of a product."""
        return tiled_mma.make_fragment_B(
            part.partition_B(self.stages.part(base, offset, shape, major))
        )

    @cute.jit
    def load(self, ring, at, load_v, v_source, v, decays, decay, left, column, lane):
        """Waits for the first part of a stage, and loads its values and decays into registers."""
        self.come(ring, 0, at)
        self.load_values(load_v, v_source[None, None, None, at.index], v, left, column, lane)
        cute.autovec_copy(decays[None, None, at.index], decay)

    @cute.jit
    def load_values(self, load_v, source: cute.Tensor, v: cute.Tensor, left, column, lane):
        """Loads v^T of a chunk in the order of an accumulator; it is zero past the end, and for the columns of M."""
        cute.copy(load_v, source, load_v.retile(v))
        if cutlass.const_expr(self.config.scan):
            left = left if column < self.config.v_tiles else I32(0)
        if cutlass.const_expr(self.config.scan or self.config.packed):
            if (
                left < CHUNK
            ):  # tokens of the next sequence may hold anything, and 0 * inf is no zero
                values = cute.make_tensor(v.iterator, cute.make_layout((2, 2, CHUNK // 8)))
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            beyond = 8 * n + lane % 4 * 2 + a >= left
                            values[a, b, n] = self.dtype(0.0) if beyond else values[a, b, n]

    # ---- states -----------------------------------------------------------------------------------------------------

    @cute.jit
    def read_state(self, s: cute.Tensor, state: cute.Tensor, column, part_s):
        tile = cute.local_tile(state, (V_TILE, HEAD_DIM), (column, 0))
        read(part_s.partition_C(tile), s)

    @cute.jit
    def write_state(self, s: cute.Tensor, state: cute.Tensor, column, part_s):
        tile = cute.local_tile(state, (V_TILE, HEAD_DIM), (column, 0))
        write(s, part_s.partition_C(tile))

    @cute.jit
    def write_identity(self, s: cute.Tensor, column, part_s):
        fill_identity(s, part_s, V_TILE, HEAD_DIM, column * V_TILE)


class KdaRecurrenceBeside(KdaRecurrence):
    """The same beside the kernel that prepares its chunks: CTAs of machines, which walk through chains in order."""

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        cu_seqlens: cute.Tensor,
        flags: cute.Tensor,
        carried: cute.Tensor,
        share: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.beside_arguments`; what the config lacks is None."""
        self.start(
            blocks, v, out, initial, indices, targets, fresh, final, checkpoints, checkpoint_rows, checkpoint_offsets,
            maps, starts, factors, segments, cu_seqlens, flags, carried, null_slot, checkpoint_every, segment_tokens,
            first_slot, share, ctas, stream,
        )  # fmt: skip
