"""wgmma.mma_async as data, in the form of tables_matrix.py: every format, shape, layout, major-ness and source of A.

Each case runs two instructions over neighbouring k blocks, the second accumulating, so that descriptors also start
inside a swizzle atom. Operands are placed by the canonical layouts of the PTX ISA, written here as sums of strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tables_matrix import (
    ROUNDING,
    Case,
    Problem,
    accumulator,
    allowed,
    at_thread,
    finish,
    fragment_a,
    fragment_c,
    operand,
    raw,
    unfragment_c,
    vector,
    width,
    words_of,
)

_SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Layout:
    """Where element (mn, k) of one k block lies. Offsets in bytes; `swizzle` is 0, 32, 64 or 128."""

    mn_major: bool
    swizzle: int
    leading: int
    stride: int
    block_starts: tuple[int, int]  # of the two k blocks
    size: int

    def offset(self, mn: torch.Tensor, k: torch.Tensor, element: int) -> torch.Tensor:
        if self.mn_major:
            span = (self.swizzle or 16) // element  # elements that are contiguous along mn
            per_group = 16 if self.swizzle == 0 else self.swizzle
            group, eight = (
                (self.stride, self.leading) if self.swizzle == 0 else (self.leading, self.stride)
            )
            return mn % span * element + mn // span * group + k % 8 * per_group + k // 8 * eight
        if self.swizzle == 0:
            unit = 16 // element
            return (
                mn % 8 * 16 + mn // 8 * self.stride + k % unit * element + k // unit * self.leading
            )
        return mn % 8 * self.swizzle + mn // 8 * self.stride + k * element

    def swizzled(self, address: torch.Tensor) -> torch.Tensor:
        rows = {0: 1, 32: 2, 64: 4, 128: 8}[self.swizzle]
        return address ^ (address // 128 % rows) * 16

    def place(
        self, image: torch.Tensor, start: int, block: int, values: torch.Tensor, name: str
    ) -> None:
        """Writes values [mn, k] into the bytes of shared memory; `start` is a multiple of 1024."""
        element = width(name)
        mn, k = torch.arange(values.shape[0]).view(-1, 1), torch.arange(values.shape[1])
        at = self.swizzled(start + self.block_starts[block] + self.offset(mn, k, element))
        image[at.unsqueeze(-1) + torch.arange(element)] = raw(values, name)


def layout(mn: int, element: int, mn_major: bool, swizzle: int) -> Layout:
    """A dense layout for two k blocks of 32 bytes each (16-bit elements when mn_major)."""
    if mn_major and swizzle == 0:
        eight = mn * 16 + 32  # eight k, and two units of padding
        return Layout(True, 0, eight, 128, (0, 2 * eight), 4 * eight)
    if mn_major:
        atom = 8 * swizzle
        groups = -(-mn * element // swizzle)
        return Layout(True, swizzle, 4 * atom, atom, (0, 2 * atom), groups * 4 * atom)
    if swizzle == 0:
        column = mn * 16 + 16  # one column of units, and one unit of padding
        return Layout(False, 0, column, 128, (0, 2 * column), 4 * column)
    atoms = mn // 8 * 8 * swizzle
    starts = {32: (0, atoms), 64: (0, 32), 128: (32, 96)}[swizzle]
    return Layout(False, swizzle, 16, 8 * swizzle, starts, atoms * (2 if swizzle == 32 else 1))


def descriptor(register: str, at: Layout, start: int) -> str:
    fields = at.leading >> 4 << 16 | at.stride >> 4 << 32 | _SWIZZLE_CODE[at.swizzle] << 62
    return (
        f"add.u32 %r24, %r10, {start}; shr.u32 %r24, %r24, 4; cvt.u64.u32 {register}, %r24;"
        f"or.b64 {register}, {register}, 0x{fields:x};"
    )


def wgmma_case(
    n: int,
    a: str,
    b: str,
    acc: str,
    swizzle: int = 128,
    majors: str = "kk",
    from_registers: bool = False,
    signs: tuple[int, int] = (1, 1),
    use_c: bool = True,
    saturate: bool = False,
) -> Case:
    """majors: of A ("k" or "m") and of B ("k" or "n")."""
    element = width(a)
    k = 32 // element
    at_a, at_b = (
        layout(64, element, majors[0] == "m", swizzle),
        layout(n, element, majors[1] == "n", swizzle),
    )
    b_start = 0 if from_registers else -(-at_a.size // 1024) * 1024
    image_bytes = -(-(b_start + at_b.size) // 1024) * 1024
    registers = n // 4 if acc == "f16" else n // 2
    d = [f"%d{i}" for i in range(registers)]
    per_thread = registers + (8 if from_registers else 0)
    load = " ".join(f"ld.global.b32 {r}, [%rd9+{4 * i}];" for i, r in enumerate(d))
    if from_registers:
        load += " ".join(f"ld.global.b32 %a{i}, [%rd9+{4 * (registers + i)}];" for i in range(8))
    fill = (
        f"mov.u32 %r10, tile; mov.u32 %r20, %r2; F: shl.b32 %r21, %r20, 4; cvt.u64.u32 %rd6, %r21;"
        "add.s64 %rd6, %rd6, %rd1; ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%rd6]; add.u32 %r23, %r10, %r21;"
        "st.shared.v4.b32 [%r23], {%r30, %r31, %r32, %r33}; add.u32 %r20, %r20, 128;"
        f"setp.lt.u32 %p1, %r20, {image_bytes // 16}; @%p1 bra F; fence.proxy.async.shared::cta; bar.sync 0;"
    )
    multiply = ""
    for block in (0, 1):
        fragment = [f"%a{4 * block + i}" for i in range(4)]
        multiply += (
            "" if from_registers else descriptor(f"%rd{10 + block}", at_a, at_a.block_starts[block])
        )
        multiply += descriptor(f"%rd{12 + block}", at_b, b_start + at_b.block_starts[block])
        flags = [] if acc == "s32" else list(signs)
        if element == 2:
            flags += (
                [int(majors[1] == "n")]
                if from_registers
                else [int(majors[0] == "m"), int(majors[1] == "n")]
            )
        left = vector(fragment) if from_registers else f"%rd{10 + block}"
        tail = "".join(f", {f}" for f in flags)
        multiply += "wgmma.fence.sync.aligned;" if block == 0 else ""
        suffix = f"m64n{n}k{k}{'.satfinite' if saturate else ''}.{acc}.{a}.{b}"
        multiply += f"wgmma.mma_async.sync.aligned.{suffix} {vector(d)}, {left}, %rd{12 + block}, %p{2 + block}{tail};"
    store = " ".join(f"st.global.b32 [%rd14+{4 * i}], {r};" for i, r in enumerate(d))
    body = (
        f".reg .b32 %d<{registers}>; .reg .b32 %a<8>; add.s64 %rd8, %rd1, {image_bytes};"
        f"{at_thread('%rd9', '%rd8', 4 * per_thread)} {at_thread('%rd14', '%rd2', 4 * registers)} {load} {fill}"
        f"setp.ne.b32 %p2, {int(use_c)}, 0; setp.ne.b32 %p3, 1, 0; {multiply}"
        f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {store}"
    )

    def problem(kind: str, seed: int) -> Problem:
        g = torch.Generator().manual_seed(seed)
        left, right = operand(kind, a, (64, 2 * k), g), operand(kind, b, (n, 2 * k), g)
        c = accumulator(kind, acc, (64, n), g)
        image = torch.full((image_bytes,), 0xFF, dtype=torch.uint8)  # NaN between the operands
        total = c if use_c else torch.zeros_like(c)
        for block in (0, 1):
            left_block, right_block = (x[:, block * k : block * k + k] for x in (left, right))
            if not from_registers:
                at_a.place(image, 0, block, left_block, a)
            at_b.place(image, b_start, block, right_block, b)
            product = signs[0] * signs[1] * left_block @ right_block.t()
            total = finish(total + product, acc, saturate).double()
        warps = [fragment_c(c[16 * w : 16 * w + 16], acc) for w in range(4)]
        if from_registers:
            blocks = [
                torch.cat(
                    [fragment_a(left[16 * w : 16 * w + 16, j * k : j * k + k], a) for j in (0, 1)],
                    1,
                )
                for w in range(4)
            ]
            warps = [torch.cat(pair, 1) for pair in zip(warps, blocks)]
        scale = left.abs() @ right.abs().t() + c.abs()

        def decode(out: torch.Tensor) -> torch.Tensor:
            return torch.cat([unfragment_c(w, n, acc) for w in out.view(4, 32, registers)])

        expected = total.long() if acc == "s32" else total
        return Problem(
            words_of(image, *warps), decode, expected, allowed(kind, acc, scale, ROUNDING)
        )

    name = f"wgmma_n{n}_{a}_{b}_{acc}_{majors}{swizzle}"
    name += "_rs" * from_registers + "_satfinite" * saturate + "_overwrite" * (not use_c)
    name += "".join("_plus" if s > 0 else "_minus" for s in signs) if signs != (1, 1) else ""
    kinds = ("exact",) if acc == "s32" else ("exact", "random")
    return Case(name, body, 128 * registers, problem, image_bytes, 128, kinds)


def _cases() -> list[Case]:
    every = [wgmma_case(n, "bf16", "bf16", "f32") for n in range(8, 257, 8)]
    for swizzle in (0, 32, 64, 128):
        every += [
            wgmma_case(128, "f16", "f16", "f32", swizzle, majors)
            for majors in ("kk", "mk", "kn", "mn")
        ]
        every += [wgmma_case(n, "tf32", "tf32", "f32", swizzle) for n in (8, 24, 136)]
        every += [wgmma_case(n, "s8", "u8", "s32", swizzle) for n in (8, 24, 48)]
        every += [
            wgmma_case(64, "bf16", "bf16", "f32", swizzle, major, True) for major in ("kk", "kn")
        ]
    for n in (16, 192):
        every += [
            wgmma_case(n, "f16", "f16", "f16"),
            wgmma_case(n, "f16", "f16", "f16", from_registers=True),
        ]
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            every += [wgmma_case(n, a, b, acc) for n, acc in ((40, "f32"), (32, "f16"))]
            every.append(wgmma_case(72, a, b, "f32", 64, from_registers=True))
    for a in ("s8", "u8"):
        for b in ("s8", "u8"):
            every += [wgmma_case(32, a, b, "s32", 32, saturate=s) for s in (False, True)]
            every.append(wgmma_case(16, a, b, "s32", from_registers=True, saturate=True))
    for signs in ((-1, 1), (1, -1), (-1, -1)):
        every += [wgmma_case(24, x, x, "f32", signs=signs) for x in ("bf16", "tf32", "e4m3")]
        every.append(wgmma_case(16, "f16", "f16", "f16", signs=signs, from_registers=True))
    every += [
        wgmma_case(64, "bf16", "bf16", "f32", use_c=False),
        wgmma_case(256, "s8", "s8", "s32", use_c=False),
    ]
    every += [
        wgmma_case(256, "e4m3", "e4m3", "f32", 64),
        wgmma_case(256, "f16", "f16", "f32", 64, "mn"),
    ]
    return every


WGMMA = {c.name: c for c in _cases()}
