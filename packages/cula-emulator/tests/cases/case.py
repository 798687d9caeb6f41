"""What a case is: a small PTX kernel, its inputs, and the output words that every implementation must give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cases.tensor_map import TensorMap

HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"
_PARAMETERS = ".param .u64 in, .param .u64 out, .param .u32 n, .param .u64 maps"
_PROLOGUE = """
    .reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<96>; .reg .f32 %f<32>; .reg .b64 %rd<40>; .reg .f64 %fd<8>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.param.u32 %r1, [n]; ld.param.u64 %rd3, [maps];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.u32 %r5, %r3, %r4, %r2;
    mul.wide.u32 %rd6, %r5, 4; add.s64 %rd4, %rd1, %rd6; add.s64 %rd5, %rd2, %rd6;
"""


@dataclass(frozen=True)
class Case:
    """One kernel (in, out, n, maps) and one launch of it. All buffers are int32 words.

    body: PTX in which %rd1 is `in`, %rd2 `out`, %r1 `n`, %rd3 the tensor maps (128 bytes each), %r2 the thread, %r3 the
    CTA, %r5 the thread of the grid, and %rd4 and %rd5 point to that thread's words of `in` and `out`.
    expected: the words of `out` afterwards. start: those before, -1 everywhere unless given.
    head, shared, directives: declarations of the module, of the kernel, and what follows its parameters.
    """

    family: str
    name: str
    body: str
    expected: torch.Tensor
    source: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int32))
    start: torch.Tensor | None = None
    grid: int = 1
    block: int = 32
    cluster: int = 1
    n: int = 0
    head: str = ""
    shared: str = ""
    directives: str = ""
    maps: tuple[TensorMap, ...] = ()

    @property
    def text(self) -> str:
        lines = self.body.replace(
            ";", ";\n"
        )  # one instruction a line, for the line numbers of the messages
        start = f".visible .entry {self.name}({_PARAMETERS}) {self.directives}\n{{{_PROLOGUE}{self.shared}"
        return f"{start}{lines}\n    ret;\n}}"

    def output(self) -> torch.Tensor:
        """A fresh output buffer as it is before the launch."""
        start = torch.full_like(self.expected, -1) if self.start is None else self.start
        return aligned(start)


def module_text(cases: Sequence[Case]) -> str:
    """One PTX module with an entry per case; declarations that several cases share appear once."""
    heads = dict.fromkeys(case.head for case in cases if case.head)
    return HEADER + "\n".join([*heads, *(case.text for case in cases)])


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU at a multiple of 256 bytes, as a GPU allocator would place it."""
    values = values.contiguous()
    size = values.numel() * values.element_size()
    raw = torch.empty(size + 256, dtype=torch.uint8)
    shift = -raw.data_ptr() % 256
    return raw[shift : shift + size].view(values.dtype).view(values.shape).copy_(values)


def words(values: torch.Tensor) -> torch.Tensor:
    """Any tensor as int32 words."""
    return values.contiguous().view(-1).view(torch.uint8).view(torch.int32).clone()


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )


def named(case: Case, suffix: str, **changes: object) -> Case:
    return dataclasses.replace(case, name=f"{case.name}_{suffix}", **changes)
