"""Compiles configs for an architecture and launches calls. The only host file that imports the DSL."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from cula_core.cute import fake
from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.types import INDICES, LOG2_E
from cula_core.dtypes import dtype_name
from cula_core.once import once

from . import masks
from .config import BackwardConfig, ForwardConfig, Problem, int8_width
from .kernels.backward import LiteBackward
from .kernels.forward import LiteForward
from .kernels.gather_dq import GatherDq
from .kernels.quantize import Quantize
from .kernels.row_sums import RowSums
from .plan import plan_backward, plan_forward, plan_quantize


class _Fakes:
    """Stand-ins for arguments, of which only dtypes, the head dimension and flags are fixed."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.batch, self.rows, self.keys = (cute.sym_int() for _ in range(3))
        self.heads, self.heads_k = cute.sym_int(), cute.sym_int()

    def activation(self, of_keys: bool, columns: int | None = None):
        length, heads = (self.keys, self.heads_k) if of_keys else (self.rows, self.heads)
        shape = (self.batch, length, heads, columns or self.problem.head_dim)
        return fake.rows(self.problem.dtype, shape)

    def mask(self):
        strides = (*(cute.sym_int64() for _ in range(3)), 1)
        shape = (cute.sym_int(), self.heads, cute.sym_int(), cute.sym_int())
        return make_fake_tensor(cutlass.Int32, shape, stride=strides)

    def per_row(self):
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(
            cutlass.Float32, (self.batch, self.heads, self.rows), stride=strides
        )

    def per_tile(self, size: int):
        strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        shape = (self.batch, self.heads, cute.sym_int(), size)
        return make_fake_tensor(cutlass.Float32, shape, stride=strides, assumed_align=16)

    def scales(self, of_keys: bool):
        shape = (self.batch, self.heads_k if of_keys else self.heads, cute.sym_int())
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(cutlass.Float32, shape, stride=strides)

    def starts(self):
        if not self.problem.packed:
            return None
        return fake.vector(INDICES[self.problem.index_dtype])


