"""How much two outputs of the same kernel differ."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# PTX type -> (torch type of the bits, exponent and mantissa bits); packed types are their element, twice.
_FLOATS = {
    "f16": (torch.int16, 5, 10), "bf16": (torch.int16, 8, 7), "f32": (torch.int32, 8, 23), "f64": (torch.int64, 11, 52),
    "tf32": (torch.int32, 8, 23),
}  # fmt: skip


@dataclass
class Difference:
    """elements compared; different: unequal bits; nan_bits: both NaN, other payload; ulp and relative: the largest.

    `relative` is to the size that the comparison names (the value itself, or |A| |B| + |C| of a matrix product).
    """

    elements: int = 0
    different: int = 0
    nan_bits: int = 0
    ulp: int = 0
    relative: float = 0.0

    @property
    def identical(self) -> bool:
        return self.different == 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.elements + other.elements,
            self.different + other.different,
            self.nan_bits + other.nan_bits,
            max(self.ulp, other.ulp),
            max(self.relative, other.relative),
        )


def of_words(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Any bits: equal or not."""
    different = int((a != b).sum())
    return Difference(a.numel(), different, relative=math.inf if different else 0.0)


def _ordered(bits: int, width: int) -> int:
    """Neighbouring floats are neighbouring numbers."""
    return -(bits & ((1 << width - 1) - 1)) if bits >> width - 1 else bits


def _value(kind: str, bits: int) -> float:
    if kind == "f64":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if kind == "f16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    return struct.unpack("<f", struct.pack("<I", bits << 16 if kind == "bf16" else bits))[0]


def of_bits(kind: str, a: int, b: int) -> Difference:
    """Two bit patterns of one PTX type."""
    if kind.endswith("x2") and kind[:-2] in _FLOATS:
        width = 8 * _FLOATS[kind[:-2]][0].itemsize
        mask = (1 << width) - 1
        return of_bits(kind[:-2], a & mask, b & mask) + of_bits(kind[:-2], a >> width, b >> width)
    if a == b:
        return Difference(1)
    if kind not in _FLOATS:
        return Difference(1, 1, relative=math.inf)
    width = 8 * _FLOATS[kind][0].itemsize
    x, y = _value(kind, a), _value(kind, b)
    if math.isnan(x) and math.isnan(y):
        return Difference(1, 0, 1)
    if not (math.isfinite(x) and math.isfinite(y)):
        return Difference(1, 1, 0, 1 << 31, math.inf)
    size = max(abs(x), abs(y))
    return Difference(
        1, 1, 0, abs(_ordered(a, width) - _ordered(b, width)), abs(x - y) / size if size else 0.0
    )


def of_values(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor) -> Difference:
    """Decoded values, relative to `size`; NaN equals NaN."""
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    gap = torch.where(same, 0.0, (a.double() - b.double()).abs())
    relative = (
        float((gap / size.clamp(min=1e-300)).nan_to_num(nan=math.inf).max()) if gap.numel() else 0.0
    )
    return Difference(a.numel(), int((~same).sum()), relative=relative)


def of_cases(
    kinds: Sequence[str], words: Sequence[int], a: Sequence[int], b: Sequence[int], defined
) -> Difference:
    """Outputs of threads: `kinds` per thread, each of `words` words of 32 bits; `defined(thread, index)`: it counts."""
    total, position, thread = Difference(), 0, 0
    while position < len(a):
        for index, (kind, count) in enumerate(zip(kinds, words)):
            x, y = (
                sum((v[position + k] & 0xFFFFFFFF) << 32 * k for k in range(count)) for v in (a, b)
            )
            position += count
            if defined(thread, index):
                total += of_bits(kind, x, y)
        thread += 1
    return total
