"""Linear attention with a scalar decay, chunk by chunk, on Hopper: TMA loads, wgmma, the state in registers.

Per sequence and value head, over chunks of 64 tokens (docs/lightning-prefill.md derives it), with G the running sum of
log2 decays inside the chunk and L the chunk's length:

    P    = scale (q k^T)_ij 2^(G_i - G_j), j <= i              weights' warpgroup
    o^T  = scale 2^G_i (S^T q^T) + v^T P^T                     one warpgroup per 64 columns of v
    S^T  = 2^G_L S^T + (2^(G_L - G_j) v_j)^T k

The state is transposed, S^T [64 V x K] in fp32, and every product takes it, or v, as the A operand from registers: it
never touches shared memory. All exponents are differences <= 0 formed before the exponential.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from .config import CHUNK, V_TILE, Config

F32, I32 = cutlass.Float32, cutlass.Int32
GROUP = 128  # threads of a warpgroup
SLOTS = 2  # of weights, outputs and items
# One token's log2 decay is held at or above this: 2^-150 is zero in fp32, and sums over a chunk stay exact enough.
FLOOR = -150.0
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
# What the loading warp tells the others about an item of work.
ITEM = ("valid", "token", "batch", "length", "sequence", "slot", "part", "parts", "head", "tile", "row")
ITEM_WORDS = 12  # whole 16-byte units
# Floats of a slot of weights: of o, of v, total decay and padding.
TABLE = 2 * CHUNK + 4
BARRIER_WEIGHTS, BARRIER_TILE = 1, 2
LOG2_E = 1.4426950408889634


def mma(dtype, n, a_source, b_major):
    """wgmma m64 x n x k16 with B in shared memory."""
    op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), a_source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))


def swizzled(shape, major, dtype):
    """A matrix of rows of 128 bytes with the 128-byte swizzle; `major` says which mode is contiguous."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if major == "k" else kinds.MN_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1) if major == "k" else (1, 0))


