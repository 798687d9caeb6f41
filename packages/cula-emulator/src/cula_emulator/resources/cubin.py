"""Reader of cubins: ELF files of machine code. Says what the file says, without any tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import EmulatorError
from . import sass


class CubinError(EmulatorError, ValueError):
    """The bytes are not a cubin, or one of an architecture before sm_80."""


# Attributes of `.nv.info` (of the file: one record per function) and `.nv.info.<kernel>`.
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F
_MAX_THREADS, _REQUIRED_THREADS, _PARAMETER_BYTES, _MAX_REGISTERS = 0x05, 0x10, 0x19, 0x1B
_TOOLKIT, _MBARRIERS, _CLUSTER, _BARRIERS, _ANNOTATIONS = 0x37, 0x38, 0x3D, 0x4C, 0x55
_SPILL_OR_REFILL = 1  # kind of annotation
_ENTRY = 0x10  # bit of a symbol's st_other: a kernel
_FUNCTION = 2  # kind of a symbol
_UNKNOWN_STACK = 0xFFFFFFFF  # recursion
# From sm_90 on the section of a kernel's shared memory begins with what the system keeps for itself.
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class CubinKernel:
    """What the cubin says about one kernel; sizes in bytes.

    stack_bytes is None if the compiler could not bound it (recursion). spill_offsets are the places in `code` that the
    compiler marked as spill or refill of a register. required_threads, max_threads and cluster are (x, y, z) where the
    kernel fixes them. functions: what lies in `code` besides the kernel itself and may
    be called by it. toolkit is the CUDA version of the assembler, e.g. (12, 9), or None.
    """

    name: str
    toolkit: tuple[int, int] | None
    registers: int
    max_registers: int | None
    stack_bytes: int | None
    local_bytes: int
    shared_bytes: int
    parameter_bytes: int
    barriers: int
    mbarriers: int
    required_threads: tuple[int, int, int] | None
    max_threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    spill_offsets: tuple[int, ...]
    functions: tuple[str, ...]
    code: bytes


@dataclass(frozen=True)
class Cubin:
    """sm: 90 for sm_90 and sm_90a (newer files do not keep the letter)."""

    sm: int
    kernels: dict[str, CubinKernel]


@dataclass(frozen=True)
class _Section:
    name: str
    flags: int
    size: int
    link: int
    data: bytes


@dataclass(frozen=True)
class _Symbol:
    name: str
    is_function: bool
    is_kernel: bool
    home: int


def read_cubin(cubin: bytes) -> Cubin:
    """Everything the cubin says about its kernels. Raises CubinError."""
    try:
        return _read(cubin)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CubinError(f"not a complete cubin: {error}") from error


def _read(cubin: bytes) -> Cubin:
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != 190:
        raise CubinError("not a cubin: no 64-bit ELF header for CUDA")
    (flags,) = struct.unpack_from("<I", cubin, 48)
    # Before CUDA 13's layout (ABI version 8) the architecture is the low byte, afterwards the second.
    sm = flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF
    if sm < sass.OLDEST_SM:
        raise CubinError(f"machine code of sm_{sm}; sm_{sass.OLDEST_SM} and newer can be read")
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols = list(_symbols(by_name[".symtab"], sections))
    whole = _attributes(by_name[".nv.info"].data) if ".nv.info" in by_name else []
    per_function: dict[tuple[int, int], int] = {}
    for attribute, payload in whole:
        if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS):
            number, amount = struct.unpack_from("<II", payload)
            per_function[attribute, number] = amount
    kernels = {}
    for number, symbol in enumerate(symbols):
        if not symbol.is_kernel or sections[symbol.home].name != f".text.{symbol.name}":
            continue
        kernel = _kernel(symbol.name, sections[symbol.home], by_name, sm)
        stack = max(per_function.get((kind, number), 0) for kind in (_FRAME_SIZE, _MIN_STACK_SIZE))
        neighbours = [
            s.name for s in symbols if s.is_function and s.home == symbol.home and s is not symbol
        ]
        kernels[symbol.name] = replace(
            kernel,
            registers=per_function[_REGISTERS, number],
            stack_bytes=None if stack == _UNKNOWN_STACK else stack,
            functions=tuple(name.removeprefix(f"${symbol.name}$") for name in neighbours),
        )
    return Cubin(sm, kernels)


def _kernel(name: str, code: _Section, by_name: dict[str, _Section], sm: int) -> CubinKernel:
    def size(kind: str) -> int:
        return by_name[f".nv.{kind}.{name}"].size if f".nv.{kind}.{name}" in by_name else 0

    def number(attribute: int, default: int) -> int:
        return int.from_bytes(found[attribute][:4], "little") if attribute in found else default

    def dimensions(attribute: int) -> tuple[int, int, int] | None:
        return struct.unpack_from("<III", found[attribute]) if attribute in found else None

    info = by_name.get(f".nv.info.{name}")
    found = dict(_attributes(info.data)) if info else {}
    annotations = struct.iter_unpack("<II", found.get(_ANNOTATIONS, b""))
    reserved = _RESERVED_SHARED if sm >= 90 else 0
    limit = number(_MAX_REGISTERS, 255)
    toolkit = divmod(number(_TOOLKIT, 0), 10)
    return CubinKernel(
        name=name,
        toolkit=toolkit if toolkit[0] else None,
        registers=0,
        max_registers=limit if limit < 255 else None,
        stack_bytes=0,
        local_bytes=size("local"),
        shared_bytes=max(0, size("shared") - reserved),
        parameter_bytes=number(_PARAMETER_BYTES, 0),
        barriers=number(_BARRIERS, code.flags >> 20 & 0x7F),
        mbarriers=number(_MBARRIERS, 0),
        required_threads=dimensions(_REQUIRED_THREADS),
        max_threads=dimensions(_MAX_THREADS),
        cluster=dimensions(_CLUSTER),
        spill_offsets=tuple(at for kind, at in annotations if kind == _SPILL_OR_REFILL),
        functions=(),
        code=code.data,
    )


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]
    names = headers[names_at]
    no_bits = 8

    def build(header: tuple) -> _Section:
        name, kind, flags, _, offset, size, link = header[:7]
        data = b"" if kind == no_bits else cubin[offset : offset + size]
        return _Section(_text(cubin, names[4] + name), flags, size, link, data)

    return [build(header) for header in headers]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _symbols(table: _Section, sections: list[_Section]) -> Iterator[_Symbol]:
    strings = sections[table.link].data
    for name, info, other, home, _, _ in struct.iter_unpack("<IBBHQQ", table.data):
        yield _Symbol(_text(strings, name), info & 15 == _FUNCTION, bool(other & _ENTRY), home)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Records of an information section: format, attribute, then a value in place or, in format 4, size and bytes."""
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        sized = form == 4
        yield attribute, data[at + 4 : at + 4 + value] if sized else data[at + 2 : at + 4]
        at += 4 + (value if sized else 0)
