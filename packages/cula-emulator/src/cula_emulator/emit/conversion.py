"""cvt and cvt.pack."""

from __future__ import annotations

from ..ptx import ir
from .function import BITS, CPP_TYPES, FLOATS, FunctionEmitter
from .registry import Unsupported, emits

_INTEGERS = "u8|s8|u16|s16|u32|s32|u64|s64"
_ROUND = {"rn": "kNearest", "rz": "kZero", "rm": "kDown", "rp": "kUp", "rna": "kAway"}
_INTEGRAL = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_TYPES = (*_INTEGERS.split("|"), *FLOATS, "f16x2", "bf16x2", "e4m3x2", "e5m2x2", "tf32")
_FP8 = ("e4m3x2", "e5m2x2")


def _relu(i: ir.Instruction, value: str) -> str:
    return f"relu({value})" if i.has("relu") else value


def _narrowed(i: ir.Instruction, value: str, to: str) -> str:
    """The bits of a float rounded to f16, bf16, tf32, e4m3 or e5m2."""
    mode = i.first_of(_ROUND, "rn")
    value = _relu(i, value)
    value = f"saturate({value})" if i.has("sat") else value
    if to in ("e4m3", "e5m2"):
        return f"narrow<format_{to}>({value}, Rounding::kNearest, true)"
    if mode == "rn" and not i.has("satfinite") and to != "tf32":
        return f"f32_to_{to}({value})"
    finite = "true" if i.has("satfinite") else "false"
    return f"narrow<format_{to}>({value}, Rounding::{_ROUND[mode]}, {finite})"


def _small_halves(e: FunctionEmitter, x: ir.Operand, source: str) -> tuple[str, str]:
    """The high and the low element of a packed operand, as floats."""
    element, bits = source[:-2], 8 if source in _FP8 else 16
    v = e.value(x, "b16" if bits == 8 else "b32")
    high, low = (f"{element}_to_f32((uint{bits}_t)({v} >> {s}))" for s in (bits, 0))
    return high, low


def _packed(e: FunctionEmitter, i: ir.Instruction, to: str, source: str) -> str:
    """Two results in one register: the first operand, or the upper half of a packed one, goes up."""
    if source == "f32":
        high, low = e.read(i.operands[1], "f32"), e.read(i.operands[2], "f32")
    else:
        high, low = _small_halves(e, i.operands[1], source)
    bits, width = (8, "b16") if to in _FP8 else (16, "b32")
    high, low = _narrowed(i, high, to[:-2]), _narrowed(i, low, to[:-2])
    return e.write(i.operands[0], width, f"(uint32_t){high} << {bits} | {low}")


def _to_integer(e: FunctionEmitter, i: ir.Instruction, to: str, source: str) -> str:
    value = e.read(i.operands[1], source)
    value = f"flush({value})" if i.has("ftz") and source == "f32" else value
    rounded = f"{_INTEGRAL[i.first_of(_INTEGRAL)]}((double){value})"
    nan = 1 << BITS[to] - 1 if source == "f64" or BITS[to] == 64 else 0
    return e.write(
        i.operands[0], to, f"float_to_int<{CPP_TYPES[to]}>({rounded}, ({CPP_TYPES[to]}){nan:#x}ull)"
    )


def _from_integer(e: FunctionEmitter, i: ir.Instruction, to: str, source: str) -> str:
    value, mode = e.read(i.operands[1], source), _ROUND[i.first_of(_ROUND)]
    if to == "f64":
        cast = "(double)" if mode == "kNearest" else f"directed_double<Rounding::{mode}>"
        result = f"{cast}({value})"
        return e.write(i.operands[0], "f64", f"saturate({result})" if i.has("sat") else result)
    if to == "f32" and mode == "kNearest":
        result = f"(float)({value})"
        return e.write(i.operands[0], "f32", f"saturate({result})" if i.has("sat") else result)
    return _write_narrow(e, i, f"odd_double({value})", to, mode)


def _write_narrow(e: FunctionEmitter, i: ir.Instruction, value: str, to: str, mode: str) -> str:
    """Rounds a double once, to f16, bf16 or f32."""
    value = f"saturate({value})" if i.has("sat") else value
    bits = f"narrow<format_{to}>({value}, Rounding::{mode}, false)"
    bits = f"from_f32(flush(as_f32({bits})))" if i.has("ftz") and to == "f32" else bits
    return e.write(i.operands[0], f"b{BITS[to]}", bits)


