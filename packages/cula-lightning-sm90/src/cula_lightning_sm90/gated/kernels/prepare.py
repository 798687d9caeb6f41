"""What belongs to single chunks: T', Aqk and tables over tokens of every chunk and state head, written to blocks.

    Akk_ij = beta_i r(k_i) r(k_j) (k_i . k_j) 2^(G_i - G_j), j < i        T' = (I + Akk)^-1 diag(beta)
    Aqk_ij = scale r(q_i) r(k_j) (q_i . k_j) 2^(G_i - G_j), j <= i

r is 1 over the norm, or 1. The recurrence runs beside this kernel: blocks come in the order in which it needs them, and
each has a flag that says that it is there. Where sequences are cut, what reads the blocks comes after this kernel.
"""

import itertools
import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import nanosleep
from cula_core.cute.memory import by_token, load_tile, repeated, swizzled, view
from cula_core.cute.output import GROUP
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import issue, mma
from cula_core.delta_rule.kernels.order import Order

from ...kernels.chunks import clear_past
from ..config import CHUNK, ENDS, HEAD_DIM, LINE, SUB, TABLES, PrepareConfig
from .gates import Gates
from .layout import (
    BY_TOKEN,
    GROWTH,
    INVERSE,
    PRODUCTS,
    SQUARE,
    WIDE,
    Place,
    by_pairs,
    panels,
    release,
    square,
)
from .solve import SCRATCH_BYTES, Solve
from .tokens import ALL_TABLES, GATES, NORM, STRENGTH, SUM, Tokens
from .weights import store_growth, weigh_left, weighed_diagonal
from .workspace import blocks_in

GROUPS = 3  # chunks in work
THREADS = GROUP * (GROUPS + 2)
FEEDERS, WRITERS = 4 * GROUPS, 4 * GROUPS + 4  # the first warps
SLOTS = 2  # of gates and tables
TASK = 4  # words of a task
BARRIER = 1  # the first group's
PATIENCE = 2000  # how often a feeder looks for a chain that does not come on, about 1 us each
# Per thread of a group, of a feeder, and of a writer: 5 x 96 together.
REGISTERS = (128, 56, 40)


class Memory(NamedTuple):
    """Where a group's things lie in shared memory. k, q: the chunk. inverse, products: T', Aqk. gates, tables: fp32 per
    token. tasks: `Task`s. scratch: of `Solve`."""

    k: cute.Pointer
    q: cute.Pointer
    inverse: cute.Pointer
    products: cute.Pointer
    gates: cute.Pointer
    tables: cute.Pointer
    tasks: cute.Pointer
    scratch: cute.Pointer


