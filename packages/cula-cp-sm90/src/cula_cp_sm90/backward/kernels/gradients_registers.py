"""Registers of a thread of the kernel that computes the gradients of a chunk, and their products over tokens.

Matrices are transposed, [channel, token]. Warp w has channels 16 w ... of all 64 tokens, and a lane channels lane / 4
and 8 further on, tokens 8 n + 2 (lane % 4) and the next one: elements [b, half, n]. That is the accumulator of the
products with states, the first operand of products over tokens in 16 bits, and with the tokens renamed in tf32.
Sub-blocks of 16 tokens have elements [b, half, 2 of n].

The gradients dA of products inside a chunk lie in shared memory by rows: in 16 bits for pairs of different sub-blocks,
and the diagonal blocks in fp32.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula_core.cute.memory import view
from cula_core.cute.types import F32, I32
from cula_core.delta_rule.config import CHUNK, SUB
from cula_core.delta_rule.kernels.block import SQUARE, WIDE

SUBS, TILES = CHUNK // SUB, CHUNK // 8
OWN, OWN_SUB = (2, 2, TILES), (2, 2, 2)
DA_STRIDE = CHUNK + 8  # elements of a row of dA
INSIDE_STRIDE = SUB + 2  # of a diagonal block
INSIDE = SUB * INSIDE_STRIDE
HALVINGS = 4  # until a half of a sub-block is a single row
_TF32_HALF, _TF32_MASK = 0x1000, -0x2000


def zeros(shape=OWN_SUB):
    """Returns registers of zeros."""
    x = cute.make_rmem_tensor(shape, F32)
    x.fill(0.0)
    return x


@cute.jit
def to_tf32(x, only_read: cutlass.Constexpr = False):
    """Returns the nearest number that products in tf32 read exactly. only_read: nothing but products reads it, which
    leave its lower bits out, so that these may be any."""
    bits = cute.make_rmem_tensor(1, F32)
    bits[0] = x
    word = cute.recast_tensor(bits, I32)
    word[0] = word[0] + I32(_TF32_HALF)
    if cutlass.const_expr(not only_read):
        word[0] = word[0] & I32(_TF32_MASK)
    return bits[0]


@cute.jit
def load_sub(matrix: cute.Pointer, sub, w, lane):
    """Returns the own elements of a sub-block of a [token, channel] matrix in 16 bits, of panels as TMA writes them."""
    copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), matrix.dtype)
    x = cute.make_rmem_tensor(OWN_SUB, matrix.dtype)
    flat = cute.make_layout((8, 1))
    row = SUB * sub + lane // 16 * 8 + lane % 8
    unit = (2 * (w % 4) + lane // 8 % 2) ^ (lane % 8)
    source = view(matrix, w // 4 * SQUARE + row * 64 + unit * 8, 8)
    cute.copy(copy, cute.make_tensor(source.iterator, flat), cute.make_tensor(x.iterator, flat))
    return x


@cute.jit
def fetch(dA: cute.Pointer, which, i, j, columns: cutlass.Constexpr, lane):
    """Returns dA of sub-blocks i, j as a second operand: [2 of k, half of k, tile]. columns: k runs over i and the
    result over j, else the other way round."""
    b = cute.make_rmem_tensor(OWN_SUB, dA.dtype)
    copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(columns, 4), dA.dtype)
    flat = cute.make_layout((8, 1))
    tile, half = lane // 16, lane // 8 % 2
    row = SUB * i + lane % 8 + 8 * (half if columns else tile)
    column = SUB * j + 8 * (tile if columns else half)
    source = view(dA, (which * CHUNK + row) * DA_STRIDE + column, 8)
    cute.copy(copy, cute.make_tensor(source.iterator, flat), cute.make_tensor(b.iterator, flat))
    return b


@cute.jit
def add(acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Adds the product of the own elements of a sub-block with dA of two."""
    mma = cute.make_mma_atom(warp.MmaF16BF16Op(a.element_type, F32, (16, 8, 16)))
    left = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
    for tile in cutlass.range_constexpr(2):
        right = cute.make_tensor(b.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
        sums = cute.make_tensor(acc.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
        cute.gemm(mma, sums, left, right, sums)


@cute.jit
def add_inside(
    acc: cute.Tensor, x: cute.Tensor, inside: cute.Pointer, which, sub, columns: cutlass.Constexpr, level, lane
):  # fmt: skip
    """Adds the same inside a sub-block, in tf32.

    level: None, or the only pairs are those in different halves of 16 (0), 8, 4 or 2 (3) tokens.

    The slots of k are renamed: lane % 4 is the even token of the lane, lane % 4 + 4 the odd one.
    """
    mma = cute.make_mma_atom(warp.MmaTF32Op((16, 8, 8)))
    block = (which * SUBS + sub) * INSIDE
    for step in cutlass.range_constexpr(2):
        a = cute.make_rmem_tensor((2, 2), F32)  # [half, b]
        for b in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                a[half, b] = x[b, half, step]
        left = cute.recast_tensor(a, cutlass.TFloat32)
        left = cute.make_tensor(left.iterator, cute.make_layout(((2, 2), 1, 1)))
        for tile in cutlass.range_constexpr(2):
            two = cute.make_rmem_tensor(2, F32)
            k, n = 8 * step + lane % 4 * 2, 8 * tile + lane // 4
            if cutlass.const_expr(columns):
                for b in cutlass.range_constexpr(2):
                    two[b] = view(inside, block + (k + b) * INSIDE_STRIDE + n, 1)[0]
            else:
                cute.autovec_copy(view(inside, block + n * INSIDE_STRIDE + k, 2), two)
            if cutlass.const_expr(level is not None):
                for b in cutlass.range_constexpr(2):
                    here = ((k + b) ^ n) >> (HALVINGS - 1 - level) == 1
                    two[b] = two[b] if here else F32(0.0)
            right = cute.recast_tensor(two, cutlass.TFloat32)
            right = cute.make_tensor(right.iterator, cute.make_layout((2, 1, 1)))
            sums = cute.make_tensor(acc.iterator + 4 * tile, cute.make_layout(((2, 2), 1, 1)))
            cute.gemm(mma, sums, left, right, sums)


@cute.jit
def scale(acc: cute.Tensor, factors: cute.Tensor):
    """Multiplies the elements of a sub-block by a factor of each of the two channels."""
    for half in cutlass.range_constexpr(2):
        for m in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(2):
                acc[b, half, m] = acc[b, half, m] * factors[half]


@cute.jit
def sum_tokens(
    x: cute.Tensor,
    lane,
    inside: cutlass.Constexpr = False,
    back: cutlass.Constexpr = False,
    exclusive: cutlass.Constexpr = False,
):
    """Replaces own elements by their sums over tokens up to each one. inside: they begin anew in every sub-block.
    back: from the last token on. exclusive: without the token itself."""
    near, far = (1, 0) if back else (0, 1)
    for half in cutlass.range_constexpr(2):
        before = F32(0.0)
        for step in cutlass.range_constexpr(TILES):
            n = TILES - 1 - step if back else step
            if cutlass.const_expr(inside and n % 2 == 0):
                before = F32(0.0)
            both = x[0, half, n] + x[1, half, n]
            total, begin = both, before
            for p in cutlass.range_constexpr(2):
                other = cute.arch.shuffle_sync_bfly(total, offset=1 << p)
                behind = lane & 1 << p == 0 if back else lane & 1 << p != 0
                begin = begin + (other if behind else F32(0.0))
                total = total + other
            own = x[near, half, n]
            x[near, half, n] = begin if exclusive else begin + own
            x[far, half, n] = begin + own if exclusive else begin + both
            before = before + total


@cute.jit
def products_of_states(s: cute.Pointer, d: cute.Pointer, w, lane):
    """Returns the sum over V of S D for the two channels of the thread: diagonals of their product."""
    mma = cute.make_mma_atom(warp.MmaF16BF16Op(s.dtype, F32, (16, 8, 16)))
    sums = zeros((4, 2))
    for step in cutlass.range_constexpr(2 * SUBS):
        # Rows are columns of V here: 16 of them, of 128 in two tiles.
        a = load_sub(s + step // SUBS * WIDE, step % SUBS, w, lane)
        x = load_sub(d + step // SUBS * WIDE, step % SUBS, w, lane)
        left = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
        for half in cutlass.range_constexpr(2):
            b = cute.make_rmem_tensor((2, 2), s.dtype)
            b.store(x[None, half, None].load())
            right = cute.make_tensor(b.iterator, cute.make_layout(((2, 2), 1, 1)))
            c = cute.make_tensor(sums.iterator + 4 * half, cute.make_layout(((2, 2), 1, 1)))
            cute.gemm(mma, c, left, right, c)
    kept = cute.make_rmem_tensor(2, F32)
    r = lane // 4
    for half in cutlass.range_constexpr(
        2
    ):  # element r of the diagonal is register r % 2 of lane 4 r + r / 2
        even = cute.arch.shuffle_sync(sums[2 * half, half], 4 * r + r // 2)
        odd = cute.arch.shuffle_sync(sums[2 * half + 1, half], 4 * r + r // 2)
        kept[half] = odd if r % 2 == 1 else even
    return kept
