"""Integer arithmetic, with and without carry, and dot products of small integers."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import ir
from .function import BITS, CPP_TYPES, FunctionEmitter, block, boolean
from .registry import emits

INTEGERS = "u16|s16|u32|s32|u64|s64"
_WIDE = {"s": "__int128", "u": "unsigned __int128"}


def halves(e: FunctionEmitter, i: ir.Instruction, combine: Callable[[list[str]], str]) -> str:
    """Applies combine(C++ operands) to the two 16-bit halves of 32-bit registers."""
    t = CPP_TYPES[i.type[:-2]]
    low, high = (
        combine([f"(({t})({e.value(x, 'b32')} >> {shift}))" for x in i.operands[1:]])
        for shift in (0, 16)
    )
    return e.write(i.operands[0], "b32", f"(uint16_t)({low}) | (uint32_t)(uint16_t)({high}) << 16")


def integer(e: FunctionEmitter, i: ir.Instruction) -> str:
    """add sub min max neg abs of integers; floating.py sends them here by type."""
    base, t, o = i.parts[0], i.type, i.operands
    relu = "std::max<int32_t>({}, 0)" if i.has("relu") else "{}"
    if t in ("u16x2", "s16x2"):
        if base == "add":
            return halves(e, i, lambda x: f"{x[0]} + {x[1]}")
        return halves(e, i, lambda x: relu.format(f"std::{base}({x[0]}, {x[1]})"))
    a = [e.read(x, t) for x in o[1:]]
    if base in ("min", "max"):
        return e.write(o[0], t, relu.format(f"std::{base}<{CPP_TYPES[t]}>({a[0]}, {a[1]})"))
    if base == "neg":
        return e.write(o[0], t, f"0 - (uint64_t){a[0]}")
    if base == "abs":
        return e.write(o[0], t, f"{a[0]} < 0 ? 0 - (uint64_t){a[0]} : (uint64_t){a[0]}")
    sign = "+" if base == "add" else "-"
    if i.has("sat"):
        return e.write(o[0], t, f"int_saturate<int32_t>((int64_t){a[0]} {sign} {a[1]})")
    if i.has("cc"):
        return _with_carry(e, i, a[0], a[1], carry_in=False)
    return e.write(o[0], t, f"(uint64_t){a[0]} {sign} (uint64_t){a[1]}")


def _with_carry(e: FunctionEmitter, i: ir.Instruction, a: str, b: str, carry_in: bool) -> str:
    """a + b or a - b with the flag read (addc, subc) and, for .cc, written."""
    unsigned, minus = (
        f"(unsigned __int128)({CPP_TYPES['u' + i.type[1:]]})",
        i.parts[0].startswith("sub"),
    )
    flag = ir.CARRY.name
    total = f"{unsigned}({a}) {'-' if minus else '+'} {unsigned}({b})"
    total += f" {'-' if minus else '+'} {flag}" if carry_in else ""
    out = f"{flag} = t_ >> {BITS[i.type]} & 1;" if i.has("cc") else ""
    return block(f"unsigned __int128 t_ = {total};", e.write(i.operands[0], i.type, "t_"), out)


@emits("addc", "subc", forms=["?cc u32|s32|u64|s64"], operands=3)
def add_with_carry(e: FunctionEmitter, i: ir.Instruction) -> str:
    return _with_carry(
        e, i, e.read(i.operands[1], i.type), e.read(i.operands[2], i.type), carry_in=True
    )


def product(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The low or high half of a product, as an expression of the instruction's width."""
    t, o = i.type, i.operands
    a, b = e.read(o[1], t), e.read(o[2], t)
    if i.has("hi"):
        wide = _WIDE[t[0]] if BITS[t] == 64 else f"{'' if t[0] == 's' else 'u'}int64_t"
        return f"({CPP_TYPES[t]})((({wide}){a} * {b}) >> {BITS[t]})"
    return f"({CPP_TYPES[t]})((uint64_t){a} * (uint64_t){b})"


