"""The tokens of a row on [K, V] states: every thread has a few columns of V and part of K."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cula_core.cute.warp import reduce_scatter

from ..config import Config
from .operands import (
    NORM,
    NORM_EPS,
    QK,
    STRENGTH,
    WARP,
    Gates,
    Numbers,
    Row,
    Staged,
    Staging,
    Token,
    element,
    first_token,
    neighbours,
    widened,
)
from .records import Records, Ring, Rings
from .states import Place, States, Targets


class Shared(NamedTuple):
    """sSums [warps, x or y, tile_v]: each warp's part. sSquares [warps, 3]: of k.k, q.q and q.k. sSteps [tile_v]: what
    a token adds to each column."""

    sSums: cute.Tensor
    sSquares: cute.Tensor
    sSteps: cute.Tensor


class Columns:
    """What a column of V sums up over K lies in all warps.

    x = S'^T k and y = S'^T q are summed inside each warp by shuffles and over the warps in shared memory, where
    `tile_v` threads make u = b (v - x) and o = y + (q.k) u of them; then every thread adds k u^T.
    """

    def __init__(self, config: Config):
        problem = config.problem
        self.tokens, self.replayed = problem.tokens, problem.replay
        self.direct, self.l2norm = config.direct, problem.l2norm
        self.long = problem.long
        # Whether the state after the last of these tokens is of use.
        self.stores = problem.ends or problem.every_token or problem.long
        self.gates = Gates(config)
        self.channels = problem.gate.channels
        self.lanes, self.vector, self.rows = config.lanes, config.vector, config.rows_per_thread
        self.tile_v, self.warps = config.tile_v, config.threads // WARP
        self.states, self.staging, self.records = States(config), Staging(config), Records(config)

    @cute.jit
    def advance(
        self,
        row: Row,
        numbers: Numbers,
        token,
        gState,
        targets: Targets,
        rings: Rings,
        slot,
        accepted,
    ):
        """Loads the tile, runs the tokens through it, and stores what is wanted. token: what `fetch` returned."""
        place = self.states.place(row)
        rState = self.states.load(gState, place)
        ring = None
        if cutlass.const_expr(self.replayed):
            ring = self.records.open(rings, slot, row, accepted)
            self.replay(rState, ring, place)
            if ring.full:
                self.states.store(rState, gState, place)
        shared = self.allocate()
        if cutlass.const_expr(self.direct):
            if row.length > 0:
                read = token if token is not None else self.fetch(row, numbers)
                self.one_token(rState, row, numbers, read, targets, ring, shared, place)
        else:
            staged = self.staging.allocate()
            if cutlass.const_expr(self.long):
                for first in range(0, row.length, self.tokens):
                    part = row.part(first, self.tokens)
                    self.several_tokens(rState, part, numbers, targets, ring, staged, shared, place)
                    # The next tokens take the place of these.
                    cute.arch.sync_threads()
            else:
                self.several_tokens(rState, row, numbers, targets, ring, staged, shared, place)
        self.states.store_last(rState, targets, place)

    def allocate(self):
        """Returns the shared memory of sums and steps."""
        smem = cutlass.memory.SmemAllocator()

        def tensor(*shape):
            order = tuple(reversed(range(len(shape))))
            return smem.allocate_tensor(Float32, cute.make_ordered_layout(shape, order=order), 16)

        return Shared(
            tensor(self.warps, 2, self.tile_v), tensor(self.warps, 3), tensor(self.tile_v)
        )

    # ---- one token ---------------------------------------------------------------------------------------------------

    @cute.jit
    def fetch(self, row: Row, numbers: Numbers):
        """Reads what the thread needs of the only token; it depends on no state, and nothing is computed of it yet."""
        place = self.states.place(row)
        # Single numbers come first: what is read last the compiler moves to its use, behind the state.
        beta = element(row.gBeta, 0)
        values = [row.gV[0, cutlass.min(row.tidx, Int32(self.tile_v - 1))]]
        if cutlass.const_expr(self.channels):
            gates = self.along(row.gG[0, None], place, numbers.aligned)
            biases = self.along(row.gBias, place, Boolean(True))
        else:
            gates, biases = element(row.gG, 0), element(row.gBias, 0)
        rQ = self.along(first_token(row.gQ), place, numbers.aligned)
        rK = self.along(row.gK[0, None], place, numbers.aligned)
        return Token(rQ, rK, gates, biases, values, beta, row.rate)

    @cute.jit
    def along(self, gX, place: Place, aligned):
        """Returns the thread's rows of a vector over K, None of None."""
        if cutlass.const_expr(gX is None):
            return None
        return [neighbours(gX, place.row, self.rows, aligned)]

    @cute.jit
    def one_token(
        self,
        rState,
        row: Row,
        numbers: Numbers,
        token: Token,
        targets: Targets,
        ring,
        shared: Shared,
        place: Place,
    ):
        """The only token of the row, as the threads themselves read it."""
        rK = widened(token.rK[0])
        # A commit has no q, and then no output.
        rQ = rK if token.rQ is None else widened(token.rQ[0])
        factors = self.gates.factors(token, numbers, 1, self.rows)[0]
        strength = self.gates.strength(token.beta)
        self.sum_up(rState, rQ, rK, factors, shared, place, row)
        squares = [Float32(0.0)] * 3
        for r in cutlass.range_constexpr(self.rows):
            products = (rK[r] * rK[r], rQ[r] * rQ[r], rK[r] * rQ[r])
            squares = [a + b for a, b in zip(squares, products)]
        lane, warp = row.tidx % WARP, row.tidx // WARP
        for i in cutlass.range_constexpr(3):
            offset = WARP // 2
            while cutlass.const_expr(offset >= self.lanes):
                squares[i] = squares[i] + cute.arch.shuffle_sync_bfly(squares[i], offset=offset)
                offset //= 2
            if lane == i:
                shared.sSquares[warp, i] = squares[i]
        cute.arch.sync_threads()
        if row.tidx < self.tile_v:
            x, y = self.sums(shared, row.tidx)
            kk, qq, qk = Float32(0.0), Float32(0.0), Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                kk, qq = kk + shared.sSquares[w, 0], qq + shared.sSquares[w, 1]
                qk = qk + shared.sSquares[w, 2]
            norm_k, norm_q = Float32(1.0), numbers.scale
            if cutlass.const_expr(self.l2norm):
                norm_k = cute.math.rsqrt(kk + NORM_EPS)
                norm_q = numbers.scale * cute.math.rsqrt(qq + NORM_EPS)
            step = norm_k * strength * (token.values[0].to(Float32) - norm_k * x)
            shared.sSteps[row.tidx] = step
            if cutlass.const_expr(row.gOut is not None):
                row.gOut[0, row.tidx] = (norm_q * (y + qk * step)).to(row.gOut.element_type)
            if cutlass.const_expr(self.replayed):
                ring.gU[ring.first, row.tidx] = step
        if cutlass.const_expr(self.stores):
            cute.arch.sync_threads()
            self.update(rState, rK, shared, place)
            self.states.store_token(rState, targets, row, numbers, 0, place)
        if cutlass.const_expr(self.replayed):
            self.records.keys(ring, row, 0)
            if row.tile == 0 and row.tidx % self.lanes == 0:
                self.record_factors(ring, factors, row, place)

    @cute.jit
    def record_factors(self, ring: Ring, factors, row: Row, place: Place):
        """Writes the factors of the only token, which one thread of every row has."""
        if cutlass.const_expr(self.channels):
            for r in cutlass.range_constexpr(self.rows):
                ring.gDecay[ring.first, place.row + r] = factors[r]
        elif row.tidx == 0:
            ring.gDecay[ring.first] = factors[0]

    # ---- several tokens ----------------------------------------------------------------------------------------------

    @cute.jit
    def several_tokens(
        self,
        rState,
        row: Row,
        numbers: Numbers,
        targets: Targets,
        ring,
        staged: Staged,
        shared: Shared,
        place: Place,
    ):
        """All tokens of a row, or as many as shared memory holds."""
        self.staging.fill(staged, row, numbers)
        cute.arch.sync_threads()
        seen = self.staging.outputs(staged, row)
        for t in cutlass.range_constexpr(self.tokens):
            if t < row.length:
                self.token(rState, seen, numbers, staged, targets, ring, shared, t, place)
        self.staging.finish(staged, row, numbers, waits=not self.stores)

    @cute.jit
    def token(
        self,
        rState,
        row: Row,
        numbers: Numbers,
        staged: Staged,
        targets: Targets,
        ring,
        shared: Shared,
        t: cutlass.Constexpr,
        place: Place,
    ):
        """One of several tokens, from shared memory."""
        rQ, rK, factors = [], [], []
        for r in cutlass.range_constexpr(self.rows):
            rK.append(staged.sK[t, place.row + r])
            rQ.append(staged.sQ[t, place.row + r] if row.gOut is not None else rK[r])
            factors.append(staged.sFactor[t, place.row + r if self.channels else 0])
        self.sum_up(rState, rQ, rK, factors, shared, place, row)
        cute.arch.sync_threads()
        if row.tidx < self.tile_v:
            x, y = self.sums(shared, row.tidx)
            step = staged.sNumbers[t, STRENGTH] * (staged.sV[t, row.tidx] - x)
            shared.sSteps[row.tidx] = step
            if cutlass.const_expr(row.gOut is not None):
                out = y + staged.sNumbers[t, QK] * step
                row.gOut[t, row.tidx] = out.to(row.gOut.element_type)
            if cutlass.const_expr(self.replayed):
                at = (ring.first + t) & ring.last
                ring.gU[at, row.tidx] = step * staged.sNumbers[t, NORM]
        if cutlass.const_expr(self.replayed):
            self.records.keys(ring, row, t, staged)
            self.records.factors(ring, row, staged, t)
        # Nobody reads the state after the last token unless it is stored.
        if cutlass.const_expr(self.stores or t < self.tokens - 1):
            cute.arch.sync_threads()
            self.update(rState, rK, shared, place)
            self.states.store_token(rState, targets, row, numbers, t, place)

    # ---- states and records ------------------------------------------------------------------------------------------

    @cute.jit
    def sum_up(self, rState, rQ, rK, factors, shared: Shared, place: Place, row: Row):
        """Fades the tile, and writes each warp's part of x and y."""
        sums = [Float32(0.0)] * (2 * self.vector)
        for r in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.vector):
                value = rState[i, 0, r] * factors[r]
                rState[i, 0, r] = value
                sums[i] = sums[i] + value * rK[r]
                sums[self.vector + i] = sums[self.vector + i] + value * rQ[r]
        index, owner, sums = reduce_scatter(sums, WARP // self.lanes, self.lanes)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                which, column = (index + i) // self.vector, (index + i) % self.vector
                shared.sSums[row.tidx // WARP, which, place.column + column] = sums[i]

    @cute.jit
    def sums(self, shared: Shared, column):
        """Returns x and y of a column of V."""
        x, y = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(self.warps):
            x, y = x + shared.sSums[w, 0, column], y + shared.sSums[w, 1, column]
        return x, y

    @cute.jit
    def update(self, rState, rK, shared: Shared, place: Place):
        """Adds the outer product of the key and what the columns add."""
        for i in cutlass.range_constexpr(self.vector):
            step = shared.sSteps[place.column + i]
            for r in cutlass.range_constexpr(self.rows):
                rState[i, 0, r] = rState[i, 0, r] + rK[r] * step

    @cute.jit
    def replay(self, rState: cute.Tensor, ring: Ring, place: Place):
        """Applies the certain records to the tile."""
        for number in range(ring.count):
            at = (ring.begin + number) & ring.last
            for r in cutlass.range_constexpr(self.rows):
                k = ring.gK[at, place.row + r].to(Float32)
                if cutlass.const_expr(self.channels):
                    factor = ring.gDecay[at, place.row + r]
                else:
                    factor = ring.gDecay[at]
                for i in cutlass.range_constexpr(self.vector):
                    u = ring.gU[at, place.column + i]
                    rState[i, 0, r] = rState[i, 0, r] * factor + k * u
