"""Floating point of every format in exact rational arithmetic: the oracle of the scalar tables.

A number is a bit pattern (an int); it shares no code and no machine arithmetic with the emulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property


def _scaled(top: int, bottom: int, exponent: int) -> tuple[int, int]:
    """The fraction top/bottom times a power of two, by shifts: `Fraction` would look for common divisors."""
    return (top << exponent, bottom) if exponent >= 0 else (top, bottom << -exponent)


@dataclass(frozen=True, eq=False)  # identity is a hash that costs nothing
class Format:
    """A binary format. `finite` ones have no infinity: e4m3 keeps a single NaN, all ones."""

    exponent_bits: int
    mantissa_bits: int
    finite: bool = False
    flushes: bool = False  # results that are subnormal become zero

    @cached_property
    def flushing(self) -> Format:
        return replace(self, flushes=True)

    @cached_property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    @cached_property
    def sign(self) -> int:
        return 1 << self.bits - 1

    @cached_property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @cached_property
    def nan(self) -> int:
        """The canonical NaN of the GPU: all ones but the sign."""
        return self.sign - 1

    @cached_property
    def largest(self) -> int:
        return (self.sign - 2) if self.finite else self.infinity - 1

    @cached_property
    def smallest_normal(self) -> int:
        return 1 << self.mantissa_bits

    def is_nan(self, x: int) -> bool:
        magnitude = x & (self.sign - 1)
        return magnitude == self.sign - 1 if self.finite else magnitude > self.infinity

    def is_infinite(self, x: int) -> bool:
        return not self.finite and x & (self.sign - 1) == self.infinity

    def is_subnormal(self, x: int) -> bool:
        return 0 < x & (self.sign - 1) < self.smallest_normal

    def flush(self, x: int) -> int:
        """.ftz: subnormals become zero of their sign."""
        return x & self.sign if self.is_subnormal(x) else x

    @cache  # noqa: B019  a format lives as long as the tests
    def value(self, x: int):
        """The number as a Fraction, or an infinity. NaN and the sign of zero are the caller's."""
        magnitude, exponent = (
            x & (self.sign - 1),
            x >> self.mantissa_bits & ((1 << self.exponent_bits) - 1),
        )
        if self.is_infinite(x):
            return -math.inf if x & self.sign else math.inf
        mantissa = magnitude & (self.smallest_normal - 1)
        if exponent:
            mantissa |= self.smallest_normal
        result = Fraction(*_scaled(mantissa, 1, max(exponent, 1) - self.bias - self.mantissa_bits))
        return -result if x & self.sign else result

    def _rounded(self, magnitude, exponent: int, mode: str, negative: bool) -> int:
        """The mantissa, an integer, of a number with this exponent."""
        top, bottom = _scaled(
            magnitude.numerator, magnitude.denominator, self.mantissa_bits - exponent
        )
        whole, rest = divmod(top, bottom)
        up = {
            "rn": 2 * rest > bottom or (2 * rest == bottom and whole & 1),
            "rna": 2 * rest >= bottom,
            "rz": False,
            "rm": rest > 0 and negative,
            "rp": rest > 0 and not negative,
        }[mode]
        return whole + bool(up)

    def encode(self, value, mode: str = "rn", zero_sign: int = 0) -> int:
        """Rounds an exact number; `zero_sign` is the sign of an exact zero. Modes rn rna rz rm rp."""
        if value == 0:
            return self.sign if zero_sign else 0
        negative = value < 0
        sign, magnitude = self.sign if negative else 0, abs(value)
        if magnitude == math.inf:
            return sign | self.infinity
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        top, bottom = _scaled(magnitude.numerator, magnitude.denominator, -exponent)
        if top < bottom:
            exponent -= 1
        if self.flushes and self._rounded(magnitude, exponent, mode, negative) * Fraction(2) ** (
            exponent - self.mantissa_bits
        ) < Fraction(2) ** (1 - self.bias):
            return sign  # subnormal although rounded with an unlimited exponent
        exponent = max(exponent, 1 - self.bias)
        whole = self._rounded(magnitude, exponent, mode, negative)
        bits = whole + ((exponent + self.bias - 1) << self.mantissa_bits)
        if bits > self.largest:
            towards_zero = (
                mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
            )
            bits = self.largest if self.finite or towards_zero else self.infinity
        return sign | bits


F16, BF16, F32, F64 = Format(5, 10), Format(8, 7), Format(8, 23), Format(11, 52)
TF32, E4M3, E5M2 = Format(8, 10), Format(4, 3, finite=True), Format(5, 2)
FORMATS = {
    "f16": F16,
    "bf16": BF16,
    "f32": F32,
    "f64": F64,
    "tf32": TF32,
    "e4m3": E4M3,
    "e5m2": E5M2,
}