def _wide_product(e: FunctionEmitter, i: ir.Instruction) -> tuple[str, str]:
    w = i.type[0] + str(2 * BITS[i.type])
    a, b = e.read(i.operands[1], i.type), e.read(i.operands[2], i.type)
    return w, f"({CPP_TYPES[w]}){a} * ({CPP_TYPES[w]}){b}"


def multiply(e: FunctionEmitter, i: ir.Instruction) -> str:
    """mul.lo, .hi and .wide; floating.py sends integers here."""
    if i.has("wide"):
        w, wide = _wide_product(e, i)
        return e.write(i.operands[0], w, wide)
    return e.write(i.operands[0], i.type, product(e, i))


def multiply_add(e: FunctionEmitter, i: ir.Instruction) -> str:
    """mad.lo, .hi, .wide, .hi.sat and .cc; floating.py sends integers here."""
    t, (d, _, _, c) = i.type, i.operands
    if i.has("wide"):
        w, wide = _wide_product(e, i)
        return e.write(d, w, f"(uint64_t)({wide}) + (uint64_t){e.read(c, w)}")
    if i.has("cc"):
        return _with_carry(e, i, product(e, i), e.read(c, t), carry_in=False)
    if i.has("sat"):
        return e.write(d, t, f"int_saturate<int32_t>((int64_t){product(e, i)} + {e.read(c, t)})")
    return e.write(d, t, f"(uint64_t){product(e, i)} + (uint64_t){e.read(c, t)}")


@emits("madc", forms=["lo|hi ?cc u32|s32|u64|s64"], operands=4)
def multiply_add_with_carry(e: FunctionEmitter, i: ir.Instruction) -> str:
    return _with_carry(e, i, product(e, i), e.read(i.operands[3], i.type), carry_in=True)


