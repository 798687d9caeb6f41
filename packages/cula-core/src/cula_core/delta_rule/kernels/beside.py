"""The chunk-parallel kernel beside the recurrence: persistent CTAs, which set a flag for each block they write."""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from ...constants import LOG2_E
from ...cute.functions import exp2, nanosleep
from ...cute.memory import EVICT_FIRST, copy_with_policy, view
from ...cute.types import DTYPES, F32, I32
from ...cute.work import draw
from ..config import CHUNK, HEAD_DIM, MOST_MACHINES, TEAMS, UNCUT
from .flags import counter_at, progress_of, ready_flag
from .fragments import OF_WARP, ROUNDS, UNIT, place_in_line, place_of
from .inverse import GROUP, INVERSE_BYTES, SUBS
from .order import Order
from .prepare import PLACES, THREADS, KdaPrepare, Shared, Thread

LOOKOUT = 7  # the warp of a team that finds the next chunk
LOOK_NS = 1500  # between looks at how far a machine is
# How often a team looks: before a chunk, because meanwhile it holds back the one in hand, for which that machine may
# wait; and in all for machines that have not begun, and may not before this kernel ends.
LOOKS, PATIENCE = 20, 100


@dsl_user_op
def again(x, loop, *, loc=None, ip=None):
    """Returns x, in a way that the compiler believes to depend on `loop`."""
    return I32(
        llvm.inline_asm(
            T.i32(),
            [I32(v).ir_value(loc=loc, ip=ip) for v in (x, loop)],
            "{ .reg .b32 t; mov.b32 t, $2; mov.b32 $0, $1; }",
            "=r,r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


class KdaPrepareBeside(KdaPrepare):
    """Persistent CTAs of three teams, each of which does what a CTA of `KdaPrepare` does, chunk after chunk.

    | warps | work |
    |---|---|
    | 0-3 of a team | Aqk and results but T', then loads of the next chunk |
    | 4-7 of a team | inverse; meanwhile warp 7 finds the next chunk, and waits if it is too early for that |
    | 24 | flags of the blocks of all teams |

    | shared memory | bytes |
    |---|---|
    | of each team as of a CTA of `KdaPrepare`; the next chunk, rate and barriers | 74,752 + 128 |
    | bounds of the machines' steps | 2,048 |
    """

    def __init__(self, config):
        super().__init__(config)
        self.order = Order(config.index_dtype is not None, by_head=True)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
        cu_seqlens: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        machines: cutlass.Int32,
        share: cutlass.Int32,
        lead: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        if cutlass.const_expr(bias is not None):
            layout = cute.make_layout((mG.shape[2], HEAD_DIM), stride=(HEAD_DIM, 1))
            bias = cute.make_tensor(bias.iterator, layout)
        row = cute.fast_divmod_create_divisor_v2(machines)
        group = cute.fast_divmod_create_divisor_v2(mG.shape[2] // mQ.shape[2])
        self.kernel(
            mQ, mK, mG, mBeta, rate, bias, cu_seqlens, blocks, flags, scale, lower_bound, row, group, share, lead
        ).launch(
            grid=(ctas, 1, 1), block=(TEAMS * THREADS + 32, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
        cu_seqlens: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        row: cute.FastDivmodDivisorV2,
        group: cute.FastDivmodDivisorV2,
        share: cutlass.Int32,
        lead: cutlass.Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tidx0, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        team, member = warp_idx // (THREADS // 32), warp_idx % (THREADS // 32)
        shared, ahead, rates, filled, whole, table = self.allocate_of(cutlass.min(team, TEAMS - 1))
        written, taken = filled + SUBS, filled + SUBS + 1
        if tidx0 < row.divisor:
            total = self.order.total(cu_seqlens, blocks.shape[0], blocks.shape[1])
            found = self.order.bounds(
                cu_seqlens, tidx0, share, total, blocks.shape[1], mQ.shape[1], UNCUT
            )
            for i in cutlass.range_constexpr(4):
                table[i, tidx0] = found[i]
        if (tidx0 & (THREADS - 1)) == 0:
            if team < TEAMS:
                ahead[0], ahead[7] = I32(-1), I32(PATIENCE)
                for i in cutlass.range_constexpr(SUBS):
                    cute.arch.mbarrier_init(filled + i, 32)
                cute.arch.mbarrier_init(written, THREADS // 32)
                cute.arch.mbarrier_init(taken, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        road = cu_seqlens, blocks, row, share, lead, mQ.shape[1]
        inputs = mQ, mK, mG, bias, group
        if member == LOOKOUT:
            self.look_ahead(flags, ahead, table, *road)
        cute.arch.sync_threads()
        flag, token, left, head, slot, batch = I32(-1), *(I32(0) for _ in range(5))
        if team == TEAMS:
            self.announce(flags, ahead, written, whole)
        else:
            flag, token, left, head, slot, batch = self.read(ahead)
        held, phase = F32(0.0), I32(0)
        if flag >= 0:
            thread = self.lanes(tidx0, flag, team)
            if thread.half == 0:
                held = self.ask(shared, ahead, filled, inputs, thread)
            else:
                held = self.ask_behind(mBeta, rate, batch, token, left, head, thread)
        while flag >= 0:
            lanes = self.lanes(tidx0, flag, team)
            thread = lanes.with_tokens()
            inside = (
                F32(1.0) if thread.row < left else F32(0.0),
                F32(1.0) if thread.row + 1 < left else F32(0.0),
            )
            if cutlass.const_expr(self.config.gate != "log"):
                if thread.tidx < HEAD_DIM:
                    shared.bias[thread.tidx] = held
            if cutlass.const_expr(self.config.rate):
                if thread.tidx == GROUP + CHUNK:
                    rates[0] = exp2(held * LOG2_E) * -LOG2_E
            raw = cute.make_rmem_tensor((UNIT, 2), self.tokens.gate_dtype)
            cute.arch.mbarrier_wait(filled + thread.sub, phase)
            norm = cute.make_rmem_tensor((2, 2), F32)  # [token, q or k]
            self.tokens.normalize(shared, norm, scale, inside, thread)
            # Behind a barrier: T' of the chunk before is multiplied by its own strengths until then.
            if (thread.tidx >= GROUP) & (thread.tidx < GROUP + CHUNK):
                strength = self.tokens.strength(held)
                at = thread.tidx - GROUP
                shared.betas[at] = strength if at < left else F32(0.0)
            speed = F32(-LOG2_E)
            if cutlass.const_expr(self.config.rate):
                speed = rates[0]
            diag = self.transform(shared, raw, norm, speed, lower_bound, inside, thread)
            mine = self.exchange(diag, shared.diag, thread.half, thread.tidx)
            own = blocks[slot, head, None]
            held = self.hand_most_on(
                shared, mine, own, None, left, thread,
                lambda: self.look_ahead_again(flags, ahead, table, taken, phase, *road),
                lambda: self.ask(shared, ahead, filled, inputs, thread),
            )  # fmt: skip
            before = left
            then, token, left, head, slot, batch = self.read(ahead)
            if (thread.half != 0) & (then >= 0):
                held = self.ask_behind(mBeta, rate, batch, token, left, head, thread)
            self.inverse.store_tprime(shared.base, own, None, shared.betas, thread.tidx, before)
            cute.arch.sync_warp()
            if lanes.lane == 0:
                cute.arch.mbarrier_arrive(written)
            flag, phase = then, phase ^ 1

    @cute.jit
    def announce(self, flags, ahead, written, whole):
        """Sets the flags of blocks of which every warp of a team has stored its part; by a warp of its own, since this
        waits until they have arrived in memory."""
        # A lane has a team; words are those of the last one.
        lane = cute.arch.lane_idx()
        here = whole * (lane - (TEAMS - 1))
        number = cute.make_tensor(ahead.iterator + here // 4, cute.make_layout(7))
        written = written + here // 8
        phase, left = I32(0), I32(0)
        if lane < TEAMS:
            left = I32(number[0] >= 0)
            cute.arch.mbarrier_arrive(written + 1)
        while cute.arch.vote_ballot_sync(left != 0) != 0:
            done = cutlass.Boolean(False)
            if left != 0:
                done = cute.arch.mbarrier_test_wait(written, phase)
            if done:
                flag = number[6]
                left = I32(number[0] >= 0)
                cute.arch.mbarrier_arrive(written + 1)
                # The recurrence reads the block through another proxy.
                cute.arch.fence_proxy("async.global")
                cute.arch.store(ready_flag(flags, flag), I32(1), sem="release", scope="gpu")
                phase = phase ^ 1
            if cute.arch.vote_ballot_sync(done) == 0:
                nanosleep(200)

    @cute.jit
    def look_ahead_again(self, flags, ahead, table, taken, phase, *road):
        """Looks ahead from a chunk, once the flag of the one before has been read."""
        cute.arch.mbarrier_wait(taken, phase)
        if cute.arch.lane_idx() == 0:
            ahead[6] = ahead[0]
        self.look_ahead(flags, ahead, table, *road)

    @cute.jit
    def look_ahead(self, flags, ahead, table, cu_seqlens, blocks, row, share, lead, tokens):
        """Writes what the team's next chunk is: its flag, -1 behind the last one, first token, tokens left in the
        sequence, head, slot and row of the batch; by a warp."""
        lane = cute.arch.lane_idx()
        counter = cute.make_tensor(counter_at(flags, row.divisor, share, 0), cute.make_layout(1))
        heads, numbers = blocks.shape[1], row.divisor * share
        number, left = draw(counter, lane), I32(0)
        flag, token, head, slot, batch = I32(-1), I32(0), I32(0), I32(0), I32(0)
        while (number < numbers) & (left <= 0):
            step, machine = divmod(number, row)
            at = self.order.walked_within(step, *(table[i, machine] for i in range(4)))
            if at >= 0:
                here = self.order.find(cu_seqlens, at, heads, tokens, UNCUT, True)
                batch, start, length, slot = self.order.tokens_of(cu_seqlens, here.sequence, tokens)
                left, head = length - here.chunk * CHUNK, here.head
                token, slot = start + here.chunk * CHUNK, slot + here.chunk
                if (left <= 0) & (lane == 0):  # a slot without tokens
                    empty = ready_flag(flags, machine * share + step)
                    cute.arch.store(empty, I32(1), sem="relaxed", scope="gpu")
            if left > 0:
                flag = machine * share + step
                if (lead > 0) & (lane == 0):
                    self.hold(flags, ahead, row, share, machine, step - lead)
            else:
                number = draw(counter, lane)
        if lane == 0:
            for i, word in enumerate((flag, token, left, head, slot, batch)):
                ahead[i] = word

    @cute.jit
    def hold(self, flags, ahead, row, share, machine, step):
        """Waits until a machine has come to a step, so that it finds in the L2 what is prepared here.

        Never for long: whether it comes there may depend on this team.
        """
        progress, patience = progress_of(flags, row.divisor, share, machine), ahead[7]
        reached, looks = cute.arch.load(progress, I32, sem="relaxed", scope="gpu"), I32(0)
        while (reached < step) & (looks < LOOKS) & (patience > 0):
            nanosleep(LOOK_NS)
            looks = looks + 1
            if reached == 0:
                patience = patience - 1
            reached = cute.arch.load(progress, I32, sem="relaxed", scope="gpu")
        ahead[7] = patience

    def read(self, ahead):
        """Returns what `look_ahead` wrote."""
        words = cute.make_rmem_tensor(8, I32)
        cute.autovec_copy(view(ahead.iterator, 0, 8), words)
        return tuple(words[i] for i in range(6))

    def lanes(self, tidx0, number, team):
        """Returns the `Thread`, computed anew for every chunk: registers do not suffice to keep it."""
        # Masks and shifts: the compiler does not know that the number is not negative.
        tidx = again(tidx0, number) & (THREADS - 1)
        warp_idx = cute.arch.make_warp_uniform(tidx >> 5)
        lane = tidx & 31
        half, sub = (warp_idx >> 2) & 1, warp_idx & (SUBS - 1)
        lines = warp_idx * OF_WARP
        place = lines + place_of(lane // 4, lane % 4)
        return Thread(tidx, lane, half, sub, lines, place, team=team)

    @cute.jit
    def ask(self, shared, ahead, filled, inputs, thread):
        """Starts to load the next chunk, by the first half of the threads. Returns a channel's bias."""
        mQ, mK, mG, bias, group = inputs
        flag, token, left, head, _, batch = self.read(ahead)
        held = F32(0.0)
        if flag >= 0:
            head_k, _ = divmod(head, group)
            rows, channel = self.tokens.lines(I32(0), left, thread)
            policy = cutlass.Int64(EVICT_FIRST)
            planes = []
            for x, own in ((mQ, head_k), (mK, head_k), (mG, head)):
                first = view(x[batch, token, own, None].iterator, channel, UNIT)
                planes.append((first.iterator.toint(), cutlass.Int64(x.stride[1]) * 2))
            for j in cutlass.range_constexpr(ROUNDS):
                place = thread.lines + place_in_line(thread.lane, j)
                target = shared.raw[None, place, 0].iterator.toint()
                row = cutlass.Int64(cutlass.Uint32(rows[j]))  # of the chunk: never negative
                for which, (first, stride) in enumerate(planes):
                    source = first + row * stride
                    for half in cutlass.range_constexpr(2):
                        # Planes lie behind each other, and in each the lines of the other half of the channels.
                        there = PLACES * which + SUBS * OF_WARP * half
                        behind = 2 * UNIT * there, HEAD_DIM * half
                        copy_with_policy(target, source, policy, behind)
            cute.arch.cp_async_mbarrier_arrive_noinc(filled + thread.sub)
            if cutlass.const_expr(self.config.bias):
                held = bias[head, thread.tidx]
        return held

    @cute.jit
    def ask_behind(self, mBeta: cute.Tensor, rate: cute.Tensor, batch, token, left, head, thread):
        """Returns beta or the rate of the head, each in threads of its own of the second half."""
        held, at = F32(0.0), thread.tidx - GROUP
        if at < cutlass.min(left, CHUNK):
            held = mBeta[batch, token + at, head].to(F32)
        if cutlass.const_expr(self.config.rate):
            if at == CHUNK:
                held = rate[head]
        return held

    def allocate_of(self, team):
        """Returns the shared memory of a team."""
        smem = SmemAllocator()
        sizes = (
            2 * 3 * UNIT * PLACES, INVERSE_BYTES, 4 * HEAD_DIM * SUBS, 4 * HEAD_DIM * SUBS, 16 * CHUNK, 4 * HEAD_DIM,
            4 * CHUNK, 128,
        )  # fmt: skip
        whole = sum(sizes)
        table = smem.allocate_tensor(I32, cute.make_layout((4, MOST_MACHINES)), byte_alignment=16)
        start = smem.allocate_array(F32, TEAMS * whole // 4, byte_alignment=128)
        start = start + cute.assume(team * (whole // 4), divby=32)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]

        def at(i, dtype):
            return cute.recast_ptr(
                (start + offsets[i] // 4).align(128 if i < 2 else 16), dtype=dtype
            )

        gate_dtype = DTYPES[self.config.gate_dtype]
        base = at(1, F32)
        exchanged = cute.make_layout((4, (32, THREADS // 32), 2), stride=(1, (4, 4 * OF_WARP), 128))
        units = cute.make_layout((UNIT, PLACES, 3))
        shared = Shared(
            raw=cute.make_tensor(at(0, self.dtype), units),
            x=cute.make_tensor(at(0, self.operand), units),
            base=base,
            # Where each thread writes 2^(e - g) k once it has read the gates there: they are loaded before.
            gates=cute.make_tensor(
                at(0, gate_dtype) + 2 * UNIT * PLACES, cute.make_layout((UNIT, PLACES))
            ),
            diag=cute.make_tensor(base, exchanged),
            ends=cute.make_tensor(at(2, F32), cute.make_layout((HEAD_DIM, SUBS))),
            spans=cute.make_tensor(at(3, self.operand), cute.make_layout((HEAD_DIM, SUBS, 2))),
            norms=cute.make_tensor(at(4, F32), cute.make_layout((2, CHUNK, 2))),
            bias=cute.make_tensor(at(5, F32), cute.make_layout(HEAD_DIM)),
            betas=cute.make_tensor(at(6, F32), cute.make_layout(CHUNK)),
            sums=None,
        )
        return (
            shared,
            cute.make_tensor(at(7, I32), cute.make_layout(8)),
            cute.make_tensor(at(7, F32) + 8, cute.make_layout(1)),
            at(7, cutlass.Int64) + 8,
            whole,
            table,
        )
