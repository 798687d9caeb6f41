"""setmaxnreg: registers that move between a warp and the pool of its CTA."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, boolean
from .registry import emits


@emits("setmaxnreg", forms=["inc|dec sync aligned u32"], operands=1)
def set_max_registers(e: FunctionEmitter, i: ir.Instruction) -> str:
    return f"set_max_registers({e.value(i.operands[0])}, {boolean(i.has('inc'))});"


def register_facts(kernel: ir.Kernel, in_machine_code: int) -> str:
    """The RegisterFacts of the runtime.

    in_machine_code: registers at launch if the kernel's machine code is known, -1 if the assembler left setmaxnreg out
    of it, else 0, and the PTX says.
    """
    asked = [
        int(i.operands[0].text, 0)
        for i in kernel.body
        if isinstance(i, ir.Instruction) and i.parts[0] == "setmaxnreg"
        if isinstance(i.operands[0], ir.Literal)
    ]
    at_launch = in_machine_code or kernel.max_registers
    return f"{{{at_launch}, {max(asked, default=0)}, {kernel.threads}, {kernel.min_ctas}}}"
