"""Registers per thread at launch, from the machine code that came with a kernel's host code."""

from __future__ import annotations

import struct

_ELF, _MACHINE_AT, _CUDA = b"\x7fELF\x02", 18, 190
LEFT_OUT = -1


def in_machine_code(host_object: bytes | None) -> dict[str, int]:
    """Kernel -> registers of each thread at launch, LEFT_OUT where the assembler ignored setmaxnreg.

    The host code of CuTe DSL holds the cubin that it would load; what is no cubin gives nothing.
    """
    from .resources.cubin import CubinError, read_cubin
    from .resources.sass import tally

    found: dict[str, int] = {}
    data = host_object or b""
    at = data.find(_ELF)
    while at >= 0:
        machine = data[at + _MACHINE_AT : at + _MACHINE_AT + 2]
        if machine == struct.pack("<H", _CUDA):
            try:
                cubin = read_cubin(data[at:])
            except CubinError:
                pass
            else:
                for name, kernel in cubin.kernels.items():
                    heeded = tally(kernel.code, cubin.sm)["USETMAXREG"] > 0
                    found[name] = kernel.registers if heeded else LEFT_OUT
        at = data.find(_ELF, at + 1)
    return found
