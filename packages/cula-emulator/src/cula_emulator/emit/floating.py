"""Floating-point arithmetic and the approximate functions. Mnemonics that integers share go to integer.py by type.

Every operation works on one element, from bits to bits; packed types apply it to both halves.
"""

from __future__ import annotations

from ..ptx import ir
from . import integer
from .function import BITS, FLOATS, FunctionEmitter
from .registry import Unsupported, emits

_DIRECTED = {"rz": "kZero", "rm": "kDown", "rp": "kUp"}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_ELEMENT_BITS = {"f16": "16", "bf16": "16", "f32": "32", "f64": "64"}
_READ = {
    "f16": "f16_to_f32({})",
    "bf16": "bf16_to_f32({})",
    "f32": "as_f32({})",
    "f64": "as_f64({})",
}
_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}


def _opened(bits: str, t: str, ftz: bool) -> str:
    """The value of an element; f16 and bf16 widen to float."""
    if t == "f16" and ftz:
        return f"f16_to_f32(flush_f16({bits}))"
    value = _READ[t].format(bits)
    return f"flush({value})" if ftz else value


def _closed(i: ir.Instruction, value: str, t: str) -> str:
    """The bits of a result after .sat, .relu and .ftz. `value` has the element's C++ type (float for f16 and bf16)."""
    value = f"saturate({value})" if i.has("sat") else f"relu({value})" if i.has("relu") else value
    if t in ("f16", "bf16"):
        return (
            f"narrow_and_flush_f16({value})"
            if i.has("ftz") and t == "f16"
            else f"f32_to_{t}({value})"
        )
    value = f"flush({value})" if i.has("ftz") else value
    return f"from_{t}({value})"


def _arithmetic(i: ir.Instruction, base: str, t: str, bits: list[str]) -> str:
    """add sub mul div fma of one element, rounded once."""
    a = [_opened(x, t, i.has("ftz")) for x in bits]
    result = _rounded(i, base, t, a)
    if i.has("ftz") and t == "f32" and base in ("mul", "div", "fma"):
        scaled = _rounded(i, base, t, [f"({x} * s_)" if n != 1 else x for n, x in enumerate(a)])
        result = f"flush_result({result}, [&](float s_) {{ return {scaled}; }})"
    return _closed(i, result, t)


def _rounded(i: ir.Instruction, base: str, t: str, a: list[str]) -> str:
    mode = _DIRECTED.get(i.first_of(("rn", *_DIRECTED)))
    if mode is not None:
        return f"directed<Rounding::{mode}, Op::{base.capitalize()}>({', '.join(a)})"
    if base == "fma":
        return f"{'fma_small' if t in ('f16', 'bf16') else 'std::fma'}({', '.join(a)})"
    return f"{a[0]} {_OPERATORS[base]} {a[1]}"


def _extreme(i: ir.Instruction, base: str, t: str, bits: list[str]) -> str:
    a = [_opened(x, t, i.has("ftz")) for x in bits]
    name = f"{base}_nan" if i.has("NaN") else f"{base}_number"
    if i.has("xorsign"):
        return _closed(
            i, f"xorsign({a[0]}, {a[1]}, {name}(std::fabs({a[0]}), std::fabs({a[1]})))", t
        )
    a = [f"std::fabs({x})" for x in a] if i.has("abs") else a
    result = f"{name}({a[0]}, {a[1]})"
    return _closed(i, f"{name}({result}, {a[2]})" if len(a) == 3 else result, t)


def _sign(i: ir.Instruction, base: str, t: str, bits: list[str]) -> str:
    """neg and abs touch nothing but the sign bit, after .ftz."""
    x, width = bits[0], _ELEMENT_BITS[t]
    if i.has("ftz"):
        x = f"flush_f16({x})" if t == "f16" else f"from_f32(flush(as_f32({x})))"
    mask = 1 << int(width) - 1
    mask = mask if base == "neg" else mask - 1
    return f"(uint{width}_t)(({x}) {'^' if base == 'neg' else '&'} {mask:#x}ull)"


_FUNCTIONS = {
    "ex2": "exp2f({})",
    "lg2": "log2f({})",
    "rcp": "1.0f / {}",
    "rsqrt": "1.0f / sqrtf({})",
    "sqrt": "sqrtf({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
    "tanh": "tanhf({})",
}


def _function(i: ir.Instruction, base: str, t: str, bits: list[str]) -> str:
    x = _opened(bits[0], t, i.has("ftz"))
    mode = _DIRECTED.get(i.first_of(("rn", *_DIRECTED)))
    if mode is not None:
        return _closed(i, f"directed<Rounding::{mode}, Op::{base.capitalize()}>({x})", t)
    if t == "f64":
        x = {"rcp": "1.0 / {}", "rsqrt": "1.0 / sqrt({})", "sqrt": "sqrt({})"}[base].format(x)
        return _closed(i, x, t)
    result = _FUNCTIONS[base].format(x)
    if t == "bf16" and i.has("ftz"):
        result = f"flush({result})"
    return _closed(i, result, t)


_ELEMENT = {
    **dict.fromkeys(("add", "sub", "mul", "div", "fma"), _arithmetic),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("neg", "abs"), _sign),
    **dict.fromkeys(_FUNCTIONS, _function),
}