def _between_floats(e: FunctionEmitter, i: ir.Instruction, to: str, source: str) -> str:
    d, value = i.operands[0], e.read(i.operands[1], source)
    value = f"flush({value})" if i.has("ftz") and source == "f32" else value
    if integral := i.first_of(_INTEGRAL):
        value = f"std::{_INTEGRAL[integral]}({value})"
    elif source == "f64" and to != "f64":
        return _write_narrow(e, i, value, to, _ROUND[i.first_of(_ROUND)])
    elif to in ("f16", "bf16") and source != to:
        return e.write(d, f"b{BITS[to]}", _narrowed(i, value, to))
    return e.write(d, to, f"saturate({value})" if i.has("sat") else value)


_IRND, _FRND = "rni|rzi|rmi|rpi", "rn|rz|rm|rp"
_FORMS = [
    f"?sat {_INTEGERS} {_INTEGERS}",
    f"{_IRND} ?sat {_INTEGERS} f16|bf16|f64",
    f"{_IRND} ?ftz ?sat {_INTEGERS} f32",
    f"{_FRND} ?sat f16|bf16|f64 {_INTEGERS}",
    f"{_FRND} ?ftz ?sat f32 {_INTEGERS}",
    # a float rounded to an integral value, or as it is
    "?rni|rzi|rmi|rpi ?ftz ?sat f32 f32",
    *(f"?rni|rzi|rmi|rpi ?sat {t} {t}" for t in ("f16", "bf16", "f64")),
    # to a wider format
    "?ftz ?sat f32 f16|bf16",
    "?sat f64 f16|bf16",
    "?ftz ?sat f64 f32",
    # to a narrower or different one
    f"{_FRND} ?ftz ?sat f32 f64",
    f"{_FRND} ?sat f16|bf16 f64",
    f"{_FRND} ?ftz ?sat f16|bf16 f32",
    f"{_FRND} ?sat f16 bf16",
    f"{_FRND} ?sat bf16 f16",
    "rn|rz ?relu ?satfinite f16|bf16 f32",
    "rn|rz ?relu ?satfinite f16x2|bf16x2 f32",
    "rna ?satfinite tf32 f32",
    "rn|rz ?satfinite ?relu tf32 f32",
    "rn satfinite ?relu e4m3x2|e5m2x2 f32|f16x2|bf16x2",
    "rn ?relu f16x2 e4m3x2|e5m2x2",
]


@emits(
    "cvt",
    forms=_FORMS,
    operands=(2, 3),
)
def convert(e: FunctionEmitter, i: ir.Instruction) -> str:
    to, source = (p for p in i.parts if p in _TYPES)
    if (len(i.operands) == 3) != (source == "f32" and to.endswith("x2")):
        raise Unsupported(f"{len(i.operands)} operands")
    if to in ("f16x2", "bf16x2", *_FP8):
        return _packed(e, i, to, source)
    if to == "tf32":
        return e.write(
            i.operands[0], "b32", f"{_narrowed(i, e.read(i.operands[1], 'f32'), 'tf32')} << 13"
        )
    if to in FLOATS:
        return (_between_floats if source in FLOATS else _from_integer)(e, i, to, source)
    if source in FLOATS:
        return _to_integer(e, i, to, source)
    value = e.read(i.operands[1], source)
    return e.write(
        i.operands[0], to, f"int_saturate<{CPP_TYPES[to]}>({value})" if i.has("sat") else value
    )


@emits("cvt.pack", forms=["sat u16|s16 s32", "sat u8|s8|u4|s4|u2|s2 s32 b32"], operands=(3, 4))
def pack(e: FunctionEmitter, i: ir.Instruction) -> str:
    """a and b clamped, a above b; small types leave the rest to the low bits of c."""
    t, o = i.parts[3], i.operands
    bits = int(t[1:])
    if (len(o) == 4) != (bits < 16):
        raise Unsupported(f"{len(o)} operands")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if t[0] == "s" else (0, (1 << bits) - 1)
    a, b = (
        f"((uint32_t)std::clamp({e.read(x, 's32')}, {low}, {high}) & {(1 << bits) - 1}u)"
        for x in o[1:3]
    )
    rest = f" | {e.value(o[3])} << {2 * bits}" if bits < 16 else ""
    return e.write(o[0], "b32", f"{a} << {bits} | {b}{rest}")
