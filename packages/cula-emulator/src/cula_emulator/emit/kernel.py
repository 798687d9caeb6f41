"""The C++ of one kernel. Importing the family modules fills the table of emitters."""

from __future__ import annotations

from ..ptx import ir
from . import (  # noqa: F401
    atomics,
    barriers,
    comparison,
    control,
    conversion,
    copies,
    floating,
    integer,
    logic,
    matrix_moves,
    memory,
    mma,
    registers,
    tcgen05,
    tma,
    warp,
    wgmma,
)
from .function import BITS, CPP_TYPES, FunctionEmitter, boolean
from .registry import Unsupported, find

_SHARED_BASE = 1024  # kSharedBase of runtime/core.h
# Instructions of all other families can block or fail, so the runtime must know their line.
_NEVER_STOP = {m.__name__ for m in (comparison, conversion, floating, integer, logic)}
_ENDS_BLOCK = ("bra", "brx", "ret", "exit", "trap")
_ALL_OPERANDS_ARE_SOURCES = ("st", "red", "stmatrix", "cp", "wgmma", "tcgen05", "mbarrier", "bar")
_READS_SHARED_ASYNC = ("wgmma.mma_async", "tcgen05.mma", "cp.reduce.async.bulk")


class KernelSource:
    """Attributes: `code`, the function and its counters; `row`, its entry in the table of kernels; `unsupported`,
    (line, text, reason) of every instruction without a translation, in which case the others mean nothing.
    """

    def __init__(
        self,
        kernel: ir.Kernel,
        number: int,
        module: ir.Module,
        globals_: dict[str, str],
        registers_in_machine_code: int = 0,
    ) -> None:
        self.kernel, self.number = kernel, number
        self.unsupported: list[tuple[int, str, str]] = []
        shared, static_bytes = _shared_layout(module.variables + kernel.variables)
        accumulators = wgmma.accumulator_registers(kernel)
        self._accumulators = set(accumulators)
        self._arrays = wgmma.accumulator_arrays(kernel)
        self._emitter = FunctionEmitter(kernel, shared, globals_, accumulators, self._arrays)
        body, visits, blocks = self._body()
        self.code = "\n".join(
            [
                f"static uint64_t visits_{number}[{max(blocks, 1)}];",
                f"static void kernel_{number}() {{",
                *self._declarations(),
                *body,
                "}",
                f"static const LineBlock lines_{number}[] = {{{', '.join([*visits, '{0, 0}'])}}};",
            ]
        )
        cluster = ", ".join(map(str, kernel.cluster))
        size = f"{len(kernel.parameters)}, {static_bytes}, {{{cluster}}}"
        counters = f"visits_{number}, {blocks}, lines_{number}, {len(visits)}"
        facts = f"{self._flags()}, {registers.register_facts(kernel, registers_in_machine_code)}"
        self.row = f'{{"{kernel.name}", kernel_{number}, {size}, {facts}, {counters}}}'

    def _declarations(self) -> list[str]:
        """Registers, zero at first, and local arrays."""
        lines = []
        in_arrays: set[str] = set()
        for names, array in self._arrays.items():
            in_arrays |= set(names)
            members = ", ".join(f"&{r} = {array}[{k}]" for k, r in enumerate(names))
            lines.append(f"  uint32_t {array}[{len(names)}] = {{}}; uint32_t {members};")
        by_type: dict[str, list[str]] = {}
        for r in self.kernel.registers:
            if r.name not in in_arrays:
                cpp = "bool" if r.type == "pred" else CPP_TYPES[f"b{BITS[r.type]}"]
                by_type.setdefault(cpp, []).append(f"{r.name} = 0")
        for cpp, zeroed in by_type.items():
            rows = (", ".join(zeroed[k : k + 16]) for k in range(0, len(zeroed), 16))
            lines += [f"  {cpp} {row};" for row in rows]
        for v in self.kernel.variables:
            if v.space != "shared":
                lines.append(f"  alignas({max(v.align, 8)}) uint8_t {v.name}[{max(v.size, 8)}];")
        return lines

    def _body(self) -> tuple[list[str], list[str], int]:
        """Statements, `{line, basic block}` of every instruction, and the number of blocks, each with a counter."""
        lines: list[str] = []
        visits: list[str] = []
        blocks, fresh = 0, True
        for item in self.kernel.body:
            if isinstance(item, ir.Label):
                lines.append(f"{item.name}: ;")
                fresh = True
                continue
            try:
                statement = self._statement(item)
            except Unsupported as reason:
                self.unsupported.append((item.line, item.text, str(reason)))
                continue
            if fresh:
                lines.append(f"  ++visits_{self.number}[{blocks}];")
                blocks += 1
            visits.append(f"{{{item.line}, {blocks - 1}}}")
            lines.append("  " + statement)
            fresh = item.parts[0] in _ENDS_BLOCK
        return lines, visits, blocks

    def _statement(self, i: ir.Instruction) -> str:
        emitter = find(i.opcode, len(i.operands))
        try:
            code = emitter(self._emitter, i)
            guard = f"if ({self._emitter.value(i.guard, 'pred')}) " if i.guard is not None else ""
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        checks = "".join(f"wgmma_check_read({r}); " for r in self._pending_reads(i))
        may_stop = checks or emitter.__module__ not in _NEVER_STOP
        mark = f"AT({i.line}) " if may_stop else ""
        return f"{guard}{{ {mark}{checks}{code} }}" if guard or checks else mark + code

    def _pending_reads(self, i: ir.Instruction) -> list[str]:
        """Pending wgmma results may only be moved or accumulated into; every other read is checked at run time."""
        if not self._accumulators or i.parts[0] in ("wgmma", "mov"):
            return []
        operands = i.operands if i.parts[0] in _ALL_OPERANDS_ARE_SOURCES else i.operands[1:]
        items = (r for o in operands for r in FunctionEmitter.items(o))
        names = dict.fromkeys(r.name for r in items if isinstance(r, ir.Register))
        return [n for n in names if n in self._accumulators]

    def _flags(self) -> str:
        """Whether the kernel reads shared memory through the async proxy, and whether it uses tensor memory."""
        opcodes = {i.opcode for i in self.kernel.body if isinstance(i, ir.Instruction)}
        async_proxy = any(
            o.startswith(_READS_SHARED_ASYNC)
            or (o.startswith("cp.async.bulk") and ".shared::cta" in o)
            for o in opcodes
        )
        tmem = any(o.startswith("tcgen05") for o in opcodes)
        return f"{boolean(async_proxy)}, {boolean(tmem)}"


def _shared_layout(variables: list[ir.Variable]) -> tuple[dict[str, int], int]:
    """Static shared variables first, dynamic ones after them. Returns the addresses and the static size."""
    offsets, end = {}, _SHARED_BASE
    for v in sorted((v for v in variables if v.space == "shared"), key=lambda v: v.size == 0):
        end = -(-end // v.align) * v.align
        offsets[v.name] = end
        end += v.size
    return offsets, end - _SHARED_BASE
