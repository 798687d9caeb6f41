"""Machine code (SASS) to instruction names, without a disassembler, for sm_80 and newer.

An instruction is one 128-bit little-endian word. Its low twelve bits are the opcode; a few operations share one and are
told apart by a further field or by the architecture. An opcode that is not in the table is named "unknown 0x...".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from .opcodes import OPCODES

BYTES_PER_INSTRUCTION = 16
OLDEST_SM = 80

# Families that NVIDIA spells differently per space, type or architecture, under one name for `count`.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "UTCMMA": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "ATOM": ("ATOM", "ATOMG", "ATOMS"),
    "RED": ("RED", "REDG", "REDAS"),
}

_NAMES = {
    int(opcode, 16): name
    for name, *opcodes in map(str.split, OPCODES.strip().splitlines())
    for opcode in opcodes
}

# Bits 73 to 75 of ordinary loads and stores: bits moved per thread (signed and unsigned alike).
_WIDTHS = ("8", "8", "16", "16", "32", "64", "128")
_LOADS_AND_STORES = frozenset({"LD", "LDG", "LDS", "LDL", "ST", "STG", "STS", "STL"})
_256_BIT = frozenset({0x97E, 0x97F})
_MUFU = ("COS", "SIN", "EX2", "LG2", "RCP", "RSQ", "RCP64H", "RSQ64H", "SQRT", "TANH")
_WARPGROUP = ("ARRIVE", "WAIT", "DEPBAR")
_MATRICES = ("1", "2", "4")  # 8x8 matrices that one LDSM or STSM moves
# Kind of tcgen05.mma: bit 63, bit 72 and bit 73, from low to high.
_UTCMMA = {0b000: "UTCHMMA", 0b001: "UTCOMMA", 0b010: "UTCIMMA", 0b110: "UTCQMMA"}


def _field(word: int, low: int, bits: int) -> int:
    return word >> low & (1 << bits) - 1


def _pick(names: tuple[str, ...], value: int) -> str:
    return f".{names[value]}" if value < len(names) else ""


def _shared_opcode(opcode: int, word: int, generation: int) -> str | None:
    """The operation where the opcode alone does not say; None if it does. `generation` is 8, 9, 10, 11 or 12."""
    name = _NAMES[opcode]
    if name == "UTCHMMA":
        kind = _field(word, 63, 1) | _field(word, 72, 2) << 1
        return _UTCMMA.get(kind, f"unknown 0x{opcode:03x}")
    if generation >= 10 and word >> 81 & 1:
        if opcode in (0x221, 0xE21):
            return "FHADD"
        if opcode in (0x223, 0xC23, 0xE23):
            return "FHFMA"
    if generation == 10 and word >> 76 & 1:
        if name == "IADD3" and opcode in (0x210, 0x810, 0xC10):
            return "IADD"
        if opcode in (0x224, 0x225, 0x424, 0x824, 0x825, 0xC24, 0xC25, 0xE24, 0xE25):
            return "IMUL"
    if generation == 12:
        if opcode in (0x235, 0x835, 0xC35):
            return "IADD"
        if opcode in (0x249, 0x849):
            return "UVIADD"
        if opcode in (0x24A, 0x84A):
            return "UVIMNMX"
        if opcode in (0x254, 0x255) and word >> 81 & 1:
            return "UFHADD" if opcode == 0x254 else "UFHFMA"
    if opcode == 0x98E:
        return "RED" if generation == 8 else "REDG"
    return None


def mnemonic(word: int, sm: int) -> str:
    """Name of one instruction word, e.g. "HGMMA", "LDG.128", "MUFU.EX2", "WARPGROUP.DEPBAR"; sm: 80 for sm_80.

    Loads and stores carry the bits they move per thread, LDSM and STSM the matrices, as the only suffixes besides the
    function of MUFU and of WARPGROUP.
    """
    opcode = word & 0xFFF
    if opcode not in _NAMES:
        return f"unknown 0x{opcode:03x}"
    name = _shared_opcode(opcode, word, sm // 10) or _NAMES[opcode]
    if opcode in _256_BIT:
        return f"{name}.256"
    if name in _LOADS_AND_STORES:
        return name + _pick(_WIDTHS, _field(word, 73, 3))
    if name == "LDGSTS":
        return name + (
            _pick(_WIDTHS[4:], _field(word, 74, 2))
            if sm >= 100
            else _pick(_WIDTHS, _field(word, 73, 3))
        )
    if name in ("LDSM", "STSM"):
        return name + _pick(_MATRICES, _field(word, 72, 2))
    if name == "MUFU":
        return name + _pick(_MUFU, _field(word, 74, 4))
    if name == "WARPGROUP":
        return name + _pick(_WARPGROUP, _field(word, 79, 2))
    return name


def mnemonics(code: bytes, sm: int) -> Iterator[str]:
    """Names of the instructions of a code section, in order."""
    for at in range(0, len(code), BYTES_PER_INSTRUCTION):
        yield mnemonic(int.from_bytes(code[at : at + BYTES_PER_INSTRUCTION], "little"), sm)


def width(name: str) -> int:
    """Bytes that a load or store named by `mnemonic` moves per thread."""
    return int(name.rpartition(".")[2]) // 8


def count(instructions: Mapping[str, int], name: str) -> int:
    """How many instructions are `name`: a family ("LDG", "UTCMMA") or one member of it ("LDG.128", "UTCHMMA")."""
    members = FAMILIES.get(name, (name,))
    return sum(
        n
        for key, n in instructions.items()
        if any(key == m or key.startswith(f"{m}.") for m in members)
    )


def tally(code: bytes, sm: int) -> Counter[str]:
    """Number of instructions of each name in a code section, NOPs of the padding included."""
    return Counter(mnemonics(code, sm))
