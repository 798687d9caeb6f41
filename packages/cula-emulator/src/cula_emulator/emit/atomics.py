"""Atomic read-modify-write of one element or a vector, at once or asynchronously."""

from __future__ import annotations

from ..ptx import ir
from .function import (
    BITS,
    CPP_TYPES,
    FLOATS,
    READ,
    STRONG,
    WRITE,
    FunctionEmitter,
    access,
    bits_type,
    block,
)
from .memory import CACHE, SCOPE
from .registry import emits

_HEAD = f"?relaxed|acquire|release|acq_rel {SCOPE} ?global|shared|shared::cta|shared::cluster"
_FORMS = [
    f"{_HEAD} add|min|max|and|or|xor|exch|cas|inc|dec {CACHE} b32|b64|b128|u32|u64|s32|s64",
    f"{_HEAD} add|exch {CACHE} f32|f64",
    f"{_HEAD} add|cas ?noftz {CACHE} b16|f16|bf16|f16x2|bf16x2",
    f"{_HEAD} add|min|max ?noftz {CACHE} v2|v4|v8 f32|f16|bf16|f16x2|bf16x2",
]


def _updated(
    e: FunctionEmitter,
    i: ir.Instruction,
    operation: str,
    t: str,
    part: int | None,
    operands: list[ir.Operand],
    flushes: bool = False,
) -> str:
    """The new bits of one element whose old bits are `old_`. Additions in global memory flush subnormal numbers."""
    values = [e.items(o)[part] if part is not None else o for o in operands]
    v = e.value(values[0], bits_type(t))
    if operation == "exch":
        return v
    if operation == "cas":
        return f"old_ == {v} ? {e.value(values[1], bits_type(t))} : old_"
    if operation in ("and", "or", "xor"):
        return f"old_ {dict(zip(('and', 'or', 'xor'), '&|^'))[operation]} {v}"
    if t in ("f16x2", "bf16x2"):
        widen, narrow = {
            "f16x2": ("f16_to_f32", "f32_to_f16"),
            "bf16x2": ("bf16_to_f32", "f32_to_bf16"),
        }[t]
        combine = {"add": "{} + {}", "min": "min_number({}, {})", "max": "max_number({}, {})"}[
            operation
        ]

        def half(shift: int) -> str:
            old, fresh = (f"{widen}((uint16_t)({x} >> {shift}))" for x in ("old_", v))
            return f"(uint32_t){narrow}({combine.format(old, fresh)}) << {shift}"

        return f"{half(0)} | {half(16)}"
    if t in FLOATS:
        widen, narrow = {
            "f32": ("as_f32", "from_f32"),
            "f64": ("as_f64", "from_f64"),
            "f16": ("f16_to_f32", "f32_to_f16"),
            "bf16": ("bf16_to_f32", "f32_to_bf16"),
        }[t]
        combine = {"add": "{} + {}", "min": "min_number({}, {})", "max": "max_number({}, {})"}[
            operation
        ]
        old, fresh = f"{widen}(old_)", e.read(values[0], t)
        if operation == "add" and t == "f32" and flushes:
            return f"{narrow}(flush({combine.format(f'flush({old})', f'flush({fresh})')}))"
        return f"{narrow}({combine.format(old, fresh)})"
    old, fresh, cpp = f"({CPP_TYPES[t]})old_", e.read(values[0], t), CPP_TYPES[t]
    if operation == "inc":
        return f"old_ >= {v} ? 0 : old_ + 1"
    if operation == "dec":
        return f"old_ == 0 || old_ > {v} ? {v} : old_ - 1"
    return {
        "add": f"old_ + (uint64_t){fresh}",
        "min": f"std::min<{cpp}>({old}, {fresh})",
        "max": f"std::max<{cpp}>({old}, {fresh})",
    }[operation]


@emits("atom", "red", forms=_FORMS)
def atomic(e: FunctionEmitter, i: ir.Instruction) -> str:
    operation, t = (
        i.first_of(("add", "min", "max", "exch", "cas", "and", "or", "xor", "inc", "dec")),
        i.type,
    )
    operands = list(i.operands)
    destination = operands.pop(0) if i.parts[0] == "atom" else None
    address, values = operands[0], operands[1:]
    parts = len(values[0].items) if isinstance(values[0], ir.Vector) else None
    storage, size = CPP_TYPES[bits_type(t)], BITS[t] // 8
    space = e.space_of(i, address)
    pointer = e.pointer(address, space, size * (parts or 1), access(i, READ | WRITE | STRONG))
    statements = [f"uint8_t* p_ = {pointer};"]
    for n in range(parts or 1):
        part = n if parts else None
        fresh = f"({storage})({_updated(e, i, operation, t, part, values, space == 'global')})"
        body = f"atomic_update<{storage}>(p_ + {n * size}, [&]({storage} old_) -> {storage} {{ return {fresh}; }});"
        if destination is None:
            statements.append(body)
        else:
            statements.append(f"auto o{n}_ = {body}")
            statements.append(
                e.write(e.items(destination)[n] if parts else destination, bits_type(t), f"o{n}_")
            )
    return "{ " + " ".join(statements) + " }"


_SYNC = "?shared::cluster mbarrier::complete_tx::bytes"
_WORDS = "b32|b64|u32|u64|s32|s64"


@emits("st.async", forms=[f"?weak {_SYNC} ?v2|v4 {_WORDS}|f32|f64"])
@emits(
    "red.async",
    forms=[f"?relaxed ?cluster {_SYNC} add|min|max|and|or|xor|inc|dec {_WORDS}"],
)
def asynchronous_update(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Store or reduction in shared memory of the cluster whose completion an mbarrier counts."""
    t, (address, value, barrier) = i.type, i.operands
    operation = i.first_of(("add", "min", "max", "and", "or", "xor", "inc", "dec"), "exch")
    storage, size, values = CPP_TYPES[bits_type(t)], BITS[t] // 8, e.items(value)
    held = [f"v{n}_ = ({storage})({e.value(v, bits_type(t))})" for n, v in enumerate(values)]
    updates = []
    for n in range(len(values)):
        fresh = _updated(e, i, operation, t, None, [ir.Register(f"v{n}_", t)])
        updates.append(f"{{ {storage} old_ = load<{storage}>(p_ + {n * size}); "
                       f"store<{storage}>(p_ + {n * size}, ({storage})({fresh})); }}")  # fmt: skip
    total = size * len(values)
    place = f"uint8_t* p_ = shared(a_, {total}, {total});"
    return block(
        f"const {storage} {', '.join(held)};",
        f"const uint32_t a_ = {e.address32(address)}, b_ = {e.address32(barrier)}; const Past r_ = race_past();",
        f"push_async(Engine::kCopyIn, [=] {block(place, *updates, f'bulk_written(r_, a_, {total}, b_);')});",
    )