def _apply(e: FunctionEmitter, i: ir.Instruction, base: str) -> str:
    element, t, (d, *sources) = _ELEMENT[base], i.type, i.operands
    if t not in _PACKED:
        return e.write(d, f"b{BITS[t]}", element(i, base, t, [e.value(x, t) for x in sources]))
    t, wide = _PACKED[t], i.type == "f32x2"
    storage, half, shift = ("b64", "uint32_t", 32) if wide else ("b32", "uint16_t", 16)
    values = [e.value(x, storage) for x in sources]
    low, high = (element(i, base, t, [f"({half})({v} >> {s})" for v in values]) for s in (0, shift))
    return e.write(d, storage, f"{low} | (uint{2 * shift}_t){high} << {shift}")


_ROUND = "?rn|rz|rm|rp"
_SMALL = ["?rn ?ftz ?sat f16|f16x2", "?rn bf16|bf16x2"]
_LARGE = [f"{_ROUND} ?ftz ?sat f32", f"{_ROUND} f64", f"{_ROUND} ?ftz f32x2"]
_MIXED = [f"{_ROUND} ?sat f32 f16|bf16"]


@emits(
    "add",
    forms=[
        "u16|u32|u64|s16|s64|u16x2|s16x2",
        "?sat s32",
        "cc u32|s32|u64|s64",
        *_LARGE,
        *_SMALL,
        *_MIXED,
    ],
    operands=3,
)
@emits(
    "sub",
    forms=["u16|u32|u64|s16|s64", "?sat s32", "cc u32|s32|u64|s64", *_LARGE, *_SMALL, *_MIXED],
    operands=3,
)
@emits(
    "mul",
    forms=["lo|hi u16|u32|u64|s16|s32|s64", "wide u16|u32|s16|s32", *_LARGE, *_SMALL],
    operands=3,
)
@emits(
    "fma",
    forms=[*_LARGE, "rn ?ftz ?sat|relu f16|f16x2", "rn ?relu bf16|bf16x2", *_MIXED],
    operands=4,
)
@emits(
    "mad",
    forms=[
        "lo|hi ?cc u32|s32|u64|s64",
        "lo|hi u16|s16",
        "hi sat s32",
        "wide u16|u32|s16|s32",
        *_LARGE[:2],
    ],
    operands=4,
)
@emits(
    "div",
    forms=[integer.INTEGERS, "approx|full|rn|rz|rm|rp ?ftz f32", "rn|rz|rm|rp f64"],
    operands=3,
)
def arithmetic(e: FunctionEmitter, i: ir.Instruction) -> str:
    base, mixed = i.parts[0], i.parts[-2] == "f32" and i.type in ("f16", "bf16")
    if mixed:
        return _mixed_precision(e, i)
    if i.type in FLOATS or i.type in _PACKED:
        return _apply(e, i, "fma" if base == "mad" else base)
    integers = {"mul": integer.multiply, "mad": integer.multiply_add, "div": integer.divide}
    return integers.get(base, integer.integer)(e, i)


def _mixed_precision(e: FunctionEmitter, i: ir.Instruction) -> str:
    """f32 accumulation of f16 or bf16 sources (sm_100): fma rounds once, add and sub take one small operand."""
    base, (d, *small, c) = i.parts[0], i.operands
    bits = [f"from_f32({e.read(x, i.type)})" for x in small] + [e.value(c, "f32")]
    return e.write(d, "b32", _arithmetic(i, base, "f32", bits))


_EXTREME = ["u16|u32|u64|u16x2|s16|s64", "?relu s16x2|s32", "f64"]
_EXTREME += ["?ftz ?NaN ?xorsign ?abs f32|f16|f16x2", "?NaN ?xorsign ?abs bf16|bf16x2"]


@emits("min", "max", forms=_EXTREME, operands=(3, 4))
def extreme(e: FunctionEmitter, i: ir.Instruction) -> str:
    three = len(i.operands) == 4
    if (three and (i.type != "f32" or i.has("xorsign"))) or (
        not three and i.has("abs") != i.has("xorsign")
    ):
        raise Unsupported(f"{len(i.operands)} operands")
    if i.type in FLOATS or i.type in _PACKED:
        return _apply(e, i, i.parts[0])
    return integer.integer(e, i)


@emits("neg", "abs", forms=["s16|s32|s64", "?ftz f32|f16|f16x2", "f64|bf16|bf16x2"], operands=2)
def sign(e: FunctionEmitter, i: ir.Instruction) -> str:
    return integer.integer(e, i) if i.type[0] == "s" else _apply(e, i, i.parts[0])


@emits("ex2", forms=["approx ?ftz f32", "approx f16|f16x2", "approx ftz bf16|bf16x2"], operands=2)
@emits("tanh", forms=["approx f32|f16|f16x2|bf16|bf16x2"], operands=2)
@emits("lg2", "sin", "cos", forms=["approx ?ftz f32"], operands=2)
@emits("rsqrt", forms=["approx ?ftz f32", "approx f64"], operands=2)
@emits("rcp", "sqrt", forms=["approx|rn|rz|rm|rp ?ftz f32", "rn|rz|rm|rp f64"], operands=2)
def function(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The libm functions stand for the approximate ones: they are more exact than the GPU's."""
    return _apply(e, i, i.parts[0])


@emits("copysign", forms=["f32|f64"], operands=3)
def copysign(e: FunctionEmitter, i: ir.Instruction) -> str:
    """The sign of a with the magnitude of b."""
    t, (d, a, b) = i.type, i.operands
    top = 1 << BITS[t] - 1
    return e.write(
        d, f"b{BITS[t]}", f"({e.value(a, t)} & {top:#x}ull) | ({e.value(b, t)} & {top - 1:#x}ull)"
    )
