"""The C++ of a module: its variables, its kernels one by one, and the table that the runtime finds them in."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnsupportedInstruction
from ..ptx import ir
from .kernel import KernelSource


def translate(module: ir.Module, registers: Mapping[str, int] | None = None) -> str:
    """The C++ source of all kernels of a module. Raises UnsupportedInstruction, which lists all that has no emitter.

    registers: of kernels whose machine code is known, as `registers.in_machine_code` gives them.
    """
    out = ['#include "kernel.h"', "using namespace emu;"]
    globals_: dict[str, str] = {}
    ranges = []
    for v in module.variables:
        if v.space == "shared":
            continue
        name = globals_[v.name] = "g_" + "".join(c if c.isalnum() else "_" for c in v.name)
        initial = ", ".join(str(b) for b in v.data) if v.data else "0"
        size, alignment = max(v.size, 1), max(v.align, 16)
        out.append(f"alignas({alignment}) static uint8_t {name}[{size}] = {{{initial}}};")
        ranges.append(f"{{(uint64_t){name}, (uint64_t){name} + sizeof {name}}}")
    kernels = [
        KernelSource(k, n, module, globals_, (registers or {}).get(k.name, 0))
        for n, k in enumerate(module.kernels)
    ]
    missing = [
        (line, f"{text}   [{reason}]") for k in kernels for line, text, reason in k.unsupported
    ]
    if missing:
        raise UnsupportedInstruction(missing)
    out += [k.code for k in kernels]
    rows = ", ".join([*(k.row for k in kernels), "{}"])
    out += [
        "namespace emu {",
        f"extern const KernelInfo module_kernels[] = {{{rows}}};",
        f"extern const MemoryRange module_ranges[] = {{{', '.join([*ranges, '{0, 0}'])}}};",
        "}  // namespace emu",
    ]
    return "\n".join(out) + "\n"
