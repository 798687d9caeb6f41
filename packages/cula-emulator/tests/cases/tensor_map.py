"""Tensor maps: what a case asks for, and the 128 bytes that describe it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# name -> (CUtensorMapDataType, its number inside the map, bytes)
TYPES = {
    "u8": (0, 0, 1), "u16": (1, 1, 2), "u32": (2, 2, 4), "s32": (3, 3, 4), "u64": (4, 4, 8), "s64": (5, 5, 8),
    "f16": (6, 6, 2), "f32": (7, 7, 4), "f64": (8, 9, 8), "bf16": (9, 10, 2), "tf32": (11, 7, 4),
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True)
class TensorMap:
    """A tiled map over `in` or `out`. Sizes and box in elements, innermost first.

    strides: in bytes, from dimension 1 on. swizzle: 0, 32, 64 or 128 bytes. offset: bytes from the start of the buffer.
    """

    of: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    nan_fill: bool = False

    @property
    def element_bytes(self) -> int:
        return TYPES[self.dtype][2]

    def encode(self, address: int) -> bytes:
        """The fields that this project knows, in the driver's places; `driver.py` can ask the driver itself."""
        rank = len(self.sizes)
        flags = (
            (rank - 1) << 4
            | TYPES[self.dtype][1] << 7
            | SWIZZLES[self.swizzle] << 13
            | int(self.nan_fill) << 15
            | int(self.dtype == "tf32") << 16
        )
        strides = [s >> 4 for s in self.strides] + [0] * (5 - rank)
        sizes = [n - 1 for n in self.sizes] + [0] * (5 - rank)
        box = [n - 1 for n in self.box] + [0] * (5 - rank)
        high = sum((s >> 32) << 4 * i for i, s in enumerate(strides))
        low = [s & 0xFFFFFFFF for s in strides]
        return struct.pack("<QI4IHH5I3xB4B68x", address, flags, *low, high, 0, *sizes, *box)


def decode(data: bytes) -> dict[str, object]:
    """The fields of `encode`, read back."""
    address, flags, *rest = struct.unpack("<QI4IHH5I3xB4B68x", data)
    low, high, sizes, box = rest[:4], rest[4], rest[6:11], rest[11:]
    rank = (flags >> 4 & 7) + 1
    return {
        "address": address,
        "type": flags >> 7 & 15,
        "swizzle": flags >> 13 & 3,
        "nan fill": flags >> 15 & 1,
        "tf32": flags >> 16 & 1,
        "strides": tuple((low[i] | (high >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)),
        "sizes": tuple(n + 1 for n in sizes[:rank]),
        "box": tuple(n + 1 for n in box[:rank]),
        "rank": rank,
    }
