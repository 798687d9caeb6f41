"""Gradients of log decays, from the sums and states that the passes of dq and dk leave (../decays.py says how)."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import F32, I32
from cula_core.cute.warp import all_sums, prefix_sum

from ..config import CHUNK, EVERY, FLOOR, FORGOTTEN, DecaysConfig

CHUNKS = EVERY // CHUNK
THREADS = 32 * CHUNKS
UNIT = 4  # elements of 16 bytes
TOTALS = 5  # of a chunk: a, b, their squares, log decays


class GradientsOfDecays:
    """One CTA per value head and `EVERY` tokens of a sequence, one warp per chunk, two tokens per lane."""

    def __init__(self, config: DecaysConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        of_q: cute.Tensor,
        of_k: cute.Tensor,
        states: cute.Tensor,
        d_states: cute.Tensor,
        started: cute.Tensor,
        ended: cute.Tensor,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        segments: cute.Tensor,
        dg: cute.Tensor,
        sums: cute.Tensor,
        scale: cutlass.Float32,
        sign: cutlass.Float32,
        count: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.decays_arguments`."""
        per_row = None
        if cutlass.const_expr(segments is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(of_q.shape[4], EVERY))
        self.kernel(
            of_q, of_k, states, d_states, started, ended, g, head_decay, segments, per_row, dg, sums, scale, sign
        ).launch(grid=(of_q.shape[1], count, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        of_q: cute.Tensor,
        of_k: cute.Tensor,
        states: cute.Tensor,
        d_states: cute.Tensor,
        started: cute.Tensor,
        ended: cute.Tensor,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        segments: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        dg: cute.Tensor,
        sums: cute.Tensor,
        scale: cutlass.Float32,
        sign: cutlass.Float32,
    ):
        head, number, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        smem = SmemAllocator()
        of_warps = cute.make_tensor(
            smem.allocate_array(F32, CHUNKS * (TOTALS + 2)), cute.make_layout((TOTALS + 2, CHUNKS))
        )
        of_tokens = cute.make_tensor(smem.allocate_array(F32, CHUNKS), cute.make_layout(CHUNKS))
        tokens = I32(of_q.shape[4])
        batch, sequence, slot, part = I32(0), I32(0), I32(number), I32(0)
        start, length, parts, row = I32(0), I32(0), I32(1), I32(0)
        if cutlass.const_expr(segments is None):
            batch, part = divmod(number, per_row)
            start, parts, sequence = part * EVERY, cute.ceil_div(tokens, EVERY), batch
            length, row = cutlass.min(tokens - start, EVERY), batch * (tokens // EVERY) + part
        elif number < segments[0, 0]:
            own = segments[1 + number, None]
            start, length, sequence, slot, part, parts = (own[i] for i in range(6))
            row = (start - part * EVERY) // EVERY + part
        if length > 0:
            # Of this lane's two tokens: a, b, r - c + a and the log decay.
            left = length - warp * CHUNK
            first = start + warp * CHUNK
            a, b, inside, steps = ([F32(0.0), F32(0.0)] for _ in range(4))
            slope = F32(0.0)
            if cutlass.const_expr(head_decay is not None):
                slope = sign * head_decay[head]
            for i in cutlass.range_constexpr(2):
                if lane + 32 * i < left:
                    token = first + lane + 32 * i
                    whole = F32(0.0)
                    for p in cutlass.range_constexpr(self.config.parts):
                        a[i] = a[i] + of_q[batch, head, p, 0, token]
                        b[i] = b[i] + of_k[batch, head, p, 0, token]
                    for p in cutlass.range_constexpr(self.config.parts):
                        whole = whole + of_q[batch, head, p, 1, token]
                        inside[i] = inside[i] + of_k[batch, head, p, 1, token]
                    inside[i] = whole - inside[i] + b[i]
                    step = slope
                    if cutlass.const_expr(g is not None):
                        step = step + g[batch, token, head].to(F32)
                    steps[i] = cutlass.max(step, FLOOR)
            plain = [x[0] + x[1] for x in (a, b)]
            squares = [x[0] * x[0] + x[1] * x[1] for x in (a, b)]
            dots = self.dots_of_states(states, d_states, row, head, part, parts, tidx)
            totals = all_sums([*plain, *squares, steps[0] + steps[1], *dots], 32)
            if lane == 0:
                for i in cutlass.range_constexpr(TOTALS + 2):
                    of_warps[i, warp] = totals[i]
            cute.arch.sync_threads()
            # Of the state in front of these tokens and its gradient, and behind.
            before, after = F32(0.0), F32(0.0)
            for w in cutlass.range_constexpr(CHUNKS):
                before = before + of_warps[TOTALS, w] * scale
                after = after + of_warps[TOTALS + 1, w] * scale
            if cutlass.const_expr(started is not None):
                before = started[sequence, head] if part == 0 else before
            if cutlass.const_expr(ended is not None):
                after = ended[sequence, head] if part + 1 == parts else after
            base = self.of_others(of_warps, warp, before, after)
            # Sums over what lies behind a token, which may be small, are none of sums over all.
            total = F32(0.0)
            at = [self.suffix_sum(inside[i], lane) for i in range(2)]
            at[0] = at[0] + cute.arch.shuffle_sync(at[1], 0)
            upto = [prefix_sum(b[i], lane) for i in range(2)]
            low = cute.arch.shuffle_sync(upto[0], 31)
            for i in cutlass.range_constexpr(2):
                if lane + 32 * i < left:
                    value = at[i] + (upto[i] - b[i] + (low if i else F32(0.0))) + base
                    total = total + value
                    if cutlass.const_expr(dg is not None):
                        dg[batch, first + lane + 32 * i, head] = value
            if cutlass.const_expr(sums is not None):
                (total,) = all_sums([total], 32)
                if lane == 0:
                    of_tokens[warp] = total
                cute.arch.sync_threads()
                if tidx == 0:
                    total = F32(0.0)
                    for w in cutlass.range_constexpr(CHUNKS):
                        total = total + of_tokens[w]
                    sums[slot, head] = total

    @cute.jit
    def dots_of_states(self, states, d_states, row, head, part, parts, tidx):
        """Returns this thread's share of the sums of states times their gradients, in front of the tokens and behind
        them, where a pass left both."""
        found = [F32(0.0), F32(0.0)]
        if cutlass.const_expr(states is not None):
            layout = cute.make_layout(
                (UNIT, self.config.size // (UNIT * THREADS)), stride=(1, UNIT * THREADS)
            )
            there = part > 0, part + 1 < parts
            for side in cutlass.range_constexpr(2):
                if there[side]:
                    pair = []
                    for x in (states, d_states):
                        own = x[row - 1 + side, head, None].iterator + UNIT * tidx
                        pair.append(cute.make_tensor(own.align(16), layout).load())
                    found[side] = (pair[0] * pair[1]).reduce(cute.ReductionOp.ADD, F32(0.0), 0)
        return found

    @cute.jit
    def of_others(self, of_warps: cute.Tensor, warp, before, after):
        """Returns what pairs of the state in front of a warp's chunk and the gradient of the one behind it add.

        before, after: the same of all tokens of the CTA. A chunk that forgets has none of these pairs.
        """
        sum_a, sum_b, square_a, square_b = (F32(0.0) for _ in range(4))
        passing, doubt, early, late = F32(0.0), F32(0.0), -before, F32(0.0)
        known, until = F32(0.0), F32(0.0)
        ahead = cutlass.Boolean(True)  # whether no chunk behind this one has forgotten so far
        for w in cutlass.range_constexpr(CHUNKS):
            sum_a, square_a = sum_a + of_warps[0, w], square_a + of_warps[2, w]
            own, of_own = sum_b - sum_a, square_b + square_a
            sum_b, square_b = sum_b + of_warps[1, w], square_b + of_warps[3, w]
            forgets = of_warps[4, w] < FORGOTTEN
            if w == warp:
                passing, doubt = own, of_own
            if forgets and w <= warp:
                early, known = own, of_own
            if forgets and w > warp and ahead:
                late, until, ahead = own, of_own, cutlass.Boolean(False)
        if ahead:
            late, until = sum_b - sum_a - after, square_b + square_a
        share = F32(0.0)
        if until > known:
            share = (doubt - known) / (until - known)
        return passing - early - share * (late - early)

    @cute.jit
    def suffix_sum(self, value, lane):
        """Returns the sum of the values of this lane and those above it."""
        for i in cutlass.range_constexpr(5):
            above = cute.arch.shuffle_sync_down(value, 1 << i, mask_and_clamp=31)
            value = value + above if lane + (1 << i) < 32 else value
        return value
