"""Compiles configs for an architecture and launches calls. The only host file that imports the DSL."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from . import masks
from .config import BackwardConfig, ForwardConfig, Problem, dtype_name, int8_width
from .kernels.backward import LiteBackward
from .kernels.forward import LiteForward
from .kernels.gather_dq import GatherDq
from .kernels.quantize import Quantize
from .kernels.row_sums import RowSums
from .kernels.tiles import DTYPES
from .plan import plan_backward, plan_forward, plan_quantize

_INDEX = {"int32": cutlass.Int32, "int64": cutlass.Int64}


class _Fakes:
    """Stand-ins for arguments, of which only dtypes, the head dimension and flags are fixed."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.batch, self.rows, self.keys = (cute.sym_int() for _ in range(3))
        self.heads, self.heads_k = cute.sym_int(), cute.sym_int()

    def activation(self, of_keys: bool, columns: int | None = None):
        length, heads = (self.keys, self.heads_k) if of_keys else (self.rows, self.heads)
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (self.batch, length, heads, columns or self.problem.head_dim)
        return make_fake_tensor(DTYPES[self.problem.dtype], shape, stride=strides, assumed_align=16)

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
        return make_fake_tensor(_INDEX[self.problem.index_dtype], (cute.sym_int(),), stride=(1,))


def forward_arguments(config: ForwardConfig) -> tuple:
    """Of q, k, v, out, lse, read mask, must_do, write mask, cu_seqlens_q and _k, direction_at, scales of 8-bit q and k,
    what lse misses with them, scale in log2 units, margin, direction, number of query tiles and of sequences."""
    problem = config.problem
    fake = _Fakes(problem)
    columns = config.score_columns if problem.int8 else problem.head_dim
    return (
        fake.activation(False, columns),
        fake.activation(True, columns),
        fake.activation(True),
        fake.activation(False),
        fake.per_row(),
        fake.mask() if problem.skip else None,
        fake.mask() if problem.must_do else None,
        fake.mask() if problem.skip else None,
        fake.starts(),
        fake.starts(),
        make_fake_tensor(cutlass.Int32, (1,), stride=(1,)) if problem.on_device else None,
        fake.scales(False) if problem.int8 else None,
        fake.scales(True) if problem.int8 else None,
        fake.per_row() if problem.int8 else None,
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 3,
    )


def quantize_arguments(problem: Problem, of_keys: bool) -> tuple:
    """Of q or k, means of the keys, integers, their scales, shifts of lse, cu_seqlens, scale, number of tiles and of
    sequences."""
    fake = _Fakes(problem)
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    means = (fake.batch, fake.heads_k, problem.head_dim)
    return (
        fake.activation(of_keys),
        make_fake_tensor(cutlass.Float32, means, stride=strides, assumed_align=16),
        fake.activation(of_keys, int8_width(problem.head_dim) // 2),
        fake.scales(of_keys),
        None if of_keys else fake.per_row(),
        fake.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )


def backward_arguments(config: BackwardConfig) -> tuple:
    """Of q, k, v, dout, sums, mask (transposed unless the role is "queries"), dq (accumulators if the role is "both"),
    dk, dv, cu_seqlens_q and _k, scale, the same in log2 units, number of tiles and of sequences."""
    fake = _Fakes(config.problem)
    keys = config.role != "queries"
    dq = {
        "both": lambda: fake.per_tile(config.rows * config.width),
        "keys": lambda: None,
        "queries": lambda: fake.activation(False),
    }[config.role]()
    return (
        fake.activation(False),
        fake.activation(True),
        fake.activation(True),
        fake.activation(False),
        fake.per_tile(2 * config.rows),
        fake.mask() if config.problem.skip else None,
        dq,
        fake.activation(True) if keys else None,
        fake.activation(True) if keys else None,
        fake.starts(),
        fake.starts(),
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 2,
    )


def sums_arguments(config: BackwardConfig, with_dlse: bool) -> tuple:
    """Of out, dout, lse, dlse, sums, accumulators of dq, cu_seqlens_q, number of tiles and of sequences."""
    fake = _Fakes(config.problem)
    return (
        fake.activation(False),
        fake.activation(False),
        fake.per_row(),
        fake.per_row() if with_dlse else None,
        fake.per_tile(2 * config.rows),
        fake.per_tile(config.rows * config.width) if config.role == "both" else None,
        fake.starts(),
        *(cutlass.Int32(1),) * 2,
    )


def gather_arguments(config: BackwardConfig) -> tuple:
    """Of accumulators, dq, cu_seqlens_q, scale, number of tiles and of sequences."""
    fake = _Fakes(config.problem)
    return (
        fake.per_tile(config.rows * config.width),
        fake.activation(False),
        fake.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )


def _compile(arch: str, options: tuple, kernel: object, *arguments: object) -> Callable[..., None]:
    with warnings.catch_warnings():
        # Loops over accumulator registers are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile[(cute.GPUArch(arch), cute.EnableTVMFFI, *options)](
            kernel, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True)
        )


@functools.cache
def compile_forward(config: ForwardConfig, arch: str, *options) -> Callable[..., None]:
    """A callable for one config on one architecture ("sm_89", "sm_90a", ...), reused for every size and stride."""
    return _compile(arch, options, LiteForward(config), *forward_arguments(config))


@functools.cache
def compile_quantize(problem: Problem, of_keys: bool, arch: str, *options) -> Callable[..., None]:
    kernel = Quantize(problem, of_keys)
    return _compile(arch, options, kernel, *quantize_arguments(problem, of_keys))


@functools.cache
def compile_backward(config: BackwardConfig, arch: str, *options) -> Callable[..., None]:
    return _compile(arch, options, LiteBackward(config), *backward_arguments(config))


@functools.cache
def compile_sums(
    config: BackwardConfig, with_dlse: bool, arch: str, *options
) -> Callable[..., None]:
    return _compile(arch, options, RowSums(config), *sums_arguments(config, with_dlse))


@functools.cache
def compile_gather(config: BackwardConfig, arch: str, *options) -> Callable[..., None]:
    return _compile(arch, options, GatherDq(config), *gather_arguments(config))


@functools.cache
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
    scale_log2 = scale * math.log2(math.e)
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
    scales = scale, scale * math.log2(math.e)
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
