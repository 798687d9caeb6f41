"""Bitwise logic, shifts, byte permutation, moves and selections."""

from __future__ import annotations

from ..ptx import ir
from .function import BITS, CPP_TYPES, FunctionEmitter
from .registry import Unsupported, emits

_BITWISE = {"and": "&", "or": "|", "xor": "^"}


@emits("and", "or", "xor", forms=["pred|b16|b32|b64"], operands=3)
def logic(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    return e.write(o[0], t, f"{e.value(o[1], t)} {_BITWISE[i.parts[0]]} {e.value(o[2], t)}")


@emits("not", forms=["pred|b16|b32|b64"], operands=2)
@emits("cnot", forms=["b16|b32|b64"], operands=2)
def invert(e: FunctionEmitter, i: ir.Instruction) -> str:
    logical = i.type == "pred" or i.parts[0] == "cnot"
    return e.write(
        i.operands[0], i.type, ("!" if logical else "~") + e.value(i.operands[1], i.type)
    )


@emits("shl", forms=["b16|b32|b64"], operands=3)
@emits("shr", forms=["b16|b32|b64|u16|u32|u64|s16|s32|s64"], operands=3)
def shift(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Amounts of the width or more shift everything out."""
    t, o = i.type, i.operands
    amount, width, unsigned = e.value(o[2]), BITS[t], CPP_TYPES[f"b{BITS[t]}"]
    if i.parts[0] == "shr" and t[0] == "s":
        return e.write(o[0], t, f"{e.read(o[1], t)} >> std::min<uint32_t>({amount}, {width - 1})")
    operator = "<<" if i.parts[0] == "shl" else ">>"
    return e.write(
        o[0],
        t,
        f"({amount}) >= {width} ? 0 : ({unsigned})({e.value(o[1], t)}) {operator} ({amount})",
    )


@emits("shf", forms=["l|r clamp|wrap b32"], operands=4)
def funnel_shift(e: FunctionEmitter, i: ir.Instruction) -> str:
    o = i.operands
    both = f"((uint64_t){e.value(o[2])} << 32 | {e.value(o[1])})"
    amount = (
        f"({e.value(o[3])} & 31)" if i.has("wrap") else f"std::min<uint32_t>({e.value(o[3])}, 32)"
    )
    return e.write(
        o[0], "b32", f"({both} << {amount}) >> 32" if i.has("l") else f"{both} >> {amount}"
    )


@emits("prmt", forms=["b32", "b32 f4e|b4e|rc8|ecl|ecr|rc16"], operands=4)
def permute_bytes(e: FunctionEmitter, i: ir.Instruction) -> str:
    (d, a, b, c), mode = i.operands, i.parts[-1]
    both = f"(uint64_t){e.value(b)} << 32 | {e.value(a)}"
    if mode == "b32":
        return e.write(d, "b32", f"permute_bytes({both}, {e.value(c)})")
    return e.write(d, "b32", f"permute_bytes({both}, permutation_{mode}({e.value(c)} & 3))")


@emits("lop3", forms=["b32", "or|and b32"], operands=(5, 6))
def three_input_logic(e: FunctionEmitter, i: ir.Instruction) -> str:
    """With a boolean operation: d|p, where p is (d != 0) combined with the last operand."""
    o = i.operands
    a, b, c, table = e.value(o[1]), e.value(o[2]), e.value(o[3]), int(o[4].text)
    terms = [
        f"({'' if n & 4 else '~'}{a} & {'' if n & 2 else '~'}{b} & {'' if n & 1 else '~'}{c})"
        for n in range(8)
        if table >> n & 1
    ]
    result = " | ".join(terms) or "0"
    if len(o) == 5 and not isinstance(o[0], ir.Pair) and len(i.parts) == 2:
        return e.write(o[0], "b32", result)
    if len(o) != 6 or not isinstance(o[0], ir.Pair) or len(i.parts) != 3:
        raise Unsupported("operands")
    combined = f"(r_ != 0) {_BITWISE[i.parts[1]]} {e.value(o[5], 'pred')}"
    return f"{{ uint32_t r_ = {result}; {e.write(o[0].second, 'pred', combined)} {e.write(o[0].first, 'b32', 'r_')} }}"


@emits("selp", forms=["b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"], operands=4)
def select(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    return e.write(
        o[0], f"b{BITS[t]}", f"{e.value(o[3], 'pred')} ? {e.value(o[1], t)} : {e.value(o[2], t)}"
    )


_SLCT = "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"


@emits("slct", forms=[f"{_SLCT} s32", f"?ftz {_SLCT} f32"], operands=4)
def select_by_sign(e: FunctionEmitter, i: ir.Instruction) -> str:
    """a where c >= 0 (also -0.0), else b (also for NaN). Flushing c would change nothing but its sign of zero."""
    t, o = i.parts[-2], i.operands
    c = e.read(o[3], i.type)
    c = f"flush({c})" if i.has("ftz") else c
    return e.write(o[0], f"b{BITS[t]}", f"{c} >= 0 ? {e.value(o[1], t)} : {e.value(o[2], t)}")


@emits("mov", forms=["pred|b16|b32|b64|b128|u16|u32|u64|s16|s32|s64|f32|f64"], operands=2)
def move(e: FunctionEmitter, i: ir.Instruction) -> str:
    t, o = i.type, i.operands
    width = BITS[t]

    def source(x: ir.Operand, kind: str) -> str:
        pending = isinstance(x, ir.Register) and x.name in e.accumulators
        return f"wgmma_forced({x.name})" if pending else e.value(x, kind)

    storage = "unsigned __int128" if width == 128 else "uint64_t"
    if isinstance(o[0], ir.Vector):
        part = width // len(o[0].items)
        parts = [
            e.write(x, f"b{part}", f"v_ >> {part * n}")
            for n, x in enumerate(o[0].items)
            if isinstance(x, ir.Register)
        ]
        return f"{{ {storage} v_ = {source(o[1], t)}; {' '.join(parts)} }}"
    if isinstance(o[1], ir.Vector):
        part = width // len(o[1].items)
        parts = [
            f"({storage})({CPP_TYPES[f'b{part}']})({source(x, f'b{part}')}) << {part * n}"
            for n, x in enumerate(o[1].items)
        ]
        return e.write(o[0], t, " | ".join(parts))
    return e.write(o[0], "pred" if t == "pred" else f"b{width}", e.value(o[1], t))