def add(f: Format, a: int, b: int, mode: str = "rn") -> int:
    if f.is_nan(a) or f.is_nan(b) or (f.is_infinite(a) and f.is_infinite(b) and a != b):
        return f.nan
    total = f.value(a) + f.value(b)
    both_negative = a & b & f.sign
    return f.encode(total, mode, both_negative or (mode == "rm" and (a | b) & f.sign))


def subtract(f: Format, a: int, b: int, mode: str = "rn") -> int:
    return add(f, a, b ^ f.sign, mode)


def multiply(f: Format, a: int, b: int, mode: str = "rn") -> int:
    x, y = f.value(a), f.value(b)
    if f.is_nan(a) or f.is_nan(b) or {abs(x), abs(y)} == {0, math.inf}:
        return f.nan
    if math.inf in (abs(x), abs(y)):
        return f.infinity | (a ^ b) & f.sign
    return f.encode(x * y, mode, (a ^ b) & f.sign)


def fused(f: Format, a: int, b: int, c: int, mode: str = "rn") -> int:
    x, y, z = f.value(a), f.value(b), f.value(c)
    negative = (a ^ b) & f.sign
    if f.is_nan(a) or f.is_nan(b) or f.is_nan(c) or {abs(x), abs(y)} == {0, math.inf}:
        return f.nan
    if math.inf in (abs(x), abs(y)):
        return f.nan if f.is_infinite(c) and negative != c & f.sign else f.infinity | negative
    if f.is_infinite(c):
        return c
    return f.encode(x * y + z, mode, (negative & c) or (mode == "rm" and (negative | c) & f.sign))


def divide(f: Format, a: int, b: int, mode: str = "rn") -> int:
    x, y, sign = f.value(a), f.value(b), (a ^ b) & f.sign
    if f.is_nan(a) or f.is_nan(b) or (x == 0 == y) or (f.is_infinite(a) and f.is_infinite(b)):
        return f.nan
    if f.is_infinite(a) or y == 0:
        return f.infinity | sign
    return sign if f.is_infinite(b) else f.encode(x / y, mode, sign)


def square_root(f: Format, a: int, mode: str = "rn") -> int:
    if f.is_nan(a) or (a & f.sign and a != f.sign):
        return f.nan
    if a in (0, f.sign, f.infinity):
        return a
    x, shift = f.value(a), 4 * f.mantissa_bits + 2 * f.bias
    root = math.isqrt(int(x * 4**shift))
    exact = Fraction(root * root, 4**shift) == x
    # An irrational root is no tie, so half a unit beyond the last bit stands for the rest.
    return f.encode(Fraction(2 * root + (0 if exact else 1), 2 << shift), mode)


def minimum(f: Format, a: int, b: int, propagate: bool = False, largest: bool = False) -> int:
    """PTX min, or max: a number wins over NaN unless `propagate`; -0 is less than +0."""
    if f.is_nan(a) or f.is_nan(b):
        return f.nan if propagate or (f.is_nan(a) and f.is_nan(b)) else (b if f.is_nan(a) else a)
    order = lambda x: (f.value(x), -(x & f.sign))  # noqa: E731
    return max(a, b, key=order) if largest else min(a, b, key=order)


def saturate(f: Format, x: int) -> int:
    """.sat: [0, 1], NaN becomes +0."""
    one = f.bias << f.mantissa_bits
    return 0 if f.is_nan(x) or x & f.sign else min(x, one)


def relu(f: Format, x: int) -> int:
    """.relu: 0 if negative, NaN stays (canonical)."""
    return f.nan if f.is_nan(x) else 0 if x & f.sign else x


def convert(
    source: Format, target: Format, x: int, mode: str = "rn", satfinite: bool = False
) -> int:
    sign = target.sign if x & source.sign else 0
    if source.is_nan(x):
        return target.nan
    if source.is_infinite(x):
        return sign | (target.largest if satfinite or target.finite else target.infinity)
    result = target.encode(source.value(x), mode, sign)
    return sign | target.largest if satfinite and target.is_infinite(result) else result


def integral(f: Format, x: int, mode: str) -> int:
    """Rounds to an integral value of the same format; modes rni rzi rmi rpi."""
    if f.is_nan(x):
        return f.nan
    if f.is_infinite(x):
        return x
    return f.encode(Fraction(_integer(f.value(x), mode)), "rn", x & f.sign)


def _integer(v: Fraction, mode: str) -> int:
    return {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](v)


def to_integer(f: Format, x: int, bits: int, signed: bool, mode: str, nan: int = 0) -> int:
    """Clamped to the range of the integer; returns its bit pattern. `nan` is the result for NaN."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if f.is_nan(x):
        return nan
    v = f.value(x)
    n = (high if v > 0 else low) if f.is_infinite(x) else min(max(_integer(v, mode), low), high)
    return n & ((1 << bits) - 1)