def forward_arguments(config: ForwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteForward`.

    They are q, k, v, out, lse, read mask, must_do, write mask, cu_seqlens_q and _k, direction_at, scales of 8-bit q and
    k, what lse misses with them, scale in log2 units, margin, direction, number of query tiles and of sequences.
    """
    problem = config.problem
    x = _Fakes(problem)
    columns = config.score_columns if problem.int8 else problem.head_dim
    return (
        x.activation(False, columns),
        x.activation(True, columns),
        x.activation(True),
        x.activation(False),
        x.per_row(),
        x.mask() if problem.skip else None,
        x.mask() if problem.must_do else None,
        x.mask() if problem.skip else None,
        x.starts(),
        x.starts(),
        fake.vector(cutlass.Int32, 1) if problem.on_device else None,
        x.scales(False) if problem.int8 else None,
        x.scales(True) if problem.int8 else None,
        x.per_row() if problem.int8 else None,
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 3,
    )


def quantize_arguments(problem: Problem, of_keys: bool) -> tuple:
    """Returns stand-ins for the arguments of `Quantize`.

    They are q or k, means of the keys, integers, their scales, shifts of lse, cu_seqlens, scale, number of tiles and of
    sequences.
    """
    x = _Fakes(problem)
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    means = (x.batch, x.heads_k, problem.head_dim)
    return (
        x.activation(of_keys),
        make_fake_tensor(cutlass.Float32, means, stride=strides, assumed_align=16),
        x.activation(of_keys, int8_width(problem.head_dim) // 2),
        x.scales(of_keys),
        None if of_keys else x.per_row(),
        x.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )


def backward_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteBackward`.

    They are q, k, v, dout, sums, mask (transposed unless the role is "queries"), dq (accumulators if the role is
    "both"), dk, dv, cu_seqlens_q and _k, scale, the same in log2 units, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    keys = config.role != "queries"
    dq = {
        "both": lambda: x.per_tile(config.rows * config.width),
        "keys": lambda: None,
        "queries": lambda: x.activation(False),
    }[config.role]()
    return (
        x.activation(False),
        x.activation(True),
        x.activation(True),
        x.activation(False),
        x.per_tile(2 * config.rows),
        x.mask() if config.problem.skip else None,
        dq,
        x.activation(True) if keys else None,
        x.activation(True) if keys else None,
        x.starts(),
        x.starts(),
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 2,
    )


def sums_arguments(config: BackwardConfig, with_dlse: bool) -> tuple:
    """Returns stand-ins for the arguments of `RowSums`.

    They are out, dout, lse, dlse, sums, accumulators of dq, cu_seqlens_q, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    return (
        x.activation(False),
        x.activation(False),
        x.per_row(),
        x.per_row() if with_dlse else None,
        x.per_tile(2 * config.rows),
        x.per_tile(config.rows * config.width) if config.role == "both" else None,
        x.starts(),
        *(cutlass.Int32(1),) * 2,
    )


def gather_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `GatherDq`.

    They are accumulators, dq, cu_seqlens_q, scale, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    return (
        x.per_tile(config.rows * config.width),
        x.activation(False),
        x.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )


def forward_unit(config: ForwardConfig, arch: str) -> Unit:
    """Returns the kernel of attention for an architecture ("sm_89", "sm_90a", ...), to be compiled."""
    return _unit(lambda: (LiteForward(config), *forward_arguments(config)), arch, "forward", config)


def quantize_unit(problem: Problem, of_keys: bool, arch: str) -> Unit:
    """Returns the kernel that rounds queries, or keys, to 8-bit integers."""

    def make() -> tuple:
        return Quantize(problem, of_keys), *quantize_arguments(problem, of_keys)

    return _unit(make, arch, "quantize", problem, of_keys)


def backward_unit(config: BackwardConfig, arch: str) -> Unit:
    """Returns the kernel of the gradients that the config's role names."""
    return _unit(
        lambda: (LiteBackward(config), *backward_arguments(config)), arch, "backward", config
    )


def sums_unit(config: BackwardConfig, with_dlse: bool, arch: str) -> Unit:
    """Returns the kernel that comes before those of the gradients. with_dlse: lse has a gradient too."""

    def make() -> tuple:
        return RowSums(config), *sums_arguments(config, with_dlse)

    return _unit(make, arch, "sums", config, with_dlse)


def gather_unit(config: BackwardConfig, arch: str) -> Unit:
    """Returns the kernel that brings the accumulated gradients of queries into their layout."""
    return _unit(lambda: (GatherDq(config), *gather_arguments(config)), arch, "gather", config)


def _unit(make: Callable[[], tuple], arch: str, *facts: object) -> Unit:
    """Returns what can be compiled; the facts tell kernels of one config apart."""
    return Unit(make, facts, arch, (__name__,))


def _compiled(unit: Unit, options: tuple) -> Callable[..., None]:
    return compile_kernel(*unit.make(), arch=unit.arch, options=options)


@once
def compile_forward(config: ForwardConfig, arch: str, *options: object) -> Callable[..., None]:
    """Returns a callable for one config on one architecture, reused for every size and stride.

    options: further ones of `cute.compile`.
    """
    return _compiled(forward_unit(config, arch), options)


@once
def compile_quantize(
    problem: Problem, of_keys: bool, arch: str, *options: object
) -> Callable[..., None]:
    """Returns what launches the kernel of `quantize_unit`."""
    return _compiled(quantize_unit(problem, of_keys, arch), options)


@once
def compile_backward(config: BackwardConfig, arch: str, *options: object) -> Callable[..., None]:
    """Returns what launches the kernel of `backward_unit`."""
    return _compiled(backward_unit(config, arch), options)


@once
def compile_sums(
    config: BackwardConfig, with_dlse: bool, arch: str, *options: object
) -> Callable[..., None]:
    """Returns what launches the kernel of `sums_unit`."""
    return _compiled(sums_unit(config, with_dlse, arch), options)


@once
def compile_gather(config: BackwardConfig, arch: str, *options: object) -> Callable[..., None]:
    """Returns what launches the kernel of `gather_unit`."""
    return _compiled(gather_unit(config, arch), options)


@once
def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"liteattention-sm89 needs compute capability 8.0 or newer; {device} has {major}.{minor}"
        )
    return f"sm_{major}{minor}" + "a" * (major >= 9)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    read: Tensor | None,
    must_do: Tensor | None,
    write: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    *,
    threshold: float,
    direction: int | Tensor,
    scale: float,
    causal: bool,
    block_n: int,
    int8: bool = False,
    max_seqlen_k: int | None = None,
    kernel_for: Callable[[ForwardConfig, str], Callable[..., None]] = compile_forward,
    quantize_for: Callable[[Problem, bool, str], Callable[..., None]] = compile_quantize,
    arch: str | None = None,
) -> None:
    """Launches one call on torch's current stream; arguments are those of `ops.lite_attention`, checked, scale > 0.

    lse [B, Hq, Sq]. write may be read: a query tile's row is read before it is written, and by nobody else. int8 rounds
    q and k first, into a workspace of their number of elements in bytes, and needs max_seqlen_k. The kernels and arch
    are for tests without a GPU.
    """
    on_device = isinstance(direction, Tensor)
    index_dtype = "int32" if cu_seqlens_q is None else dtype_name(cu_seqlens_q.dtype)
    problem = Problem(
        dtype_name(q.dtype), q.shape[3], causal,
        skip=read is not None,
        block_n=block_n,
        must_do=must_do is not None,
        packed=cu_seqlens_q is not None,
        index_dtype=index_dtype,
        on_device=on_device,
        int8=int8,
    )  # fmt: skip
    scale_log2 = scale * LOG2_E
    arch = arch or _arch(q.device)
    plan = plan_forward(problem, arch, q.shape[0], _packed(cu_seqlens_q), max_seqlen_q)
    scales = (None,) * 3
    margin = threshold / scale_log2  # in the units of products q k^T
    if int8:
        margin = threshold  # there are none, because every tile has its own scale
        most = max_seqlen_q, max_seqlen_k
        q, k, *scales = _quantized(
            q, k, cu_seqlens_q, cu_seqlens_k, *most, scale, problem, arch, quantize_for
        )
    kernel_for(plan.config, arch)(
        q, k, v, out, lse, read, must_do, write, cu_seqlens_q, cu_seqlens_k, direction if on_device else None,
        *scales, scale_log2, margin, 1 if on_device else direction, plan.query_tiles, plan.sequences,
    )  # fmt: skip


