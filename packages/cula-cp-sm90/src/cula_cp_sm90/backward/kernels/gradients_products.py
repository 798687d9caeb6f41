"""Products over the tokens of a chunk: what dA and dM add to the gradients of q~, k~ and of log decays."""

import cutlass
import cutlass.cute as cute

from cula_core.cute.functions import exp2
from cula_core.cute.memory import view
from cula_core.cute.types import DTYPES, F32
from cula_core.cute.widen import widened
from cula_core.delta_rule.backward.kernels.chunk import THREADS, renewed
from cula_core.delta_rule.config import CHUNK, SUB
from cula_core.delta_rule.kernels.block import WIDE

from ..config import GradientsConfig
from .gradients_layout import DO, SUB_INDICES, K, Q, S
from .gradients_registers import (
    HALVINGS,
    OWN_SUB,
    SUBS,
    add,
    add_inside,
    fetch,
    load_sub,
    scale,
    to_tf32,
    zeros,
)
from .gradients_rows import place_in


class Products:
    """Adds the products of dA and dM with tokens, one sub-block after the other.

    Inside a sub-block decays that have a bound are split at its begin, 2^g and 2^-g. Others are split at the middle of
    16, 8, 4 and 2 tokens, for pairs in different halves of them, so that both factors are at most 1.
    """

    def __init__(self, config: GradientsConfig):
        self.bounded, self.operand = config.bounded, DTYPES[config.operand]

    def sums_of(self, shared, sub, thread):
        """Returns the running sums of decays of a sub-block."""
        g = cute.make_rmem_tensor(OWN_SUB, F32)
        for m in range(2):
            own = view(shared.planes, 4 * (THREADS * (2 * sub + m) + thread.tidx), 4)
            cute.autovec_copy(own, cute.make_tensor(g.iterator + 4 * m, cute.make_layout(4)))
        return g

    @cute.jit
    def tokens_of(self, shared, which, sub: cutlass.Constexpr, thread):
        """Returns own elements of q~ (0) or k~ (1) of a sub-block."""
        raw = load_sub(
            shared.q + cute.assume(which * (K - Q), divby=WIDE), sub, thread.w, thread.lane
        )
        x, factors = widened(raw), cute.make_rmem_tensor(2, F32)
        for m in cutlass.range_constexpr(2):
            at = CHUNK * which + SUB * sub + 8 * m + thread.token
            cute.autovec_copy(view(shared.scales.iterator, at, 2), factors)
            for half in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(2):
                    x[b, half, m] = x[b, half, m] * factors[b]
        return x

    @cute.jit
    def operand_of(self, x: cute.Tensor, exponents: cute.Tensor):
        """Returns x 2^exponent as an operand."""
        wide, rounded = (
            cute.make_rmem_tensor(OWN_SUB, F32),
            cute.make_rmem_tensor(OWN_SUB, self.operand),
        )
        for b, half, m in SUB_INDICES:
            wide[b, half, m] = x[b, half, m] * exp2(exponents[b, half, m])
        rounded.store(wide.load().to(self.operand))
        return rounded

    @cute.jit
    def ends_of(self, shared, sub, which, thread):
        """Returns e (0) or 2^e (1) of a sub-block, of both channels."""
        x = cute.make_rmem_tensor(2, F32)
        for half in cutlass.range_constexpr(2):
            x[half] = shared.ends[16 * thread.w + thread.lane // 4 + 8 * half, sub, which]
        return x

    @cute.jit
    def until_end(self, shared, g: cute.Tensor, sub, thread):
        """Returns the sums of decays from each token to the end of the sub-block."""
        x, ends = cute.make_rmem_tensor(OWN_SUB, F32), self.ends_of(shared, sub, 0, thread)
        for b, half, m in SUB_INDICES:
            x[b, half, m] = ends[half] - g[b, half, m]
        return x

    @cute.jit
    def add_rows(self, shared, to_state: tuple, sums: cute.Tensor, factor, places, left, thread):
        """Writes the gradients of q~ and of k~ as a row, and adds their products to the sums for decays.

        to_state: gradients of products with the state, of both. The results are left where do and y were, and where S
        was. left: of which the compiler does not know that it is positive: so it works at one sub-block at a time, and
        does not run out of registers. Returns 2^g q~ and 2^g k~ as operands, [.., sub-block, which]; None without a
        bound, where there are no registers to keep them.
        """
        rounded = None
        if cutlass.const_expr(self.bounded):
            rounded = cute.make_rmem_tensor((*OWN_SUB, SUBS, 2), self.operand)
        # 2^(e - g) k~ of the sub-blocks before.
        earlier = cute.make_rmem_tensor((*OWN_SUB, SUBS), self.operand)
        before = cute.make_rmem_tensor(2, F32)
        before.fill(1.0)
        for i in cutlass.range_constexpr(SUBS):
            if renewed(left) > 0:
                self.finish_rows(
                    shared, i, rounded, earlier, before, to_state, sums, factor, places, thread
                )
        return rounded

    @cute.jit
    def finish_rows(
        self, shared, i: cutlass.Constexpr, rounded: cute.Tensor, earlier: cute.Tensor, before: cute.Tensor,
        to_state: tuple, sums: cute.Tensor, factor, places, thread,
    ):  # fmt: skip
        """Finishes the rows of a sub-block. before: decays in front of it; then behind it."""
        g = self.sums_of(shared, i, thread)
        q, k = (self.tokens_of(shared, which, i, thread) for which in range(2))
        own = cute.make_rmem_tensor((2, 2), F32)
        for m in cutlass.range_constexpr(2):
            at = SUB * i + 8 * m + thread.token
            cute.autovec_copy(view(shared.own.iterator, at, 2), own[None, m])
        for which, mine in enumerate((q, k)):
            matrix = cute.recast_ptr(shared.do, dtype=F32)
            matrix = matrix + cute.assume(which * ((S - DO) // 2), divby=WIDE // 2)
            near, near_pairs = zeros(), zeros()
            self.add_near(shared, which, i, False, mine, (k,), g, near, near_pairs, thread)
            acc, exact = zeros(), cute.make_rmem_tensor(OWN_SUB, F32)
            for j in cutlass.range_constexpr(i):
                if cutlass.const_expr(j > 0):
                    scale(acc, self.ends_of(shared, j, 1, thread))
                operand = earlier[None, None, None, j]
                add(acc, operand, fetch(shared.dA, which, i, j, False, thread.lane))
            for at in SUB_INDICES:
                exact[at] = mine[at] * exp2(g[at])
            operand = cute.make_rmem_tensor(OWN_SUB, self.operand)
            operand.store(exact.load().to(self.operand))
            if cutlass.const_expr(self.bounded):
                rounded[None, None, None, i, which].store(operand.load())
            for b, half, m in SUB_INDICES:
                at, n = (b, half, m), 2 * i + m
                growth, read = exp2(g[at]), before[half] * to_state[which][b, half, n]
                pair = operand[at].to(F32) * acc[at] + near_pairs[at]
                sums[b, half, n] = sums[b, half, n] + pair * factor + exact[at] * read
                total = (growth * acc[at] + near[at]) * factor + growth * read
                if cutlass.const_expr(which == 0):
                    total = total + own[b, m] * k[at]
                place_in(matrix, places, b, half, n)[0] = total
        if cutlass.const_expr(i < SUBS - 1):
            until_end = self.until_end(shared, g, i, thread)
            earlier[None, None, None, i].store(self.operand_of(k, until_end).load())
        scale_pair(before, self.ends_of(shared, i, 1, thread))

    @cute.jit
    def add_near(
        self, shared, first: cutlass.Constexpr, i: cutlass.Constexpr, columns: cutlass.Constexpr, own: cute.Tensor,
        others: tuple, g: cute.Tensor, near: cute.Tensor, pairs: cute.Tensor, thread,
    ):  # fmt: skip
        """Adds the products of the others with dA (number 0) and dM (1) inside a sub-block, with decays, to `near`, and
        the same times the own operands to `pairs`. first: number that goes with the first of the others."""
        of_own, of_others = cute.make_rmem_tensor(OWN_SUB, F32), cute.make_rmem_tensor(OWN_SUB, F32)
        if cutlass.const_expr(self.bounded):
            for at in SUB_INDICES:
                of_own[at], of_others[at] = (-g[at], g[at]) if columns else (g[at], -g[at])
            self.add_level(
                shared, first, i, columns, own, others, of_own, of_others, near, pairs, None, thread
            )
        else:
            for level in cutlass.range(HALVINGS, unroll=1):
                # The last token of the first half: of 16, of 8, of 4, and of the thread's own two.
                lane = thread.lane
                source = lane & -2 if level == 2 else lane
                source = lane & -4 | 1 if level == 1 else source
                source = lane | 3 if level == 0 else source
                for half in cutlass.range_constexpr(2):
                    for m in cutlass.range_constexpr(2):
                        last = g[1, half, m] if level < 3 else g[0, half, m]
                        last = g[1, half, 0] if level == 0 else last
                        middle = cute.arch.shuffle_sync(last, source)
                        for b in cutlass.range_constexpr(2):
                            of_own[b, half, m] = -cute.math.absf(g[b, half, m] - middle)
                self.add_level(
                    shared,
                    first,
                    i,
                    columns,
                    own,
                    others,
                    of_own,
                    of_own,
                    near,
                    pairs,
                    level,
                    thread,
                )

    @cute.jit
    def add_level(
        self, shared, first: cutlass.Constexpr, i: cutlass.Constexpr, columns: cutlass.Constexpr, own: cute.Tensor,
        others: tuple, of_own: cute.Tensor, of_others: cute.Tensor, near: cute.Tensor, pairs: cute.Tensor, level,
        thread,
    ):  # fmt: skip
        """Adds the products of one level, all if it is None. of_own, of_others: exponents of decays."""
        acc, x = zeros(), cute.make_rmem_tensor(OWN_SUB, F32)
        for number, other in enumerate(others, first):
            for at in SUB_INDICES:
                x[at] = to_tf32(other[at] * exp2(of_others[at]), only_read=True)
            add_inside(acc, x, shared.inside, number, i, columns, level, thread.lane)
        for at in SUB_INDICES:
            decay = exp2(of_own[at])
            near[at] = near[at] + decay * acc[at]
            pairs[at] = pairs[at] + to_tf32(own[at] * decay) * acc[at]

    @cute.jit
    def add_columns(
        self, shared, rounded: cute.Tensor, handed: cute.Tensor, sums: cute.Tensor, factor, places, left, thread
    ):  # fmt: skip
        """Adds the gradient of k~ as a column to that as a row, and subtracts its products from the sums for decays.

        rounded, left: as of `add_rows`. handed: gradients of products with D; they are replaced by the products of the
        token with it. Returns the decays of the chunk.
        """
        behind = cute.make_rmem_tensor(2, F32)
        behind.fill(1.0)
        for back in cutlass.range_constexpr(SUBS):
            if renewed(left) > 0:
                j = SUBS - 1 - back
                self.finish_columns(
                    shared, j, rounded, behind, handed, sums, factor, places, thread
                )
        return behind

    @cute.jit
    def multiply_columns(self, shared, j: cutlass.Constexpr, rounded: cute.Tensor, thread):
        """Returns the products of dA and dM with the queries and keys of the sub-blocks behind one."""
        acc = zeros()
        for back in cutlass.range_constexpr(SUBS - 1 - j):
            i = SUBS - 1 - back
            if cutlass.const_expr(back > 0):
                scale(acc, self.ends_of(shared, i, 1, thread))
            for which in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.bounded):
                    operand = rounded[None, None, None, i, which]
                else:
                    g = self.sums_of(shared, i, thread)
                    operand = self.operand_of(self.tokens_of(shared, which, i, thread), g)
                add(acc, operand, fetch(shared.dA, which, i, j, True, thread.lane))
        return acc

    @cute.jit
    def finish_columns(
        self, shared, i: cutlass.Constexpr, rounded: cute.Tensor, behind: cute.Tensor, handed: cute.Tensor,
        sums: cute.Tensor, factor, places, thread,
    ):  # fmt: skip
        """Finishes the columns of a sub-block. behind: decays behind it; then in front of it."""
        matrix = cute.recast_ptr(shared.s, dtype=F32)
        acc = self.multiply_columns(shared, i, rounded, thread)
        g = self.sums_of(shared, i, thread)
        until_end = self.until_end(shared, g, i, thread)
        q, k = (self.tokens_of(shared, which, i, thread) for which in range(2))
        near, near_pairs = zeros(), zeros()
        self.add_near(shared, 0, i, True, k, (q, k), g, near, near_pairs, thread)
        for m in cutlass.range_constexpr(2):
            n = 2 * i + m
            own = cute.make_rmem_tensor(2, F32)
            cute.autovec_copy(view(shared.own.iterator, 8 * n + thread.token, 2), own)
            for b in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    apart, until = acc[b, half, m], exp2(until_end[b, half, m])
                    given, exact = behind[half] * handed[b, half, n], k[b, half, m] * until
                    pair = exact.to(self.operand).to(F32) * apart + near_pairs[b, half, m]
                    sums[b, half, n] = sums[b, half, n] - pair * factor
                    total = (until * apart + near[b, half, m]) * factor + until * given
                    place = place_in(matrix, places, b, half, n)
                    place[0] = place[0] + (total + own[b] * q[b, half, m])
                    handed[b, half, n] = exact * given
        scale_pair(behind, self.ends_of(shared, i, 1, thread))


@cute.jit
def scale_pair(x: cute.Tensor, factors: cute.Tensor):
    """Multiplies a number of each of the two channels by a factor."""
    for half in cutlass.range_constexpr(2):
        x[half] = x[half] * factors[half]
