"""wgmma: D += A B for the four warps of a warpgroup, B and mostly A in shared memory (sm_90a)."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, block, boolean
from .matrix import FORMATS, accumulator_of, array, check_count, check_types, format_of, match
from .registry import Order, Unsupported, emits


def accumulator_registers(kernel: ir.Kernel) -> list[str]:
    """Registers that can hold a wgmma result before its wait: its destinations and what `mov` copies from them."""
    found: dict[str, None] = {}
    moves: list[tuple[str, str]] = []
    for item in kernel.body:
        if not isinstance(item, ir.Instruction):
            continue
        if item.opcode.startswith("wgmma.mma_async"):
            found |= dict.fromkeys(_names(item.operands[0]))
        elif item.opcode.startswith("mov.") and all(
            isinstance(o, ir.Register) for o in item.operands
        ):
            moves.append((item.operands[0].name, item.operands[1].name))
    grown = bool(found)
    while grown:
        fresh = {to for to, source in moves if source in found and to not in found}
        found |= dict.fromkeys(sorted(fresh))
        grown = bool(fresh)
    return list(found)


def accumulator_arrays(kernel: ir.Kernel) -> dict[tuple[str, ...], str]:
    """Accumulators that can live in C++ arrays, so that a wgmma need not copy them: registers -> name of the array.

    A register belongs to the first accumulator that names it; an accumulator that overlaps with another is copied.
    """
    arrays: dict[tuple[str, ...], str] = {}
    taken: set[str] = set()
    for item in kernel.body:
        if isinstance(item, ir.Instruction) and item.opcode.startswith("wgmma.mma_async"):
            names = _names(item.operands[0])
            if len(set(names)) == len(FunctionEmitter.items(item.operands[0])) and not taken & set(
                names
            ):
                arrays[names] = f"accumulator_{len(arrays)}"
                taken |= set(names)
    return arrays


def _names(operand: ir.Operand) -> tuple[str, ...]:
    return tuple(r.name for r in FunctionEmitter.items(operand) if isinstance(r, ir.Register))


@emits("wgmma.fence", forms=["sync aligned"], order=Order.ABSENT)
def fence(e: FunctionEmitter, i: ir.Instruction) -> str:
    """Registers are read when the instruction is issued, so the fence changes nothing; the warps must agree on it."""
    return "wgmma_fence();"


@emits("wgmma.commit_group", forms=["sync aligned"], order=Order.MODELLED)
def commit(e: FunctionEmitter, i: ir.Instruction) -> str:
    return "wgmma_commit();"


@emits("wgmma.wait_group", forms=["sync aligned"], order=Order.MODELLED)
def wait(e: FunctionEmitter, i: ir.Instruction) -> str:
    in_arrays = {name for names in e.accumulator_arrays for name in names}
    settled = [
        f"for (uint32_t& r : {name}) r = wgmma_settled(r);"
        for name in e.accumulator_arrays.values()
    ]
    settled += [f"{r} = wgmma_settled({r});" for r in e.accumulators if r not in in_arrays]
    return f"wgmma_wait({e.value(i.operands[0])}); if (deferred()) {{ {' '.join(settled)} }}"


@emits("wgmma.mma_async")
def multiply(e: FunctionEmitter, i: ir.Instruction) -> str:
    types = "|".join(FORMATS)
    found = match(
        i,
        rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(f32|f16|s32)\.({types})\.({types})",
    )
    width, depth, saturates, d_type, a_type, b_type = found.groups()
    check_types(d_type, a_type, b_type, bool(saturates))
    n, element = int(width), FORMATS[a_type][1]
    if (
        int(depth) * element != 32
        or n % 8
        or not 8 <= n <= 256
        or (d_type == "s32" and n > 32 and n % 16)
    ):
        raise Unsupported("shape")
    d, a, b, scale_d, *immediates = i.operands
    from_registers = isinstance(a, ir.Vector)
    negative, a_mn_major, b_mn_major = _flags(immediates, d_type, element, from_registers)
    registers = check_count(d, n // 4 if d_type == "f16" else n // 2, "D")
    flags = ", ".join(map(boolean, (a_mn_major, b_mn_major, negative, saturates)))
    shape = (
        f"{n}, {depth}, {format_of(a_type)}, {format_of(b_type)}, {accumulator_of(d_type)}, {flags}"
    )
    left = "a_, 0" if from_registers else f"nullptr, {e.value(a, 'b64')}"
    held = e.accumulator_arrays.get(_names(d))
    target, inputs = held or "d_", f"{left}, {e.value(b, 'b64')}, {e.value(scale_d, 'pred')} != 0"
    call = f"wgmma(WgmmaShape{{{shape}}}, {target}, {inputs});"
    return block(
        "" if held else array(e, "d_", registers),
        array(e, "a_", check_count(a, 4, "A")) if from_registers else "",
        call,
        *([] if held else [e.write(r, "b32", f"d_[{k}]") for k, r in enumerate(registers)]),
    )


def _flags(
    immediates: list[ir.Operand], d_type: str, element: int, from_registers: bool
) -> tuple[bool, bool, bool]:
    """Whether the product is negated, A and B are not K-major; from imm-scale-a, -b, imm-trans-a and -b."""
    values = [int(o.text, 0) for o in immediates]
    scales = 0 if d_type == "s32" else 2
    transposes = 0 if element != 2 else 1 if from_registers else 2
    if len(values) != scales + transposes:
        raise Unsupported(f"{len(values)} immediate operands, not {scales + transposes}")
    signs, majors = values[:scales], values[scales:]
    if any(s not in (1, -1) for s in signs) or any(t not in (0, 1) for t in majors):
        raise Unsupported("immediate operand")
    majors = [0] * (2 - len(majors)) + majors
    return signs in ([1, -1], [-1, 1]), bool(majors[0]), bool(majors[1])
