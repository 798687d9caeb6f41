"""setp and set, and testp."""

from __future__ import annotations

from collections.abc import Sequence

from ..ptx import ir
from .function import FLOATS, FunctionEmitter, block
from .registry import Unsupported, emits

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMBINE = {"and": "&&", "or": "||", "xor": "!="}
_FLOAT_TESTS = "|".join([*_ORDERED, *(f"{name}u" for name in _ORDERED), "num", "nan"])
_SIGNED_TESTS = "|".join(_ORDERED)
_UNSIGNED_TESTS = "|".join([*_ORDERED, *_UNSIGNED])
_TESTS = (*_ORDERED, *(f"{name}u" for name in _ORDERED), "num", "nan", *_UNSIGNED)
_ONE = {"f32": "0x3f800000u", "f16": "(uint16_t)0x3c00", "bf16": "(uint16_t)0x3f80"}


def _forms(destination: str, halves: str) -> list[str]:
    combine = "?and|or|xor"
    return [
        f"{_SIGNED_TESTS} {combine} {destination} s16|s32|s64|b16|b32|b64",
        f"{_UNSIGNED_TESTS} {combine} {destination} u16|u32|u64",
        f"{_FLOAT_TESTS} {combine} ?ftz {destination} f32",
        f"{_FLOAT_TESTS} {combine} {destination} f64",
        f"{_FLOAT_TESTS} {combine} ?ftz {halves} f16",
        f"{_FLOAT_TESTS} {combine} {halves} bf16",
    ]


def _compared(i: ir.Instruction, operands: Sequence[str], is_float: bool) -> str:
    """C++ of the comparison of two operands, which are values already."""
    x, y = operands
    name = i.first_of(_TESTS)
    if name in _UNSIGNED:
        return f"({x} {_UNSIGNED[name]} {y})"
    if name == "ne" and is_float:
        return f"({x} < {y} || {x} > {y})"
    if name in _ORDERED:
        return f"({x} {_ORDERED[name]} {y})"
    if name in ("num", "nan"):
        return f"({'!' if name == 'num' else ''}std::isunordered({x}, {y}))"
    return f"(std::isunordered({x}, {y}) || {x} {_ORDERED[name[:2]]} {y})"


def _values(e: FunctionEmitter, i: ir.Instruction) -> list[str]:
    t, flush = i.type, i.has("ftz")
    if t == "f16" and flush:
        return [f"f16_to_f32(flush_f16({e.value(x, t)}))" for x in i.operands[1:3]]
    values = [e.read(x, t) for x in i.operands[1:3]]
    return [f"flush({v})" for v in values] if flush else values


def _halves(e: FunctionEmitter, i: ir.Instruction) -> list[str]:
    """The comparisons of the low and the high half of packed operands."""
    t, flush = i.type[:-2], "flush_f16" if i.has("ftz") else ""
    registers = [e.value(x) for x in i.operands[1:3]]
    return [
        _compared(i, [f"{t}_to_f32({flush}((uint16_t)({r} >> {s})))" for r in registers], True)
        for s in (0, 16)
    ]


def _combined(e: FunctionEmitter, i: ir.Instruction, names: list[str]) -> tuple[str, list[str]]:
    """The statement that reads the third operand, and the results combined with it."""
    combine = i.first_of(_COMBINE)
    if (combine is not None) != (len(i.operands) == 4):
        raise Unsupported("operands")
    if combine is None:
        return "", names
    return f"bool p_ = {e.value(i.operands[3], 'pred')};", [
        f"({n} {_COMBINE[combine]} p_)" for n in names
    ]


@emits(
    "setp",
    forms=[
        *_forms("", ""),
        f"{_FLOAT_TESTS} ?and|or|xor ?ftz f16x2",
        f"{_FLOAT_TESTS} ?and|or|xor bf16x2",
    ],
    operands=(3, 4),
)
def set_predicate(e: FunctionEmitter, i: ir.Instruction) -> str:
    """p|q: the result and its complement; for packed types the results of the low and of the high half."""
    d, packed = i.operands[0], i.type.endswith("x2")
    if packed:
        results = _halves(e, i)
    else:
        result = _compared(i, _values(e, i), i.type in FLOATS)
        results = [result, "!c0_"]
    targets = [d.first, d.second] if isinstance(d, ir.Pair) else [d]
    if packed and len(targets) != 2:
        raise Unsupported("one predicate for a packed comparison")
    read, combined = _combined(e, i, ["c0_", "c1_"])
    names = [f"bool c{n}_ = {r};" for n, r in enumerate(results[: len(targets)])]
    return block(*names, read, *(e.write(t, "pred", c) for t, c in zip(targets, combined)))


@emits(
    "set",
    forms=[
        *_forms("u32|s32|f32", "u16|s16|u32|s32|f16|bf16"),
        f"{_FLOAT_TESTS} ?and|or|xor ?ftz f16x2 f16x2",
        f"{_FLOAT_TESTS} ?and|or|xor bf16x2 bf16x2",
    ],
    operands=(3, 4),
)
def set_value(e: FunctionEmitter, i: ir.Instruction) -> str:
    """True is all ones in an integer and 1.0 in a float."""
    d, t = i.operands[0], i.parts[-2]
    if t.endswith("x2"):
        one = _ONE[t[:-2]]
        read, (low, high) = _combined(e, i, _halves(e, i))
        return block(
            read, e.write(d, "b32", f"({low} ? {one} : 0) | (uint32_t)({high} ? {one} : 0) << 16")
        )
    read, (result,) = _combined(e, i, [_compared(i, _values(e, i), i.type in FLOATS)])
    return block(read, e.write(d, f"b{t.lstrip('busf')}", f"{result} ? {_ONE.get(t, '~0u')} : 0"))


@emits("testp", forms=["finite|infinite|number|notanumber|normal|subnormal f32|f64"], operands=2)
def test_property(e: FunctionEmitter, i: ir.Instruction) -> str:
    x = e.read(i.operands[1], i.type)
    test = {
        "finite": "std::isfinite({})",
        "infinite": "std::isinf({})",
        "notanumber": "std::isnan({})",
        "number": "!std::isnan({})",
        "normal": "std::isnormal({})",
        "subnormal": "std::fpclassify({}) == FP_SUBNORMAL",
    }[i.parts[1]]
    return e.write(i.operands[0], "pred", test.format(x))
