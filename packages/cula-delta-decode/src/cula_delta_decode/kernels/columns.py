"""The tokens of a row on [K, V] states: every thread has a few columns of V and part of K."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cula_core.cute.warp import reduce_scatter

from ..config import Config
from .operands import NORM, QK, STRENGTH, WARP, Numbers, Row, Staged, Staging
from .records import Records, Ring, Rings
from .states import Place, States, Targets


class Columns:
    """What a column of V sums up over K lies in all warps.

    x = S'^T k and y = S'^T q are summed inside each warp by shuffles and over the warps in shared memory, where
    `tile_v` threads make u = b (v - x) and o = y + (q.k) u of them; then every thread adds k u^T.
    """

    def __init__(self, config: Config):
        problem = config.problem
        self.tokens, self.replayed = problem.tokens, problem.replay
        self.channels = problem.gate.channels
        self.lanes, self.vector, self.rows = config.lanes, config.vector, config.rows_per_thread
        self.tile_v, self.warps = config.tile_v, config.threads // WARP
        self.states, self.staging, self.records = States(config), Staging(config), Records(config)

    @cute.jit
    def advance(self, row: Row, numbers: Numbers, gState, targets: Targets, rings: Rings, slot, accepted):
        """Loads the tile, runs the tokens through it, and stores what is wanted."""
        place = self.states.place(row)
        rState = self.states.load(gState, place)
        ring = None
        if cutlass.const_expr(self.replayed):
            ring = self.records.open(rings, slot, row, accepted)
            self.replay(rState, ring, place)
            if ring.full:
                self.states.store(rState, gState, place)
        staged = self.staging.allocate()
        smem = cutlass.memory.SmemAllocator()
        shape = (self.warps, 2, self.tile_v)
        sSums = smem.allocate_tensor(Float32, cute.make_ordered_layout(shape, order=(2, 1, 0)), 16)
        sSteps = smem.allocate_tensor(Float32, cute.make_layout(self.tile_v), 16)
        self.staging.fill(staged, row, numbers)
        cute.arch.sync_threads()
        for t in cutlass.range_constexpr(self.tokens):
            if t < row.length:
                self.sum_up(rState, staged, sSums, t, place, row)
                cute.arch.sync_threads()
                self.finish(row, staged, sSums, sSteps, ring, t)
                cute.arch.sync_threads()
                self.update(rState, staged, sSteps, t, place)
                self.states.store_token(rState, targets, row, numbers, t, place)
        self.states.store_last(rState, targets, place)

    @cute.jit
    def sum_up(self, rState, staged: Staged, sSums, t: cutlass.Constexpr, place: Place, row: Row):
        """Fades the tile, and writes each warp's part of x and y."""
        sums = [Float32(0.0)] * (2 * self.vector)
        for r in cutlass.range_constexpr(self.rows):
            k, q = staged.sK[t, place.row + r], staged.sQ[t, place.row + r]
            factor = staged.sFactor[t, place.row + r if self.channels else 0]
            for i in cutlass.range_constexpr(self.vector):
                value = rState[i, 0, r] * factor
                rState[i, 0, r] = value
                sums[i] = sums[i] + value * k
                sums[self.vector + i] = sums[self.vector + i] + value * q
        index, owner, sums = reduce_scatter(sums, WARP // self.lanes, self.lanes)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                which, column = (index + i) // self.vector, (index + i) % self.vector
                sSums[row.tidx // WARP, which, place.column + column] = sums[i]

    @cute.jit
    def finish(self, row: Row, staged: Staged, sSums, sSteps, ring, t: cutlass.Constexpr):
        """Makes what a token adds to the state, and its output, from the sums."""
        if row.tidx < self.tile_v:
            column, x, y = row.tidx, Float32(0.0), Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                x, y = x + sSums[w, 0, column], y + sSums[w, 1, column]
            u = staged.sNumbers[t, STRENGTH] * (staged.sV[t, column] - x)
            sSteps[column] = u
            row.gOut[t, column] = (y + staged.sNumbers[t, QK] * u).to(row.gOut.element_type)
            if cutlass.const_expr(self.replayed):
                ring.gU[(ring.first + t) & ring.last, column] = u * staged.sNumbers[t, NORM]
        if cutlass.const_expr(self.replayed):
            self.records.keys(ring, row, t)
            self.records.factors(ring, row, staged, t)

    @cute.jit
    def update(self, rState, staged: Staged, sSteps, t: cutlass.Constexpr, place: Place):
        """Adds the outer product of the key and what the columns add."""
        for r in cutlass.range_constexpr(self.rows):
            k = staged.sK[t, place.row + r]
            for i in cutlass.range_constexpr(self.vector):
                rState[i, 0, r] = rState[i, 0, r] + k * sSteps[place.column + i]

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
