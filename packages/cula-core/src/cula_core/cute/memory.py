"""Views and copies of a few neighbouring elements, and layouts of tiles in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

# A cache policy of the L2, as createpolicy encodes it: nobody needs the line again.
EVICT_FIRST = 0x12F0000000000000


def view(pointer, offset, size, unit=None):
    """Returns `size` neighbours behind a pointer as a tensor.

    The offset is a multiple of `unit` elements (of `size` if it is None). Said so, it keeps the pointer's alignment at
    no cost, where `align` would compute an address.
    """
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=size if unit is None else unit)
    return cute.make_tensor(pointer + offset, cute.make_layout(size))


@cute.jit
def copy_async(source: cute.Tensor, target: cute.Tensor):
    """Starts an asynchronous copy of 16 bytes from global to shared memory (cp.async)."""
    mode = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
    copy = cute.make_copy_atom(mode, source.element_type, num_bits_per_copy=128)
    cute.copy(copy, source, target)


@dsl_user_op
def copy_with_policy(target, source, policy, behind=(0, 0), *, loc=None, ip=None):
    """Starts such a copy with a policy of the L2, a number of 64 bits.

    target, source: addresses. behind: how many bytes further on both are, which costs no instruction.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (target, source, policy)]
    llvm.inline_asm(
        None,
        operands,
        f"cp.async.cg.shared.global.L2::cache_hint [$0+{behind[0]}], [$1+{behind[1]}], 16, $2;",
        "r,l,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def swizzled(shape, major, dtype):
    """Returns the swizzled layout of a matrix in shared memory, as TMA writes it and tensor cores read it.

    major: the contiguous mode, "k" or "mn" with the 128-byte swizzle, or "panels", which are 16 columns of k wide and
    have the 32-byte swizzle.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {"k": kinds.K_SW128, "mn": kinds.MN_SW128, "panels": kinds.K_SW32}[major]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, shape, order=(1, 0) if major == "mn" else (0, 1))


def by_token(x):
    """Returns [B, T, H, D] seen as (T, D, H, B), so that a tile of tokens and channels comes first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


def repeated(base, shape, major, dtype, count, stride=None):
    """Returns a swizzled matrix of every slot or stage, as [rows, columns, slot].

    base: pointer to the first one. stride: elements from one to the next; None: they lie side by side.
    """
    layout = swizzled(shape, major, dtype)
    atom = 256 if major == "panels" else 1024
    pointer = cute.recast_ptr(base.align(atom), layout.inner, dtype=dtype)
    every = cute.make_layout(count, stride=shape[0] * shape[1] if stride is None else stride)
    return cute.make_tensor(pointer, cute.append(layout.outer, every))


def cache_policy(policy):
    """Returns a cache policy of the L2 as copies take it."""
    return None if policy is None else cutlass.Int64(policy)


@cute.jit
def load_tile(
    tma,
    whole: cute.Tensor,
    first,
    head,
    batch,
    column,
    shared: cute.Tensor,
    barrier,
    policy=None,
    paired: cutlass.Constexpr = False,
):
    """Loads a tile of tokens from `first` on by TMA; tokens past the end of the tensor arrive as zeros.

    whole: as `by_token` sees it. column: which tile of channels. shared: [tokens, channels]. barrier: of the bytes.
    policy: None, or EVICT_FIRST of bytes that nobody needs again. paired: each CTA of a cluster of two loads half of
    the tile for both, with a multicast atom; the barrier of either hears of the bytes of both halves.
    """
    rank, ctas, options = 0, 1, {"cache_policy": cache_policy(policy)}
    if cutlass.const_expr(paired):
        rank, ctas = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()), 2
        options["mcast_mask"] = cutlass.Int16(3)
    rows = cute.domain_offset((first, 0), whole[None, None, head, batch])
    tile = (cute.size(shared, mode=[0]), cute.size(shared, mode=[1]))
    source = cute.local_tile(rows, tile, (0, column))
    s, g = cpasync.tma_partition(
        tma,
        rank,
        cute.make_layout(ctas),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(source, 0, 2),
    )
    cute.copy(tma, g, s, tma_bar_ptr=barrier, **options)


@dsl_user_op
def send_to_cta(source: cute.Pointer, barrier: cute.Pointer, rank, size: int, *, loc=None, ip=None):
    """Starts to copy shared memory to the same place of another CTA of the cluster, whose barrier hears of the bytes.

    CuTe DSL's own copy of this kind names the barrier of the CTA that sends.
    """
    target = "mapa.shared::cluster.u32 d, $0, $2; mapa.shared::cluster.u32 b, $1, $2;"
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    llvm.inline_asm(
        None,
        [
            source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            cutlass.Int32(rank).ir_value(loc=loc, ip=ip),
        ],
        f"{{ .reg .b32 d, b; {target} {copy} [d], [$0], {size}, [b]; }}",
        "r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
