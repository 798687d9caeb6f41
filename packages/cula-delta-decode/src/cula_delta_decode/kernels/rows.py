"""The tokens of a row on [V, K] states: every thread has part of K of a few rows of V."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cula_core.cute.functions import fma
from cula_core.cute.warp import all_sums
from cula_core.cute.widen import widened

from ..config import Config
from .operands import (
    NORM,
    NORM_EPS,
    QK,
    STRENGTH,
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


class Rows(Tile):
    """`lanes` neighbouring threads share a row of V; what they sum up is exchanged by shuffles.

    With S' = diag(a) S, a token needs x = S' k and y = S' q of the row before its update: u = b (v - x),
    o = y + (q.k) u, S = S' + u k^T. One token is read by every thread directly, and the norms of q and k are summed in
    the same exchange as x and y. Several tokens are staged in shared memory.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.vectors = config.vectors_per_row
        self.pieces = [self.vector] * self.vectors

    # ---- one token ---------------------------------------------------------------------------------------------------

    @cute.jit
    def values(self, row: Row, place: Place):
        """Returns v of the thread's rows."""
        gV = row.gV[0, None]
        values = []
        for r in cutlass.range_constexpr(self.rows):
            values.append(gV[place.row + r])
        return values

    @cute.jit
    def along(self, gX, place: Place):
        """Returns the thread's columns of a vector, None of None."""
        if cutlass.const_expr(gX is None):
            return None
        firsts = self.firsts(place)
        return [neighbours(gX, first, self.vector, self.aligned) for first in firsts]

    @cute.jit
    def staged(self, sX: cute.Tensor, t, place: Place):
        """Returns what a token or record in shared memory has in the thread's columns."""
        return [staged_part(sX, t, first, self.vector) for first in self.firsts(place)]

    def alike(self, factor):
        """Returns one factor for all of the thread's columns."""
        return [[factor] * self.vector] * self.vectors

    def firsts(self, place: Place):
        """Returns where the thread's vectors of columns begin."""
        return [place.column + j * self.lanes * self.vector for j in range(self.vectors)]

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
        shared,
        place: Place,
    ):
        """The only token of the row, as the thread itself reads it."""
        rK = [widened(x) for x in token.rK]
        # A commit has no q, and then no output.
        rQ = None if token.rQ is None else [widened(x) for x in token.rQ]
        strength = self.gates.strength(token.beta)
        values = [self.states.row(rState, r) for r in range(self.rows)]
        sums = [Float32(0.0)] * (2 * self.rows)
        for j in cutlass.range_constexpr(self.vectors):
            for i in cutlass.range_constexpr(self.vector):
                # The tile fades when it is updated; until then q and k do.
                k, q = rK[j][i] * factors[j][i], None
                if cutlass.const_expr(rQ is not None):
                    q = rQ[j][i] * factors[j][i]
                for r in cutlass.range_constexpr(self.rows):
                    value = values[r][i, j]
                    sums[r] = sums[r] + value * k
                    if cutlass.const_expr(rQ is not None):
                        sums[self.rows + r] = sums[self.rows + r] + value * q
        kk, qq, qk = Float32(0.0), Float32(0.0), Float32(0.0)
        for j in cutlass.range_constexpr(self.vectors):
            for i in cutlass.range_constexpr(self.vector):
                kk = kk + rK[j][i] * rK[j][i]
                if cutlass.const_expr(rQ is not None):
                    qq, qk = qq + rQ[j][i] * rQ[j][i], qk + rK[j][i] * rQ[j][i]
        if cutlass.const_expr(rQ is not None):
            *sums, kk, qq, qk = all_sums([*sums, kk, qq, qk], self.lanes)
        else:
            *sums, kk = all_sums([*sums[: self.rows], kk], self.lanes)
            sums = sums * 2
        norm_k, norm_q = Float32(1.0), numbers.scale
        if cutlass.const_expr(self.l2norm):
            norm_k = cute.math.rsqrt(kk + NORM_EPS)
            norm_q = numbers.scale * cute.math.rsqrt(qq + NORM_EPS)
        steps, out = [], Float32(0.0)
        for r in cutlass.range_constexpr(self.rows):
            u = strength * (token.values[r].to(Float32) - norm_k * sums[r])
            steps.append(norm_k * u)
            value = norm_q * (sums[self.rows + r] + qk * steps[r])
            out = cutlass.select_(row.tidx % self.lanes == r, value, out)
        for r in cutlass.range_constexpr(self.rows):
            before = self.states.row(rState, r, again=True)
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    faded = before[i, j] * factors[j][i]
                    before[i, j] = fma(rK[j][i], steps[r], faded)
            self.states.set_row(rState, r, before)
        self.states.store_token(rState, targets, row, numbers, 0, place)
        self.write(row, out, 0, place)
        if cutlass.const_expr(self.replayed):
            self.records.keys(ring, row, 0)
            self.record_steps(ring, row, steps, 0, place)
            if row.tile == 0 and row.tidx < self.lanes:
                self.record_factors(ring, factors, place)

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
        shared,
        t: cutlass.Constexpr,
        place: Place,
    ):
        """One of several tokens, from shared memory."""
        rK = self.staged(staged.sK, t, place)
        factors = self.decays(staged.sFactor, t, place)
        outputs = row.gOut is not None
        rQ = self.staged(staged.sQ, t, place) if outputs else None
        sums = [Float32(0.0)] * ((1 + outputs) * self.rows)
        for j in cutlass.range_constexpr(self.vectors):
            for r in cutlass.range_constexpr(self.rows):
                for i in cutlass.range_constexpr(self.vector):
                    value = rState[i, j, r] * factors[j][i]
                    rState[i, j, r] = value
                    sums[r] = sums[r] + value * rK[j][i]
                    if cutlass.const_expr(outputs):
                        sums[self.rows + r] = sums[self.rows + r] + value * rQ[j][i]
        sums = all_sums(sums, self.lanes)
        strength, qk = staged.sNumbers[t, STRENGTH], staged.sNumbers[t, QK]
        values = staged_part(staged.sV, t, place.row, self.rows)
        steps, out = [], Float32(0.0)
        for r in cutlass.range_constexpr(self.rows):
            steps.append(strength * (values[r] - sums[r]))
            if cutlass.const_expr(outputs):
                value = sums[self.rows + r] + qk * steps[r]
                out = cutlass.select_(row.tidx % self.lanes == r, value, out)
        self.update(rState, rK, steps)
        self.states.store_token(rState, targets, row, numbers, t, place)
        self.write(row, out, t, place)
        if cutlass.const_expr(self.replayed):
            self.records.keys(ring, row, t, staged)
            self.records.factors(ring, row, staged, t)
            norm = staged.sNumbers[t, NORM]
            self.record_steps(ring, row, [norm * u for u in steps], t, place)

    # ---- results, states and records ---------------------------------------------------------------------------------

    @cute.jit
    def write(self, row: Row, out, t: cutlass.Constexpr, place: Place):
        """Writes the outputs of a token, of which each thread has that of one row at most."""
        if cutlass.const_expr(row.gOut is not None):
            if row.tidx % self.lanes < self.rows:
                row.gOut[t, place.row + row.tidx % self.lanes] = out.to(row.gOut.element_type)

    @cute.jit
    def update(self, rState: cute.Tensor, rK, steps):
        """Adds the outer product of what each row adds and the key."""
        for r in cutlass.range_constexpr(self.rows):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    rState[i, j, r] = rState[i, j, r] + rK[j][i] * steps[r]

    @cute.jit
    def fade(self, rState: cute.Tensor, factors):
        """Multiplies the tile by the factors of its columns."""
        for r in cutlass.range_constexpr(self.rows):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    rState[i, j, r] = rState[i, j, r] * factors[j][i]

    @cute.jit
    def steps(self, sU: cute.Tensor, number, place: Place):
        """Returns what a record adds to the thread's rows, over the key."""
        return staged_part(sU, number, place.row, self.rows)

    @cute.jit
    def record_steps(self, ring: Ring, row: Row, steps, t: cutlass.Constexpr, place: Place):
        """Writes what each row adds to the state, over the norm of the key."""
        lane, own = row.tidx % self.lanes, Float32(0.0)
        for r in cutlass.range_constexpr(self.rows):
            own = cutlass.select_(lane == r, steps[r], own)
        if lane < self.rows:
            ring.gU[(ring.first + t) & ring.last, place.row + lane] = own

    @cute.jit
    def record_factors(self, ring: Ring, factors, place: Place):
        """Writes the factors of the only token, which one thread of every column has."""
        at = ring.first & ring.last
        if cutlass.const_expr(self.channels):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    column = place.column + j * self.lanes * self.vector + i
                    ring.gDecay[at, column] = factors[j][i]
        else:
            ring.gDecay[at] = factors[0][0]
