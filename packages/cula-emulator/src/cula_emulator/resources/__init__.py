"""What a compiled kernel asks of a GPU, found without one: registers, spills, shared memory, instructions, warnings.

from cula_emulator import resources
report = resources.compile(my_cute_function, *fake_tensors, arch="sm_90a")   # or resources.report(cubin, PTX or a path)
kernel = report.kernel                                                       # report.kernels[name] if there are several
kernel.registers, kernel.spill_stores, kernel.shared_bytes, kernel.count("HGMMA"), kernel.count("LDG.128")
resources.check(kernel, expect=("HGMMA", "UTMALDG"))                         # no spills, fits the SM, not serialised
print(report)

The numbers come from the cubin itself; no disassembler is needed, and an assembler only for PTX text.
"""

from __future__ import annotations

from .cubin import CubinError
from .cute import compile
from .kernels import KernelResources, Report
from .limits import REGISTERS_PER_SM, SHARED_LIMITS, check
from .load import report
from .ptxas import AssemblerNotFound, AssemblyFailed, compile_ptx

__all__ = [
    "REGISTERS_PER_SM",
    "SHARED_LIMITS",
    "AssemblerNotFound",
    "AssemblyFailed",
    "CubinError",
    "KernelResources",
    "Report",
    "check",
    "compile",
    "compile_ptx",
    "report",
]