def _packed(starts: Tensor | None) -> int | None:
    """The number of packed sequences, None for a dense batch."""
    return None if starts is None else starts.shape[0] - 1


def _quantized(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, problem: Problem, arch: str, quantize_for: Callable[..., Callable[..., None]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """q and k as integers, two to a 16-bit element, their scales, and what lse misses."""
    means = (
        k.mean(1, dtype=torch.float32)
        if k.shape[1]
        else k.new_zeros(k.shape[0], *k.shape[2:], dtype=torch.float32)
    )
    shifts = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    found, scales = [], []
    for x, starts, longest, of_keys in (
        (q, cu_seqlens_q, max_seqlen_q, False),
        (k, cu_seqlens_k, max_seqlen_k, True),
    ):
        plan = plan_quantize(of_keys, *x.shape[:2], _packed(starts), longest)
        found.append(x.new_empty(*x.shape[:3], int8_width(x.shape[3]) // 2))
        shape = x.shape[0], x.shape[2], plan.groups
        scales.append(torch.empty(shape, dtype=torch.float32, device=x.device))
        if plan.tiles > 0:
            quantize_for(problem.plain, of_keys, arch)(
                x, means, found[-1], scales[-1], None if of_keys else shifts, starts, scale,
                plan.tiles, plan.sequences,
            )  # fmt: skip
    return *found, *scales, shifts


class BackwardKernels:
    """The kernels of a backward pass; tests without a GPU pass others."""

    backward = staticmethod(compile_backward)
    sums = staticmethod(compile_sums)
    gather = staticmethod(compile_gather)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    causal: bool,
    block_n: int,
    deterministic: bool,
    kernels: type[BackwardKernels] = BackwardKernels,
    arch: str | None = None,
) -> None:
    """Writes dq, dk and dv on torch's current stream; scale > 0, lse and dlse [B, Hq, Sq], mask [B, Hq, Mt, W].

    Workspace: 8 bytes per row and head, and unless deterministic 4 bytes per element of dq.
    """
    problem = Problem(
        dtype_name(q.dtype), q.shape[3], causal,
        skip=mask is not None,
        block_n=block_n,
        packed=cu_seqlens_q is not None,
        index_dtype="int32" if cu_seqlens_q is None else dtype_name(cu_seqlens_q.dtype),
    )  # fmt: skip
    arch = arch or _arch(q.device)
    plan = plan_backward(
        problem, arch, *q.shape[:2], _packed(cu_seqlens_q), max_seqlen_q, max_seqlen_k, deterministic
    )  # fmt: skip
    main, ends, sequences = plan.main, plan.ends, plan.sequences
    shape = (q.shape[0], q.shape[2], plan.slots)
    sums = torch.empty(*shape, 2 * main.rows, dtype=torch.float32, device=q.device)
    acc = None
    if not deterministic:
        acc = torch.empty(*shape, main.rows * main.width, dtype=torch.float32, device=q.device)
    kernels.sums(ends, dlse is not None, arch)(
        out, dout, lse, dlse, sums, acc, cu_seqlens_q, plan.row_tiles, sequences
    )
    starts = cu_seqlens_q, cu_seqlens_k
    scales = scale, scale * LOG2_E
    across = None if mask is None else masks.transpose(mask, *plan.mask_tiles)
    kernels.backward(main, arch)(
        q, k, v, dout, sums, across, acc, dk, dv, *starts, *scales, plan.key_tiles, sequences
    )  # fmt: skip
    if plan.queries is None:
        kernels.gather(ends, arch)(acc, dq, cu_seqlens_q, scale, plan.query_tiles, sequences)
        return
    kernels.backward(plan.queries, arch)(
        q, k, v, dout, sums, mask, dq, None, None, *starts, *scales, plan.query_tiles, sequences
    )
