"""The Lightning decode kernel: one pass over the state, any number of tokens."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cula_core.cute.warp import reduce_scatter

from ..config import Config

_WARP = 32


class LightningDecode:
    """state <- exp(-decay) state + k v^T and out = scale q^T state, token after token, on a pool of states.

    | what         | size                         | where                                                     |
    |--------------|------------------------------|-----------------------------------------------------------|
    | grid         | V / tile_v x HV / H, H, B    | one CTA for tile_v columns of V of one state              |
    | rState       | rows x columns over the CTA  | registers, fp32; 16-byte loads and stores of global memory |
    | gQ, gK, gV   | T x K, T x K, T x tile_v     | read as they are needed when `direct`, else staged in sX  |
    | sQ, sK, sV   | the same, fp32               | shared memory                                             |
    | sPartial     | T x warps x tile_v fp32      | shared memory, only for [K, V] states                     |

    The state is read once, all T tokens run on the registers, and the state is written once. Thread t holds rows
    [g * rows_per_thread, ...) with g = t // lanes, and the 16-byte columns t % lanes, lanes + t % lanes, ...
    Columns are contiguous in memory: V when the state is [K, V], K when it is [V, K] (`state_v_first`).
    """

    def __init__(self, config: Config, overlap: bool = False):
        """overlap: the launch may begin before the previous kernel has ended (sm_90 and newer)."""
        problem = config.problem
        self.overlap, self.direct = overlap, config.direct
        self.tokens = problem.tokens
        self.dim_k, self.dim_v = problem.head_dim_k, problem.head_dim_v
        self.v_first = problem.state_v_first
        self.indexed, self.stochastic = problem.indexed, problem.stochastic
        self.writes_output = problem.mode != "commit"
        self.writes_state = problem.mode != "verify"
        self.counted = problem.mode == "commit"
        self.tile_v, self.threads = config.tile_v, config.threads
        self.lanes, self.vector = config.lanes, config.vector
        self.vectors, self.rows_per_thread = config.vectors_per_row, config.rows_per_thread
        self.pitch = self.dim_k if self.v_first else self.dim_v
        self.tiles = self.dim_v // self.tile_v
        self.warps = self.threads // _WARP

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mState: cute.Tensor,
        mDecay: cute.Tensor,
        mIndices: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mSeed: cute.Tensor | None,
        mOut: cute.Tensor | None,
        scale: Float32,
        null_slot: Int32 | None,
        stream,
    ):
        aligned = Boolean(True)
        for mX in (mQ, mK, mV):
            if cutlass.const_expr(self.direct and mX is not None):
                strides = mX.stride[0] | mX.stride[1] | mX.stride[2]
                aligned = aligned and ((mX.iterator.toint() | (strides * 2)) & 15) == 0
        tensors = (mQ, mK, mV, mState, mDecay, mIndices, mAccepted, mSeed, mOut)
        batch, _, heads, _ = mK.shape
        self.kernel(*tensors, scale, null_slot, aligned).launch(
            grid=[self.tiles * (mV.shape[2] // heads), heads, batch],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mState: cute.Tensor,
        mDecay: cute.Tensor,
        mIndices: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mSeed: cute.Tensor | None,
        mOut: cute.Tensor | None,
        scale: Float32,
        null_slot: Int32 | None,
        aligned: Boolean,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        x, head_qk, row = cute.arch.block_idx()
        # Tiles and grouped heads share x, so that finding the query head takes no division.
        tile = x % self.tiles
        head = head_qk * (cute.arch.grid_dim()[0] // self.tiles) + x // self.tiles
        if cutlass.const_expr(self.overlap):
            # The next launch may start now. Nothing here reads memory before the previous one is done.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        first = (0, tile * self.tile_v)
        gQ = gOut = None
        if cutlass.const_expr(self.writes_output):
            gQ = mQ[row, None, head_qk, None]
            gOut = cute.domain_offset(first, mOut[row, None, head, None])
        gK = mK[row, None, head_qk, None]
        gV = cute.domain_offset(first, mV[row, None, head, None])
        slot, accepted, seed = row, Int32(self.tokens), Uint32(0)
        if cutlass.const_expr(self.indexed):
            slot = mIndices[row]
        if cutlass.const_expr(null_slot is not None):
            slot = cutlass.select_(slot == null_slot, Int32(-1), slot)
        if cutlass.const_expr(self.counted):
            accepted = mAccepted[row]
        if cutlass.const_expr(self.stochastic):
            seed = self.head_seed(mSeed[0], Uint32(Int64(slot) * mV.shape[2] + head))
        if slot >= 0:
            gState = mState[slot, head, None, None]
            self.advance(
                gQ, gK, gV, gState, gOut, mDecay[head], scale, accepted, seed, aligned, tile, tidx
            )
        elif cutlass.const_expr(self.writes_output):
            for t in cutlass.range_constexpr(self.tokens):
                for i in range(tidx, self.tile_v, self.threads):
                    gOut[t, i] = gOut.element_type(0.0)

    @cute.jit
    def advance(self, gQ, gK, gV, gState, gOut, decay, scale, accepted, seed, aligned, tile, tidx):
        """Loads the slice, runs the tokens through it, and stores what the mode asks for."""
        row0 = tidx // self.lanes * self.rows_per_thread
        column0 = tidx % self.lanes * self.vector
        tile0 = tile * self.tile_v * (self.pitch if self.v_first else 1)
        offset = tile0 + row0 * self.pitch + column0
        layout = cute.make_layout(
            (self.vector, self.vectors, self.rows_per_thread),
            stride=(1, self.lanes * self.vector, self.pitch),
        )
        gPart = cute.make_tensor(gState.iterator + cute.assume(offset, divby=self.vector), layout)
        rStored = cute.make_rmem_tensor_like(gPart)
        dtype = gState.element_type
        wide = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
        cute.copy(wide, gPart, rStored)
        if cutlass.const_expr(self.tokens == 1 and dtype.width == 16):
            # All loads of the state go out before anything waits for the token, or the assembler puts some behind that.
            cute.arch.sync_warp()

        # x: the tokens wherever they are, global memory or shared.
        xQ, xK, xV = gQ, gK, gV
        if cutlass.const_expr(not self.direct):
            xQ, xK, xV = (
                self.stage(gQ, self.dim_k, tidx),
                self.stage(gK, self.dim_k, tidx),
                self.stage(gV, self.tile_v, tidx),
            )
            cute.arch.sync_threads()
        sPartial = None
        if cutlass.const_expr(self.writes_output and not self.v_first):
            shape = (self.tokens, self.warps, self.tile_v)
            sPartial = self.allocate(cute.make_ordered_layout(shape, order=(2, 1, 0)))

        factor = cute.math.exp(-decay)
        rState = cute.make_rmem_tensor(rStored.shape, Float32)
        rState.store(rStored.load().to(Float32))
        for t in cutlass.range_constexpr(self.tokens):
            if cutlass.const_expr(self.counted):
                if t < accepted:
                    self.update(rState, factor, xK, xV, t, row0, column0, aligned)
            else:
                self.update(rState, factor, xK, xV, t, row0, column0, aligned)
            # The state is stored before the last output is summed: the memory waits for it.
            if cutlass.const_expr(self.writes_state and t == self.tokens - 1):
                if cutlass.const_expr(self.stochastic):
                    self.round_stochastic(rState, rStored, seed, offset)
                else:
                    rStored.store(rState.load().to(dtype))
                cute.copy(wide, rStored, gPart)
            if cutlass.const_expr(self.writes_output):
                if cutlass.const_expr(self.v_first):
                    self.output_over_columns(rState, xQ, gOut, t, scale, row0, column0, aligned)
                else:
                    self.output_over_rows(rState, xQ, sPartial, t, row0, column0, aligned, tidx)
        if cutlass.const_expr(self.writes_output and not self.v_first):
            self.finish_rows(sPartial, gOut, scale, tidx)

    def allocate(self, layout):
        return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, 16)

    @cute.jit
    def stage(self, gX, width: cutlass.Constexpr, tidx):
        """Copies [T, width] to shared memory, element by element, because activations may be unaligned views."""
        sX = None
        if cutlass.const_expr(gX is not None):
            sX = self.allocate(cute.make_ordered_layout((self.tokens, width), order=(1, 0)))
            total = self.tokens * width
            for i in cutlass.range_constexpr((total + self.threads - 1) // self.threads):
                e = tidx + i * self.threads
                if e < total:
                    sX[e // width, e % width] = gX[e // width, e % width].to(Float32)
        return sX

    @cute.jit
    def fragment(self, xX, t: cutlass.Constexpr, first, count: cutlass.Constexpr, aligned):
        """Returns `count` neighbouring values of token t as fp32."""
        rX = cute.make_rmem_tensor(count, xX.element_type)
        source = xX.iterator + t * xX.stride[0] + cute.assume(first, divby=count)
        if cutlass.const_expr(not self.direct):
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), rX)
        elif aligned:
            size = count * xX.element_type.width // 8
            space = cute.AddressSpace.gmem
            wide = cute.make_ptr(xX.element_type, source.toint(), space, assumed_align=size)
            cute.autovec_copy(cute.make_tensor(wide, cute.make_layout(count)), rX)
        else:
            for i in cutlass.range_constexpr(count):
                rX[i] = source[i]
        rWide = cute.make_rmem_tensor(count, Float32)
        rWide.store(rX.load().to(Float32))
        return rWide

    @cute.jit
    def along_columns(self, xX, t: cutlass.Constexpr, column0, aligned):
        """Returns the values of token t that belong to the thread's columns, one fragment per vector."""
        step = self.lanes * self.vector
        return [
            self.fragment(xX, t, column0 + j * step, self.vector, aligned)
            for j in range(self.vectors)
        ]

    @cute.jit
    def update(self, rState, factor, xK, xV, t: cutlass.Constexpr, row0, column0, aligned):
        """Advances the slice by one token: every element becomes factor * element + k * v."""
        xRow, xColumn = (xV, xK) if cutlass.const_expr(self.v_first) else (xK, xV)
        rRow = self.fragment(xRow, t, row0, self.rows_per_thread, aligned)
        rColumn = self.along_columns(xColumn, t, column0, aligned)
        for r in cutlass.range_constexpr(self.rows_per_thread):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    rState[i, j, r] = rState[i, j, r] * factor + rRow[r] * rColumn[j][i]

    @cute.jit
    def output_over_columns(
        self, rState, xQ, gOut, t: cutlass.Constexpr, scale, row0, column0, aligned
    ):
        """Writes the outputs of [V, K] states, one per row of the slice, whose columns `lanes` threads share."""
        rQ = self.along_columns(xQ, t, column0, aligned)
        sums = [Float32(0.0)] * self.rows_per_thread
        for r in cutlass.range_constexpr(self.rows_per_thread):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    sums[r] = sums[r] + rState[i, j, r] * rQ[j][i]
        index, owner, sums = reduce_scatter(sums, self.lanes, 1)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                gOut[t, row0 + index + i] = (sums[i] * scale).to(gOut.element_type)

    @cute.jit
    def output_over_rows(
        self, rState, xQ, sPartial, t: cutlass.Constexpr, row0, column0, aligned, tidx
    ):
        """Writes each warp's part of the outputs of [K, V] states, one per column of the slice, to shared memory."""
        rQ = self.fragment(xQ, t, row0, self.rows_per_thread, aligned)
        for j in cutlass.range_constexpr(self.vectors):
            sums = [Float32(0.0)] * self.vector
            for r in cutlass.range_constexpr(self.rows_per_thread):
                for i in cutlass.range_constexpr(self.vector):
                    sums[i] = sums[i] + rState[i, j, r] * rQ[r]
            index, owner, sums = reduce_scatter(sums, _WARP // self.lanes, self.lanes)
            column = column0 + j * self.lanes * self.vector + index
            if owner:
                for i in cutlass.range_constexpr(len(sums)):
                    sPartial[t, tidx // _WARP, column + i] = sums[i]

    @cute.jit
    def finish_rows(self, sPartial, gOut, scale, tidx):
        """Adds the warps' partial outputs and writes them."""
        cute.arch.sync_threads()
        total = self.tokens * self.tile_v
        for i in cutlass.range_constexpr((total + self.threads - 1) // self.threads):
            e = tidx + i * self.threads
            if e < total:
                t, column = e // self.tile_v, e % self.tile_v
                value = Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    value = value + sPartial[t, w, column]
                gOut[t, column] = (value * scale).to(gOut.element_type)

    @cute.jit
    def head_seed(self, seed, number):
        """Returns the 32-bit seed of matrix `number` = slot * HV + head."""
        low, high = Uint32(seed & 0xFFFFFFFF), Uint32((seed >> 32) & 0xFFFFFFFF)
        return self.mix(low ^ self.mix(number + high * Uint32(0x9E3779B1)))

    @cute.jit
    def round_stochastic(self, rState, rStored, seed, offset):
        """Converts fp32 to bf16: adds 16 random bits below those kept, and cuts. Two neighbours share one hash."""
        rBits = cute.recast_tensor(rStored, Uint32)
        for r in cutlass.range_constexpr(self.rows_per_thread):
            for j in cutlass.range_constexpr(self.vectors):
                pair = (offset + r * self.pitch + j * self.lanes * self.vector) // 2
                for i in cutlass.range_constexpr(self.vector // 2):
                    noise = self.mix(seed + Uint32(pair + i))
                    low = self.add_noise(rState[2 * i, j, r], noise & Uint32(0xFFFF))
                    high = self.add_noise(rState[2 * i + 1, j, r], noise >> Uint32(16))
                    rBits[i, j, r] = (low >> Uint32(16)) | (high & Uint32(0xFFFF0000))

    def add_noise(self, value, noise):
        """Returns the bits of `value` plus noise; infinities and NaN are not changed."""
        bits = value.bitcast(Uint32)
        special = (bits & Uint32(0x7F800000)) == Uint32(0x7F800000)
        return cutlass.select_(special, bits, bits + noise)

    def mix(self, x):
        """Returns a 32-bit integer hash (xor-shift-multiply), that of `cula_core.reference.lightning_decode`."""
        x = (x ^ (x >> Uint32(16))) * Uint32(0x21F0AAAD)
        x = (x ^ (x >> Uint32(15))) * Uint32(0xD35A2D97)
        return x ^ (x >> Uint32(15))
