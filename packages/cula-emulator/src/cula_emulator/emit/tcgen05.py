"""tcgen05: tensor memory and its matrix multiplication for one CTA (sm_100a)."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, block, boolean
from .matrix import array, check_count
from .registry import Order, Unsupported, emits

_KINDS = {
    "kind::f16": "kF16", "kind::tf32": "kTf32", "kind::f8f6f4": "kF8f6f4", "kind::i8": "kI8",
}  # fmt: skip
_COLLECTOR_HINTS = [f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")]
_REPETITIONS = [f"x{1 << n}" for n in range(8)]
_SHAPES = {  # of ld and st -> (enumerator, registers per repetition)
    "32x32b": ("k32x32", 1), "16x64b": ("k16x64", 1), "16x128b": ("k16x128", 2), "16x256b": ("k16x256", 4),
}  # fmt: skip


@emits("tcgen05.alloc", forms=["cta_group::1 sync aligned ?shared::cta b32"], operands=2)
def allocate(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"tmem_alloc({e.shared_address(i, i.operands[0])}, {e.value(i.operands[1])});"


@emits("tcgen05.dealloc", forms=["cta_group::1 sync aligned b32"], operands=2)
def free(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"tmem_free({e.value(i.operands[0])}, {e.value(i.operands[1])});"


@emits("tcgen05.relinquish_alloc_permit", forms=["cta_group::1 sync aligned"])
def relinquish(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "tmem_relinquish();"


@emits("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", order=Order.ABSENT)
def fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Tensor-core work runs in the order of issue, so the fences change nothing."""
    return ";"


@emits("tcgen05.wait::ld", forms=["sync aligned"], order=Order.ABSENT)
def wait_for_loads(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Loads are done at once."""
    return ";"


@emits("tcgen05.wait::st", forms=["sync aligned"], order=Order.MODELLED)
def wait_for_stores(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "tmem_wait_stores();"


@emits(
    "tcgen05.commit",
    forms=["cta_group::1 mbarrier::arrive::one ?shared::cluster ?multicast::cluster b64"],
    operands=(1, 2),
    order=Order.MODELLED,
)
def commit(e: FunctionEmitter, i: ir.Instruction) -> str:
    mask = e.value(i.operands[1], "b16") if i.has("multicast::cluster") else "0"
    return f"tcgen05_commit({e.shared_address(i, i.operands[0])}, {mask});"


@emits(
    "tcgen05.mma",
    forms=[f"cta_group::1 {'|'.join(_KINDS)} ?{'|'.join(_COLLECTOR_HINTS)}"],
    operands=(5, 6),
)
def multiply(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The collector hints say what hardware may keep of A; they do not change results."""
    d, a, b, descriptor, *rest = i.operands
    disabled = ["0"] * 4
    if isinstance(rest[0], ir.Vector):
        disabled = [e.value(r) for r in check_count(rest.pop(0), 4, "disable-output-lane")]
    if len(rest) != 1:
        raise Unsupported("scale-input-d")
    in_tmem = isinstance(a, ir.Address)
    fields = [
        e.address32(d),
        e.address32(a) if in_tmem else e.value(a, "b64"),
        e.value(b, "b64"),
        boolean(in_tmem),
        e.value(descriptor),
        e.value(rest[0], "pred"),
        f"{{{', '.join(disabled)}}}",
    ]
    return f"tcgen05_mma(TmemKind::{_KINDS[i.first_of(_KINDS)]}, Tcgen05Operands{{{', '.join(fields)}}});"


@emits(
    "tcgen05.ld",
    "tcgen05.st",
    forms=[f"sync aligned {'|'.join(_SHAPES)} {'|'.join(_REPETITIONS)} b32"],
    operands=2,
)
def move(e: FunctionEmitter, i: ir.Instruction) -> str:
    shape, per_repetition = _SHAPES[i.first_of(_SHAPES)]
    count = per_repetition * int(i.first_of(_REPETITIONS)[1:])
    if count > 128:
        raise Unsupported("number of repetitions")
    is_load = i.parts[1] == "ld"
    vector, address = i.operands if is_load else reversed(i.operands)
    registers = check_count(vector, count, "the cells")
    arguments = f"(TmemShape::{shape}, {e.address32(address)}, {count}, m_);"
    if not is_load:
        return block(array(e, "m_", registers), f"tmem_store{arguments}")
    results = (e.write(r, "b32", f"m_[{n}]") for n, r in enumerate(registers))
    return block(f"uint32_t m_[{count}]; tmem_load{arguments}", *results)
