"""The resource report: what each kernel of a cubin asks of an SM and which instructions it consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import sass
from .cubin import CubinKernel, read_cubin
from .ptxas import parse_spills, parse_warnings

# Assemblers from here on mark every spill and refill in the cubin; those before are not known to.
_MARKS_SPILLS = (12, 9)


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs. Memory in bytes: stack and spills per thread, shared memory per CTA.

    arch: "sm_90a", or "sm_90" where only a cubin was given (it does not keep the letter).
    registers: 32-bit, per thread, at launch (`setmaxnreg` changes them later).
    spill_stores, spill_loads: bytes that all spilling instructions in the code move together, as `ptxas -v` prints
    them; from the marks in the cubin and from the log, the greater; None if there is neither (assembled before
    12.9, or a called function saves registers).
    stack_bytes: spilled registers and arrays in local memory; None if recursion leaves it open.
    shared_bytes: static, without the 1024 bytes that the system keeps on sm_90 and newer.
    dynamic_shared_bytes: what the host code asks for at launch; None if unknown.
    barriers: named barriers (bar.sync). mbarriers: initialised in shared memory, as far as the compiler counted them.
    threads: (x, y, z) that the kernel requires or, failing that, its maximum. cluster: (x, y, z) if fixed.
    instructions: number of each instruction in the code, called functions included; keys as in `sass.mnemonic`.
    warnings: lines of the compiler's log that name this kernel.
    """

    name: str
    arch: str
    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack_bytes: int | None
    shared_bytes: int
    dynamic_shared_bytes: int | None
    parameter_bytes: int
    barriers: int
    mbarriers: int
    threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    instructions: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def count(self, name: str) -> int:
        """Number of instructions of a family ("HGMMA", "LDG", "UTCMMA", "WARPGROUP.DEPBAR") or width ("LDG.128").

        It counts places in the code, not executions. "UTCMMA", "ATOM" and "RED" stand for all spellings of these.
        """
        return sass.count(self.instructions, name)

    @property
    def spills(self) -> bool:
        """Whether registers are spilled; where nothing says so, whether local memory is accessed at all."""
        if self.spill_stores is None or self.spill_loads is None:
            return self.count("STL") + self.count("LDL") > 0
        return self.spill_stores + self.spill_loads > 0

    @property
    def unknown(self) -> dict[str, int]:
        """Instructions that are not in the table, with their numbers; empty for what this package knows."""
        return {name: n for name, n in self.instructions.items() if name.startswith("unknown")}

    @property
    def serialized(self) -> bool:
        """Whether the compiler said that it serialises WGMMA; needs its log."""
        return any("serialized" in warning for warning in self.warnings)

    def __str__(self) -> str:
        def known(value: object) -> object:
            return "unknown" if value is None else value

        dynamic = (
            "" if self.dynamic_shared_bytes is None else f" + {self.dynamic_shared_bytes} dynamic"
        )
        threads = "" if self.threads is None else f", {'x'.join(map(str, self.threads))} threads"
        head = [
            f"{self.name} ({self.arch}{threads})",
            f"  registers {self.registers}, spill stores {known(self.spill_stores)} B, spill loads "
            f"{known(self.spill_loads)} B, stack {known(self.stack_bytes)} B",
            f"  shared memory {self.shared_bytes} B{dynamic}, parameters {self.parameter_bytes} B, "
            f"barriers {self.barriers}, mbarriers {self.mbarriers}",
        ]
        ordered = sorted(self.instructions.items(), key=lambda item: (-item[1], item[0]))
        cells = [f"{name} {n}".ljust(26) for name, n in ordered if name != "NOP"]
        rows = ["  " + "".join(cells[i : i + 4]).rstrip() for i in range(0, len(cells), 4)]
        return "\n".join([*head, *rows, *(f"  warning: {text}" for text in self.warnings)])