@cute.jit
def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: cutlass.Constexpr):
    """Issues acc (+)= a b^T as one committed group; the caller has fenced and will wait."""
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh atom: its accumulate flag may be set inside loops
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def by_token(x):
    """[B, T, H, D] seen as (T, D, H, B), so that a tile of tokens and channels comes first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


def as_operand(registers, a):
    """Accumulator registers seen as an A operand: the order is the same."""
    return cute.make_tensor(registers.iterator, a.layout)


@cute.jit
def floored(x):
    return FLOOR if x < FLOOR else x


@cute.jit
def running_sums(pair, lane):
    """Inclusive sums over 64 tokens, two per lane."""
    total = pair[0] + pair[1]
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
        total = total + before if lane >= 1 << i else total
    before = cute.arch.shuffle_sync_up(total, 1, mask_and_clamp=0)
    start = before if lane > 0 else F32(0.0)
    return start + pair[0], total


@cute.jit
def pick(sums, token):
    """The sum at a token, of all lanes' pairs."""
    even = cute.arch.shuffle_sync(sums[0], token // 2)
    odd = cute.arch.shuffle_sync(sums[1], token // 2)
    return odd if token % 2 == 1 else even


def set_registers(wanted, threads):
    """Raises or lowers the registers of a thread from what the launch gives everybody."""
    if wanted > 65536 // threads:
        cute.arch.setmaxregister_increase(wanted)
    else:
        cute.arch.setmaxregister_decrease(wanted)


class LightningPrefill:
    """One pass over the items of work: (segment, value head, tiles of V).

    | thread role | warps | work |
    |---|---|---|
    | weights | 0-3 | decay tables, intra-chunk products P, one chunk ahead of the tiles |
    | tile t | 4 + 4t ... | state and output of 64 columns of v |
    | load | first of the last four | next item, TMA loads |

    | shared memory | bytes | slots |
    |---|---|---|
    | q, k [64, K], v [64, 64] per tile | 2 * 64 * (2K + 64 tiles) | config.stages |
    | P [64, 64] | 8192 | 2 |
    | weights of o and v, total decay | 528 | 2 |
    | o [64, 64] per tile | 8192 tiles | 2 |
    """

    def __init__(self, config: Config):
        self.config, self.problem = config, config.problem
        self.dtype = DTYPES[self.problem.dtype]
        self.dim_k, self.tiles, self.stages = self.problem.head_dim_k, config.tiles, config.stages
        self.v_tiles = self.problem.head_dim_v // V_TILE
        self.gate = self.problem.gate_dtype is not None
        self.forward = not config.prescan
        self.k_at = CHUNK * self.dim_k if self.forward else 0  # elements within a stage
        self.v_at = self.k_at + CHUNK * self.dim_k
        self.stage = self.v_at + CHUNK * V_TILE * self.tiles
        self.loader = 4 + 4 * self.tiles  # warp index

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.fake_arguments`, which describes them; what the problem does not have is None."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        wide = swizzled((CHUNK, self.dim_k), "k", self.dtype)
        square = swizzled((CHUNK, V_TILE), "k", self.dtype)
        tma_q, mQ, tma_o, mO = None, None, None, None
        if cutlass.const_expr(self.forward):
            tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_token(q), wide, (CHUNK, self.dim_k))
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), square, (CHUNK, V_TILE))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_token(k), wide, (CHUNK, self.dim_k))
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), square, (CHUNK, V_TILE))
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, g, head_decay, initial, indices, final, checkpoints,
            segments, counter, states, decays, scale, decay_factor, segment_tokens, checkpoint_every,
        ).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), min_blocks_per_mp=1, stream=stream
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
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * (self.stages + 2 * SLOTS))
        base = smem.allocate_array(self.dtype, self.stages * self.stage, byte_alignment=1024)
        p_base, o_base = None, None
        if cutlass.const_expr(self.forward):
            p_base = smem.allocate_array(self.dtype, SLOTS * CHUNK * CHUNK, byte_alignment=1024)
            o_size = self.tiles * SLOTS * CHUNK * V_TILE
            o_base = smem.allocate_array(self.dtype, o_size, byte_alignment=1024)
        # Per slot: weights of o, weights of v, total decay.
        tables = smem.allocate_array(F32, SLOTS * TABLE, byte_alignment=16)
        norms = smem.allocate_array(F32, SLOTS * GROUP, byte_alignment=16)
        item_words = smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16)
        thread = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, 4 * (1 + self.tiles)),
            tx_count=self.config.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        weights = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * self.stages,
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, GROUP),
            consumer_group=pipeline.CooperativeGroup(thread, 4 * self.tiles),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * (self.stages + SLOTS),
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(thread, GROUP * (1 + self.tiles)),
            defer_sync=True,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        registers = self.config.registers
        if warp_idx >= self.loader:
            cute.arch.setmaxregister_decrease(registers[2])
            if warp_idx == self.loader:
                self.load(
                    ring, items, base, item_words, tma_q, mQ, tma_k, mK, tma_v, mV,
                    indices, segments, counter, segment_tokens, out.shape[2], out.shape[1], out.shape[0],
                )  # fmt: skip
        elif warp_idx < 4:
            set_registers(registers[0], self.config.threads)
            self.weigh(
                ring, weights, items, base, p_base, tables, norms, item_words, g, head_decay, decays,
                scale, decay_factor, tidx,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(registers[1])
            tile = warp_idx // 4 - 1
            thread_idx = tidx % GROUP
            if cutlass.const_expr(self.forward):
                self.attend(
                    ring, weights, items, base, p_base, o_base, tables, item_words, tma_o, mO, out, initial,
                    final, checkpoints, states, decays, segment_tokens, checkpoint_every, tile, thread_idx,
                )  # fmt: skip
            else:
                self.scan(
                    ring, weights, items, base, tables, item_words, initial, states, tile, thread_idx
                )

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def staged(self, base, offset, shape, major):
        """A matrix of every stage, as [rows, columns, stage]."""
        layout = swizzled(shape, major, self.dtype)
        pointer = cute.recast_ptr((base + offset).align(1024), layout.inner, dtype=self.dtype)
        stages = cute.make_layout(self.stages, stride=self.stage)
        return cute.make_tensor(pointer, cute.append(layout.outer, stages))

    def slots(self, base, shape, major):
        """A matrix of every slot, as [rows, columns, slot]."""
        layout = swizzled(shape, major, self.dtype)
        pointer = cute.recast_ptr(base.align(1024), layout.inner, dtype=self.dtype)
        slots = cute.make_layout(SLOTS, stride=shape[0] * shape[1])
        return cute.make_tensor(pointer, cute.append(layout.outer, slots))

    def token_table(self, tables, offset, lane):
        """A table over tokens as this thread's columns of an accumulator see it: [2 neighbours, 8, slot]."""
        whole = cute.make_tensor(
            (tables + offset).align(16), cute.make_layout((2, 4, 8, SLOTS), stride=(1, 2, 8, TABLE))
        )
        return whole[None, lane % 4, None, None]

    # ---- items of work ----------------------------------------------------------------------------------------------

    @cute.jit
    def receive(self, items, at, item_words: cute.Pointer):
        """The next item, as the loading warp described it."""
        items.consumer_wait(at)
        words = cute.make_tensor(item_words, cute.make_layout((ITEM_WORDS, SLOTS)))
        item = cute.make_rmem_tensor(len(ITEM), I32)
        for i in cutlass.range_constexpr(len(ITEM)):
            item[i] = words[i, at.index]
        items.consumer_release(at)
        return item

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
        indices: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        segment_tokens: cutlass.Int32,
        heads_v: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Hands out items and loads their chunks, ahead of everybody."""
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        sQ = self.staged(base, 0, (CHUNK, self.dim_k), "k") if self.forward else None
        sK = self.staged(base, self.k_at, (CHUNK, self.dim_k), "k")
        group = heads_v // mK.shape[2]
        columns = heads_v * (self.v_tiles // self.tiles)
        parts = cute.ceil_div(tokens, segment_tokens)
        if cutlass.const_expr(self.problem.packed):
            count = segments[0, 0] * columns
        else:
            count = batch * (parts if self.forward else parts - 1) * columns
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        words = cute.make_tensor(item_words, cute.make_layout((ITEM_WORDS, SLOTS)))
        number = block
        if cutlass.const_expr(self.problem.packed):
            number = self.draw(counter, lane)
        while number < count:
            segment, column = number // columns, number % columns
            head, tile = column // (self.v_tiles // self.tiles), column % (self.v_tiles // self.tiles)
            head_k = head // group
            item = self.describe(segments, segment, segment_tokens, parts, tokens)
            token, in_batch, length, sequence, slot, part, parts_here = item
            row = sequence
            if cutlass.const_expr(self.problem.indexed):
                row = indices[sequence]
            wanted = cutlass.Boolean(True)
            if cutlass.const_expr(not self.forward):
                wanted = (part + 1 < parts_here) & (row >= 0)
            if wanted:
                items.producer_acquire(item_at)
                if lane == 0:
                    values = (1, token, in_batch, length, sequence, slot, part, parts_here, head, tile * self.tiles, row)
                    for i in cutlass.range_constexpr(len(ITEM)):
                        words[i, item_at.index] = I32(values[i])
                    items.producer_commit(item_at)
                item_at.advance()
                chunks = cute.ceil_div(length, CHUNK)
                if row < 0:
                    chunks = 0
                for c in cutlass.range(chunks, unroll=1):
                    ring.producer_acquire(at)
                    full = ring.producer_get_barrier(at)
                    first = token + c * CHUNK
                    if cutlass.const_expr(self.forward):
                        self.fetch(tma_q, mQ, first, head_k, in_batch, 0, sQ[None, None, at.index], full)
                    self.fetch(tma_k, mK, first, head_k, in_batch, 0, sK[None, None, at.index], full)
                    for i in cutlass.range_constexpr(self.tiles):
                        sV = self.staged(base, self.v_at + i * CHUNK * V_TILE, (CHUNK, V_TILE), "k")
                        self.fetch(
                            tma_v, mV, first, head, in_batch, tile * self.tiles + i, sV[None, None, at.index], full
                        )
                    at.advance()
            if cutlass.const_expr(self.problem.packed):
                number = self.draw(counter, lane)
            else:
                number = number + ctas
        items.producer_acquire(item_at)
        if lane == 0:
            words[0, item_at.index] = I32(0)
            items.producer_commit(item_at)
        item_at.advance()
        items.producer_tail(item_at)
        ring.producer_tail(at)

    @cute.jit
    def describe(
        self,
        segments: cute.Tensor,
        segment: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        parts: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """(first token, batch, length, sequence, slot, part, parts) of a segment."""
        if cutlass.const_expr(self.problem.packed):
            row = segments[1 + segment, None]
            return row[0], I32(0), row[1], row[2], row[3], row[4], row[5]
        else:
            listed = parts if self.forward else parts - 1
            sequence, part = segment // listed, segment % listed
            token = part * segment_tokens
            length = cutlass.min(segment_tokens, tokens - token)
            return token, sequence, length, sequence, sequence * parts + part, part, parts

    @cute.jit
    def draw(self, counter: cute.Tensor, lane: cutlass.Int32):
        """The number of the next item in the order of the segment table."""
        number = I32(0)
        if lane == 0:
            number = cute.arch.atomic_add(counter.iterator.llvm_ptr, I32(1))
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def fetch(self, tma, whole: cute.Tensor, first, head, batch, column, shared: cute.Tensor, barrier):
        """Loads 64 tokens from `first` on; tokens past the end of the tensor arrive as zeros."""
        tiles = cute.domain_offset((first, 0), whole[None, None, head, batch])
        source = cute.local_tile(tiles, (CHUNK, cute.size(shared, mode=[1])), (0, column))
        s, g = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(source, 0, 2)
        )
        cute.copy(tma, g, s, tma_bar_ptr=barrier)

    # ---- weights ----------------------------------------------------------------------------------------------------

    @cute.jit
    def weigh(
        self,
        ring,
        weights,
        items,
        base: cute.Pointer,
        p_base: cute.Pointer,
        tables: cute.Pointer,
        norms: cute.Pointer,
        item_words: cute.Pointer,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        tidx: cutlass.Int32,
    ):
        """Decay tables and intra-chunk products of every chunk, one slot ahead of the tiles."""
        lane, mine = tidx % 32, tidx % CHUNK
        row, column = tidx // 32 * 16 + lane // 4, lane % 4 * 2  # of the accumulator's first element
        sK = self.staged(base, self.k_at, (CHUNK, self.dim_k), "k")
        if cutlass.const_expr(self.forward):
            product = mma(self.dtype, CHUNK, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
            part = product.get_slice(tidx)
            sQ = self.staged(base, 0, (CHUNK, self.dim_k), "k")
            tPrQ = product.make_fragment_A(part.partition_A(sQ))
            tPrK = product.make_fragment_B(part.partition_B(sK))
            acc = cute.make_rmem_tensor(product.partition_shape_C((CHUNK, CHUNK)), F32)
            store = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), product
            ).get_slice(tidx)
            tPsP = store.partition_D(self.slots(p_base, (CHUNK, CHUNK), "k"))
            p = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, CHUNK // 8)))
        factors = cute.make_rmem_tensor((2, 2, CHUNK // 8), F32)
        table = cute.make_tensor(tables, cute.make_layout((TABLE, SLOTS)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        out_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)

        item = self.receive(items, item_at, item_words)
        item_at.advance()
        while item[0] != 0:
            token, batch, length, head = item[1], item[2], item[3], item[8]
            chunks = cute.ceil_div(length, CHUNK)
            if item[10] < 0:
                chunks = 0
            slope = F32(0.0)  # log2 decay per token of the head
            if cutlass.const_expr(self.problem.decay):
                slope = floored(head_decay[head] * decay_factor)
            if cutlass.const_expr(self.gate):
                near, far = cute.make_rmem_tensor(2, g.element_type), cute.make_rmem_tensor(2, g.element_type)
                self.read_gates(near, g, batch, token, head, 0, length, lane)
                self.read_gates(far, g, batch, token, head, CHUNK, length, lane)
            elif cutlass.const_expr(self.forward):
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for b in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            distance = row + 8 * b - (column + 8 * n + a)
                            factor = cute.arch.exp2(cutlass.Float32(distance) * slope) * scale
                            factors[a, b, n] = factor if distance >= 0 else F32(0.0)
            total = F32(0.0)
            for c in cutlass.range(chunks, unroll=1):
                left = cutlass.min(length - c * CHUNK, CHUNK)
                ring.consumer_wait(at)
                if cutlass.const_expr(self.problem.packed):
                    if left < CHUNK:
                        self.clear_keys(sK[None, None, at.index], left, tidx)
                if cutlass.const_expr(self.forward):
                    warpgroup.fence()
                    issue(product, acc, tPrQ[None, None, None, at.index], tPrK[None, None, None, at.index], True)
                # Running sum of log2 decays up to this thread's token, and over the chunk.
                if cutlass.const_expr(self.gate):
                    sums = running_sums(self.log_decays(near, slope, left, lane), lane)
                    near.store(far.load())
                    # Two chunks ahead, so that nobody waits for memory.
                    self.read_gates(far, g, batch, token, head, (c + 2) * CHUNK, length, lane)
                    here = pick(sums, mine)
                    last = cute.arch.shuffle_sync(sums[1], 31)
                    to_end = last - here
                else:
                    here = cutlass.Float32(mine + 1) * slope
                    last = cutlass.Float32(left) * slope
                    to_end = cutlass.Float32(cutlass.max(left - 1 - mine, 0)) * slope
                own = F32(1.0)
                if cutlass.const_expr(self.problem.l2norm):
                    own = self.inverse_norm(base + at.index * self.stage, tidx)
                    norm = cute.make_tensor(norms, cute.make_layout((GROUP, SLOTS)))
                    norm[tidx, out_at.index] = own
                weights.producer_acquire(out_at)
                if tidx < CHUNK:
                    if cutlass.const_expr(self.forward):
                        table[tidx, out_at.index] = cute.arch.exp2(here) * own * scale
                else:
                    table[tidx, out_at.index] = cute.arch.exp2(to_end) * own
                if tidx == 0:
                    table[2 * CHUNK, out_at.index] = cute.arch.exp2(last)
                total = total + last
                if cutlass.const_expr(self.forward):
                    if cutlass.const_expr(self.gate):
                        self.gate_factors(factors, sums, row, column, lane, scale)
                    if cutlass.const_expr(self.problem.l2norm):
                        cute.arch.barrier(barrier_id=BARRIER_WEIGHTS, number_of_threads=GROUP)
                    warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(cute.size(p)):
                        p[i] = p[i] * factors[i]
                    if cutlass.const_expr(self.problem.l2norm):
                        self.scale_by_norms(p, norms, out_at.index, row, lane)
                    rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
                    rounded.store(acc.load().to(self.dtype))
                    cute.copy(store, store.retile(rounded), tPsP[None, None, None, out_at.index])
                    cute.arch.fence_view_async_shared()
                elif cutlass.const_expr(self.problem.packed):
                    cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                ring.consumer_release(at)
                weights.producer_commit(out_at)
                at.advance()
                out_at.advance()
            if cutlass.const_expr(not self.forward):
                if (tidx == 0) & (item[9] == 0):
                    decays[item[5], head] = total
            item = self.receive(items, item_at, item_words)
            item_at.advance()

    @cute.jit
    def read_gates(self, found: cute.Tensor, g: cute.Tensor, batch, token, head, first, length, lane):
        """g of this lane's two tokens of the chunk that starts at `first`, as it is stored."""
        for i in cutlass.range_constexpr(2):
            at = first + 2 * lane + i
            if at < length:
                found[i] = g[batch, token + at, head]

    @cute.jit
    def log_decays(self, found: cute.Tensor, slope, left, lane):
        """log2 decays of this lane's two tokens, zero past the end."""
        zero = F32(0.0)
        even = floored(found[0].to(F32) * LOG2_E + slope)
        odd = floored(found[1].to(F32) * LOG2_E + slope)
        return even if 2 * lane < left else zero, odd if 2 * lane + 1 < left else zero

    @cute.jit
    def gate_factors(self, factors: cute.Tensor, sums, row, column, lane, scale):
        """scale 2^(G_i - G_j) where j <= i, else 0, in the order of the accumulator."""
        rows = (pick(sums, row), pick(sums, row + 8))
        for n in cutlass.range_constexpr(CHUNK // 8):
            for a in cutlass.range_constexpr(2):
                column_sum = cute.arch.shuffle_sync(sums[a], 4 * n + lane % 4)
                for b in cutlass.range_constexpr(2):
                    factor = cute.arch.exp2(rows[b] - column_sum) * scale
                    factors[a, b, n] = factor if row + 8 * b >= column + 8 * n + a else F32(0.0)

    @cute.jit
    def clear_keys(self, keys: cute.Tensor, left, tidx):
        """Zeroes what lies past the end of a packed sequence: tokens of the next one, of any value."""
        units = cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128),
            cute.make_layout((16, 8), stride=(8, 1)),
            cute.make_layout((1, 8)),
        ).get_slice(tidx)
        target = units.partition_D(keys)
        zeros = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            if tidx // 8 + 16 * i >= left:
                for j in cutlass.range_constexpr(cute.size(target, mode=[2])):
                    cute.copy(units, zeros, target[None, i, j])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_WEIGHTS, number_of_threads=GROUP)

    @cute.jit
    def inverse_norm(self, stage: cute.Pointer, tidx):
        """1 / |x| of one token: of q in threads 0-63, of k in the others."""
        row = tidx % CHUNK
        offset = row * CHUNK
        if cutlass.const_expr(self.forward):
            offset = offset + tidx // CHUNK * self.k_at
        squares = F32(0.0)
        for panel in cutlass.range_constexpr(self.dim_k // CHUNK):
            for unit in cutlass.range_constexpr(CHUNK // 8):
                at = offset + panel * CHUNK * CHUNK + (unit ^ (row % 8)) * 8
                source = cute.make_tensor((stage + at).align(16), cute.make_layout(8))
                x = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(source, x)
                for i in cutlass.range_constexpr(8):
                    squares = squares + x[i].to(F32) * x[i].to(F32)
        return cute.math.rsqrt(squares + 1e-6)

    @cute.jit
    def scale_by_norms(self, p: cute.Tensor, norms: cute.Pointer, slot, row, lane):
        rows = cute.make_tensor(norms, cute.make_layout((GROUP, SLOTS)))
        columns = cute.make_tensor(
            (norms + CHUNK).align(16), cute.make_layout((2, 4, 8, SLOTS), stride=(1, 2, 8, GROUP))
        )
        by_column = cute.make_rmem_tensor((2, CHUNK // 8), F32)
        cute.autovec_copy(columns[None, lane % 4, None, slot], by_column)
        for b in cutlass.range_constexpr(2):
            by_row = rows[row + 8 * b, slot]
            for n in cutlass.range_constexpr(CHUNK // 8):
                for a in cutlass.range_constexpr(2):
                    p[a, b, n] = p[a, b, n] * by_row * by_column[a, n]

    # ---- tiles ------------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self,
        ring,
        weights,
        items,
        base: cute.Pointer,
        p_base: cute.Pointer,
        o_base: cute.Pointer,
        tables: cute.Pointer,
        item_words: cute.Pointer,
        tma_o,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        segment_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        tile: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """States and outputs of 64 columns of v."""
        lane = tidx % 32
        registers, k_major, mn_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
        mma_o = mma(self.dtype, CHUNK, registers, k_major)
        mma_s = mma(self.dtype, self.dim_k, registers, mn_major)
        part_o, part_s = mma_o.get_slice(tidx), mma_s.get_slice(tidx)
        tOrQ = mma_o.make_fragment_B(part_o.partition_B(self.staged(base, 0, (CHUNK, self.dim_k), "k")))
        tOrP = mma_o.make_fragment_B(part_o.partition_B(self.slots(p_base, (CHUNK, CHUNK), "k")))
        tSrK = mma_s.make_fragment_B(
            part_s.partition_B(self.staged(base, self.k_at, (self.dim_k, CHUNK), "mn"))
        )
        load_v, tVsV = self.values(base, mma_o, tile, tidx)
        store_o = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_o
        ).get_slice(tidx)
        own_o = o_base + tile * (SLOTS * CHUNK * V_TILE)
        sO = self.slots(own_o, (CHUNK, V_TILE), "k")
        tOsO = store_o.partition_D(self.slots(own_o, (V_TILE, CHUNK), "mn"))
        o_weights, v_weights = self.token_table(tables, 0, lane), self.token_table(tables, CHUNK, lane)
        totals = cute.make_tensor(tables + 2 * CHUNK, cute.make_layout(SLOTS, stride=TABLE))

        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, self.dim_k)), F32)
        o = cute.make_rmem_tensor(mma_o.partition_shape_C((V_TILE, CHUNK)), F32)
        s_a = mma_s.make_fragment_A(mma_s.partition_shape_A((V_TILE, self.dim_k)))
        v_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        w_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        rest_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        weights_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks sent so far: which output slot is next

        item = self.receive(items, item_at, item_words)
        item_at.advance()
        while item[0] != 0:
            token, batch, length, sequence, slot, part, parts, head = (item[i] for i in range(1, 9))
            column, row = item[9] + tile, item[10]
            chunks = cute.ceil_div(length, CHUNK)
            if row < 0:
                chunks = 0
                self.clear_output(out, batch, token, length, head, column, tidx)
            self.start(s, part_s, initial, states, decays, sequence, slot, part, parts, head, column, row, tidx)
            gO = cute.local_tile(
                cute.domain_offset((token, 0), mO[None, None, head, batch]), (CHUNK, V_TILE), (None, column)
            )
            for c in cutlass.range(chunks, unroll=1):
                left = cutlass.min(length - c * CHUNK, CHUNK)
                ring.consumer_wait(at)
                weights.consumer_wait(weights_at)
                self.take_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                self.weigh_values(v_weights[None, None, weights_at.index], v_a, w_a, rest_a)
                s_a.store(as_operand(s, s_a).load().to(self.dtype))
                self.decay(s, totals[weights_at.index])
                warpgroup.fence()
                issue(mma_o, o, s_a, tOrQ[None, None, None, at.index], True)
                issue(mma_s, s, w_a, tSrK[None, None, None, at.index], False)
                if cutlass.const_expr(self.problem.exact_state):
                    issue(mma_s, s, rest_a, tSrK[None, None, None, at.index], False)
                if c > 0:
                    self.send(tma_o, gO, sO, c - 1, turn - 1, tile, tidx)
                by_token = cute.make_rmem_tensor((2, CHUNK // 8), F32)
                cute.autovec_copy(o_weights[None, None, weights_at.index], by_token)
                warpgroup.wait_group(2 if self.problem.exact_state else 1)
                by_pairs = cute.make_tensor(o.iterator, cute.make_layout((2, 2, CHUNK // 8)))
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for b in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            by_pairs[a, b, n] = by_pairs[a, b, n] * by_token[a, n]
                if cutlass.const_expr(self.problem.exact_state):  # registers do not suffice to keep it
                    self.take_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                warpgroup.fence()
                issue(mma_o, o, v_a, tOrP[None, None, None, weights_at.index], False)
                warpgroup.wait_group(0)
                ring.consumer_release(at)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    weights.consumer_release(weights_at)
                at.advance()
                weights_at.advance()
                self.keep(store_o, o, tOsO[None, None, None, turn % SLOTS])
                turn = turn + 1
                if cutlass.const_expr(self.problem.checkpoints):
                    done = part * segment_tokens + (c + 1) * CHUNK
                    if (left == CHUNK) & (done % checkpoint_every == 0):
                        at_row = self.checkpoint_row(token, part, segment_tokens, sequence, checkpoint_every, out)
                        at_row = at_row + done // checkpoint_every - 1
                        self.put(s, part_s, checkpoints, at_row, head, column)
            if chunks > 0:
                self.finish(tma_o, gO, sO, out, batch, token, length, head, column, chunks, turn - 1, tile, tidx)
            if cutlass.const_expr(self.problem.final_state):
                self.save(s, part_s, final, sequence, part, parts, head, column, row)
            item = self.receive(items, item_at, item_words)
            item_at.advance()
        if tidx < 32:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def scan(
        self,
        ring,
        weights,
        items,
        base: cute.Pointer,
        tables: cute.Pointer,
        item_words: cute.Pointer,
        initial: cute.Tensor,
        states: cute.Tensor,
        tile: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """What a segment adds to the state, from zero, or for the first of a sequence from its initial state."""
        lane = tidx % 32
        mma_v = mma(self.dtype, CHUNK, warpgroup.OperandSource.RMEM, OperandMajorMode.K)
        mma_s = mma(self.dtype, self.dim_k, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        part_s = mma_s.get_slice(tidx)
        tSrK = mma_s.make_fragment_B(
            part_s.partition_B(self.staged(base, self.k_at, (self.dim_k, CHUNK), "mn"))
        )
        load_v, tVsV = self.values(base, mma_v, tile, tidx)
        v_weights = self.token_table(tables, CHUNK, lane)
        totals = cute.make_tensor(tables + 2 * CHUNK, cute.make_layout(SLOTS, stride=TABLE))
        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, self.dim_k)), F32)
        v_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        w_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        rest_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        weights_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = self.receive(items, item_at, item_words)
        item_at.advance()
        while item[0] != 0:
            length, slot, part, parts, head = item[3], item[5], item[6], item[7], item[8]
            column, row = item[9] + tile, item[10]
            s.fill(0.0)
            if cutlass.const_expr(self.problem.initial_state):
                if part == 0:
                    self.get(s, part_s, initial, row, head, column)
                    if cutlass.const_expr(self.problem.in_place):
                        # The last segment may replace the pool's row before the first one is started.
                        self.spill(s, states, slot + parts - 1, head, column, tidx)
            for c in cutlass.range(cute.ceil_div(length, CHUNK), unroll=1):
                left = cutlass.min(length - c * CHUNK, CHUNK)
                ring.consumer_wait(at)
                weights.consumer_wait(weights_at)
                self.take_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                self.weigh_values(v_weights[None, None, weights_at.index], v_a, w_a, rest_a)
                self.decay(s, totals[weights_at.index])
                warpgroup.fence()
                issue(mma_s, s, w_a, tSrK[None, None, None, at.index], False)
                if cutlass.const_expr(self.problem.exact_state):
                    issue(mma_s, s, rest_a, tSrK[None, None, None, at.index], False)
                warpgroup.wait_group(0)
                ring.consumer_release(at)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    weights.consumer_release(weights_at)
                at.advance()
                weights_at.advance()
            self.spill(s, states, slot, head, column, tidx)
            item = self.receive(items, item_at, item_words)
            item_at.advance()

    def values(self, base, mma_v, tile, tidx):
        """v^T of this tile in the order of an accumulator, transposed on the way by ldmatrix."""
        load_v = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma_v
        ).get_slice(tidx)
        sV = self.staged(base + tile * (CHUNK * V_TILE), self.v_at, (V_TILE, CHUNK), "mn")
        return load_v, load_v.partition_S(sV)

    @cute.jit
    def take_values(self, load_v, source: cute.Tensor, v_a: cute.Tensor, left, lane):
        """v^T of a chunk as an A operand."""
        v = cute.make_tensor(v_a.iterator, cute.make_layout((2, 2, CHUNK // 8)))
        whole = cute.make_tensor(v_a.iterator, cute.make_layout(((2, 2, CHUNK // 8), 1, 1)))
        cute.copy(load_v, source, load_v.retile(whole))
        if cutlass.const_expr(self.problem.packed):
            if left < CHUNK:  # tokens of the next sequence may hold anything, and 0 * inf is no zero
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            beyond = 8 * n + lane % 4 * 2 + a >= left
                            v[a, b, n] = self.dtype(0.0) if beyond else v[a, b, n]

    @cute.jit
    def weigh_values(self, by_token: cute.Tensor, v_a: cute.Tensor, w_a: cute.Tensor, rest_a: cute.Tensor):
        """2^(G_L - G_j) v^T as an A operand, and for exact_state what its rounding lost."""
        factors = cute.make_rmem_tensor((2, CHUNK // 8), F32)
        cute.autovec_copy(by_token, factors)
        exact = cute.make_rmem_tensor((2, 2, CHUNK // 8), F32)
        exact.store(cute.make_tensor(v_a.iterator, exact.layout).load().to(F32))
        for n in cutlass.range_constexpr(CHUNK // 8):
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    exact[a, b, n] = exact[a, b, n] * factors[a, n]
        w_a.store(as_operand(exact, w_a).load().to(self.dtype))
        if cutlass.const_expr(self.problem.exact_state):
            rounded = cute.make_tensor(w_a.iterator, exact.layout)
            exact.store(exact.load() - rounded.load().to(F32))
            rest_a.store(as_operand(exact, rest_a).load().to(self.dtype))

    @cute.jit
    def decay(self, s: cute.Tensor, factor):
        for i in cutlass.range_constexpr(cute.size(s)):
            s[i] = s[i] * factor

    # ---- outputs ----------------------------------------------------------------------------------------------------

    @cute.jit
    def keep(self, store_o, o: cute.Tensor, target: cute.Tensor):
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        cute.copy(store_o, store_o.retile(rounded), target)

    @cute.jit
    def send(self, tma, gO: cute.Tensor, sO: cute.Tensor, c, turn, tile, tidx):
        """Sends a full chunk; after its barrier the other slot may be written again."""
        if tidx < 32:  # whichever thread of the warp is elected to copy
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_TILE + tile, number_of_threads=GROUP)
        if tidx < 32:
            s, g = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(sO[None, None, turn % SLOTS], 0, 2),
                cute.group_modes(gO[None, None, c], 0, 2),
            )  # fmt: skip
            cute.copy(tma, s, g)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self, tma, gO, sO, out, batch, token, length, head, column, chunks, turn, tile, tidx):
        """Sends the last chunk of an item; a partial one by ordinary stores, its neighbours being others' tokens."""
        left = length - (chunks - 1) * CHUNK
        if left == CHUNK:
            self.send(tma, gO, sO, chunks - 1, turn, tile, tidx)
        else:
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=BARRIER_TILE + tile, number_of_threads=GROUP)
            units, target = self.rows_of(out, batch, token + (chunks - 1) * CHUNK, head, column, tidx)
            source = units.partition_S(sO[None, None, turn % SLOTS])
            held = cute.make_rmem_tensor(source[None, 0, 0].shape, self.dtype)
            for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
                if tidx // 8 + 16 * i < left:
                    cute.autovec_copy(source[None, i, 0], held)
                    cute.autovec_copy(held, target[None, i, 0])

    @cute.jit
    def clear_output(self, out, batch, token, length, head, column, tidx):
        """The outputs of a skipped sequence are zero."""
        for c in cutlass.range(cute.ceil_div(length, CHUNK), unroll=1):
            units, target = self.rows_of(out, batch, token + c * CHUNK, head, column, tidx)
            zeros = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
            zeros.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
                if tidx // 8 + 16 * i < length - c * CHUNK:
                    cute.autovec_copy(zeros, target[None, i, 0])

    def rows_of(self, out, batch, token, head, column, tidx):
        """64 tokens of this tile's outputs in units of 16 bytes: thread t has unit t % 8 of rows t // 8 + 16 i."""
        units = cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128),
            cute.make_layout((16, 8), stride=(8, 1)),
            cute.make_layout((1, 8)),
        ).get_slice(tidx)
        tokens = cute.domain_offset((token, 0), out[batch, None, head, None])
        return units, units.partition_D(cute.local_tile(tokens, (CHUNK, V_TILE), (0, column)))

    # ---- states -----------------------------------------------------------------------------------------------------

    def transposed(self, pool, row, head, column):
        """64 columns of v of a state as [V, K], whatever its layout."""
        state = pool[row, head, None, None]
        if not self.problem.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return cute.local_tile(state, (V_TILE, self.dim_k), (column, 0))

    @cute.jit
    def get(self, s: cute.Tensor, part_s, pool, row, head, column):
        cute.autovec_copy(part_s.partition_C(self.transposed(pool, row, head, column)), s)

    @cute.jit
    def put(self, s: cute.Tensor, part_s, pool, row, head, column):
        cute.autovec_copy(s, part_s.partition_C(self.transposed(pool, row, head, column)))

    def spilled(self, states, slot, head, column, tidx):
        """A segment's contribution in the workspace: registers one after another, 128 threads wide."""
        return states[slot, head, column, None, tidx]

    @cute.jit
    def spill(self, s: cute.Tensor, states: cute.Tensor, slot, head, column, tidx):
        target = self.spilled(states, slot, head, column, tidx)
        for i in cutlass.range_constexpr(cute.size(s)):
            target[i] = s[i]

    @cute.jit
    def start(
        self, s: cute.Tensor, part_s, initial, states, decays, sequence, slot, part, parts, head, column, row, tidx
    ):
        """The state in front of an item: the initial one, or the sum over the segments before it."""
        s.fill(0.0)
        if row >= 0:
            if cutlass.const_expr(self.problem.initial_state):
                if part == 0:
                    if cutlass.const_expr(self.problem.in_place and self.config.split):
                        if parts > 1:
                            source = self.spilled(states, slot + parts - 1, head, column, tidx)
                            for i in cutlass.range_constexpr(cute.size(s)):
                                s[i] = source[i]
                        else:
                            self.get(s, part_s, initial, row, head, column)
                    else:
                        self.get(s, part_s, initial, row, head, column)
            if cutlass.const_expr(self.config.split):
                for before in cutlass.range(slot - part, slot, unroll=1):
                    factor = cute.arch.exp2(decays[before, head])
                    source = self.spilled(states, before, head, column, tidx)
                    for i in cutlass.range_constexpr(cute.size(s)):
                        s[i] = s[i] * factor + source[i]

    @cute.jit
    def save(self, s: cute.Tensor, part_s, final, sequence, part, parts, head, column, row):
        """The state behind a sequence. Nothing for padding slots in place; zero where results are separate."""
        if part + 1 == parts:
            if cutlass.const_expr(self.problem.in_place):
                if row >= 0:
                    self.put(s, part_s, final, row, head, column)
            else:
                self.put(s, part_s, final, sequence, head, column)

    @cute.jit
    def checkpoint_row(self, token, part, segment_tokens, sequence, checkpoint_every, out):
        """The row of a sequence's first checkpoint."""
        if cutlass.const_expr(self.problem.packed):
            return (token - part * segment_tokens) // checkpoint_every
        else:
            return sequence * (out.shape[1] // checkpoint_every)