SIZES = Memory(
    k=2 * WIDE,
    q=2 * WIDE,
    inverse=2 * SQUARE,
    products=2 * SQUARE,
    gates=4 * SLOTS * GATES,
    tables=4 * SLOTS * ALL_TABLES,
    tasks=4 * SLOTS * TASK,
    scratch=SCRATCH_BYTES,
)
*OFFSETS, USED = itertools.accumulate(SIZES, initial=0)
OWN = -(-USED // 1024) * 1024  # bytes of a group


class Task(NamedTuple):
    """What a group is told about a chunk: its tokens and those behind it, none when there are no more chunks; its slot
    and head, which are where its block goes, and its number."""

    left: cutlass.Int32
    slot: cutlass.Int32
    head: cutlass.Int32
    number: cutlass.Int32


class Pipes(NamedTuple):
    """Who of a group waits for whom: for k and q, for tasks and their gates, for a block. Slots of all groups."""

    loaded: object
    gates: object
    made: object


class GatedDeltaPrepare:
    """Persistent CTAs of groups that work by themselves, on a chunk and state head at a time.

    | thread role | warps | work |
    |---|---|---|
    | group i | 4 i ... | products of q and k, weights, the inverse |
    | feeder of group i | 12 + i | finds the next chunk, loads it by TMA, makes its gates |
    | writer of group i | 16 + i | copies the block to global memory, and sets its flag |

    | shared memory of a group | bytes | slots |
    |---|---|---|
    | k, q [64, 128] | 16384 each | 1 |
    | T', Aqk [64, 64] | 8192 each | 1 |
    | gates | 768 | 2 |
    | tables | 1312 | 2 |
    | scratch of the inverse | 13568 | 1 |
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.gates, self.tokens = Gates(config), Tokens(config, self.dtype)
        self.solve, self.order = Solve(self.operand), Order(config.packed, ENDS)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        cu_seqlens: cute.Tensor,
        workspace: cute.Tensor,
        scale: cutlass.Float32,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        flag_count: cutlass.Int32,
        slots: cutlass.Int32,
        heads: cutlass.Int32,
        seats: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
        ahead: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.prepare_arguments`; what the config lacks is None."""
        load, wide = cpasync.CopyBulkTensorTileG2SOp(), swizzled((CHUNK, HEAD_DIM), "k", self.dtype)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_token(q), wide, (CHUNK, HEAD_DIM))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_token(k), wide, (CHUNK, HEAD_DIM))
        blocks = blocks_in(workspace, flag_count, slots, heads, self.operand)
        flags = cute.make_tensor(workspace.iterator, cute.make_layout((flag_count,)))
        self.kernel(
            tma_q, mQ, tma_k, mK, g, beta, rates, biases, cu_seqlens, blocks, flags, scale, softplus_beta, threshold,
            seats, together, share, segment, ahead, q.shape[1],
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        cu_seqlens: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        scale: cutlass.Float32,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        seats: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
        ahead: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        group = warp_idx // 4
        if warp_idx >= FEEDERS:
            group = warp_idx % 4
        pipes = self.make_pipes(smem)
        base = smem.allocate_array(self.operand, GROUPS * OWN // 2, byte_alignment=1024)
        base = base + cute.assume(group * (OWN // 2), divby=512)

        # At constant distances from one pointer: a register for each would be too many.
        types = Memory(
            self.dtype, self.dtype, self.operand, self.operand, F32, F32, I32, self.operand
        )
        memory = Memory(
            *(
                cute.recast_ptr((base + offset // 2).align(math.gcd(offset, 1024)), dtype=dtype)
                for offset, dtype in zip(OFFSETS, types, strict=True)
            )
        )
        cute.arch.mbarrier_init_fence()
        worker, workers = block * GROUPS + group, ctas * GROUPS
        cute.arch.sync_threads()

        if warp_idx < FEEDERS:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.make(pipes, memory, scale, group, tidx % GROUP)
        elif warp_idx < WRITERS:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if group < GROUPS:
                self.feed(
                    pipes, memory, tma_q, mQ, tma_k, mK, g, beta, rates, biases, cu_seqlens, blocks, flags,
                    softplus_beta, threshold, seats, together, share, segment, ahead, tokens, group, worker, workers,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[2])
            if group < GROUPS:
                self.write(pipes, memory, blocks, flags, seats, share, group, worker, workers)

    def make_pipes(self, smem):
        """Returns the pipelines, on barriers of their own."""
        thread = pipeline.Agent.Thread

        def group(count):
            return pipeline.CooperativeGroup(thread, count)

        def made(slots, producers, consumers):
            return pipeline.PipelineAsync.create(
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * slots),
                num_stages=slots,
                producer_group=group(producers),
                consumer_group=group(consumers),
                defer_sync=True,
            )

        loaded = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * GROUPS),
            num_stages=GROUPS,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=group(4),
            tx_count=2 * WIDE * self.dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        return Pipes(loaded, made(GROUPS * SLOTS, 32, 5), made(GROUPS, 4, 1))

    # ---- the feeder -------------------------------------------------------------------------------------------------

    @cute.jit
    def feed(
        self,
        pipes: Pipes,
        memory: Memory,
        tma_q,
        mQ: cute.Tensor,
        tma_k,
        mK: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        cu_seqlens: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        seats: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
        ahead: cutlass.Int32,
        tokens: cutlass.Int32,
        group: cutlass.Int32,
        worker: cutlass.Int32,
        workers: cutlass.Int32,
    ):
        """Hands the worker's chunks to its group: those whose number is `worker` modulo `workers`."""
        lane = cute.arch.lane_idx()
        heads = blocks.shape[1]
        group_q, group_k = heads // mQ.shape[2], heads // mK.shape[2]
        sQ, sK = self.matrix(memory.q), self.matrix(memory.k)
        tasks = cute.make_tensor(memory.tasks, cute.make_layout((TASK, SLOTS)))
        producer = pipeline.PipelineUserType.Producer
        loaded_at = pipeline.make_pipeline_state(producer, 1)
        gates_at = pipeline.make_pipeline_state(producer, SLOTS)
        numbers, patience = seats * share, I32(PATIENCE)
        for first in cutlass.range(worker, numbers, 32 * workers, unroll=1):
            # Every lane finds one of the next 32 chunks.
            found = self.find(
                cu_seqlens, first + lane * workers, seats, together, share, segment, blocks, tokens
            )
            for i in cutlass.range(32, unroll=1):
                left = cute.arch.shuffle_sync(found[0], i)
                if left > 0:
                    batch, token, head, slot = (cute.arch.shuffle_sync(x, i) for x in found[1:])
                    number = first + i * workers
                    own_g = self.gates.read(g, batch, token, head, left, lane)
                    own_beta = self.gates.read(beta, batch, token, head, left, lane)
                    if cutlass.const_expr(not self.config.cut):
                        patience = self.hold(
                            flags, number // seats - ahead, number % seats, numbers, patience
                        )
                    at = self.place(loaded_at, group, 1)
                    pipes.loaded.producer_acquire(at)
                    full = pipes.loaded.producer_get_barrier(at)
                    load_tile(tma_k, mK, token, head // group_k, batch, 0, sK, full)
                    load_tile(tma_q, mQ, token, head // group_q, batch, 0, sQ, full)
                    loaded_at.advance()
                    at = self.place(gates_at, group, SLOTS)
                    pipes.gates.producer_acquire(at)
                    self.gates.write(
                        own_g, own_beta, rates, biases, softplus_beta, threshold, head, left,
                        memory.gates + cute.assume(gates_at.index * GATES, divby=GATES), lane,
                    )  # fmt: skip
                    self.tell(tasks, gates_at.index, Task(left, slot, head, number), lane)
                    pipes.gates.producer_commit(at)
                    gates_at.advance()
        at = self.place(gates_at, group, SLOTS)
        pipes.gates.producer_acquire(at)
        self.tell(tasks, gates_at.index, Task(I32(0), I32(0), I32(0), I32(0)), lane)
        pipes.gates.producer_commit(at)

    @cute.jit
    def tell(self, tasks: cute.Tensor, index, task: Task, lane):
        """Writes a task to its slot."""
        if lane == 0:
            for i in cutlass.range_constexpr(TASK):
                tasks[i, index] = task[i]

    @cute.jit
    def hold(self, flags: cute.Tensor, step, seat, numbers, patience):
        """Waits until a machine has come to a step, so that it finds in the L2 what is loaded here; returns how often
        it may still look.

        Not for ever: the recurrence may not have started, and may not start before this kernel ends.
        """
        if (patience > 0) & (step > 0):
            progress = flags.iterator + (numbers + seat) * LINE
            reached = cute.arch.load(progress, I32, sem="relaxed", scope="gpu")
            while (reached < step) & (patience > 0):
                nanosleep(500)
                reached = cute.arch.load(progress, I32, sem="relaxed", scope="gpu")
                patience = patience - 1
        return patience

    def place(self, at, group, slots):
        """Returns a state of a group's own slots as one of the pipeline of all groups."""
        return Place(group * slots + at.index, at.phase)

    @cute.jit
    def find(
        self, cu_seqlens, number, seats, together, share, segment, blocks: cute.Tensor, tokens
    ):  # fmt: skip
        """Returns (tokens from the chunk to the end of its sequence, batch, first token, head, slot) of a number; no
        tokens where it has no chunk."""
        heads = blocks.shape[1] // together
        left, batch, token, head, slot = I32(0), I32(0), I32(0), I32(0), I32(0)
        if number < seats * share:
            total = self.order.total(cu_seqlens, blocks.shape[0], heads)
            seat = number % seats
            step = self.order.walked(
                cu_seqlens, seat // together, number // seats, share, total, heads, tokens, segment
            )
            if step >= 0:
                at = self.order.find(cu_seqlens, step, heads, tokens, segment)
                batch, start, length, slot = self.order.tokens_of(cu_seqlens, at.sequence, tokens)
                before = at.chunk * CHUNK
                head = at.head * together + seat % together
                left, token, slot = length - before, start + before, slot + at.chunk
        return left, batch, token, head, slot

    # ---- a group ----------------------------------------------------------------------------------------------------

    def matrix(self, base, major="k"):
        """Returns k or q [64, 128]."""
        return repeated(base, (CHUNK, HEAD_DIM), major, self.dtype, 1)[None, None, 0]

    @cute.jit
    def make(self, pipes: Pipes, memory: Memory, scale: cutlass.Float32, group, tidx):
        """Makes T', Aqk and tables of the chunks that the group is fed with."""
        lane, w = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        product = mma(self.dtype, CHUNK, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        part = product.get_slice(tidx)
        sQ, sK = self.matrix(memory.q), self.matrix(memory.k)
        tQ = product.make_fragment_A(part.partition_A(sQ))
        tK = product.make_fragment_A(part.partition_A(sK))
        keys = product.make_fragment_B(part.partition_B(sK))
        shape = product.partition_shape_C((CHUNK, CHUNK))
        acc_q, acc_k = cute.make_rmem_tensor(shape, F32), cute.make_rmem_tensor(shape, F32)
        p, q = by_pairs(acc_k), by_pairs(acc_q)
        sT = square(memory.inverse, self.operand, 1)[None, None, 0]
        sP = square(memory.products, self.operand, 1)[None, None, 0]
        every_gate = cute.make_tensor(memory.gates, cute.make_layout((GATES, SLOTS)))
        every_table = cute.make_tensor(memory.tables, cute.make_layout((ALL_TABLES, SLOTS)))
        tasks = cute.make_tensor(memory.tasks, cute.make_layout((TASK, SLOTS)))
        producer, consumer = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer
        loaded_at = pipeline.make_pipeline_state(consumer, 1)
        gates_at = pipeline.make_pipeline_state(consumer, SLOTS)
        made_at = pipeline.make_pipeline_state(producer, 1)
        pipes.gates.consumer_wait(self.place(gates_at, group, SLOTS))
        left = tasks[0, gates_at.index]
        while left > 0:
            gate, table = every_gate[None, gates_at.index], every_table[None, gates_at.index]
            loaded, made = self.place(loaded_at, group, 1), self.place(made_at, group, 1)
            pipes.loaded.consumer_wait(loaded)
            if cutlass.const_expr(self.config.packed):
                if left < CHUNK:
                    clear_past(sK, left, BARRIER + group, tidx)
            # 1 over the norms of the rows of an accumulator that this thread has, and of token lane % 16.
            rows_q, own_q, own_k = [F32(1.0), F32(1.0)], F32(1.0), F32(1.0)
            if cutlass.const_expr(self.config.l2norm):
                own_q = self.tokens.norm(memory.q, w, lane)
                own_k = self.tokens.norm(memory.k, w, lane)
                rows_q = [cute.arch.shuffle_sync(own_q, lane // 4 + 8 * b) for b in range(2)]
            self.tokens.write_tables(gate, table, own_q * scale, own_k, w, lane)
            # Not before, because norms need registers.
            warpgroup.fence()
            issue(product, acc_k, tK, keys, True)
            issue(product, acc_q, tQ, keys, True)
            cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=GROUP)
            first = SUB * w + lane // 4
            sums = (gate[SUM + first], gate[SUM + first + 8])
            rows_q = (rows_q[0] * scale, rows_q[1] * scale)
            rows_k = [
                -gate[STRENGTH + first + 8 * b] * table[NORM + first + 8 * b] for b in range(2)
            ]
            warpgroup.wait_group(0)
            # What was read of k and q comes before the copy that overwrites them.
            cute.arch.fence_view_async_shared()
            release(pipes.loaded, loaded)
            weigh_left(p, q, rows_k, rows_q, sums, gate, table, w, lane)
            of_k, of_q, own = weighed_diagonal(p, q, rows_k, rows_q, sums, gate, table, w, lane)
            if cutlass.const_expr(self.config.cut):
                store_growth(view(table.iterator, GROWTH, 4), own, w, lane)
            pipes.made.producer_acquire(made)
            store_products(self.operand, q, of_q, sP, w, lane)
            self.solve.invert(p, of_k, gate, memory.scratch, sT, BARRIER + group, w, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                pipes.made.producer_commit(made)
            release(pipes.gates, self.place(gates_at, group, SLOTS))
            loaded_at.advance()
            gates_at.advance()
            made_at.advance()
            pipes.gates.consumer_wait(self.place(gates_at, group, SLOTS))
            left = tasks[0, gates_at.index]

    # ---- the writer -------------------------------------------------------------------------------------------------

    @cute.jit
    def write(
        self, pipes: Pipes, memory: Memory, blocks: cute.Tensor, flags: cute.Tensor, seats, share, group, worker,
        workers,
    ):  # fmt: skip
        """Copies the group's blocks to global memory, and sets their flags once they are there."""
        lane, numbers = cute.arch.lane_idx(), seats * share
        of_others = I32(0)
        if cutlass.const_expr(not self.config.cut):
            # Flags are cleared by whoever sets them, so that none is cleared too late, and before the recurrence may
            # start. Behind them are those of the recurrence.
            for i in cutlass.range(worker + lane * workers, numbers, 32 * workers, unroll=1):
                flags[(i % seats * share + i // seats) * LINE] = I32(0)
            of_others = numbers * LINE
        if worker == 0:
            for i in cutlass.range(of_others + lane, flags.shape[0], 32, unroll=1):
                flags[i] = I32(0)
        if cutlass.const_expr(not self.config.cut):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.barrier(barrier_id=BARRIER + GROUPS, number_of_threads=32 * GROUPS)
            cute.arch.griddepcontrol_launch_dependents()
        bulk = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.operand)
        tasks = cute.make_tensor(memory.tasks, cute.make_layout((TASK, SLOTS)))
        gates_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        made_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        pipes.gates.consumer_wait(self.place(gates_at, group, SLOTS))
        task = Task(*(tasks[i, gates_at.index] for i in range(TASK)))
        while task.left > 0:
            made = self.place(made_at, group, 1)
            pipes.made.consumer_wait(made)
            if lane == 0:
                block = blocks[task.slot, task.head, None].iterator.align(128)
                for shared, offset in ((memory.inverse, INVERSE), (memory.products, PRODUCTS)):
                    for there, here, size in panels(offset):
                        cute.copy(
                            bulk,
                            view(shared, here, size, unit=256),
                            view(block, there, size, unit=256),
                        )
                tables = memory.tables + cute.assume(gates_at.index * ALL_TABLES, divby=ALL_TABLES)
                tables = cute.recast_ptr(tables.align(16), dtype=self.operand)
                cute.copy(
                    bulk, view(tables, 0, 2 * TABLES), view(block, BY_TOKEN, 2 * TABLES, unit=64)
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(pipes.made.sync_object_empty.get_barrier(made.index))
                if cutlass.const_expr(not self.config.cut):
                    cute.arch.cp_async_bulk_wait_group(0)
                    flag = task.number % seats * share + task.number // seats
                    cute.arch.store(
                        flags.iterator + flag * LINE, I32(1), sem="release", scope="gpu"
                    )
            release(pipes.gates, self.place(gates_at, group, SLOTS))
            gates_at.advance()
            made_at.advance()
            pipes.gates.consumer_wait(self.place(gates_at, group, SLOTS))
            task = Task(*(tasks[i, gates_at.index] for i in range(TASK)))


@cute.jit
def store_products(
    operand: cutlass.Constexpr, p: cute.Tensor, diagonal: cute.Tensor, target: cute.Tensor, w, lane
):
    """Rounds the warp's blocks left of the diagonal and on it, and stores them."""
    block = cute.make_tiled_mma(
        warp.MmaF16BF16Op(operand, F32, (SUB, 8, SUB)), permutation_mnk=(SUB, SUB, SUB)
    )
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), operand)
    save = cute.make_tiled_copy_C(atom, block).get_slice(lane)
    rounded = cute.make_rmem_tensor(block.partition_shape_C((SUB, SUB)), operand)
    for j in cutlass.range_constexpr(CHUNK // SUB):
        if j < w:
            exact = cute.make_tensor(p.iterator + 8 * j, rounded.layout)
            rounded.store(exact.load().to(operand))
            tile = cute.local_tile(target, (SUB, SUB), (w, j))
            cute.copy(save, save.retile(rounded), save.partition_D(tile))
    exact = cute.make_tensor(diagonal.iterator, rounded.layout)
    rounded.store(exact.load().to(operand))
    tile = cute.local_tile(target, (SUB, SUB), (w, w))
    cute.copy(save, save.retile(rounded), save.partition_D(tile))
