"""Gradients of softmax attention over listed tiles, with the instructions and the tiles of the forward kernel.

With P = exp(scale q k^T - lse), Delta = rowsum(out * dout) - dlse and dS = P * (dout v^T - Delta):

    dv = P^T dout        dk = scale dS^T q        dq = scale dS k
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.memory import copy_async
from cula_core.cute.types import F32, I32

from ..config import BLOCK_M, BackwardConfig
from .backward_tiles import BackwardTiles
from .tiles import rarely, tokens_of


@dataclass(frozen=True)
class Tile:
    """What a CTA reads: tensors of its batch, shared memory, and the first tokens and lengths of its sequence."""

    load: cute.TiledCopy
    thr_load: cute.TiledCopy
    gQ: cute.Tensor
    gO: cute.Tensor
    sums: cute.Tensor
    sQ: cute.Tensor
    sO: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sR: cute.Tensor
    tidx: cutlass.Int32
    slot: cutlass.Int32
    first_q: cutlass.Int32
    first_k: cutlass.Int32
    length_q: cutlass.Int32
    length_k: cutlass.Int32


@dataclass(frozen=True)
class Operands:
    """How operands go from shared memory to registers: the copy of a, b and their transposes, each with its atom."""

    mma: cute.TiledMma
    thr_mma: cute.TiledMma
    a: tuple
    b: tuple
    at: tuple
    bt: tuple


@dataclass(frozen=True)
class Walk:
    """What a CTA walks over: tiles [low, high) of every head from first_head on, or those that row `row` of a mask has.

    Without a mask it walks in a circle from `start`. first_word, words: the range of the mask's words. shared: the
    state, in turns for even and odd steps.
    """

    start: cutlass.Int32
    mask: cute.Tensor
    sequence: cutlass.Int32
    row: cutlass.Int32
    first_head: cutlass.Int32
    heads: cutlass.Int32
    low: cutlass.Int32
    high: cutlass.Int32
    first_word: cutlass.Int32
    words: cutlass.Int32
    shared: cute.Tensor
    tidx: cutlass.Int32


class LiteBackward(BackwardTiles):
    """One CTA per (keys of a step, kv head, sequence), or with role "queries" per (rows of a step, head, sequence).

    | shared memory | shape | bytes at D=128 |
    |---|---|---|
    | q, dout | [64, D + 8] each | 17,408 each |
    | k, v | [64, D + 8] each | 17,408 each |
    | P (not "queries"), dS | [64, 72] each | 9,216 each |
    | lse in log2 units, Delta | fp32 [64] each | 512 |

    The side that the CTA is for stays, tiles of the other side move: those of the mask only, if there is one, of all
    heads that share the kv head. A step, with what hides behind the products in brackets:

        wait for the moving tile; S = q k^T; dP = dout v^T [P = exp2(S - lse)]; P and dS to shared memory;
        dv += P^T dout; dk += dS^T q; dq += dS k by atomics [start to load the next tile]

    Accumulated dq lies in the order of the mma's registers, so that atomics of a warp touch whole lines; `GatherDq`
    puts it in order.
    """

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.for_keys = config.role != "queries"
        # Tiles of the moving side that a bit of the mask stands for.
        self.parts = BLOCK_M // self.m if self.for_keys else self.problem.block_n // self.n

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        sums: cute.Tensor,
        mask: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        tiles: cutlass.Int32,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.backward_arguments`; what the config does not have is None."""
        heads = k.shape[2] if cutlass.const_expr(self.for_keys) else q.shape[2]
        self.kernel(
            q, k, v, dout, sums, mask, dq, dk, dv, starts_q, starts_k, scale, scale_log2,
            self.tiled_mma(), self.tiled_load(),
        ).launch(
            grid=(tiles, heads, sequences), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        sums: cute.Tensor,
        mask: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        mma: cute.TiledMma,
        load: cute.TiledCopy,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, head, sequence = cute.arch.block_idx()
        batch, first_q, length_q = tokens_of(sequence, starts_q, q)
        _, first_k, length_k = tokens_of(sequence, starts_k, k)
        slot = I32(0)
        if cutlass.const_expr(self.problem.packed):
            slot = self.slot(first_q, sequence)
        smem = SmemAllocator()
        sQ, sO = (smem.allocate_tensor(self.dtype, self.padded(self.m), 128) for _ in range(2))
        sK, sV = (smem.allocate_tensor(self.dtype, self.padded(self.n), 128) for _ in range(2))
        sS = smem.allocate_tensor(self.dtype, self.padded(self.m, self.n), 128)
        sP, sW = None, None
        if cutlass.const_expr(self.for_keys):
            sP = smem.allocate_tensor(self.dtype, self.padded(self.m, self.n), 128)
        sR = smem.allocate_tensor(F32, cute.make_layout(2 * self.m), 16)
        if cutlass.const_expr(self.problem.skip):
            sW = smem.allocate_tensor(I32, cute.make_layout((6, 2)), 16)
        first, length = block * self.m, length_q
        if cutlass.const_expr(self.for_keys):
            first, length = block * self.n, length_k
        if first < length:
            self.differentiate(
                q, k, v, dout, sums, mask, dq, dk, dv, scale, scale_log2, mma, load, sQ, sO, sK, sV, sP, sS, sR, sW,
                tidx, block, head, sequence, batch, slot, first_q, first_k, length_q, length_k,
            )  # fmt: skip

    @cute.jit
    def differentiate(
        self, q, k, v, dout, sums, mask, dq, dk, dv, scale, scale_log2, mma, load, sQ, sO, sK, sV, sP, sS, sR, sW,
        tidx, block, head, sequence, batch, slot, first_q, first_k, length_q, length_k,
    ):  # fmt: skip
        """Computes the gradients of a tile that has rows or keys."""
        group = q.shape[2] // k.shape[2]
        shift = length_k - length_q  # query i sees the keys up to i + shift
        walk = self.walk(mask, sequence, head, block, group, length_q, length_k, shift, sW, tidx)
        count = self.number_of_tiles(walk)
        g, at = I32(0), walk.start
        if cutlass.const_expr(self.problem.skip):
            if count > 0:
                before = (I32(0), walk.first_word - 1, I32(0), I32(self.parts - 1))
                g, at = self.advance(walk, I32(-1), *before)

        thr_load, thr_mma = load.get_slice(tidx), mma.get_slice(tidx)
        operands = self.operands(mma, thr_mma, tidx)
        sQt, sOt, sKt, sSt = (self.transposed(t) for t in (sQ, sO, sK, sS))
        s = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.m, self.n)), F32)
        dp = cute.make_rmem_tensor(s.shape, F32)
        s_rows, dp_rows = self.by_row(s), self.by_row(dp)
        for shared in (sQ, sO, sK, sV):
            self.clear_padding(shared, tidx)
        gQ, gO = (t[batch, None, None, None] for t in (q, dout))
        tile = Tile(
            load=load, thr_load=thr_load, gQ=gQ, gO=gO, sums=sums[batch, None, None, None],
            sQ=sQ, sO=sO, sK=sK, sV=sV, sR=sR, tidx=tidx, slot=slot, first_q=first_q, first_k=first_k,
            length_q=length_q, length_k=length_k,
        )  # fmt: skip
        if cutlass.const_expr(self.for_keys):
            sPt = self.transposed(sP)
            here, left = first_k + block * self.n, length_k - block * self.n
            self.copy_async(load, thr_load, k[batch, None, head, None], here, left, sK)
            self.copy_async(load, thr_load, v[batch, None, head, None], here, left, sV)
            gK, gV = None, None
            dK = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.n, self.width)), F32)
            dV = cute.make_rmem_tensor(dK.shape, F32)
            dK.fill(0.0)
            dV.fill(0.0)
        else:
            here, left = first_q + block * self.m, length_q - block * self.m
            self.copy_async(load, thr_load, gQ[None, head, None], here, left, sQ)
            self.copy_async(load, thr_load, gO[None, head, None], here, left, sO)
            self.copy_sums_async(tile, head, block)
            gK, gV = (t[batch, None, head // group, None] for t in (k, v))
            dQ = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.m, self.width)), F32)
            dQ.fill(0.0)
        if count > 0:
            for part in self.moving_copies(tile, gK, gV, walk.first_head + g, at):
                part(0, 1)
        cute.arch.cp_async_commit_group()

        for step in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.problem.skip):
                g, at = sW[4, step % 2], sW[5, step % 2]
            tile_q, tile_k = (at, block) if cutlass.const_expr(self.for_keys) else (block, at)
            this_head = walk.first_head + g
            s.fill(0.0)
            dp.fill(0.0)
            self.product(operands, s, sQ, operands.a, sK, operands.b)
            edge = tile_k * self.n + self.n > length_k
            if cutlass.const_expr(self.problem.causal):
                edge = edge | (tile_k * self.n + self.n - 1 > tile_q * self.m + shift)
            for _ in cutlass.range(rarely(edge, length_k), unroll=1):
                self.mask_scores(s_rows, tile_q * self.m, tile_k * self.n, length_k, shift, tidx)
            rows = range(self.m // 16)
            biases = [sR[self.row_of(r, tidx)] for r in rows]
            deltas = [sR[self.m + self.row_of(r, tidx)] for r in rows]
            self.product(
                operands,
                dp,
                sO,
                operands.a,
                sV,
                operands.b,
                self.exponentials(s_rows, biases, scale_log2),
            )
            for c in cutlass.range_constexpr(cute.size(s_rows, mode=[1])):
                for r in cutlass.range_constexpr(self.m // 16):
                    dp_rows[r, c] = s_rows[r, c] * (dp_rows[r, c] - deltas[r])
            if cutlass.const_expr(self.for_keys):
                self.store_rounded(s, thr_mma, sP)
            self.store_rounded(dp, thr_mma, sS)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.for_keys):
                self.product(operands, dV, sPt, operands.at, sOt, operands.bt)
                self.product(operands, dK, sSt, operands.at, sQt, operands.bt)
                cute.arch.sync_threads()
            else:
                self.product(operands, dQ, sS, operands.a, sKt, operands.bt)
                cute.arch.sync_threads()
            g, at = self.next_tile(walk, step, count, g, at)
            moving = self.moving_copies(tile, gK, gV, walk.first_head + g, at)
            if cutlass.const_expr(self.config.role == "both"):
                for chunk in cutlass.range_constexpr(self.width // self.chunk):
                    acc = cute.make_rmem_tensor(self.chunk_shape(thr_mma), F32)
                    acc.fill(0.0)
                    b = sKt
                    if cutlass.const_expr(self.chunk < self.width):
                        b = cute.local_tile(sKt, (self.chunk, self.n), (chunk, 0))
                    if cutlass.const_expr(chunk == 0):
                        self.product(
                            operands, acc, sS, operands.a, b, operands.bt, self.joined(moving)
                        )
                        cute.arch.cp_async_commit_group()
                    else:
                        self.product(operands, acc, sS, operands.a, b, operands.bt)
                    to = dq[batch, this_head, slot + tile_q, None].iterator + tidx
                    size = cute.size(acc)
                    for i in cutlass.range_constexpr(size):
                        number = chunk * size + i
                        cute.arch.atomic_add((to + number * self.threads).llvm_ptr, acc[i])
            else:
                self.joined(moving)(0, 1)
                cute.arch.cp_async_commit_group()

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.for_keys):
            self.store_rounded(self.scale(dK, scale), thr_mma, sK)
            self.store_rounded(dV, thr_mma, sV)
            cute.arch.sync_threads()
            self.store(load, thr_load, dk[batch, None, head, None], here, left, sK)
            self.store(load, thr_load, dv[batch, None, head, None], here, left, sV)
        else:
            self.store_rounded(self.scale(dQ, scale), thr_mma, sQ)
            cute.arch.sync_threads()
            self.store(load, thr_load, dq[batch, None, head, None], here, left, sQ)

    # ---- the walk over the moving side ------------------------------------------------------------------------------

    @cute.jit
    def walk(self, mask, sequence, head, block, group, length_q, length_k, shift, shared, tidx):
        """Returns what there is to walk over."""
        low, high, row = I32(0), I32(0), I32(0)
        if cutlass.const_expr(self.for_keys):
            first_head, heads = head * group, group
            high = cute.ceil_div(length_q, self.m)
            if cutlass.const_expr(self.problem.causal):
                low = cutlass.min(cutlass.max(block * self.n - shift, 0) // self.m, high)
            row = block * self.n // self.problem.block_n
        else:
            first_head, heads = head, I32(1)
            reach = length_k
            if cutlass.const_expr(self.problem.causal):
                end = cutlass.min(block * self.m + self.m, length_q)
                reach = cutlass.max(cutlass.min(length_k, end + shift), 0)
            high = cute.ceil_div(reach, self.n)
            row = block * self.m // BLOCK_M
        start = low
        if cutlass.const_expr(
            self.config.role == "both"
        ):  # atomics of neighbours go to different places
            start = low + block % cutlass.max(high - low, 1)
        return Walk(
            start=start, mask=mask, sequence=sequence, row=row, first_head=first_head, heads=heads, low=low, high=high,
            first_word=low // (32 * self.parts), words=cute.ceil_div(high, 32 * self.parts),
            shared=shared, tidx=tidx,
        )  # fmt: skip

    @cute.jit
    def number_of_tiles(self, walk):
        """Returns the number of steps."""
        count = (walk.high - walk.low) * walk.heads
        if cutlass.const_expr(self.problem.skip):
            count = I32(0)
            for g in cutlass.range(walk.heads, unroll=1):
                for w in cutlass.range(walk.first_word, walk.words, unroll=1):
                    count = count + self.parts * cute.arch.popc(self.word(walk, g, w))
        return count

    @cute.jit
    def word(self, walk, g, w):
        """Returns word w of the mask's row of head g of the group, without tiles outside [low, high)."""
        bits = walk.mask[walk.sequence, walk.first_head + g, walk.row, w]
        first = walk.low // self.parts - 32 * w
        end = cute.ceil_div(walk.high, self.parts) - 32 * w
        if first > 0:
            bits = bits & (I32(-1) << first)
        if end < 32:
            bits = bits & ((I32(1) << end) - 1)
        return bits

    @cute.jit
    def next_tile(self, walk, step, count, g, at):
        """Returns the head of the group and the tile of the next step; after the last one, the last again."""
        if cutlass.const_expr(self.problem.skip):
            state = walk.shared[None, step % 2]
            g, at = state[4], state[5]
        if step + 1 < count:
            if cutlass.const_expr(self.problem.skip):
                g, at = self.advance(walk, step, state[0], state[1], state[2], state[3])
            else:
                at = at + 1
                at = walk.low if at == walk.high else at
                g = g + 1 if at == walk.start else g
        return g, at

    @cute.jit
    def advance(self, walk, step, g, w, bits, part):
        """Moves to the next listed tile, which there is, and returns its head of the group and its number.

        bits: what is left of word w of head g. part: which part of the tile of the lowest bit came last.
        The state lies in shared memory, in turns for even and odd steps, because registers are short.
        """
        part = part + 1
        if part == self.parts:
            part = I32(0)
            bits = bits & (bits - 1)
            while bits == 0:
                w = w + 1
                if w == walk.words:
                    w, g = walk.first_word, g + 1
                bits = self.word(walk, g, w)
        at = I32(32 * w + 31 - cute.arch.clz(bits & -bits)) * self.parts + part
        if walk.tidx == 0:
            state = walk.shared[None, (step + 1) % 2]
            state[0], state[1], state[2], state[3], state[4], state[5] = g, w, bits, part, g, at
        return g, at

    # ---- loads ------------------------------------------------------------------------------------------------------

    def moving_copies(self, tile, gK, gV, head, at):
        """Returns the copies of a moving tile, as functions of a part and the number of parts."""
        if self.for_keys:
            here, left = tile.first_q + at * self.m, tile.length_q - at * self.m
            pairs = ((tile.gQ[None, head, None], tile.sQ), (tile.gO[None, head, None], tile.sO))
        else:
            here, left = tile.first_k + at * self.n, tile.length_k - at * self.n
            pairs = ((gK, tile.sK), (gV, tile.sV))
        lines = [self.lines(tile.load, tile.thr_load, rows, here, left, to) for rows, to in pairs]
        copies = [lambda i, of, x=x: self.copy_part_async(x, i, of) for x in lines]
        if self.for_keys:
            copies.append(lambda i, of: self.copy_sums_async(tile, head, at) if i == 0 else None)
        return copies

    def joined(self, copies):
        """Returns one function that starts the same part of all copies."""

        def part(i, of):
            for copy in copies:
                copy(i, of)

        return part

    @cute.jit
    def copy_sums_async(self, tile, head, at):
        """Starts the copy of what `RowSums` stored for a tile of rows."""
        source = tile.sums[head, tile.slot + at, None]
        if tile.tidx < self.m // 2:
            copy_async(
                cute.local_tile(source, (4,), (tile.tidx,)),
                cute.local_tile(tile.sR, (4,), (tile.tidx,)),
            )

    # ---- products ---------------------------------------------------------------------------------------------------

    def transposed(self, shared):
        """Returns the transposed view of a tile in shared memory."""
        return cute.make_tensor(shared.iterator, cute.select(shared.layout, mode=[1, 0]))

    def operands(self, mma, thr_mma, tidx):
        """Returns how a, b and their transposes go from shared memory to registers."""
        straight, across = (
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), self.dtype)
            for transpose in (False, True)
        )
        as_a, as_b = cute.make_tiled_copy_A, cute.make_tiled_copy_B
        return Operands(
            mma=mma, thr_mma=thr_mma,
            a=(straight, as_a(straight, mma).get_slice(tidx)), b=(straight, as_b(straight, mma).get_slice(tidx)),
            at=(across, as_a(across, mma).get_slice(tidx)), bt=(across, as_b(across, mma).get_slice(tidx)),
        )  # fmt: skip

    def product(self, operands, acc, a, load_a, b, load_b, between=lambda i, of: None):
        """Adds a b^T, from shared memory, to acc; it calls between(i, of) after the i-th slice."""
        (atom_a, copy_a), (atom_b, copy_b) = load_a, load_b
        rA = operands.mma.make_fragment_A(operands.thr_mma.partition_A(a))
        rB = operands.mma.make_fragment_B(operands.thr_mma.partition_B(b))
        from_a, from_b = copy_a.partition_S(a), copy_b.partition_S(b)
        to_a, to_b = copy_a.retile(rA), copy_b.retile(rB)
        slices = cute.size(rA, mode=[2])
        for i in range(slices):
            cute.copy(atom_a, from_a[None, None, i], to_a[None, None, i])
            cute.copy(atom_b, from_b[None, None, i], to_b[None, None, i])
            cute.gemm(operands.mma, acc, rA[None, None, i], rB[None, None, i], acc)
            between(i, slices)

    def exponentials(self, s_rows, biases, scale_log2):
        """Returns a function, of a part and the number of parts, that turns scores into probabilities."""
        rows, columns = self.m // 16, cute.size(s_rows, mode=[1])

        def part(i, of):
            for number in range(rows * columns * i // of, rows * columns * (i + 1) // of):
                r, c = number % rows, number // rows
                s_rows[r, c] = exp2_pinned(s_rows[r, c] * scale_log2 - biases[r])

        return part

    def scale(self, acc, scale):
        """Multiplies accumulators in place, and returns them."""
        for i in range(cute.size(acc)):
            acc[i] = acc[i] * scale
        return acc

    # ---- rows -------------------------------------------------------------------------------------------------------

    def row_of(self, r, tidx):
        """Returns this thread's r-th row of a tile."""
        return tidx // 32 % 2 * 16 + tidx % 32 // 4 + r % 2 * 8 + r // 2 * 32

    def by_row(self, acc):
        """Returns a view of the mma's scores as [this thread's rows, columns]."""
        blocks, atoms = self.m // 32, self.n // (4 * self.config.warps)
        layout = cute.make_layout(((2, blocks), (2, atoms)), stride=((2, 4), (1, 4 * blocks)))
        return cute.make_tensor(acc.iterator, layout)

    @cute.jit
    def mask_scores(self, s_rows, first_row, first_key, length_k, shift, tidx):
        """Sets the scores of keys that a row does not see to minus infinity."""
        column = first_key + tidx // 64 * 8 + tidx % 4 * 2
        for r in cutlass.range_constexpr(self.m // 16):
            seen = length_k
            if cutlass.const_expr(self.problem.causal):
                seen = cutlass.min(length_k, first_row + self.row_of(r, tidx) + shift + 1)
            for c in cutlass.range_constexpr(cute.size(s_rows, mode=[1])):
                key = column + c % 2 + c // 2 * (4 * self.config.warps)
                s_rows[r, c] = s_rows[r, c] if key < seen else F32(-math.inf)
