"""What the matrix families share: number formats, and the reading of opcodes whose every modifier must be known."""

from __future__ import annotations

import re

from ..ptx import ir
from .function import FunctionEmitter
from .registry import Unsupported

# PTX name -> (enumerator of runtime/numeric.h, bytes)
FORMATS = {
    "f16": ("kF16", 2), "bf16": ("kBf16", 2), "tf32": ("kTf32", 4),
    "e4m3": ("kE4m3", 1), "e5m2": ("kE5m2", 1), "s8": ("kS8", 1), "u8": ("kU8", 1),
}  # fmt: skip
_ACCUMULATORS = {"f32": "kF32", "f16": "kF16", "s32": "kS32"}
_FLOAT8, _INTEGER8 = ("e4m3", "e5m2"), ("s8", "u8")


def format_of(name: str) -> str:
    return f"Format::{FORMATS[name][0]}"


def accumulator_of(name: str) -> str:
    return f"Accumulator::{_ACCUMULATORS[name]}"


def match(i: ir.Instruction, pattern: str) -> re.Match:
    """The opcode against a pattern of everything that is implemented."""
    found = re.fullmatch(pattern, i.opcode)
    if not found:
        raise Unsupported("shape, type or modifier")
    return found


def check_types(accumulator: str, a: str, b: str, saturates: bool) -> None:
    """Refuses combinations that are no instruction."""
    if a in _INTEGER8 and b in _INTEGER8:
        known = accumulator == "s32"
    elif a in _FLOAT8 and b in _FLOAT8:
        known = accumulator in ("f32", "f16")
    else:
        known = a == b and (accumulator == "f32" or accumulator == a == "f16")
    if not known or (saturates and accumulator != "s32"):
        raise Unsupported(f"{a} times {b} into {accumulator}")


def check_count(operand: ir.Operand, expected: int, what: str) -> list[ir.Operand]:
    items = FunctionEmitter.items(operand)
    if len(items) != expected:
        raise Unsupported(f"{len(items)} registers for {what}, not {expected}")
    return items


def array(e: FunctionEmitter, name: str, registers: list[ir.Operand]) -> str:
    """Declares a C++ array of the registers' values."""
    return f"uint32_t {name}[] = {{{', '.join(e.value(r) for r in registers)}}};"