@dataclass(frozen=True)
class Report:
    """kernels by name; warnings: of all kernels and of none in particular; log: the compiler's, None without one.

    Warnings exist only where there is a log: for PTX text, and for what `resources.compile` compiled.
    """

    kernels: Mapping[str, KernelResources]
    warnings: tuple[str, ...] = ()
    log: str | None = None

    @property
    def kernel(self) -> KernelResources:
        """The only kernel; ValueError if there are several."""
        if len(self.kernels) != 1:
            raise ValueError(f"{len(self.kernels)} kernels: {', '.join(self.kernels)}")
        return next(iter(self.kernels.values()))

    def __str__(self) -> str:
        named = {text for kernel in self.kernels.values() for text in kernel.warnings}
        rest = [f"warning: {text}" for text in self.warnings if text not in named]
        return "\n\n".join([*map(str, self.kernels.values()), *rest])


def from_cubin(cubin: bytes, arch: str | None = None, log: str | None = None) -> Report:
    """The report of a cubin, with spills and warnings from the log of its compiler if that is at hand."""
    content = read_cubin(cubin)
    spills, warnings = parse_spills(log or ""), parse_warnings(log or "")
    kernels = {}
    for name, kernel in content.kernels.items():
        of_kernel = tuple(text for text in warnings if f"'{name}'" in text)
        logged = [spills[known] for known in (name, *kernel.functions) if known in spills]
        stores, loads = _spills_in_code(kernel, content.sm) or (None, None)
        # The code does not mark what a called function saves; the log of some assemblers omits what the code marks.
        if logged:
            stores = max(stores or 0, sum(function.stores for function in logged))
            loads = max(loads or 0, sum(function.loads for function in logged))
        kernels[name] = replace(
            _resources(kernel, arch or f"sm_{content.sm}", content.sm),
            spill_stores=stores,
            spill_loads=loads,
            warnings=of_kernel,
        )
    return Report(kernels, warnings, log)


def with_dynamic(report: Report, asked: Sequence[int]) -> Report:
    """The report with the dynamic shared memory of the host code's launches, where it is clear whose they are."""
    if len(report.kernels) != 1 or len(asked) != 1:
        return report
    only = replace(report.kernel, dynamic_shared_bytes=asked[0])
    return replace(report, kernels={only.name: only})


def _resources(kernel: CubinKernel, arch: str, sm: int) -> KernelResources:
    instructions = dict(sass.tally(kernel.code, sm))
    # Some assemblers write 0 where a recursive function uses the stack.
    uses_stack = sass.count(instructions, "STL") + sass.count(instructions, "LDL") > 0
    return KernelResources(
        name=kernel.name,
        arch=arch,
        registers=kernel.registers,
        spill_stores=None,
        spill_loads=None,
        stack_bytes=kernel.stack_bytes or (None if uses_stack else kernel.stack_bytes),
        shared_bytes=kernel.shared_bytes,
        dynamic_shared_bytes=None,
        parameter_bytes=kernel.parameter_bytes,
        barriers=kernel.barriers,
        mbarriers=kernel.mbarriers,
        threads=kernel.required_threads or kernel.max_threads,
        cluster=kernel.cluster,
        instructions=instructions,
    )


def _spills_in_code(kernel: CubinKernel, sm: int) -> tuple[int, int] | None:
    """Bytes stored and loaded by the instructions that the compiler marked; None if it may have left some unmarked."""
    names = list(sass.mnemonics(kernel.code, sm))
    marks = kernel.toolkit is not None and kernel.toolkit >= _MARKS_SPILLS and not kernel.functions
    if not marks and any(name.startswith(("STL", "LDL")) for name in names):
        return None
    moved = {"STL": 0, "LDL": 0}
    for offset in kernel.spill_offsets:
        name = names[offset // sass.BYTES_PER_INSTRUCTION]
        if name[:3] in moved:
            moved[name[:3]] += sass.width(name)
    return moved["STL"], moved["LDL"]
