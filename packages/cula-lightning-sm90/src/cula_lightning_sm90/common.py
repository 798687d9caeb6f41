"""What the roles of the prefill kernel share: constants, layouts of shared memory, wgmma, items of work."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .config import CHUNK, V_TILE, Config

F32, I32 = cutlass.Float32, cutlass.Int32
GROUP = 128  # threads of a warpgroup
SLOTS = 2  # of weights, outputs and items
GATE_SLOTS = 4  # of summed gates
PAIR_SLOTS = 8  # of gates as they are stored, where two CTAs load them for each other
# One token's log2 decay is held at or above this: 2^-150 is zero in fp32, and sums over a chunk stay exact enough.
FLOOR = -150.0
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": F32}
ITEM_WORDS = 12  # of an item: whole 16-byte units
# Floats of a slot of weights: of o, of v, total decay and padding.
TABLE = 2 * CHUNK + 4
BARRIER_WEIGHTS, BARRIER_TILE = 1, 2
LOG2_E = math.log2(math.e)
# Coefficients of 2^x - 1 from the highest power down to the first.
EXPM1_SERIES = tuple(math.log(2) ** k / math.factorial(k) for k in range(10, 0, -1))


class Item(NamedTuple):
    """What the loading warp tells the others about an item of work; not valid: there is no more."""

    valid: cutlass.Int32
    token: cutlass.Int32
    batch: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    slot: cutlass.Int32
    part: cutlass.Int32
    parts: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32
    row: cutlass.Int32


def mma(dtype, n, a_source, b_major):
    """wgmma m64 x n x k16 with B in shared memory."""
    op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), a_source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))


def swizzled(shape, major, dtype):
    """A matrix of rows of 128 bytes with the 128-byte swizzle; `major` says which mode is contiguous."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if major == "k" else kinds.MN_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1) if major == "k" else (1, 0))


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: cutlass.Constexpr,
):
    """Issues acc (+)= a b^T as one committed group; the caller has fenced and will wait."""
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh one: its flag may be set inside loops
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def by_token(x):
    """[B, T, H, D] seen as (T, D, H, B), so that a tile of tokens and channels comes first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


def as_operand(registers, a):
    """Accumulator registers seen as an A operand: the order is the same."""
    return cute.make_tensor(registers.iterator, a.layout)


@cute.jit
def floored(x):
    return FLOOR if x < FLOOR else x


@cute.jit
def exp2_in_two(x):
    """2^x for x <= 0 as a sum of two: what a single fp32 loses adds up over thousands of chunks."""
    x = -126.0 if x < -126.0 else x  # below, the smallest normal number stands for zero
    whole = x.to(I32)  # towards zero, so that the rest lies in (-1, 0]
    rest = x - F32(whole)
    series = F32(0.0)
    for k in cutlass.range_constexpr(len(EXPM1_SERIES)):
        series = (series + EXPM1_SERIES[k]) * rest
    high = series + F32(1.0)
    low = (F32(1.0) - high) + series
    power = cute.arch.exp2(F32(whole))
    return high * power, low * power


class Layout:
    """Static facts of a config, and views of its shared memory.

    A stage holds q (but for a prescan) and k, [64 tokens, K], and v of every tile, [64 tokens, 64].
    """

    def __init__(self, config: Config):
        self.config, self.problem = config, config.problem
        self.dtype = DTYPES[self.problem.dtype]
        self.dim_k, self.tiles, self.stages = self.problem.head_dim_k, config.tiles, config.stages
        self.v_tiles = self.problem.head_dim_v // V_TILE
        self.gate = self.problem.gate_dtype is not None
        self.forward = not config.prescan
        self.k_at = CHUNK * self.dim_k if self.forward else 0  # elements within a stage
        self.v_at = self.k_at + CHUNK * self.dim_k
        self.stage = self.v_at + CHUNK * V_TILE * self.tiles

    def staged(self, base, offset, shape, major):
        """A matrix of every stage, as [rows, columns, stage]."""
        layout = swizzled(shape, major, self.dtype)
        pointer = cute.recast_ptr((base + offset).align(1024), layout.inner, dtype=self.dtype)
        stages = cute.make_layout(self.stages, stride=self.stage)
        return cute.make_tensor(pointer, cute.append(layout.outer, stages))

    def slots(self, base, shape, major):
        """A matrix of every slot, as [rows, columns, slot]."""
        layout = swizzled(shape, major, self.dtype)
        pointer = cute.recast_ptr(base.align(1024), layout.inner, dtype=self.dtype)
        slots = cute.make_layout(SLOTS, stride=shape[0] * shape[1])
        return cute.make_tensor(pointer, cute.append(layout.outer, slots))

    def token_table(self, tables, offset, lane):
        """A table over tokens as this thread's columns of an accumulator see it: [2 neighbours, 8, slot]."""
        whole = cute.make_tensor(
            (tables + offset).align(16), cute.make_layout((2, 4, 8, SLOTS), stride=(1, 2, 8, TABLE))
        )
        return whole[None, lane % 4, None, None]

    @cute.jit
    def receive(self, items, at, item_words: cute.Pointer):
        """The next item, as the loading warp described it."""
        items.consumer_wait(at)
        words = cute.make_tensor(item_words, cute.make_layout((ITEM_WORDS, SLOTS)))
        item = Item(*(words[i, at.index] for i in range(len(Item._fields))))
        items.consumer_release(at)
        return item

    @cute.jit
    def slope(self, head_decay: cute.Tensor, head, decay_factor):
        """log2 decay per token of a head."""
        # Without decay no constant: what the compiler makes of 2^0 in the factors takes more registers than there are.
        slope = decay_factor * F32(0.0)
        if cutlass.const_expr(self.problem.decay):
            slope = floored(head_decay[head] * decay_factor)
        return slope

    def units(self, tidx):
        """A copy of [64, 64 n] elements by 16 bytes: thread t has unit t % 8 of rows t // 8 + 16 i."""
        return cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128),
            cute.make_layout((GROUP // 8, 8), stride=(8, 1)),
            cute.make_layout((1, 8)),
        ).get_slice(tidx)
