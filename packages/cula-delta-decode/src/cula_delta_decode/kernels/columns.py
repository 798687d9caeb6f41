"""The tokens of a row on [K, V] states: every thread has a few columns of V and part of K."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cula_core.cute.functions import fma
from cula_core.cute.warp import reduce_scatter
from cula_core.cute.widen import widened

from ..config import Config
from .operands import (
    NORM,
    NORM_EPS,
    QK,
    STRENGTH,
    WARP,
    Numbers,
    Row,
    Staged,
    Token,
    neighbours,
    staged_part,
)
from .records import Ring
from .states import Place, Targets
from .tile import Tile


class Shared(NamedTuple):
    """sSums [warps, x or y, tile_v]: each warp's part. sSquares [warps, 3]: of k.k, q.q and q.k. sSteps [1, tile_v]:
    what a token adds to each column."""

    sSums: cute.Tensor
    sSquares: cute.Tensor
    sSteps: cute.Tensor


def in_pairs(values):
    """Returns the sum of neighbours, of neighbouring sums of two, and so on."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2])]
    return values[0]


class Columns(Tile):
    """What a column of V sums up over K lies in all warps.

    x = S'^T k and y = S'^T q are summed inside each warp by shuffles and over the warps in shared memory, where
    `tile_v` threads make u = b (v - x) and o = y + (q.k) u of them; then every thread adds k u^T. Partial sums are
    added in pairs of neighbours, in a warp and over the warps, so that tiles whose threads have as many rows add in one
    order.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        problem = config.problem
        # Whether the state after the last of these tokens is of use.
        self.stores = problem.ends or problem.every_token or problem.long
        self.pieces = [self.rows]
        self.tile_v, self.warps = config.tile_v, config.threads // WARP

    @property
    def unordered(self) -> bool:
        """Only where the state after the last token is not computed."""
        return not self.stores

    def allocate(self):
        """Returns the shared memory of sums and steps."""
        smem = cutlass.memory.SmemAllocator()

        def tensor(*shape):
            order = tuple(reversed(range(len(shape))))
            return smem.allocate_tensor(Float32, cute.make_ordered_layout(shape, order=order), 16)

        return Shared(
            tensor(self.warps, 2, self.tile_v), tensor(self.warps, 3), tensor(1, self.tile_v)
        )

    # ---- one token ---------------------------------------------------------------------------------------------------

    @cute.jit
    def values(self, row: Row, place: Place):
        """Returns v of the column that the thread finishes, if it finishes one."""
        return [row.gV[0, cutlass.min(row.tidx, Int32(self.tile_v - 1))]]

    @cute.jit
    def along(self, gX, place: Place):
        """Returns the thread's rows of a vector over K, None of None."""
        if cutlass.const_expr(gX is None):
            return None
        return [neighbours(gX, place.row, self.rows, self.aligned)]

    @cute.jit
    def staged(self, sX: cute.Tensor, t, place: Place):
        """Returns what a token or record in shared memory has in the thread's rows."""
        return [staged_part(sX, t, place.row, self.rows)]

    def alike(self, factor):
        """Returns one factor for all of the thread's rows."""
        return [[factor] * self.rows]

    @cute.jit
    def one_token(
        self,
        rState,
        row: Row,
        numbers: Numbers,
        token: Token,
        factors,
        targets: Targets,
        ring,
        shared: Shared,
        place: Place,
    ):
        """The only token of the row, as the threads themselves read it."""
        rK = [widened(token.rK[0])]
        # A commit has no q, and then no output.
        rQ = rK if token.rQ is None else [widened(token.rQ[0])]
        strength = self.gates.strength(token.beta)
        sums, squares = [Float32(0.0)] * (2 * self.vector), [Float32(0.0)] * 3
        for r in cutlass.range_constexpr(self.rows):
            values, k, q = self.states.row(rState, r), rK[0][r], rQ[0][r]
            products = (k * k, q * q, k * q)
            squares = [a + b for a, b in zip(squares, products)]
            # The tile fades when it is updated; until then q and k do.
            k, q = k * factors[0][r], q * factors[0][r]
            for i in cutlass.range_constexpr(self.vector):
                sums[i] = sums[i] + values[i, 0] * k
                sums[self.vector + i] = sums[self.vector + i] + values[i, 0] * q
        self.hand_over(sums, shared, place, row)
        lane, warp = row.tidx % WARP, row.tidx // WARP
        for i in cutlass.range_constexpr(3):
            offset = self.lanes
            while cutlass.const_expr(offset < WARP):
                squares[i] = squares[i] + cute.arch.shuffle_sync_bfly(squares[i], offset=offset)
                offset *= 2
            if lane == i:
                shared.sSquares[warp, i] = squares[i]
        cute.arch.sync_threads()
        if row.tidx < max(self.tile_v, WARP):
            kk, qq, qk = self.squares(shared, lane)
            norm_k, norm_q = Float32(1.0), numbers.scale
            if cutlass.const_expr(self.l2norm):
                norm_k = cute.math.rsqrt(kk + NORM_EPS)
                norm_q = numbers.scale * cute.math.rsqrt(qq + NORM_EPS)
            if row.tidx < self.tile_v:
                x, y = self.sums(shared, row.tidx)
                step = norm_k * strength * (token.values[0].to(Float32) - norm_k * x)
                shared.sSteps[0, row.tidx] = step
                if cutlass.const_expr(row.gOut is not None):
                    out = norm_q * (y + qk * step)
                    row.gOut[0, row.tidx] = out.to(row.gOut.element_type)
                if cutlass.const_expr(self.replayed):
                    ring.gU[ring.first, row.tidx] = step
        if cutlass.const_expr(self.stores):
            cute.arch.sync_threads()
            steps = self.steps(shared.sSteps, 0, place)
            for r in cutlass.range_constexpr(self.rows):
                values = self.states.row(rState, r, again=True)
                for i in cutlass.range_constexpr(self.vector):
                    values[i, 0] = fma(rK[0][r], steps[i], values[i, 0] * factors[0][r])
                self.states.set_row(rState, r, values)
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
                ring.gDecay[ring.first, place.row + r] = factors[0][r]
        elif row.tidx == 0:
            ring.gDecay[ring.first] = factors[0][0]

    # ---- several tokens ----------------------------------------------------------------------------------------------

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
        rK = self.staged(staged.sK, t, place)
        rQ = self.staged(staged.sQ, t, place) if row.gOut is not None else rK
        factors = self.decays(staged.sFactor, t, place)
        self.fade(rState, factors)
        sums = [Float32(0.0)] * (2 * self.vector)
        for r in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.vector):
                sums[i] = sums[i] + rState[i, 0, r] * rK[0][r]
                sums[self.vector + i] = sums[self.vector + i] + rState[i, 0, r] * rQ[0][r]
        self.hand_over(sums, shared, place, row)
        cute.arch.sync_threads()
        if row.tidx < self.tile_v:
            x, y = self.sums(shared, row.tidx)
            step = staged.sNumbers[t, STRENGTH] * (staged.sV[t, row.tidx] - x)
            shared.sSteps[0, row.tidx] = step
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
            self.update(rState, rK, self.steps(shared.sSteps, 0, place))
            self.states.store_token(rState, targets, row, numbers, t, place)

    # ---- states and records ------------------------------------------------------------------------------------------

    @cute.jit
    def hand_over(self, sums, shared: Shared, place: Place, row: Row):
        """Writes each warp's part of x and y."""
        index, owner, sums = reduce_scatter(sums, WARP // self.lanes, self.lanes, True)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                which, column = (index + i) // self.vector, (index + i) % self.vector
                shared.sSums[row.tidx // WARP, which, place.column + column] = sums[i]

    @cute.jit
    def sums(self, shared: Shared, column):
        """Returns x and y of a column of V."""
        warps = range(self.warps)
        x, y = (in_pairs([shared.sSums[w, i, column] for w in warps]) for i in range(2))
        return x, y

    @cute.jit
    def squares(self, shared: Shared, lane):
        """Returns k.k, q.q and q.k, which the lanes of a warp add up together."""
        found = []
        for i in cutlass.range_constexpr(3):
            value = shared.sSquares[lane % self.warps, i]
            offset = 1
            while cutlass.const_expr(offset < self.warps):
                value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
                offset *= 2
            found.append(value)
        return found

    @cute.jit
    def steps(self, sU: cute.Tensor, number, place: Place):
        """Returns what a token or record adds to the thread's columns, over the key."""
        return staged_part(sU, number, place.column, self.vector)

    @cute.jit
    def update(self, rState: cute.Tensor, rK, steps):
        """Adds the outer product of the key and what the columns add."""
        for i in cutlass.range_constexpr(self.vector):
            for r in cutlass.range_constexpr(self.rows):
                rState[i, 0, r] = rState[i, 0, r] + rK[0][r] * steps[i]

    @cute.jit
    def fade(self, rState: cute.Tensor, factors):
        """Multiplies the tile by the factors of its rows."""
        for i in cutlass.range_constexpr(self.vector):
            for r in cutlass.range_constexpr(self.rows):
                rState[i, 0, r] = rState[i, 0, r] * factors[0][r]
