"""The lexical side of PTX: comments, literals, lists of operands, and the error that names a line."""

from __future__ import annotations

import bisect
import re
import struct

from ..errors import EmulatorError

_NOISE = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_FLOAT_BITS = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")


class PtxSyntaxError(EmulatorError, ValueError):
    """The text is not PTX that the parser understands. Attribute: `line`, counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(f"PTX line {line}: {message}")


class Source:
    """PTX text without comments and strings; they become blanks, so that positions and line numbers stay."""

    def __init__(self, text: str) -> None:
        self.text = _NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self._line_starts = [m.end() for m in re.finditer("\n", text)]

    def line(self, position: int) -> int:
        return bisect.bisect_right(self._line_starts, position) + 1


def split_operands(text: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    if not any(ch in text for ch in "{[("):
        items = [item.strip() for item in text.split(",")]
        return items if items != [""] else []
    items, depth, start = [], 0, 0
    for m in re.finditer(r"[{}\[\](),]", text):
        if m[0] in "{[(":
            depth += 1
        elif m[0] in "}])":
            depth -= 1
        elif depth == 0:
            items.append(text[start : m.start()].strip())
            start = m.end()
    rest = text[start:].strip()
    return items + [rest] if rest else items


def integer(text: str) -> int | None:
    """Decimal, hexadecimal, octal (leading 0) or binary (0b) with an optional U, or None."""
    m = _INTEGER.fullmatch(text)
    if not m:
        return None
    sign, digits = m.groups()
    if digits[1:2] in ("b", "B"):
        value = int(digits[2:], 2)
    elif digits[1:2] in ("x", "X"):
        value = int(digits, 16)
    elif digits[0] == "0" and len(digits) > 1:
        if not set(digits) <= set("01234567"):
            return None
        value = int(digits, 8)
    else:
        value = int(digits)
    return -value if sign == "-" else value


def literal(text: str) -> str | None:
    """The canonical spelling of a constant (see ir.Literal), or None for text that is none."""
    if _FLOAT_BITS.fullmatch(text):
        return text.lower()
    value = integer(text)
    if value is not None:
        return str(value)
    if _FLOAT.fullmatch(text):
        return "0d" + struct.pack(">d", float(text)).hex()
    return None


def literal_bits(text: str, kind: str, bits: int) -> int:
    """The bit pattern of a canonical constant where an instruction of type `kind` with `bits` bits reads it."""
    if text[:2] in ("0f", "0d"):
        size = "f" if text[1] == "f" else "d"
        wanted = {"f32": "f", "f64": "d"}.get(kind, size)
        value = int(text[2:], 16)
        if size == wanted:
            return value
        number = struct.unpack(f">{size}", bytes.fromhex(text[2:]))[0]
        try:
            return int.from_bytes(struct.pack(f">{wanted}", number), "big")
        except OverflowError:
            return 0x7F800000 | (0x80000000 if number < 0 else 0)
    return int(text) & ((1 << bits) - 1)