@emits("mul24", forms=["lo|hi u32|s32"], operands=3)
@emits("mad24", forms=["lo u32|s32", "hi ?sat s32", "hi u32"], operands=4)
def multiply24(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The low 24 bits of each factor; .hi is bits 16 to 47 of the product."""
    t, o = i.type, i.operands
    a, b = (f"((int64_t)({CPP_TYPES[t]})({e.value(x)} << 8) >> 8)" for x in o[1:3])
    result = f"({CPP_TYPES[t]})(({a} * {b}) >> {16 if i.has('hi') else 0})"
    if i.parts[0] == "mad24" and i.has("sat"):
        result = f"int_saturate<int32_t>((int64_t){result} + {e.read(o[3], t)})"
    elif i.parts[0] == "mad24":
        result = f"{result} + (uint64_t){e.read(o[3], t)}"
    return e.write(o[0], t, result)


@emits("rem", forms=[INTEGERS], operands=3)
def remainder(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    return e.write(o[0], t, f"remainder<{CPP_TYPES[t]}>({e.read(o[1], t)}, {e.read(o[2], t)})")


def divide(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    return e.write(o[0], t, f"quotient<{CPP_TYPES[t]}>({e.read(o[1], t)}, {e.read(o[2], t)})")


@emits("sad", forms=[INTEGERS], operands=4)
def absolute_difference(e: FunctionEmitter, i: ir.Instruction) -> str:
    a, b, c = (e.read(x, i.type) for x in i.operands[1:])
    a64, b64, c64 = (f"(uint64_t){x}" for x in (a, b, c))
    return e.write(i.operands[0], i.type, f"{c64} + ({a} < {b} ? {b64} - {a64} : {a64} - {b64})")


@emits("dp4a", forms=["u32|s32 u32|s32"], operands=4)
@emits("dp2a", forms=["lo|hi u32|s32 u32|s32"], operands=4)
def dot_product(e: FunctionEmitter, i: ir.Instruction) -> str:
    """dp4a: four bytes by four bytes. dp2a: two 16-bit numbers by the low or high two bytes."""
    four, o = i.parts[0] == "dp4a", i.operands
    width, count, first = (8, 4, 0) if four else (16, 2, 16 * i.has("hi"))
    ta, tb = CPP_TYPES[f"{i.parts[-2][0]}{width}"], CPP_TYPES[f"{i.parts[-1][0]}8"]
    terms = [
        f"(uint32_t)(({ta})({e.value(o[1])} >> {width * n}) * ({tb})({e.value(o[2])} >> {first + 8 * n}))"
        for n in range(count)
    ]
    return e.write(o[0], "b32", " + ".join([e.value(o[3]), *terms]))


@emits("popc", forms=["b32|b64"], operands=2)
def population_count(e: FunctionEmitter, i: ir.Instruction) -> str:
    return e.write(i.operands[0], "b32", f"__builtin_popcountll({e.value(i.operands[1], i.type)})")


@emits("clz", forms=["b32|b64"], operands=2)
def leading_zeros(e: FunctionEmitter, i: ir.Instruction) -> str:
    v, width = e.value(i.operands[1], i.type), BITS[i.type]
    return e.write(i.operands[0], "b32", f"({v}) ? __builtin_clzll({v}) - {64 - width} : {width}")


@emits("bfind", forms=["?shiftamt u32|s32|u64|s64"], operands=2)
def find_leading(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The highest bit that differs from the sign; .shiftamt counts from the top."""
    t, (d, a) = i.type, i.operands
    call = f"leading_bit({e.value(a, t)}, {BITS[t]}, {boolean(t[0] == 's')}, {boolean(i.has('shiftamt'))})"
    return e.write(d, "b32", call)


@emits("brev", forms=["b32|b64"], operands=2)
def reverse_bits(e: FunctionEmitter, i: ir.Instruction) -> str:
    width = BITS[i.type]
    return e.write(
        i.operands[0], i.type, f"reverse_bits({e.value(i.operands[1], i.type)}) >> {64 - width}"
    )


@emits("bfe", forms=["u32|s32|u64|s64"], operands=4)
def bit_field_extract(e: FunctionEmitter, i: ir.Instruction) -> str:
    o, width = i.operands, BITS[i.type]
    arguments = f"{e.value(o[1], i.type)}, {e.value(o[2])}, {e.value(o[3])}, {width}, {boolean(i.type[0] == 's')}"
    return e.write(o[0], f"b{width}", f"extract_field({arguments})")


@emits("bfi", forms=["b32|b64"], operands=5)
def bit_field_insert(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    return e.write(
        o[0],
        t,
        f"insert_field({e.value(o[1], t)}, {e.value(o[2], t)}, {e.value(o[3])}, {e.value(o[4])}, {BITS[t]})",
    )


@emits("szext", forms=["clamp|wrap u32|s32"], operands=3)
def extend(e: FunctionEmitter, i: ir.Instruction) -> str:
    (d, a, n), amount = i.operands, "& 31" if i.has("wrap") else ""
    call = f"extend_field({e.value(a)}, {e.value(n)} {amount}, {boolean(i.type == 's32')})"
    return e.write(d, "b32", call)


@emits("bmsk", forms=["clamp|wrap b32"], operands=3)
def bit_mask(e: FunctionEmitter, i: ir.Instruction) -> str:
    d, position, length = i.operands
    a, b = (
        f"({e.value(x)} & 31)" if i.has("wrap") else f"std::min<uint32_t>({e.value(x)}, 32)"
        for x in (position, length)
    )
    return e.write(d, "b32", f"((1ull << {b}) - 1) << {a}")


@emits("fns", forms=["b32"], operands=4)
def find_nth_set(e: FunctionEmitter, i: ir.Instruction) -> str:
    d, mask, base, offset = i.operands
    return e.write(
        d, "b32", f"nth_set_bit({e.value(mask)}, {e.value(base)}, (int32_t){e.value(offset)})"
    )
